"""``raycloak attest revoke``: excludes a member or a machine from a run that is under way."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloak.coordinator.cli.options import AsJson, Debug, execute
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.attestation.orchestrator.revocations import RevokedKind


def revoke_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.", show_default=False)],
    member: Annotated[str | None, typer.Option(metavar="ID", help="Name of a worker or an aggregator.")] = None,
    platform: Annotated[
        str | None, typer.Option(metavar="HEX", help="Platform id of a machine, from the evidence log.")
    ] = None,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason, for the evidence log.")
    ] = "revoked by the operator",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Exclude a member, or everybody on a machine, from a run, before its next step. This cannot be undone."""
    execute(as_json, debug, lambda output: _revoke(output, run_dir, member, platform, reason))


def _revoke(output: Output, run_dir: Path, member: str | None, platform: str | None, reason: str) -> int:
    from raycloak.attestation.orchestrator.revocations import revoke
    from raycloak.coordinator.config import home
    from raycloak.coordinator.console.tables import fields_table
    from raycloak.coordinator.record.folder import RunFolder

    if (member is None) == (platform is None):
        raise ConfigError("revoke_one", "give either --member or --platform.", "The evidence log has both names.")
    kind: RevokedKind = "platform" if platform is not None else "member"
    name = platform or member or ""
    record = RunFolder.open(run_dir).record
    if record.status in ("done", "void"):
        raise ConfigError(
            "run_done",
            f"the run in {run_dir} is over; nobody takes part in it.",
            "Exclude the machine from later runs in the policy.",
        )
    revoke(home.orchestrator_file(record.run_id), kind, name, reason=reason, now=int(time.time()))
    rows = [("run", record.run_id), (kind, name), ("reason", reason), ("in effect", "from the next step on")]
    output.result(
        {"run_id": record.run_id, "kind": kind, "name": name, "reason": reason}, fields_table("Revoked", rows)
    )
    return 0
