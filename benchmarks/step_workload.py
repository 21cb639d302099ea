"""The smallest workload worth timing: 512 synthetic examples, a linear model of 1,000 parameters."""

import numpy as np
import torch

from raycloak.workers.inputs.datasets import ArrayDataset


def dataset() -> ArrayDataset:
    """512 examples of 99 features and 10 classes, the same every time."""
    grid = np.arange(512 * 99, dtype=np.float32).reshape(512, 99)
    return ArrayDataset(np.sin(grid), np.arange(512) % 10)


def model() -> torch.nn.Module:
    """99 inputs, 10 outputs."""
    return torch.nn.Linear(99, 10)
