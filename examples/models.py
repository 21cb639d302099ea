"""Two small models, named in the configurations beside this file as ``models:digits_mlp`` and ``models:mnist_cnn``.

Both use tanh: bounded activations keep gradients small, which is what clipping rewards.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def digits_mlp() -> nn.Module:
    """64 pixels to 10 classes through 64 hidden units; 4,810 parameters.

    Each image is first brought to mean 0 and variance 1 by itself, which no other example can influence.
    """
    return nn.Sequential(nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def mnist_cnn() -> nn.Module:
    """28 x 28 pixels to 10 classes through two convolutions; 26,010 parameters."""
    return nn.Sequential(
        _Image(),
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3),
        nn.Tanh(),
        _Pool(),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        _Pool(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


class _Image(nn.Module):
    """[n, 28, 28] to [n, 1, 28, 28], with pixels in [0, 1] moved to [-1, 1]."""

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels * 2.0 - 1.0).unsqueeze(1)


class _Pool(nn.Module):
    """Maximum over 2 x 2 windows, stride 1, in the memory order in which the CPU is fast at it.

    The result is in the usual order again: Opacus reads a convolution's input in no other.
    """

    def forward(self, maps: Tensor) -> Tensor:
        pooled = functional.max_pool2d(maps.contiguous(memory_format=torch.channels_last), 2, stride=1)
        return pooled.contiguous()
