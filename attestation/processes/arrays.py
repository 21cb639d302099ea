"""Arrays in shared memory that nobody can change any more: what a channel passes beside a message.

All arrays of a message lie in one memory, in their order, each at the next multiple of `ALIGNMENT`.

Guarantee: arrays are mapped only if their memory can neither be written nor resized by anybody, has the size that was
stated, and consists of ordinary pages. So their content does not change while it is read, and reading it cannot fail.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from raycloak.metrics.errors import ProtocolError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MOST_DIMENSIONS: Final = 32
ALIGNMENT: Final = 64
"""A line of a processor's cache: no type of numbers needs more, and torch's kernels are fastest with it."""


class Place(NamedTuple):
    """An array's type, shape and first byte in the memory of its message."""

    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """The byte behind its last one."""
        return self.start + self.dtype.itemsize * prod(self.shape)


def places_of(specs: Sequence[str]) -> list[Place]:
    """Return where arrays of these types and shapes lie; ProtocolError ``malformed`` if one is no type and shape."""
    places: list[Place] = []
    for spec in specs:
        start = -(-places[-1].end // ALIGNMENT) * ALIGNMENT if places else 0
        places.append(Place(*_parsed(spec), start))
    return places


def shared(arrays: "Sequence[NDArray[Any]]") -> tuple[list[str], int]:
    """Copy arrays into sealed memory; return the type and shape of each, and a descriptor that the caller closes.

    Raises:
        OSError: the memory cannot be had.
    """
    specs = [f"{each.dtype.str}:{','.join(map(str, each.shape))}" for each in arrays]
    descriptor = os.memfd_create("raycloak", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        places = places_of(specs)
        os.ftruncate(descriptor, places[-1].end)
        for array, place in zip(arrays, places, strict=True):
            # The second is for an array of Fortran's order or with gaps, whose bytes are copied once more.
            content = array.data if array.flags.c_contiguous else array.copy(order="C").data
            left = content.cast("B") if array.nbytes else memoryview(b"")
            while left:
                left = left[os.pwrite(descriptor, left, place.end - len(left)) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return specs, descriptor


def mapped(places: Sequence[Place], descriptor: int) -> "tuple[NDArray[Any], ...]":
    """Map the arrays of a descriptor, without a copy. What the caller writes into them is seen by nobody else.

    The mapping, and a descriptor of it, live as long as any of the arrays.

    Raises:
        ProtocolError: ``array_unsealed`` if the memory could still change, ``array_pages`` if it consists of other than
            ordinary pages, ``array_size`` if it is not as large as stated.
    """
    import numpy as np

    size = places[-1].end
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # a file of a disk, a pipe or a socket
    if seals & _SEALS != _SEALS:
        raise ProtocolError("array_unsealed", "the memory of an array can still be changed by its sender.")
    # Huge pages come from a pool that other processes may need.
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        raise ProtocolError("array_pages", "the memory of an array does not consist of ordinary pages.")
    if os.fstat(descriptor).st_size != size:
        raise ProtocolError("array_size", f"the memory of arrays does not have the {size} bytes that were stated.")
    if size == 0:
        return tuple(np.empty(place.shape, place.dtype) for place in places)
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return tuple(np.ndarray(place.shape, place.dtype, memory, place.start) for place in places)


@lru_cache(2**10)
def _parsed(spec: str) -> "tuple[np.dtype[Any], tuple[int, ...]]":
    # Loading it takes a tenth of a second, and most children exchange no array.
    import numpy as np

    name, _, dimensions = spec.partition(":")
    try:
        dtype, shape = np.dtype(name), tuple(map(int, dimensions.split(",") if dimensions else ()))
    except (TypeError, ValueError, SyntaxError):
        raise ProtocolError("malformed", "an array of no type and shape") from None
    # One text for each, and no type whose values are addresses.
    plain = dtype.kind in "biuf" and f"{dtype.str}:{','.join(map(str, shape))}" == spec
    if not plain or len(shape) > MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise ProtocolError("malformed", "an array of no type and shape")
    return dtype, shape
