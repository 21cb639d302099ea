"""The places of rows in the backward pass: a row's loss may reach its own place of every tensor, and no other.

Taps take place j of a tensor for example j. A model that sorts its rows and puts them back keeps examples apart in its
output, and yet another example's gradient then stands at place j. So some losses are zeroed before a backward pass, and
the gradients that taps capture at those places must be exactly zero.
"""

from itertools import combinations
from math import comb

import torch
from torch import Tensor

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.unit_rows import row_weights


class SilentRows:
    """Rows whose losses are zeroed before a backward pass, and the places of theirs that got a gradient all the same.

    A place with a number that is not finite counts as zero: zero times infinity is NaN, so a loss of zero may give one.

    Args:
        rows: bool [m * k], true where the loss is zeroed.
        rows_per_unit: k rows, side by side, are one unit, whose gradient is the mean over its other rows.
    """

    def __init__(self, rows: Tensor, rows_per_unit: int = 1) -> None:
        self._rows, self._rows_per_unit = rows, rows_per_unit
        # Name, and the least and the largest number at each place; compared all at once, since operations take time.
        self._met: list[tuple[str, Tensor, Tensor]] = []

    def weights(self, losses: Tensor) -> Tensor:
        """Return the factor of each loss in the sum that is differentiated, like ``losses`` [m * k].

        It is 0 for silent rows, and one over their number for the other rows of a unit.
        """
        return row_weights(~self._rows, self._rows_per_unit).to(losses)

    def meet(self, name: str, gradient: Tensor) -> None:
        """Look at the gradient [m * k, ...] of the output of an operation, k places a row.

        Work and shapes do not depend on which rows are silent.

        Args:
            name: of a trained parameter that enters the operation.
        """
        if gradient.numel():
            rows = gradient.detach().reshape(len(self._rows), -1)
            # Two passes: torch's kernel for both at once takes four to twenty times as long.
            self._met.append((name, rows.amin(1), rows.amax(1)))

    @property
    def reached(self) -> Tensor:
        """Return whether a silent row's place got a gradient, bool [] on the device of the rows."""
        return self._moved().any()

    @property
    def first(self) -> str | None:
        """Return the name that came with the first such gradient of the backward pass; None if there was none."""
        moved = self._moved().any(1).tolist()
        return next((name for (name, *_), here in zip(self._met, moved, strict=True) if here), None)

    def _moved(self) -> Tensor:
        """Return for each gradient the silent rows whose place got it, bool [gradients, m]."""
        if not self._met:
            return torch.zeros(0, len(self._rows), dtype=torch.bool, device=self._rows.device)
        low, high = (
            torch.stack([each.to(self._rows.device) for each in side])
            for side in zip(*((low, high) for _, low, high in self._met), strict=True)
        )
        return low.isfinite() & high.isfinite() & ((low != 0) | (high != 0)) & self._rows


class WeighedRows:
    """The sums of the gradients at each place, of a backward pass whose losses are weighed by powers of two.

    A backward pass is linear in the losses, and a power of two changes no bit of a product or a sum. So the sums at the
    place of row j are those of the plain pass times its weight, to the bit. Where another row's loss reaches it, they
    are not.

    Args:
        exponents: int64 [m] on the device of the losses; the weight of row j is two to this power.
    """

    def __init__(self, exponents: Tensor) -> None:
        self._weights = torch.exp2(exponents.double())
        self._met: list[Tensor] = []

    def weights(self, losses: Tensor) -> Tensor:
        """Return the factor of each loss in the sum that is differentiated, like ``losses`` [m]."""
        return self._weights.to(losses)

    def meet(self, _name: str, gradient: Tensor) -> None:
        """Sum the gradient [m * k, ...] of the output of an operation, k places a row."""
        if gradient.numel():
            rows = gradient.detach().reshape(len(self._weights), -1)
            sums = rows.sum(1, dtype=torch.float64), torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float64)
            self._met.append(torch.stack(sums) / self._weights.to(gradient.device))

    def is_apart_from(self, plain: "WeighedRows") -> bool:
        """Return whether all sums are those of ``plain`` but for the weights; one that is not finite says nothing."""
        pairs = zip(self._met, plain._met, strict=True)
        return all(bool(((one == other) | ~other.isfinite()).all()) for one, other in pairs)


# Larger weights would leave the range of float16 sooner, which costs the slower search.
_DIGIT = 16


def weighings(count: int, device: torch.device) -> list[Tensor]:
    """Return exponents int64 [count], each below 16, that tell any two rows apart: the digits of their numbers."""
    rows, found = torch.arange(count, device=device), list[Tensor]()
    while not found or rows.any():
        found.append(rows % _DIGIT)
        rows = rows // _DIGIT
    return found


def silences(count: int) -> list[Tensor]:
    """Return masks bool [count] of rows to silence, so that each ordered pair of rows is told apart by one of them.

    Guarantee: for any rows i and j that differ, some mask silences j and not i. The rows that a mask leaves are subsets
    of one size, of which none contains another (Sperner 1928). So about log2(count) backward passes show what one pass
    for each row would.
    """
    width = next(n for n in range(1, count + 2) if comb(n, n // 2) >= count)
    loud = torch.zeros(width, count, dtype=torch.bool, device="cpu")
    for row, members in zip(range(count), combinations(range(width), width // 2), strict=False):
        loud[list(members), row] = True
    return list(~loud)


def moved_rows(what: str) -> ModelError:
    """Return the error for a model that puts an example's row into the place of another.

    Args:
        what: a clause that says so.
    """
    return ModelError(
        "moved_rows",
        f"{what}, so the gradients of both would be clipped as one example's.",
        "Keep each example in its row of every tensor: pad and mask in place of sorting, packing and gathering.",
    )
