"""The verdict of a run as a table for a terminal, and for its log."""

import io

from rich.console import Console
from rich.table import Table

from raycloak.coordinator.console.tables import fields_table
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.words import verdict_rows, verdict_title


def verdict_table(verdict: Verdict) -> Table:
    """Return the verdict for a person."""
    return fields_table(verdict_title(verdict), verdict_rows(verdict))


def verdict_text(verdict: Verdict, width: int = 120) -> str:
    """Return the same table as plain text of at most ``width`` columns, for the run's log."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(verdict_table(verdict))
    return text.getvalue()
