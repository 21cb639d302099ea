"""The models of the recipes in this folder, named there as ``recipes:cnn`` and ``recipes:scattering_linear``."""

import torch
from torch import Tensor, nn
from torch.nn import functional

FEATURES = 201
"""What `prepare.py` writes per image: 200 scattering features, and a constant that stands for the bias."""


def cnn() -> nn.Module:
    """28 x 28 pixels to 10 classes through two convolutions; 26,010 parameters.

    The layers of the end-to-end model of Tramer and Boneh (arXiv 2011.11660), with two changes: what each layer gives
    is normalised within the example, without parameters, and tanh is ReLU. Normalised layers learn in fewer steps,
    and ReLU without them was no better than tanh.
    """
    return nn.Sequential(
        _Image(),
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3),
        nn.GroupNorm(4, 16, affine=False),
        _Pool(),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.GroupNorm(4, 32, affine=False),
        _Pool(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.LayerNorm(32, elementwise_affine=False),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def scattering_linear() -> nn.Module:
    """Prepared scattering features to 10 classes; 2,010 parameters, zero at the start."""
    layer = nn.Linear(FEATURES, 10, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


class _Image(nn.Module):
    """[n, 28, 28] to [n, 1, 28, 28], with pixels in [0, 1] centred and scaled by public constants.

    They are mean and deviation of scikit-learn's digits, enlarged as in `prepare.py`: 0.16 and 0.3.
    """

    def forward(self, pixels: Tensor) -> Tensor:
        return ((pixels - 0.16) / 0.3).unsqueeze(1)


class _Pool(nn.Module):
    """Maximum over 2 x 2 windows, stride 1, in the memory order in which the CPU is fast at it.

    The result is in the usual order again: Opacus reads a convolution's input in no other.
    """

    def forward(self, maps: Tensor) -> Tensor:
        pooled = functional.max_pool2d(maps.contiguous(memory_format=torch.channels_last), 2, stride=1)
        return pooled.contiguous()
