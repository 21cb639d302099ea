"""Figures as text, the same wherever they are shown. Loads nothing, so that the ledger can name them too."""

import math
from typing import Any


def value_text(value: Any) -> str:
    """Return a figure with four significant digits, bytes in hexadecimal, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bytes):
        return value.hex()
    return "" if value is None else str(value)


def epsilon_text(value: float | None) -> str:
    """Return ``value`` with three decimals, rounded up so that no claim is better than the truth."""
    if value is None or not math.isfinite(value):
        return "unbounded"
    return f"{math.ceil(value * 1000 - 1e-6) / 1000:.3f}"


def size_text(count: int) -> str:
    """Return a number of bytes in a decimal unit."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
