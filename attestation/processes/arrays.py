"""Arrays in shared memory that nobody can change any more: what a channel passes beside a message.

Guarantee: an array is mapped only if its memory can neither be written nor resized by anybody, has the size that was
stated, and consists of ordinary pages. So its content does not change while it is read, and reading it cannot fail.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from raycloak.metrics.errors import ProtocolError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MOST_DIMENSIONS: Final = 32


def shared(array: "NDArray[Any]") -> tuple[str, int]:
    """Copy an array into sealed memory; return its type and shape, and a descriptor that the caller closes.

    Raises:
        OSError: the memory cannot be had.
    """
    # The second is for an array of Fortran's order or with gaps, whose bytes are copied once more.
    content = array.data if array.flags.c_contiguous else array.copy(order="C").data
    descriptor = os.memfd_create("raycloak", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        if array.nbytes:
            _write(descriptor, content.cast("B"))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return f"{array.dtype.str}:{','.join(map(str, array.shape))}", descriptor


def _write(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def stated_bytes(specs: Sequence[str]) -> int:
    """Return the bytes of all arrays that these types and shapes state; ProtocolError ``malformed`` if one is none."""
    sizes = [_parsed(spec) for spec in specs]
    return sum(dtype.itemsize * prod(shape) for dtype, shape in sizes)


def mapped(spec: str, descriptor: int) -> "NDArray[Any]":
    """Map the array of a descriptor, without a copy. What the caller writes into it is seen by nobody else.

    The mapping, and a descriptor of it, live as long as the array.

    Args:
        spec: its type and shape, as :func:`shared` returned them.

    Raises:
        ProtocolError: ``array_unsealed`` if its memory could still change, ``array_pages`` if it consists of other than
            ordinary pages, ``array_size`` if it is not as large as stated.
    """
    import numpy as np

    dtype, shape = _parsed(spec)
    size = dtype.itemsize * prod(shape)
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
        raise ProtocolError("array_size", f"the memory of an array does not have the {size} bytes that were stated.")
    if size == 0:
        return np.empty(shape, dtype)
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.ndarray(shape, dtype, memory)


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
