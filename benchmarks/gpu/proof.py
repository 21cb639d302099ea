"""Sections on proof 006: a row that is added has at most the norm that was measured, whatever it holds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from benchmarks.gpu.interpreter import mend_interpreter
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.workers.gradients.numerics import exact_sums, pin_numerics
from raycloak.workers.gradients.parts import (
    DensePart,
    GramPart,
    LookupPart,
    OuterPart,
    Part,
    Products,
    RowsPart,
    merged,
    rows_part,
)

ALLOWED = (1 + 2.0**-19) ** 2 * (1 + 2.0**-22) ** 2
"""The square of what a part guarantees (`ClippedSum`)."""
ROWS = 4
Kind = Literal["ordinary", "cancelling", "large", "mixed"]
KINDS: tuple[Kind, ...] = ("ordinary", "cancelling", "large", "mixed")


@dataclass(frozen=True, slots=True)
class _Sides:
    """Both sides of a matrix product for each row, on the device."""

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, kind: Kind, tokens: int, height: int, width: int, place: Place) -> "_Sides":
        draw = torch.Generator().manual_seed(3)
        left, right = (torch.randn(ROWS, tokens, each, generator=draw) for each in (height, width))
        if kind == "cancelling":
            # Each odd token takes the one before it away, but for a millionth.
            left[:, 1::2] = left[:, ::2] * (1e-6 - 1)
            right[:, 1::2] = right[:, ::2]
        if kind == "large":
            left, right = left * 2.0**30, right * 2.0**30
        if kind == "mixed":
            left *= torch.logspace(-30, 30, ROWS)[:, None, None]
        return cls(left.to(place.device), right.to(place.device))

    def products(self) -> Products:
        return Products(self.left[:, None], self.right[:, None])


def _parts(place: Place) -> dict[str, Callable[[Kind], Part]]:
    """Return makers of each form of part, in shapes of which no side is a multiple of a tile."""

    def sides(kind: Kind, tokens: int, height: int, width: int) -> _Sides:
        return _Sides.of(kind, tokens, height, width, place)

    def outer(kind: Kind) -> Part:
        both = sides(kind, 1, 300, 200)
        return OuterPart(both.left[:, 0], both.right[:, 0])

    def lookup(kind: Kind) -> Part:
        ids = torch.randint(20, (ROWS, 64), generator=torch.Generator().manual_seed(5)).to(place.device)
        return LookupPart(merged(ids, sides(kind, 64, 48, 1).left, 50))

    def tied(kind: Kind) -> Part:
        both = sides(kind, 48, 60, 300)
        ids = torch.randint(60, (ROWS, 48), generator=torch.Generator().manual_seed(5)).to(place.device)
        return GramPart([both.products()], [merged(ids, -both.right, 60)])

    return {
        "dense": lambda kind: DensePart(sides(kind, 1, 5000, 1).left[:, 0]),
        "outer": outer,
        "rows": lambda kind: rows_part([sides(kind, 96, 250, 310).products()], []),
        "gram": lambda kind: GramPart([sides(kind, 96, 770, 700).products()], []),
        "gram, tied": tied,
        "lookup": lookup,
    }


def largest_ratio(part: Part) -> float:
    """Return the largest square of a row that is added, over the square that was measured."""
    with exact_sums():
        squares = part.squares()
        size = part.rows().shape[1]
        return max(_added_square(part, row, size, squares) / float(squares[row]) for row in range(ROWS))


class _Adds(Protocol):
    def add(self, weights: Tensor, total: Tensor) -> None: ...


def _added_square(part: _Adds, row: int, size: int, squares: Tensor) -> float:
    if not math.isfinite(float(squares[row])):
        # The engine gives such a row the weight zero.
        return 0.0
    # One element into its memory it is aligned to 8 bytes alone, as the total of a tensor after an odd one is.
    total = torch.zeros(size + 1, dtype=torch.float64, device=squares.device)[1:]
    weights = torch.zeros_like(squares)
    weights[row] = 1.0
    part.add(weights, total)
    return float(total.square().sum())


def proof_property(place: Place) -> Found:
    """Measure and add hostile rows in each form, as they are and after a user's module asked for TF32."""
    pin_numerics()
    figures, faults = {}, []
    for label, precision in (("", "highest"), (", after a module asked for TF32", "high")):
        for name, make in _parts(place).items():
            parts = [make(kind) for kind in KINDS]
            torch.set_float32_matmul_precision(precision)
            largest = max(largest_ratio(part) for part in parts)
            pin_numerics()
            figures[name + label] = largest
            if not largest <= ALLOWED:
                faults.append(f"{name}{label}: a row is added with {largest:.9g} of its square")
    part = _parts(place)["rows"]("ordinary")
    with exact_sums():
        repeats = torch.equal(part.rows(), part.rows())
    if not repeats:
        faults.append("a matrix product gives other bits when it is computed again")
    return Found({"allowed": ALLOWED, "largest added over measured": figures}, faults)


def fused_rows(place: Place) -> Found:
    """Judge `FusedRows` by the same property and beside float64, and time it and `RowsPart` in GPT-2's shape."""
    from raycloak.workers.device.rows import FusedRows

    pin_numerics()
    if not place.on_gpu:
        mend_interpreter()
    figures: dict[str, object] = {}
    faults = []
    for kind in (torch.float32, torch.bfloat16):
        sides = _Sides.of("ordinary", 40, 70, 33, place)
        both = sides.left[:, None].to(kind), sides.right[:, None].to(kind)
        part = FusedRows.proven(*both)
        squares, compiled = part.squares(), _binaries()
        largest = max(_added_square(part, row, 70 * 33, squares) / float(squares[row]) for row in range(ROWS))
        figures[f"{kind}: largest added over measured"] = largest
        if not abs(largest - 1) < 1e-12 or _binaries() != compiled:
            faults.append(f"{kind}: added with {largest!r} of the square, {_binaries() - compiled} more binaries")
        exact = (both[0].double().mT @ both[1].double()).square().sum((1, 2, 3))
        figures[f"{kind}: squares off by"] = float((squares / exact - 1).abs().max())
    if place.on_gpu:
        figures |= _speeds(place)
    return Found(figures, faults)


def _binaries() -> int:
    """Return how many binaries of the kernel this process has; the interpreter compiles none."""
    from raycloak.workers.device.row_kernel import row_kernel

    return sum(len(each[0]) for each in getattr(row_kernel, "device_caches", {}).values())


def _speeds(place: Place) -> dict[str, object]:
    """Return 10^12 operations a second of both passes, for 8 rows of GPT-2's widest layer."""
    from raycloak.workers.device.rows import FusedRows

    rows, tokens, height, width = 8, 1024, 768, 3072
    left, right = (torch.randn(rows, 1, tokens, each, device=place.device) for each in (height, width))
    weights = torch.ones(rows, dtype=torch.float64, device=place.device)
    total = torch.zeros(height * width, dtype=torch.float64, device=place.device)

    def speed(work: Callable[[], object]) -> float:
        return 2 * rows * tokens * height * width / place.median_s(work, 5) / 1e12

    figures: dict[str, object] = {}
    with exact_sums():
        for kind in (torch.float32, torch.bfloat16):
            both = left.to(kind), right.to(kind)
            # A part is measured once.
            figures[f"FusedRows {kind}: measured, Tflop/s"] = speed(lambda both=both: FusedRows(*both).squares())  # type: ignore[misc]
            figures[f"FusedRows {kind}: added, Tflop/s"] = speed(partial(FusedRows(*both).add, weights, total))
        library = RowsPart([Products(left, right)], [])
        figures["RowsPart: added, Tflop/s"] = speed(partial(library.add, weights, total))
    return figures
