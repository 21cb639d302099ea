"""Parameter ranges assign tensors to aggregators. A range is a run of whole tensors in canonical order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.manifest import TensorSpec


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """The coordinates ``start`` to ``stop`` (exclusive) of the flat parameter vector.

    Attributes:
        index: position of the range, 0 .. S-1.
        tensors: its whole tensors, in canonical order.
    """

    index: int
    start: int
    stop: int
    tensors: tuple[TensorSpec, ...]

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return self.stop - self.start


def split_ranges(tensors: Sequence[TensorSpec], count: int) -> tuple[ParameterRange, ...]:
    """Cut ``tensors`` into ``count`` contiguous ranges of whole tensors, as even in size as such cuts allow.

    Guarantee: the ranges cover every tensor exactly once and in order, none is empty, and the largest is as small as
    possible. The result depends on the arguments alone.

    Raises:
        ConfigError: ``aggregators`` if there are fewer tensors than ranges.
    """
    if not 1 <= count <= len(tensors):
        raise ConfigError(
            "aggregators",
            f"{count} aggregators cannot share {len(tensors)} trainable tensors: each needs a whole tensor.",
            f"Set aggregators to at most {len(tensors)}.",
        )
    sizes = [tensor.size for tensor in tensors]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle, 1)) - 1 <= count:
            high = middle
        else:
            low = middle + 1
    # The first tensor of each range, and the end, for the smallest possible largest range.
    cuts, starts = _fill(sizes, low, count), [0, *accumulate(sizes)]
    return tuple(
        ParameterRange(index, starts[first], starts[last], tuple(tensors[first:last]))
        for index, (first, last) in enumerate(pairwise(cuts))
    )


def ranges_needed(whole_bytes: int, rooms: Sequence[int], most: int) -> int:
    """Return the number of ranges with which each aggregator fits its node, as far as there are nodes for more.

    Args:
        whole_bytes: what one aggregator of all ranges takes.
        rooms: memory of each node for aggregators, in bytes; without any, there is one range.
        most: ranges that the model's tensors allow.
    """
    return min(-(-whole_bytes // min(rooms)), len(rooms), most) if rooms else 1


def _fill(sizes: list[int], capacity: int, at_least: int) -> list[int]:
    """Return the cuts of a first-fit walk that stays within ``capacity`` and yields at least so many ranges."""
    cuts, filled = [0], 0
    for position, size in enumerate(sizes):
        ranges_after = at_least - len(cuts)
        if position > cuts[-1] and (filled + size > capacity or len(sizes) - position <= ranges_after):
            cuts.append(position)
            filled = 0
        filled += size
    return [*cuts, len(sizes)]
