"""The verdict of a run, and the outcome of a replay, as tables for a terminal."""

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from raycloak.coordinator.console.tables import fields_table
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.words import verdict_rows, verdict_title

if TYPE_CHECKING:
    from raycloak.coordinator.runs.replay import Replay


def verdict_table(verdict: Verdict) -> Table:
    """Return the verdict for a person."""
    return fields_table(verdict_title(verdict), verdict_rows(verdict))


def verdict_text(verdict: Verdict, width: int = 120) -> str:
    """Return the same table as plain text of at most ``width`` columns, for the run's log."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(verdict_table(verdict))
    return text.getvalue()


def replay_table(replay: "Replay") -> Table:
    """Return the outcome of a replay."""
    title = "Replay (SIMULATED evidence)" if replay.evidence_class == "simulated" else "Replay"
    return fields_table(
        title,
        [
            ("steps", f"{replay.first} to {replay.last - 1}, all digests as logged"),
            ("workers", str(replay.workers)),
            ("keys", f"of {replay.most_hosted} of {replay.virtual_workers} virtual workers at most on one machine"),
            ("charged", f"nothing ({replay.charged_steps} steps, as before)"),
            ("last digest", replay.digests[-1]),
            ("run directory", str(replay.run_dir)),
        ],
    )
