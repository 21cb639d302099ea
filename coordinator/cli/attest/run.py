"""The commands ``raycloak attest observe`` and ``revoke``: watch a run in progress from outside, or exclude members."""

import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycloak.coordinator.cli.options import RUN_OR_OTHER, RunName, run_or_path
from raycloak.coordinator.console.figures import value_text
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.attestation.attester.attester import EvidenceSource
    from raycloak.attestation.core.evidence import CollateralBundle
    from raycloak.attestation.orchestrator.revocations import RevokedKind
    from raycloak.attestation.policy.policy import Policy
    from raycloak.coordinator.evidence.observer import Observation
    from raycloak.workers.terms.manifest import Manifest


def observe_command(
    output: Output,
    run: Annotated[
        str, typer.Argument(metavar="RUN|FOLDER", help=f"A {RUN_OR_OTHER}; or a folder with its manifest.json.")
    ],
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Evidence service of the run; default: the one in service.json."),
    ] = None,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="The run's policy; default: simulated.")] = None,
    collateral: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Collateral that hardware evidence is judged with.")
    ] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the evidence log to this file.")] = None,
) -> None:
    """Attest as an observer of a run, and check its newest roster, its members' evidence and its evidence log."""
    from raycloak.coordinator.evidence.observer import Observer
    from raycloak.coordinator.runs.evidence_address import manifest_in, served_at

    folder = run_or_path(run)
    manifest = manifest_in(folder)
    accepted, judged_by, source = _terms(manifest, policy, collateral)
    name = f"observer-{secrets.token_hex(8)}"
    observer = Observer(address or served_at(folder), name, manifest, source, accepted, judged_by)
    with tempfile.TemporaryDirectory() as scratch:
        facts = _facts(manifest, observer.look(log or Path(scratch) / "evidence.jsonl"))
    rows = [(key.replace("_", " "), value_text(value)) for key, value in facts.items() if key != "members"]
    for member in facts["members"]:
        hosts = f", hosts {', '.join(map(str, member['virtual_workers']))}" if member["virtual_workers"] else ""
        rows.append((member["member_id"], f"{member['role']}, {'+'.join(member['evidence_classes'])}{hosts}"))
    mark = " (SIMULATED evidence)" if facts["evidence"] == "SIMULATED" else ""
    output.show(f"Run {manifest.run_id}{mark}", facts, rows)


def _terms(
    manifest: "Manifest", policy_file: Path | None, collateral_file: Path | None
) -> tuple["Policy", "CollateralBundle", "EvidenceSource"]:
    """Return policy, collateral and own evidence; ConfigError ``policy`` unless it is the policy of the manifest."""
    from raycloak.attestation.attester.guest import GuestEvidence
    from raycloak.attestation.policy.policy import load_policy, simulated_policy
    from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
    from raycloak.coordinator.config import home
    from raycloak.coordinator.evidence.sources import LocalPlatform, collateral_of

    given = load_policy(policy_file) if policy_file is not None else None
    current = collateral_of(given, str(collateral_file) if collateral_file else None, Path())
    source: EvidenceSource = GuestEvidence()
    if given is None or given.accepts_simulated:
        vendor = SimulatedVendor.load_or_create(home.simulator_folder())
        given = given or simulated_policy(vendor, code_measurement())
        source = LocalPlatform(vendor.platform())
        current = current or (lambda: vendor.collateral(int(time.time())))
    assert current is not None, "hardware has collateral"
    if given.digest() != manifest.policy_digest:
        raise ConfigError(
            "policy",
            f"run {manifest.run_id} has another policy than this one ({given.digest().hex()[:16]}).",
            "Give the file that the run's configuration names with --policy.",
        )
    return given, current(), source


def _facts(manifest: "Manifest", seen: "Observation") -> dict[str, Any]:
    roster = seen.roster
    hosted = {member.member_id: list(member.virtual_workers) for member in roster.members} if roster else {}
    simulated = any("simulated" in member.evidence_classes for member in seen.members)
    return {
        "run_id": manifest.run_id,
        "evidence": "SIMULATED" if simulated or seen.evidence_class == "simulated" else seen.evidence_class,
        "step": roster.step if roster else None,
        "attempt": roster.attempt if roster else None,
        "log_entries": seen.log.head.length,
        "log_root": seen.log.head.root,
        "members": [
            {
                "member_id": member.member_id,
                "role": member.role,
                "virtual_workers": hosted[member.member_id],
                "evidence_classes": [each.value for each in member.evidence_classes],
                "platform_id": member.platform_id,
                "expires_at": member.expires_at,
            }
            for member in seen.members
        ],
    }


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
) -> None:
    """Exclude a member, or everybody with a machine or GPU, from a run, before its next step. It cannot be undone."""
    from raycloak.attestation.orchestrator.revocations import revoke
    from raycloak.coordinator.config import home
    from raycloak.coordinator.record.folder import RunFolder
    from raycloak.coordinator.record.run_list import find_run

    named: dict[RevokedKind, str | None] = {"member": member, "platform": platform, "gpu": gpu}
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
    facts = {"run_id": record.run_id, "kind": kind, "name": name, "members": hit, "reason": reason}
    output.show("Revoked", facts, rows)
