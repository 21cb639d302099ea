"""Writes arrays as a safetensors file, piece by piece, so that a payload never exists as a whole in memory.

The safetensors library reads it back. The format is: header length (8 bytes, little-endian), header (JSON), and the
arrays' bytes one after the other. No pickle on either side.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load

from raycloak.attestation.sealed.chunk_stream import Piece

_ALIGNMENT = 8  # the library pads its header to so many bytes
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}

State = Mapping[str, np.ndarray]


def safetensors_pieces(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Iterator[Piece]:
    """Yield the pieces of a safetensors file with ``arrays`` in their order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    yield len(encoded).to_bytes(8, "little") + encoded
    for array in arrays.values():
        # The format is little-endian, whatever the machine.
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if little.size:
            yield np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def joined_states(states: Sequence[State]) -> dict[str, np.ndarray]:
    """Merge the optimizer states of all ranges under names ``range index/name``."""
    return {f"{index}/{name}": array for index, state in enumerate(states) for name, array in state.items()}


def parted_states(arrays: Mapping[str, np.ndarray], ranges: int) -> tuple[State, ...]:
    """Split arrays into the states of their ranges, the reverse of :func:`joined_states`."""
    states: tuple[dict[str, np.ndarray], ...] = tuple({} for _ in range(ranges))
    for key, array in arrays.items():
        index, _, name = key.partition("/")
        states[int(index)][name] = array
    return states


def load_arrays(chunks: Iterator[bytes]) -> dict[str, np.ndarray]:
    """Load the arrays of a safetensors file that arrives in chunks."""
    return load(b"".join(chunks))
