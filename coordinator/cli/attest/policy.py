"""``raycloak attest policy`` and ``raycloak attest measure``: a policy in words, and the values that go into it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloak.coordinator.cli.options import command
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from raycloak.attestation.policy.explain import Sentence

policy = typer.Typer(name="policy", help="Policies that evidence is judged by.")
measure = typer.Typer(name="measure", help="Compute reference values for a policy.")

ImageFile = Annotated[Path | None, typer.Option(metavar="FILE")]


@policy.callback()
def _policy_group() -> None:
    """Keep this a group of commands while it has only one."""


@policy.command("check")
@command
def check_command(
    output: Output, file: Annotated[Path, typer.Argument(metavar="FILE", help="Policy, YAML.", show_default=False)]
) -> int:
    """Say in words what a policy accepts, and warn where it is lax or admits nothing."""
    from raycloak.attestation.policy.explain import explain
    from raycloak.attestation.policy.policy import load_policy

    found = load_policy(file)
    sentences = explain(found)
    data = {
        "digest": found.digest(),
        "accepts_simulated": found.accepts_simulated,
        "says": [{"topic": each.topic, "text": each.text, "warning": each.warning} for each in sentences],
    }
    output.result(data, _table(found.digest().hex(), sentences))
    return 0


def _table(digest: str, sentences: "tuple[Sentence, ...]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    warnings = sum(each.warning for each in sentences)
    table = Table(title=f"Policy {digest[:16]}: {warnings} warning(s)", title_justify="left", title_style="bold")
    for name in ("about", "", "what it says"):
        table.add_column(name, overflow="fold")
    for each in sentences:
        table.add_row(each.topic, "warning" if each.warning else "", Text(each.text))
    return table


@measure.command("simulated")
@command
def simulated_command(output: Output) -> int:
    """Print the value that SIMULATED platforms report: a hash of raycloak's own code on this machine."""
    from raycloak.attestation.simulators.tdx_vendor import code_measurement

    return _say(output, "tdx", code_measurement(), "SIMULATED: it says which code is here, and proves nothing")


@measure.command("sev-snp")
@command
def sev_snp_command(
    output: Output,
    ovmf: Annotated[Path, typer.Option(metavar="FILE", help="Firmware image.", show_default=False)],
    vcpus: Annotated[int, typer.Option(help="Number of virtual processors.", min=1, show_default=False)],
    vcpu_type: Annotated[str, typer.Option(help="QEMU's name of the processor model.")] = "EPYC-v4",
    kernel: ImageFile = None,
    initrd: ImageFile = None,
    append: Annotated[str, typer.Option(help="Kernel command line.")] = "",
    guest_features: Annotated[int, typer.Option(help="The guest's SEV_FEATURES word.")] = 1,
) -> int:
    """Compute the launch measurement of an SEV-SNP guest, from the files it is launched with."""
    from raycloak.attestation.snp.launch_measurement import SnpLaunch, snp_measurement

    launch = SnpLaunch(ovmf, vcpus, vcpu_type, kernel, initrd, append, guest_features)
    return _say(output, "sev_snp", snp_measurement(launch), "as QEMU launches it")


@measure.command("tdx")
@command
def tdx_command(output: Output) -> int:
    """Say how to get the measurement of a TDX guest, which raycloak cannot compute."""
    raise ConfigError(
        "measure_tool",
        "mr_td depends on the firmware and on how it is laid out in memory, which raycloak does not know.",
        "Take it from the image builder's tool (dstack-mr, tdx-measure), from your cloud's endorsement, or "
        "from a quote of a guest that you launched and trust.",
    )


def _say(output: Output, family: str, value: bytes, note: str) -> int:
    from raycloak.coordinator.console.tables import fields_table

    rows = [(f"{family}.measurements", value.hex()), ("note", note)]
    output.result({"family": family, "measurement": value, "note": note}, fields_table("Reference value", rows))
    return 0
