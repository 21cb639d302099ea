"""Writes and reads arrays as a safetensors file, piece by piece, so that no payload exists as a whole in memory.

The safetensors library reads it, too. The format is: header length (8 bytes, little-endian), header (JSON), and the
arrays' bytes one after the other. No pickle on either side.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import read_json
from raycloak.attestation.sealed.chunk_stream import Piece
from raycloak.attestation.sealed.package_manifest import PackageRefusal, refuse

_ALIGNMENT = 8  # the library pads its header to so many bytes
_MOST_HEADER_BYTES: Final = 100_000_000  # of a file that the library reads


def safetensors_pieces(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Iterator[Piece]:
    """Yield the pieces of a safetensors file with ``arrays`` in their order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        kind = "BOOL" if array.dtype.kind == "b" else f"{array.dtype.kind.upper()}{8 * array.itemsize}"
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    yield len(encoded).to_bytes(8, "little") + encoded
    for array in arrays.values():
        # The format is little-endian, whatever the machine.
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if little.size:
            yield np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def load_arrays(chunks: Iterator[bytes], places: Mapping[str, NDArray[Any]] | None = None) -> dict[str, NDArray[Any]]:
    """Read the file of :func:`safetensors_pieces` from its chunks; there is no other copy than the arrays.

    Args:
        places: C-contiguous arrays to write to, by name; an array without one gets memory of its own.

    Raises:
        EvidenceError: ``package_malformed`` for another file, and for an array of another type or shape than its place.
    """
    left = memoryview(b"")

    def fill(target: memoryview) -> None:
        nonlocal left
        while target:
            if not left and not (left := memoryview(next(chunks, b""))):
                raise ValueError("it ends early")
            taken = left[: len(target)]
            target[: len(taken)] = taken
            target, left = target[len(taken) :], left[len(taken) :]

    def read(size: int) -> bytearray:
        content = bytearray(size)
        fill(memoryview(content))
        return content

    found: dict[str, NDArray[Any]] = {}
    try:
        size = int.from_bytes(read(8), "little")
        if size > _MOST_HEADER_BYTES:
            raise ValueError("its header is too long")
        header, offset = read_json(bytes(read(size))), 0
        header.pop("__metadata__")
        for name, stated in header.items():
            dtype, shape = _dtype(stated["dtype"]), tuple(stated["shape"])
            array = (places or {}).get(name)
            array = np.empty(shape, dtype) if array is None else array
            offsets = [offset, offset := offset + array.nbytes]
            if (array.dtype, array.shape, offsets) != (dtype, shape, stated["data_offsets"]):
                raise ValueError(f"{name} is not what it should be")
            if array.size:
                fill(array.reshape(-1).view(np.uint8).data)
            found[name] = array
        if left or any(chunks):
            raise ValueError("it goes on behind its arrays")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        refuse(PackageRefusal.MALFORMED, f"a payload has no arrays: {error}.")
    return found


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(bool) if name == "BOOL" else np.dtype(f"<{name[0].lower()}{int(name[1:]) // 8}")
