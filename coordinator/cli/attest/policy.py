"""``raycloak attest policy`` and ``raycloak attest measure``: a policy in words, and the values that go into it."""

from pathlib import Path
from typing import Annotated

import typer

from raycloak.coordinator.cli.options import command
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.console.tables import columns_table
from raycloak.metrics.errors import ConfigError

policy = typer.Typer(name="policy", help="Policies that evidence is judged by.")
measure = typer.Typer(name="measure", help="Compute reference values for a policy.")

ImageFile = Annotated[Path | None, typer.Option(metavar="FILE")]


@command(policy, "check")
def check_command(output: Output, file: Annotated[Path, typer.Argument(metavar="FILE", help="Policy, YAML.")]) -> None:
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
    title = f"Policy {found.digest().hex()[:16]}: {sum(each.warning for each in sentences)} warning(s)"
    rows = [(each.topic, "warning" if each.warning else "", each.text) for each in sentences]
    output.result(data, columns_table(title, ("about", "", "what it says"), rows))


@command(policy, "code")
def code_command(
    output: Output, project: Annotated[Path, typer.Argument(metavar="PROJECT", help="Folder of the config file.")]
) -> None:
    """Print the digest for a policy's list ``code``, and the Python files of a project that it stands for."""
    from raycloak.workers.inputs.code_bundle import CodeBundle

    bundle = CodeBundle.read(project)
    if not bundle.files:
        raise ConfigError("code_unreadable", f"{project} has no Python files.", "Name the folder of the config file.")
    facts = {"folder": str(bundle.folder), "code": bundle.digest, "files": list(bundle.files)}
    rows = [("code", bundle.digest.hex()), *(("file", name) for name in bundle.files)]
    output.show("Code bundle", facts, rows)


@command(measure, "simulated")
def simulated_command(output: Output) -> None:
    """Print the value that SIMULATED platforms report: a hash of raycloak's own code on this machine."""
    from raycloak.attestation.simulators.tdx_vendor import code_measurement

    _say(output, "tdx", code_measurement(), "SIMULATED: it says which code is here, and proves nothing")


@command(measure, "sev-snp")
def sev_snp_command(
    output: Output,
    ovmf: Annotated[Path, typer.Option(metavar="FILE", help="Firmware image.")],
    vcpus: Annotated[int, typer.Option(help="Number of virtual processors.", min=1)],
    vcpu_type: Annotated[str, typer.Option(help="QEMU's name of the processor model.")] = "EPYC-v4",
    kernel: ImageFile = None,
    initrd: ImageFile = None,
    append: Annotated[str, typer.Option(help="Kernel command line.")] = "",
    guest_features: Annotated[int, typer.Option(help="The guest's SEV_FEATURES word.")] = 1,
) -> None:
    """Compute the launch measurement of an SEV-SNP guest, from the files it is launched with."""
    from raycloak.attestation.snp.launch_measurement import SnpLaunch, snp_measurement

    launch = SnpLaunch(ovmf, vcpus, vcpu_type, kernel, initrd, append, guest_features)
    _say(output, "sev_snp", snp_measurement(launch), "as QEMU launches it")


@command(measure, "tdx")
def tdx_command(output: Output) -> None:
    """Say how to get the measurement of a TDX guest, which raycloak cannot compute."""
    raise ConfigError(
        "measure_tool",
        "mr_td depends on the firmware and on how it is laid out in memory, which raycloak does not know.",
        "Take it from the image builder's tool (dstack-mr, tdx-measure), from your cloud's endorsement, or "
        "from a quote of a guest that you launched and trust.",
    )


def _say(output: Output, family: str, value: bytes, note: str) -> None:
    rows = [(f"{family}.measurements", value.hex()), ("note", note)]
    output.show("Reference value", {"family": family, "measurement": value, "note": note}, rows)
