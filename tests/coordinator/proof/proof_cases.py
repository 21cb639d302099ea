"""A small run whose proof the tests examine: trained once in one process, sealed packages and measurements included."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import IdentityKey, Purpose, Secret, derive
from raycloak.attestation.core.lineage import ModelPoint, StepRelease
from raycloak.attestation.core.messages import seal
from raycloak.attestation.core.roster import Roster, RosterMembers
from raycloak.attestation.keys.run_secret import run_id_of
from raycloak.attestation.log.entries import Entry, LogHead, entry_hash
from raycloak.attestation.log.entries import ExportedLogEntry as LogLine
from raycloak.attestation.log.evidence_log import check_exported_log
from raycloak.attestation.log.merkle import MerkleTree
from raycloak.attestation.orchestrator.documents import read_documents
from raycloak.attestation.sealed.package_keys import PackageSigner
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.console.output import json_text
from raycloak.coordinator.ledger.accounts import Account
from raycloak.coordinator.ledger.entries import (
    AccountOpened,
    Event,
    Head,
    RunRegistered,
    StepCharged,
    VectorsBound,
    make_entry,
)
from raycloak.coordinator.ledger.export import check_extract, extract_lines
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import PricedRun, epsilon_at
from raycloak.coordinator.proof.bundle import RecordPart, RecordParts
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.gather import gather, site_signer, trust_of
from raycloak.coordinator.proof.trust import Trust
from raycloak.coordinator.proof.verify import CHECKS
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.coordinator.training.assignment import NewRun
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import NOW, RENYI, SECRET, WholeRun, whole_run

STEPS = 4
MEASURED = {
    "class_counts": {"classes": 3, "noise_multiplier": 20},
    "evaluation": {"every": 2, "noise_multiplier": 20},
}


@dataclass(frozen=True)
class Site:
    """The keys of the run's site, which an attacker of a test may have."""

    ledger: IdentityKey
    orchestrator: HybridSigner
    signer: PackageSigner
    aggregator: IdentityKey


@dataclass(frozen=True)
class Proved:
    """A run's record as plain bytes by name, the trust file, and the keys that signed the record."""

    contents: dict[str, bytes]
    trust: Trust
    site: Site
    folder: Path

    @property
    def manifest(self) -> Manifest:
        return Manifest.model_validate_json(self.contents["manifest.json"])

    def lines(self, name: str) -> list[bytes]:
        return self.contents[name].splitlines()

    @property
    def parts(self) -> RecordParts:
        return parts_of(self.contents)


def parts_of(contents: dict[str, bytes]) -> RecordParts:
    return RecordParts({name: RecordPart.of(content) for name, content in contents.items()})


UNSIGNED = {"metrics.jsonl", "verdict.json"}
"""Parts of which only some fields repeat signed records; their claims have the same names."""


def established_case(record: Proved) -> ProofCase:
    """Return a case all of whose claims hold, to change one part of."""
    case = ProofCase(record.parts, record.trust, None)
    for check in CHECKS[2:]:
        if check.name not in UNSIGNED:
            check.derive(case)
    return case


CHECKPOINT = CheckpointConfig(checkpoint_frequency=2, storage="packages")


def packed(home: Path, secret: str = SECRET) -> Archive:
    """Return the archive of the run with that secret."""
    return Archive(CHECKPOINT, run_id_of(Secret(bytes.fromhex(secret))), home, lambda line: None)


def whole(home: Path, **fields) -> WholeRun:
    """Return the run, ready to be trained; with another ``secret`` it is another one, on an account of its own."""
    options = {"steps": STEPS, "dp_config": RENYI, "measurements": MEASURED, "checkpoint": CHECKPOINT.model_dump()}
    options["assignment"] = NewRun(packed(home, fields.get("secret", SECRET)))
    return whole_run(home, **(options | fields))


def train(home: Path, **fields) -> WholeRun:
    run = whole(home, **fields)
    run.train()
    return run


def proved(home: Path, run: WholeRun, secret: str = SECRET) -> Proved:
    """Gather the record of a run, whose directory gets what a run on Ray writes into its own."""
    result = verdict_of(run.finished, run.folder, 1.0, run.finished.ending.value, ())
    RunFolder(run.folder, run.coordinator.order.folder.record).mark("done")
    (run.folder / "config.yaml").write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
    text = json_text({"run_dir": str(run.folder), **result.metrics()})
    (run.folder / "verdict.json").write_bytes(text.encode() + b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYCLOAK_HOME", str(home))
        manifest, parts = gather(run.folder)
        trust, signer = trust_of(run.folder), site_signer()
    root = Secret(bytes.fromhex(secret))
    orchestrator = HybridSigner(
        *(derive(root, each) for each in (Purpose.ORCHESTRATOR_IDENTITY, Purpose.ORCHESTRATOR_ML_DSA))
    )
    with closing(PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)) as ledger:
        (aggregator, *_) = run.coordinator._members.aggregators
        site = Site(ledger._store.key, orchestrator, signer, aggregator.handle._attester.identity)
    assert (site.orchestrator.public, site.ledger.public) == (manifest.log_owner, manifest.ledger_key)
    return Proved({name: parts.read(name) for name in parts.by_name}, trust, site, run.folder)


Entries = list[tuple[str, dict[str, Any]]]


def relogged(record: Proved, edit: Callable[[Entries], None]) -> dict[str, bytes]:
    """Return the record with an edited evidence log that its owner signed, as one who has the run's secret may."""
    log = check_exported_log(record.contents["evidence.jsonl"].splitlines(), record.site.orchestrator.public)
    entries = [(entry.kind, entry.content) for entry in log.entries]
    edit(entries)
    tree, lines = MerkleTree(), []
    for sequence, (kind, content) in enumerate(entries):
        body = canonical_json(content)
        entry = Entry(sequence, kind, body, entry_hash(log.head.run_id, sequence, kind, body))
        tree.append(entry.hash)
        lines.append(LogLine.of(entry).encode())
    head = LogHead(run_id=log.head.run_id, length=len(lines), root=tree.root()).sign(record.site.orchestrator)
    return record.contents | {"evidence.jsonl": joined([*lines, head.encode()])}


def reledgered(record: Proved, edit: Callable[[list[Event]], None]) -> dict[str, bytes]:
    """Return the record with an edited account that its ledger signed, as one who has the ledger's key may."""
    events = [
        entry.event for entry in check_extract(record.lines("ledger.jsonl"), record.trust.ledger).entries.values()
    ]
    edit(events)
    first = next(iter(check_extract(record.lines("ledger.jsonl"), record.trust.ledger).entries.values()))
    head, entries = Head(first.sequence - 1, first.previous), []
    for event in events:
        entries.append(make_entry(head, event, record.site.ledger))
        head = Head(entries[-1].sequence, entries[-1].hash)
    lines = extract_lines(entries, record.manifest.account, record.site.ledger, 1)
    return record.contents | {"ledger.jsonl": joined(lines)}


def joined(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def lengthened(record: Proved, steps: int) -> dict[str, bytes]:
    """Return the record of a run that was stopped after its first step, with as many steps as its plan has.

    Nobody computed them: log and ledger have what they would have of them, signed by their keys.
    """
    manifest = record.manifest
    mechanism, digests = manifest.computation.mechanism, [bytes([1]) + step.to_bytes(31) for step in range(steps)]
    entries = list(check_extract(record.lines("ledger.jsonl"), record.trust.ledger).entries.values())
    registered = next(entry.event for entry in entries if isinstance(entry.event, RunRegistered))
    opened = next(entry.event for entry in entries if isinstance(entry.event, AccountOpened))
    terms = Account.of(opened, Head()).with_run(registered).terms
    log = check_exported_log(record.lines("evidence.jsonl"), record.site.orchestrator.public)
    body = next(entry.content for entry in log.entries if entry.kind == "roster")
    members = read_documents(record.lines("documents.jsonl"))[bytes.fromhex(body["members"])].open(RosterMembers)
    first = next(entry.content for entry in log.entries if entry.kind == "committed")
    digests[0], state = (bytes.fromhex(first[name]) for name in ("released_digest", "state_digest"))
    head, more = Head(entries[-1].sequence, entries[-1].hash), []
    for step in range(1, steps):
        common = {"recorded_at": NOW, "run_id": manifest.run_id, "query": "gradient", "step": step}
        common["fencing"] = entries[-1].event.fencing
        common["manifest_digest"] = manifest.digest()
        spent = epsilon_at(terms, [PricedRun.of(registered).spend({"gradient": step + 1})])
        charge = StepCharged(
            **common,
            input_digest=digests[step - 1],
            mechanism_digest=mechanism.digest(),
            charged_epsilon=spent,
            state_digest=state,
        )
        for event in (charge, VectorsBound(**common, vectors_digest=bytes(32))):
            entries.append(make_entry(head, event, record.site.ledger))
            head = Head(entries[-1].sequence, entries[-1].hash)
        roster = Roster(
            run_id=manifest.run_id,
            manifest_digest=manifest.digest(),
            step=step,
            attempt=1,  # one was asked for ahead, before the run was stopped
            ratchet=step,
            nonce=step.to_bytes(32),
            members=members.members,
        )
        asked = {"step": step, "attempt": 1, "ratchet": step, "nonce": roster.nonce.hex()}
        more.append(("roster", body | asked | {"digest": roster.digest().hex()}))
        commit = {"query": "gradient", "step": step, "released_digest": digests[step].hex(), "attempts": 1}
        commit |= {"state_digest": state.hex()}
        release = StepRelease(
            roster_digest=roster.digest(),
            binding=head.hash,
            input_digest=digests[step - 1],
            before=ModelPoint(parameters=digests[step - 1], state=state),
            after=ModelPoint(parameters=digests[step], state=state),
        )
        commit |= {"releases": [seal(release, record.site.aggregator).model_dump(mode="json")]}
        paid = {"ledger_sequence": head.sequence, "ledger_hash": head.hash.hex()}
        more.append(("committed", commit | paid))
    contents = relogged(record, lambda known: known.extend(more))
    for name in ("parameters.safetensors", "metrics.jsonl", "verdict.json"):
        contents.pop(name, None)
    lines = extract_lines(entries, manifest.account, record.site.ledger, NOW)
    return contents | {"ledger.jsonl": joined(lines)}
