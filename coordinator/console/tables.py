"""Tables of two columns. Knows nothing of what a command shows."""

from collections.abc import Iterable

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
