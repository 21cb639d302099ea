"""The run behind `raycloak demo`: scikit-learn's 1,797 digits, three workers, epsilon 8.

It is `examples/digits.yaml` with a model that an installed distribution can import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def demo_config() -> dict[str, Any]:
    """Build the raw configuration, a new one each time, so that overrides stay with the caller."""
    return {
        "name": "digits",
        "num_workers": 3,
        "virtual_workers": 8,
        "steps": 60,
        "expected_batch_size": 720,
        "model": "raycloak.coordinator.runs.demo:digits_model",
        "loss": "cross_entropy",
        # Everybody may have these images, so each run opens an account of its own.
        "dataset": {"kind": "digits", "public": True},
        "evaluation": {"every": 10, "dataset": {"kind": "digits", "split": "public", "public": True}},
        "optimizer": {"name": "sgd", "learning_rate": 1.5, "momentum": 0.9, "schedule": "linear"},
        "dp_config": {"target_epsilon": 8.0, "target_delta": 1e-5, "max_grad_norm": 1.0},
    }


def digits_model() -> "nn.Module":
    """Build a perceptron from 64 pixels to 10 classes with one hidden layer of 64 tanh units: 4,810 parameters.

    Each image is first brought to mean 0 and variance 1 by itself.
    """
    from torch import nn

    return nn.Sequential(nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
