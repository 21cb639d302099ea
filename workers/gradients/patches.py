"""The patches that a convolution multiplies with its weight."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional


def patches(
    rows: Tensor,
    kernel: tuple[int, ...],
    stride: int | Sequence[int],
    padding: int | str | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> Tensor:
    """Return the patches of rows [n, channels, ...], float32 [n, groups, channels / groups * kernel, positions].

    Args:
        stride, padding, dilation: as of torch's convolutions.
    """
    size = len(kernel)
    steps, holes = _each(stride, size), _each(dilation, size)
    padded = functional.pad(rows, _sides(kernel, padding, holes))
    for axis, (extent, step, hole) in enumerate(zip(kernel, steps, holes, strict=True)):
        padded = padded.unfold(2 + axis, hole * (extent - 1) + 1, step)[..., ::hole]
    # Channels, then the positions in the kernel, then those of the output.
    ordered = padded.permute(0, 1, *range(2 + size, 2 + 2 * size), *range(2, 2 + size))
    return ordered.reshape(len(rows), groups, -1, padded.shape[2 : 2 + size].numel())


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
