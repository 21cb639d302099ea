"""Models that the protocol's tests train; in a file of their own, since its digest is in every run's computation."""

import torch
from torch import nn


def small_model() -> nn.Module:
    """Six features to three classes; no tensor is all of a third, so three ranges differ in size."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def wide_model() -> nn.Module:
    """Six features to three classes with 5,003 parameters, for statistics of single vectors."""
    return nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 3))


def with_batch_norm() -> nn.Module:
    """What mixes the examples of a batch."""
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))


class Put(nn.Module):
    """The identity, by an operation that has no deterministic kernel: always, or for features above a number."""

    def __init__(self, above: float | None = None) -> None:
        super().__init__()
        self._above = above

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._above is None or ((x > self._above) & x.isfinite()).any():
            return x.clone().put_(torch.tensor([0]), x.reshape(-1)[:1])
        return x


def with_put() -> nn.Module:
    """What has no deterministic kernel, on any data."""
    return nn.Sequential(Put(), nn.Linear(6, 3))


def with_put_above_a_million() -> nn.Module:
    """The same on the private examples only: synthetic features are below, and no check may ask for the branch."""
    return nn.Sequential(Put(1e6), nn.Linear(6, 3))


class CentreBatches(nn.Module):
    """Subtracts the mean of a batch of more rows than the small ones that a model is first tried on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if len(x) > 7 else x


def with_centred_batches() -> nn.Module:
    """What mixes the examples of a physical micro-batch alone."""
    return nn.Sequential(CentreBatches(), nn.Linear(6, 3))


def linear_regression() -> nn.Module:
    """Six features to one value."""
    return nn.Linear(6, 1)


def user_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that is none of the built-in ones."""
    return nn.functional.cross_entropy(output, labels, reduction="none")


class CentreOnceGrown(nn.Module):
    """A layer that subtracts the mean of a batch once its weights are larger than any that the checks try."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = self.layer.weight.detach().abs().amax() > 100.0
        return self.layer(torch.where(large, x - x.mean(0), x))


def with_late_centring() -> nn.Module:
    """What mixes the examples of a batch with parameters that a run may come to."""
    return CentreOnceGrown()


def deep_model() -> nn.Module:
    """Images of 64 pixels to ten classes, in nine blocks with parameters."""
    blocks = [
        nn.Sequential(nn.Linear(64, 16), nn.Tanh()),
        *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(7)),
    ]
    return nn.Sequential(*blocks, nn.Linear(16, 10))
