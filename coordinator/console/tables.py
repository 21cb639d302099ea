"""Tables of two columns, and figures as text. Knows nothing of what a command shows."""

import math
from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text


def fields_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Return two columns, a label and its value; values are folded, never cut."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def value_text(value: Any) -> str:
    """Return a figure with four significant digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
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
