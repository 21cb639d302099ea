"""``raycloak attest log``: a log that verifies, each way in which one does not, and a proof that stands alone."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.sealed.package_keys import TrustStore
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.cli import app
from raycloak.coordinator.proof.trust import Trust
from tests.coordinator.checkpoints.tssp_cases import run_manifest
from tests.coordinator.record.run_logs import LoggedRun

OWNER = HybridSigner(Secret(b"e" * 32), Secret(b"m" * 32))
MANIFEST = run_manifest(orchestrator_key=OWNER.public.ed25519, orchestrator_ml_dsa=OWNER.public.ml_dsa_65)


@pytest.fixture
def raycloak(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any]]:
    """Run ``raycloak attest log ... --json`` in this process; returns (exit code, the object)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments: object) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as stopped:
            app.main(["attest", "log", *map(str, arguments), "--json"])
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, json.loads(capfd.readouterr().out)

    return run


def write_log(path: Path, *numbers: int) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        log = EvidenceLog(connection, MANIFEST.run_id, OWNER)
        log.append("admitted", {"evidence_class": "simulated"})
        for number in numbers:
            log.append("decision", {"number": number})
        log.export(path)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(MANIFEST.encode() + b"\n")
    write_log(folder / "evidence.jsonl", *range(5))
    return folder


def test_it_says_simulated_also_where_only_a_gpu_is(raycloak, tmp_path):
    (tmp_path / "owner.json").write_bytes(OWNER.public.encode())
    with closing(sqlite3.connect(":memory:")) as connection:
        log = EvidenceLog(connection, MANIFEST.run_id, OWNER)
        claims = {"submods": {"gpu-0": {"evidence_class": "simulated"}}}
        log.append("admitted", {"evidence_class": "intel_tdx", "claims": claims})
        log.append("admitted", {"evidence_class": "intel_tdx"})
        log.export(tmp_path / "log.jsonl")
    _, facts = raycloak("verify", tmp_path / "log.jsonl", "--key", tmp_path / "owner.json")
    assert facts["evidence_classes"] == ["intel_tdx", "simulated"]


def test_a_log_is_found_by_the_name_of_its_run(raycloak, raycloak_home, tmp_path):
    run = LoggedRun("mine")
    (run.path / "manifest.json").write_bytes(MANIFEST.encode() + b"\n")
    write_log(run.path / "evidence.jsonl", 1, 2)
    trust = trust_file(tmp_path / "trust.json", OWNER)
    assert raycloak("verify", "last", "--key", trust)[1]["entries"] == 3
    assert raycloak("prove", "mine", 2)[0] == 0
    LoggedRun("mine", "cd" * 8)
    assert raycloak("verify", "mine", "--key", trust)[1]["error"]["code"] == "run_ambiguous"


def trust_file(path: Path, *owners: HybridSigner) -> Path:
    Trust(
        orchestrators=tuple(owner.public for owner in owners),
        ledger=bytes(32),
        signers=TrustStore.of("site", OWNER.public),
        policy=simulated_policy(SimulatedVendor.create(), bytes(48)),
    ).save(path)
    return path


def test_a_log_verifies_by_a_trust_file_the_owners_keys_or_a_manifest(raycloak, run_dir, tmp_path):
    (tmp_path / "owner.json").write_bytes(OWNER.public.encode())
    (tmp_path / "manifest").write_bytes(MANIFEST.encode())
    trust = trust_file(tmp_path / "trust.json", HybridSigner.generate(), OWNER)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((run_dir / "evidence.jsonl").read_bytes())
    for log, key in ((run_dir, trust), (run_dir / "evidence.jsonl", tmp_path / "manifest"), (moved, "owner.json")):
        code, facts = raycloak("verify", log, "--key", tmp_path / key)
        assert (code, facts["verified"], facts["entries"]) == (0, True, 6)
        assert facts["evidence_classes"] == ["simulated"]
        assert facts["owner"] == OWNER.public.key_id.hex()
    for command in (("verify", tmp_path / "nowhere", "--key", trust), ("prove", tmp_path / "nowhere", "0")):
        code, refused = raycloak(*command)
        assert (code, refused["error"]["code"]) == (2, "log_missing")


def test_no_log_is_verified_by_keys_that_lie_beside_it(run_dir, tmp_path, capfd, raycloak):
    with pytest.raises(SystemExit) as stopped:
        app.main(["attest", "log", "verify", str(run_dir)])
    assert stopped.value.code == 2
    assert "--key" in capfd.readouterr().err
    stranger = trust_file(tmp_path / "trust.json", HybridSigner.generate(), HybridSigner.generate())
    code, refused = raycloak("verify", run_dir, "--key", stranger)
    assert (code, refused["error"]["code"]) == (3, "log_broken")


def test_the_first_bad_entry_is_named(raycloak, run_dir):
    log = run_dir / "evidence.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:3], lines[3].replace(b'"number":2', b'"number":7'), *lines[4:]]))
    code, refused = raycloak("verify", run_dir, "--key", run_dir / "manifest.json")
    assert (code, refused["error"]["code"]) == (3, "log_broken")
    assert "entry 3 is not the one" in refused["error"]["message"]


def test_an_older_head_shows_what_was_cut_off_or_rewritten(raycloak, run_dir, tmp_path):
    older, longer, forked, head = (tmp_path / name for name in ("older", "longer", "forked", "head"))
    write_log(older, 0, 1)
    write_log(longer, *range(9))
    write_log(forked, 0, 9)
    head.write_bytes(older.read_bytes().splitlines()[-1])
    key = run_dir / "manifest.json"
    for trusted in (older, head):
        assert raycloak("verify", run_dir, "--key", key, "--head", trusted)[1]["extends"] == 3
    for trusted, said in ((longer, "it was cut off"), (forked, "do not begin with the 3 of the older head")):
        code, refused = raycloak("verify", run_dir, "--key", key, "--head", trusted)
        assert (code, refused["error"]["code"]) == (3, "log_broken")
        assert said in refused["error"]["message"]


def test_a_proof_of_one_entry_stands_without_the_log(raycloak, run_dir, tmp_path):
    proof = tmp_path / "proof.json"
    code, facts = raycloak("prove", run_dir, 4, "--out", proof)
    assert (code, facts["kind"], facts["proof"]["entry"]["body"]) == (0, "decision", {"number": 3})
    for key in (run_dir / "manifest.json", trust_file(tmp_path / "trust.json", OWNER)):
        code, facts = raycloak("check", proof, "--key", key)
        assert (code, facts["verified"], facts["sequence"], facts["body"]) == (0, True, 4, {"number": 3})
    assert raycloak("prove", run_dir, 4, "--out", proof)[1]["error"]["code"] == "out_exists"
    assert raycloak("prove", run_dir, 6)[1]["error"]["code"] == "log_entry"
    proof.write_bytes(proof.read_bytes().replace(b'"number":3', b'"number":4'))
    code, refused = raycloak("check", proof, "--key", run_dir / "manifest.json")
    assert (code, refused["error"]["code"]) == (3, "log_broken")


def test_another_key_is_not_the_owners(raycloak, run_dir, tmp_path):
    (tmp_path / "other.json").write_bytes(HybridSigner.generate().public.encode())
    code, refused = raycloak("verify", run_dir, "--key", tmp_path / "other.json")
    assert (code, refused["error"]["code"]) == (3, "log_broken")
    assert "not signed by the log's owner (Ed25519, ML-DSA-65, key id)" in refused["error"]["message"]
    (tmp_path / "other.json").write_bytes(b"{}")
    assert raycloak("verify", run_dir, "--key", tmp_path / "other.json")[1]["error"]["code"] == "log_key"
