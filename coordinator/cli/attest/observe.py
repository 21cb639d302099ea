"""``raycloak attest observe``: the roster and the evidence log of a run in progress, checked from outside."""

import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycloak.coordinator.cli.options import RUN_OR_OTHER, command, run_or_path
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.attestation.attester.attester import EvidenceSource
    from raycloak.attestation.core.evidence import CollateralBundle
    from raycloak.attestation.policy.policy import Policy
    from raycloak.coordinator.evidence.observer import Observation
    from raycloak.workers.terms.manifest import Manifest


@command
def observe_command(
    output: Output,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER", help=f"A {RUN_OR_OTHER}; or a folder with its manifest.json.", show_default=False
        ),
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
) -> int:
    """Attest as an observer of a run, and check its newest roster, its members' evidence and its evidence log."""
    from raycloak.coordinator.console.figures import value_text
    from raycloak.coordinator.console.tables import fields_table
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
    rows += [(member["member_id"], _member_text(member)) for member in facts["members"]]
    mark = " (SIMULATED evidence)" if facts["evidence"] == "SIMULATED" else ""
    output.result(facts, fields_table(f"Run {manifest.run_id}{mark}", rows))
    return 0


def _terms(
    manifest: "Manifest", policy_file: Path | None, collateral_file: Path | None
) -> tuple["Policy", "CollateralBundle", "EvidenceSource"]:
    """Return policy, collateral and own evidence; ConfigError ``policy`` unless it is the policy of the manifest."""
    from raycloak.attestation.policy.policy import load_policy, simulated_policy
    from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
    from raycloak.coordinator.config import home
    from raycloak.coordinator.evidence.sources import GuestEvidence, LocalPlatform, collateral_of

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
        "log_root": seen.log.head.root.hex(),
        "members": [
            {
                "member_id": member.member_id,
                "role": member.role,
                "virtual_workers": hosted[member.member_id],
                "evidence_classes": [each.value for each in member.evidence_classes],
                "platform_id": member.platform_id.hex(),
                "expires_at": member.expires_at,
            }
            for member in seen.members
        ],
    }


def _member_text(member: dict[str, Any]) -> str:
    hosts = f", hosts {', '.join(map(str, member['virtual_workers']))}" if member["virtual_workers"] else ""
    return f"{member['role']}, {'+'.join(member['evidence_classes'])}{hosts}"
