"""A convolution's patches multiply to the gradient of its weight, whatever order they stand in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from raycloak.workers.gradients import parts as parts_module
from raycloak.workers.gradients.clipping import ClippedSum
from raycloak.workers.gradients.parts import DensePart, GramPart, Part, Products, RowsPart
from raycloak.workers.gradients.patches import patches

ROWS, KERNEL = 3, (2, 3)


def convolution(channels: int, groups: int) -> tuple[Products, Tensor]:
    """Return a convolution's products and the gradient of its weight for each row, as torch computes it."""
    draw = torch.Generator().manual_seed(5)
    shape = (6, channels // groups, *KERNEL)
    images, weight = torch.randn(ROWS, channels, 7, 8, generator=draw), torch.randn(shape, generator=draw)
    settings: dict[str, Any] = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": groups}
    output = functional.conv2d(images, weight, **settings)
    gradient = torch.randn(output.shape, generator=draw)
    right, order = patches(images, KERNEL, settings["stride"], settings["padding"], settings["dilation"], groups)
    left = gradient.reshape(ROWS, groups, len(weight) // groups, -1).mT
    rows = [
        conv2d_weight(  # type: ignore[no-untyped-call]
            image[None], shape, of_row[None], **settings
        )
        for image, of_row in zip(images, gradient, strict=True)
    ]
    return Products(left, right, order), torch.cat(rows).view(ROWS, -1)


FORMS: dict[str, Callable[[Products], Part]] = {
    "dense": lambda products: DensePart(products.unordered_rows(), products.order),
    "rows": lambda products: RowsPart([products], []),
    "rows, used twice": lambda products: RowsPart([products, products], []),
    "gram": lambda products: GramPart([products], []),
}


@pytest.mark.parametrize(
    ("form", "channels", "groups"),
    [(form, channels, 1) for form in FORMS for channels in (1, 4)] + [("dense", 4, 2), ("rows", 4, 2)],
)
def test_every_form_of_a_convolution_gives_the_gradient_of_its_weight(
    form: str, channels: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, expected = convolution(channels, groups)
    # Rows are added in pieces.
    monkeypatch.setitem(parts_module.BLOCK, "cpu", 2 * products.right.shape[3])
    part, times = FORMS[form](products), 2 if form == "rows, used twice" else 1
    torch.testing.assert_close(part.rows(), times * expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(times * products.all_rows(), times * expected, rtol=1e-4, atol=1e-5)
    weights, total = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64), torch.zeros(expected.shape[1]).double()
    part.add(weights, total)
    torch.testing.assert_close(total, times * (weights @ expected.double()), rtol=1e-4, atol=1e-5)


def test_small_parts_side_by_side_add_what_each_adds_alone() -> None:
    """Also convolutions, each with its own order."""
    found = [convolution(channels, 1) for channels in (4, 1)]
    parts = [DensePart(products.unordered_rows(), products.order) for products, _ in found]
    assert all(part.is_small for part in parts)
    total = ClippedSum([rows.shape[1] for _, rows in found], 1e6, torch.device("cpu"))
    total.add(parts, torch.ones(ROWS, dtype=torch.bool))
    expected = torch.cat([rows.sum(0) for _, rows in found]).double()
    torch.testing.assert_close(torch.cat(total.pieces()), expected, rtol=1e-4, atol=1e-4)
