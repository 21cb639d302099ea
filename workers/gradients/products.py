"""A look at a device's products: whether those of float32 and float64 have all their bits.

Torch's settings and the environment of a worker keep libraries from shorter ones. Drivers and libraries may have other
ways to be told, so a worker looks before it computes.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from raycloak.metrics.errors import ConfigError

_SIZE: Final = 256
"""The products in a sum: libraries leave small matrices to other kernels."""
_WHOLE: Final = _SIZE * 2.0**-24
"""The most by which a sum of so many positive float32 products differs from the exact one, relatively: 1.5e-5. Operands
of ten bits give 8e-5 here, and those of bfloat16 6e-4."""


def check_products(device: str | torch.device) -> None:
    """Require whole products on ``device``, whatever was set on the machine.

    Emulated float32 products of three bfloat16 parts pass: only the environment keeps those out.

    Raises:
        ConfigError: ``short_products``.
    """
    if (error := product_error(device)) > _WHOLE:
        raise ConfigError(
            "short_products",
            f"float32 products lack bits here: one differs by {error:.1e} of its value.",
            "Unset ONEDNN_DEFAULT_FPMATH_MODE, NVIDIA_TF32_OVERRIDE and CUBLAS_EMULATE_SINGLE_PRECISION.",
        )
    if not _spans_exponents(device):
        raise ConfigError(
            "short_products",
            "float64 products lose small numbers beside large ones here, as emulated ones do.",
            "Unset CUBLAS_EMULATE_DOUBLE_PRECISION.",
        )


def product_error(device: str | torch.device) -> float:
    """Return the largest relative error of two fixed float32 products, of matrices and of a convolution."""
    generator = torch.Generator("cpu").manual_seed(0)
    left, right = (1 + torch.rand(_SIZE, _SIZE, generator=generator, device="cpu") for _ in range(2))
    # The same numbers as images of 64 channels and filters of 2 x 2: as many products in a sum.
    images, filters = left.view(4, 64, 16, 16), right.view(_SIZE, 64, 2, 2)
    pairs = (
        (left.to(device) @ right.to(device), left.double() @ right.double()),
        (conv2d(images.to(device), filters.to(device)), conv2d(images.double(), filters.double())),
    )
    return max(_relative_error(found, exact) for found, exact in pairs)


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float(((found.cpu().double() - exact).abs() / exact).max())


def _spans_exponents(device: str | torch.device) -> bool:
    """Return whether rows of float64 products keep 1 beside 2³⁰⁰, which the other side multiplies by 0."""
    left, right = (torch.ones(_SIZE, _SIZE, dtype=torch.float64, device=device) for _ in range(2))
    left[:, 0], right[0] = 2.0**300, 0.0
    return bool((left @ right == _SIZE - 1).all())
