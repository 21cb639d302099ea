"""Writes arrays as a safetensors file, piece by piece, so that a payload never exists as a whole in memory.

The safetensors library reads it back. The format is: header length (8 bytes, little-endian), header (JSON), and the
arrays' bytes one after the other. No pickle on either side.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load

from raycloak.attestation.sealed.chunk_stream import Piece

_ALIGNMENT = 8  # the library pads its header to so many bytes


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


def load_arrays(chunks: Iterator[bytes]) -> dict[str, np.ndarray]:
    """Load the arrays of a safetensors file that arrives in chunks."""
    return load(b"".join(chunks))
