"""``raycloak attest revoke``: excludes a member, a machine or a GPU from a run that is under way."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from raycloak.coordinator.cli.options import RunName, command
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.revocations import RevokedKind


@command
def revoke_command(
    output: Output,
    run: RunName,
    member: Annotated[str | None, typer.Option(metavar="ID", help="Name of a worker or an aggregator.")] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="HEX", help="Platform id of a machine, from the evidence log.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="HEX", help="Id of a GPU, from the evidence log.")] = None,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason, for the evidence log.")
    ] = "revoked by the operator",
) -> int:
    """Exclude a member, or everybody with a machine or GPU, from a run, before its next step. It cannot be undone."""
    named: dict[RevokedKind, str | None] = {"member": member, "platform": platform, "gpu": gpu}
    from raycloak.attestation.orchestrator.revocations import revoke
    from raycloak.coordinator.config import home
    from raycloak.coordinator.console.tables import fields_table
    from raycloak.coordinator.record.folder import RunFolder
    from raycloak.coordinator.record.run_list import find_run

    given = [(kind, name) for kind, name in named.items() if name is not None]
    if len(given) != 1:
        raise ConfigError(
            "revoke_one", "give one of --member, --platform and --gpu.", "The evidence log has all three names."
        )
    ((kind, name),) = given
    run_dir = find_run(run)
    record = RunFolder.open(run_dir).record
    if record.status in ("done", "void"):
        raise ConfigError(
            "run_done",
            f"the run in {run_dir} is over; nobody takes part in it.",
            "Exclude the machine from later runs in the policy.",
        )
    hit = revoke(home.orchestrator_file(record.run_id), kind, name, reason=reason, now=int(time.time()))
    rows = [
        ("run", record.run_id),
        (kind, name),
        ("members", f"{len(hit)}: {', '.join(hit)}"),
        ("reason", reason),
        ("in effect", "from the next step on"),
    ]
    said = {"run_id": record.run_id, "kind": kind, "name": name, "members": hit, "reason": reason}
    output.result(said, fields_table("Revoked", rows))
    return 0
