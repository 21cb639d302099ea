"""A device whose products lack bits is refused by name, whatever made it so."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from raycloak.metrics.errors import ConfigError
from raycloak.workers.gradients import products
from raycloak.workers.gradients.environment import worker_environment
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.products import check_products, product_error
from tests.conftest import Runner

CHILD = """
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.products import check_products
pin_numerics()
check_products("cpu")
"""


PRODUCT = "import torch; a = torch.full((256, 256), 1 + 2.0**-12); print((a @ a)[0, 0].item() / 256)"
"""Prints 1 where both factors lose their last bits."""


def short(values: Tensor, bits: int) -> Tensor:
    """Round float32 to so many bits after the leading one, as a GPU's operands are."""
    dropped = 23 - bits
    words = values.contiguous().view(torch.int32) + (1 << (dropped - 1))
    return (words & ~((1 << dropped) - 1)).view(torch.float32)


def test_whole_products_pass() -> None:
    pin_numerics()
    check_products("cpu")
    assert product_error("cpu") < 2.0**-18


@pytest.mark.parametrize("bits", [10, 7])
def test_products_of_few_bits_are_refused(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    whole = torch.nn.functional.conv2d

    def narrow(images: Tensor, filters: Tensor) -> Tensor:
        if images.dtype == torch.float64:
            return whole(images, filters)
        return whole(short(images, bits), short(filters, bits))

    monkeypatch.setattr(products, "conv2d", narrow)
    with pytest.raises(ConfigError, match=r"short_products.*float32 products lack bits"):
        check_products("cpu")


def test_emulated_float64_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep digits relative to the widest number of a row, however small the others are."""
    whole = Tensor.__matmul__

    def fixed_point(left: Tensor, right: Tensor) -> Tensor:
        if left.dtype == torch.float64:
            grid = left.abs().amax(1, keepdim=True) * 2.0**-60
            left = (left / grid).round() * grid
        return whole(left, right)

    monkeypatch.setattr(Tensor, "__matmul__", fixed_point)
    with pytest.raises(ConfigError, match=r"short_products.*float64 products lose small numbers"):
        check_products("cpu")


def has_bfloat16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@pytest.mark.skipif(not has_bfloat16(), reason="this CPU does not multiply bfloat16")
@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_a_node_that_shortens_the_products_of_a_cpu_is_overruled_or_refused(
    name: str, run_python: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A test before this one may have left it set; it counts more than the variable's older name.
    monkeypatch.delenv("ONEDNN_DEFAULT_FPMATH_MODE", raising=False)
    narrow = {name: "BF16"}
    # A processor that multiplies bfloat16 may compute by a library that does not heed the variable.
    if float(run_python("-c", PRODUCT, environment=narrow).stdout) != 1:
        pytest.skip(f"{name} shortens no product on this CPU")
    refused = run_python("-c", CHILD, environment=narrow)
    assert "short_products" in refused.stderr
    overruled = run_python("-c", CHILD, environment={**narrow, **worker_environment("default")})
    assert overruled.code == 0, overruled.stderr
