"""The chaos bench's checks find each fault: other bytes, charges too few or too many, an edited log."""

import sqlite3
from contextlib import closing

import pytest

from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.metrics.errors import EvidenceError
from raycloak_lab.bench.chaos.checks import (
    Charges,
    check_charges,
    digest_differences,
    digests_of,
    logged_digests,
    missing_steps,
)
from raycloak_lab.bench.chaos.child_run import StepSeen
from tests.coordinator.ledger.ledger_cases import MANIFEST, PARAMETERS, opened


def _step(step, digest):
    return StepSeen(float(step), step, digest, 4, 1, 0.5, 0.1, 0.2, 0.1)


def test_a_step_that_any_execution_finished_otherwise_differs():
    reference = digests_of([_step(0, "aa"), _step(1, "bb"), _step(2, "cc"), _step(3, "dd")])
    assert digest_differences(reference, digests_of([_step(0, "aa"), _step(1, "bb"), _step(1, "bb")])) == ()
    assert digest_differences(reference, digests_of([_step(1, "bb"), _step(1, "xx"), _step(2, "yy")])) == (1, 2)
    assert digest_differences(reference, digests_of([_step(4, "ee"), _step(4, "ff")])) == (4,)


def test_a_step_that_was_never_finished_is_missing():
    assert missing_steps(digests_of([_step(0, "aa"), _step(2, "cc"), _step(3, "dd")])) == (1,)
    assert missing_steps({}) == ()


@pytest.fixture
def home(tmp_path):
    """A home whose ledger has charged steps 0, 1 and 2 of run-a."""
    ledger = opened(tmp_path / "ledger.sqlite")
    for step in range(3):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    ledger.close()
    return tmp_path


def test_charges_are_compared_with_the_finished_steps(home):
    assert check_charges(home, "run-a", {0, 1, 2}) == Charges((), (), (), None)
    assert check_charges(home, "run-a", {0, 1}) == Charges((), (), (2,), None)
    assert check_charges(home, "run-a", {0, 1, 2, 3}) == Charges((3,), (), (), None)


def test_an_edited_ledger_is_broken(home):
    with closing(sqlite3.connect(home / "ledger.sqlite")) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")]
        for name in names:
            connection.execute(f"DROP TRIGGER {name}")
        table = next(
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if "signature" in {column[1] for column in connection.execute(f"PRAGMA table_info({name})")}
        )
        connection.execute(f"DELETE FROM {table} WHERE sequence = (SELECT max(sequence) - 1 FROM {table})")
        connection.commit()
    found = check_charges(home, "run-a", {0, 1, 2})
    assert "chain_broken" in found.broken
    assert found.lost == (0, 1, 2)


def test_a_home_without_a_ledger_has_lost_every_charge(tmp_path):
    found = check_charges(tmp_path, "run-a", {0})
    assert found.lost == (0,)
    assert found.broken


def test_the_evidence_log_gives_every_digest_it_has_and_is_verified_first(tmp_path):
    key, path = HybridSigner.generate(), tmp_path / "evidence.jsonl"
    with closing(sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None)) as connection:
        log = EvidenceLog(connection, "run-a", key)
        log.append("committed", {"step": 0, "released_digest": "aa"})
        log.append("roster", {"step": 1, "attempt": 0})
        log.append("reproduced", {"step": 0, "released_digest": "bb"})
        log.append("committed", {"step": 1, "released_digest": "cc"})
        log.export(path)
    assert logged_digests(path, key.public) == {0: {"aa", "bb"}, 1: {"cc"}}
    path.write_bytes(path.read_bytes().replace(b'"aa"', b'"ab"'))
    with pytest.raises(EvidenceError, match="log_broken"):
        logged_digests(path, key.public)
