"""The commands ``raycloak model``: what of a model can be trained, before there is a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloak.coordinator.cli.options import Overrides, command
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.runs.progress import waiting
from raycloak.metrics.errors import ModelError

if TYPE_CHECKING:
    from rich.table import Table

    from raycloak.workers.gradients.model_report import LayerReport, ModelReport

model = typer.Typer(help="Models: what of them can be trained, layer by layer.")


@model.callback()
def _group() -> None:
    """Keep this a group of commands while it has only one."""


@model.command("check")
@command
def check_command(
    output: Output,
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="YAML file of a run, or module:function.", show_default=False),
    ],
    overrides: Overrides = None,
) -> int:
    """Say of each layer whether it is trained, why not, and the line that mends it. Exit code 2 if one is refused.

    With a configuration the model is also run, on synthetic examples of the form of its dataset.
    """
    from raycloak.coordinator.config.run import load_config
    from raycloak.coordinator.planning.model_check import report_by_type, report_in_a_run
    from raycloak.workers.inputs.user_code import telling

    with telling(), waiting(output.progress, "trying the model"):
        if ":" in target and not Path(target).exists():
            report, notes = report_by_type(target, Path())
        else:
            report, notes = report_in_a_run(load_config(Path(target), overrides), Path(target).parent)
    facts = {
        "refused": [layer.name for layer in report.refused],
        "trained_parameters": report.trained,
        "was_run": report.was_run,
        "notes": notes,
        "layers": [asdict(layer) for layer in report.layers],
    }
    output.result(facts, _table(report, notes))
    return ModelError.exit_code if report.refused else 0


def _table(report: "ModelReport", notes: tuple[str, ...]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    said = "" if report.was_run else ", judged by types alone: give a configuration to run it"
    table = Table(title=f"Model ({len(report.refused)} refused{said})", title_justify="left", title_style="bold")
    for header in ("layer", "type", "status", "trained", "why, and the line that mends it"):
        table.add_column(header, overflow="fold")
    for layer in report.layers:
        style = "bold red" if layer.status == "refused" else ""
        shown = f"{layer.parameters:,}" if layer.parameters else ""
        table.add_row(Text(layer.name), layer.kind, Text(layer.status, style=style), shown, Text(_advice(layer)))
    table.add_row("all", "", "", f"{report.trained:,}", Text(" ".join(notes)))
    return table


def _advice(layer: "LayerReport") -> str:
    mends = f"raycloak.fix(model): {layer.mechanical}." if layer.mechanical else layer.remedy
    if layer.status != "refused":
        # An in-place activation, for example, is no reason to refuse.
        return mends
    return f"{layer.reason} {mends}"
