"""Tables for a terminal. Knows nothing of what a command shows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from raycloak.coordinator.console.figures import value_text


def fields_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Return two columns, a label and its value; values are folded, never cut."""
    # As text: in a string, a name that a user has given could be markup.
    table = Table(title=Text(title, style="bold"), show_header=False, title_justify="left")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Return facts by name, as `value_text` writes them and lists with commas."""
    shown = {name: ", ".join(value) if isinstance(value, list) else value_text(value) for name, value in facts.items()}
    return fields_table(title, ((name.replace("_", " "), text) for name, text in shown.items()))


def columns_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a column for each header, a bold one of labels where it is empty; cells are folded, never cut."""
    table = Table(title=Text(title, style="bold"), title_justify="left")
    for header in headers:
        table.add_column(header, overflow="fold", style="" if header else "bold")
    for row in rows:
        # As text, as a field's value.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
