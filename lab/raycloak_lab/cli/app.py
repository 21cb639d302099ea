"""The command ``raycloak-lab``; exit codes and the line of an error as of ``raycloak``."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

import typer

from raycloak.coordinator.cli.options import Overrides, command, invoke
from raycloak.coordinator.console.output import Output, leave_stdout
from raycloak.coordinator.console.streams import open_missing_streams
from raycloak_lab.cli.adapter import adapter
from raycloak_lab.cli.bench import bench

app = typer.Typer(
    name="raycloak-lab",
    help="Beside raycloak: benches for its developers, and adapters over encrypted activations.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(adapter, name="adapter")


@command(app, "scale")
def scale_command(output: Output, overrides: Overrides = None) -> None:
    """Predict a step at other sizes from rates of this machine; see docs/scale.md."""
    from raycloak_lab.scale.calibration import calibrate, check
    from raycloak_lab.scale.large_models import count_model
    from raycloak_lab.scale.simulation import parse_scale, simulate
    from raycloak_lab.scale.tables import ScaleTables

    assumed = parse_scale(overrides or [])
    if assumed.model is not None:
        output.announce("running the model on shapes without numbers, up to some minutes")
    # Before the minute that this machine takes: it may be refused.
    model = None if assumed.model is None else count_model(assumed.model)
    output.announce("measuring this machine, about a minute")
    rates = calibrate(assumed.optimizer)
    checked = check(rates)
    found = simulate(assumed, rates, model)
    fields = {
        "assumed": assumed.model_dump(),
        "rates": asdict(rates),
        "check": asdict(checked),
        "sizes": [asdict(each) for each in found],
    }
    output.result(fields, ScaleTables(assumed, found, checked))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the console script; exits with the command's code."""
    open_missing_streams()
    code = invoke(app, "raycloak-lab", list(sys.argv[1:] if arguments is None else arguments))
    leave_stdout()
    sys.exit(code)
