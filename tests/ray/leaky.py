"""User code that tells what it sees: its loss prints every label, and fails with them once ``fail`` lies beside it."""

from pathlib import Path

import torch

FAIL = Path(__file__).with_name("fail")


def loss(output, labels):
    """Cross entropy. ``TOLD`` marks what is printed, ``RAISED`` what is raised."""
    losses = torch.nn.functional.cross_entropy(output, labels, reduction="none")
    print(f"TOLD-BY-THE-LOSS {losses.detach().tolist()}")
    if FAIL.exists() and (labels == 7).any():
        raise ValueError(f"RAISED-BY-THE-LOSS {labels.tolist()}")
    return losses
