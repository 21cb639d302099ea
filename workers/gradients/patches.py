"""The patches that a convolution multiplies with its weight."""

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.nn import functional


def patches(
    rows: Tensor,
    kernel: tuple[int, ...],
    stride: int | Sequence[int],
    padding: int | str | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> tuple[Tensor, tuple[int, int]]:
    """Return the patches of rows [n, channels, ...], [n, groups, positions, c], and the order of their c elements.

    Args:
        stride, padding, dilation: as of torch's convolutions.

    Returns:
        The patches, and the two extents of a patch if its c elements are to be transposed: places of the kernel, and
        channels. Both are 1 where they stand as in the convolution's weight.
    """
    size = len(kernel)
    steps, holes = _each(stride, size), _each(dilation, size)
    padded = functional.pad(rows, _sides(kernel, padding, holes))
    # What is copied in one piece is long: all channels of neighbours in a kernel, or of one channel all positions.
    whole = groups == 1
    if whole:
        padded = padded.movedim(1, -1).contiguous().movedim(-1, 1)
    for axis, (extent, step, hole) in enumerate(zip(kernel, steps, holes, strict=True)):
        padded = padded.unfold(2 + axis, hole * (extent - 1) + 1, step)[..., ::hole]
    outputs, places = range(2, 2 + size), range(2 + size, 2 + 2 * size)
    positions = padded.shape[2 : 2 + size].numel()
    if whole:
        found = padded.permute(0, *outputs, *places, 1).reshape(len(rows), 1, positions, -1)
        return found, (prod(kernel), rows.shape[1])
    return padded.permute(0, 1, *places, *outputs).reshape(len(rows), groups, -1, positions).mT, (1, 1)


def _sides(kernel: tuple[int, ...], padding: int | str | Sequence[int], holes: tuple[int, ...]) -> list[int]:
    """Return the padding before and after each axis, the last axis first, as ``functional.pad`` takes it."""
    if padding == "same":
        whole = [hole * (extent - 1) for extent, hole in zip(kernel, holes, strict=True)]
        pairs = [(total // 2, total - total // 2) for total in whole]
    elif padding == "valid":
        pairs = [(0, 0)] * len(kernel)
    else:
        assert not isinstance(padding, str), "torch knows no other name"
        pairs = [(each, each) for each in _each(padding, len(kernel))]
    return [side for pair in reversed(pairs) for side in pair]


def _each(value: int | Sequence[int], size: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * size if len(values) == 1 else values
