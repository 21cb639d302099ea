"""Canonical bytes: the one place that says how a value becomes bytes that are hashed, signed or derived from.

Guarantee: :func:`length_prefixed` is injective over (label, fields), so no two different inputs share an encoding.
"""

import hashlib
import json
from typing import Any

# SHA-256's.
DIGEST_BYTES = 32
# A value must have exactly one text, because texts are hashed and signed.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(data: bytes | memoryview) -> bytes:
    """Return SHA-256 of ``data``, 32 bytes."""
    return hashlib.sha256(data).digest()


def length_prefixed(label: str, *fields: bytes | str | int) -> bytes:
    """Encode a domain label and fields, each as big-endian u32 length and bytes; the design's LP.

    Text is UTF-8; an integer is its big-endian u64 (it must be in [0, 2^64)).
    """
    parts: list[bytes] = []
    for field in (label, *fields):
        if isinstance(field, int):
            raw = field.to_bytes(8, "big")
        elif isinstance(field, str):
            raw = field.encode()
        else:
            raw = bytes(field)
        parts += (len(raw).to_bytes(4, "big"), raw)
    return b"".join(parts)


def canonical_json(value: Any) -> bytes:
    """Encode JSON with sorted keys, no white space, ASCII only; ValueError for NaN and infinities."""
    return _ENCODER.encode(value).encode()


def read_json(content: bytes | str) -> Any:
    """Parse a JSON document; ValueError if an object names a key twice, or nesting is too deep."""
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the JSON document is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    # Readers of JSON disagree about which of two equal keys counts.
    if len(fields) != len(pairs):
        raise ValueError("a JSON object names a key twice")
    return fields
