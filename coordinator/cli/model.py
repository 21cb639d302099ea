"""The commands ``raycloak model``: what of a model can be trained, before there is a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from raycloak.coordinator.cli.options import Overrides, command
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.console.tables import columns_table
from raycloak.coordinator.runs.progress import waiting
from raycloak.metrics.errors import ModelError

if TYPE_CHECKING:
    from raycloak.workers.gradients.model_report import LayerReport

model = typer.Typer(help="Models: what of them can be trained, layer by layer.")


@command(model, "check")
def check_command(
    output: Output,
    target: Annotated[str, typer.Argument(metavar="MODEL", help="YAML file of a run, or module:function.")],
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
    said = "" if report.was_run else ", judged by types alone: give a configuration to run it"
    rows: list[tuple[str | Text, ...]] = [
        (
            layer.name,
            layer.kind,
            Text(layer.status, style="bold red" if layer.status == "refused" else ""),
            f"{layer.parameters:,}" if layer.parameters else "",
            advice(layer),
        )
        for layer in report.layers
    ]
    headers = ("layer", "type", "status", "trained", "why, and the line that mends it")
    rows.append(("all", "", "", f"{report.trained:,}", " ".join(notes)))
    output.result(facts, columns_table(f"Model ({len(report.refused)} refused{said})", headers, rows))
    return ModelError.exit_code if report.refused else 0


def advice(layer: "LayerReport") -> str:
    """Return why a layer is refused, and what mends it; an in-place activation, for example, is no reason to refuse."""
    mends = f"raycloak.fix(model): {layer.mechanical}." if layer.mechanical else layer.remedy
    return f"{layer.reason} {mends}" if layer.status == "refused" else mends
