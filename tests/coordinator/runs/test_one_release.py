"""A charge pays for one release, whatever became of the orchestrator's files: the same bytes, or a refusal.

The attacker reruns the run with its secret. The orchestrator's state is gone, or the second host has a home of its own
on the same ledger, and one record or one bit is another one.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.runs.local_session import local_session
from raycloak.metrics.errors import BudgetError, EvidenceError, RunFailedError
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.protocol import RENYI, WholeRun, examples, on_machines, trained, whole_run


def altered() -> tuple[np.ndarray, np.ndarray]:
    """Return the examples, with one of them another one."""
    features, labels = examples()
    features[17] = -features[17]
    return features, labels


def lose_the_orchestrator(home: Path) -> None:
    """Remove all that the orchestrator keeps on disk; the run secret is a file of the user's own."""
    shutil.rmtree(home / "orchestrator")


def entries(home: Path) -> list[bytes]:
    ledger = PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)
    try:
        return [entry.hash for entry in ledger.history()]
    finally:
        ledger.close()


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return trained(tmp_path_factory.mktemp("first"), dp_config=RENYI)


@pytest.fixture
def first(tmp_path: Path, trained_once: WholeRun) -> WholeRun:
    """Return the run that was trained, with files of the test's own."""
    return replace(trained_once, home=Path(shutil.copytree(trained_once.home, tmp_path / "first")))


def test_a_rerun_without_the_orchestrators_files_gives_the_same_bytes_for_the_same_entries(first: WholeRun):
    before = entries(first.home)
    lose_the_orchestrator(first.home)
    again = trained(first.home, tamper=on_machines(first.home, lambda member_id: member_id), dp_config=RENYI)
    assert again.digests == first.digests
    assert entries(first.home) == before
    assert again.finished.most_hosted == 8, "nobody knows which machines got keys before"


def test_a_rerun_without_the_orchestrators_files_gets_no_key_whose_machines_are_bounded(tmp_path: Path):
    """The first execution had its keys on three machines; the second would count anew, on the same machines."""
    bounded = {"dp_config": RENYI | {"colluding_workers": 1}, "min_workers": 3}
    home = tmp_path / "first"
    tamper = on_machines(home, lambda member_id: member_id)
    trained(home, tamper=tamper, **bounded)
    before = entries(home)
    trained(home, tamper=tamper, **bounded)
    lose_the_orchestrator(home)
    again = whole_run(home, tamper=tamper, **bounded)
    with pytest.raises(EvidenceError) as refusal:
        again.train()
    assert refusal.value.code == "machine_book_missing"
    assert again.stage.calls("release") == again.stage.calls("charge") == []
    assert entries(home) == before


def test_a_rerun_without_the_orchestrators_files_and_with_a_record_altered_computes_nothing(first: WholeRun):
    before = entries(first.home)
    lose_the_orchestrator(first.home)
    again = whole_run(first.home, data=altered(), dp_config=RENYI)
    with pytest.raises(BudgetError, match="data_changed"):
        again.train()
    assert len(again.stage.calls("charge")) == 1, "which is refused"
    assert again.stage.calls("step") == again.stage.calls("reduce") == []
    assert entries(first.home) == before


def test_a_second_host_on_a_shared_ledger_with_a_record_altered_computes_nothing(
    first: WholeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = entries(first.home)
    shared = f"sqlite:///{first.home / 'ledger.sqlite'}"
    genuine = local_session
    monkeypatch.setattr(
        "tests.protocol.local_session",
        lambda *arguments, **options: genuine(*arguments, **options, ledger_url=shared),
    )
    # One vendor signs the evidence of both hosts, so that policy and manifest are the same.
    shutil.copytree(first.home / "simulator", tmp_path / "second" / "simulator")
    again = whole_run(tmp_path / "second", data=altered(), dp_config=RENYI)
    with pytest.raises(BudgetError, match="data_changed"):
        again.train()
    assert len(again.stage.calls("charge")) == 1, "which is refused"
    assert again.stage.calls("step") == again.stage.calls("reduce") == []
    assert entries(first.home) == before
    # Its orchestrator has seen the altered record first.
    lose_the_orchestrator(tmp_path / "second")
    same = trained(tmp_path / "second", dp_config=RENYI)
    assert same.digests == first.digests
    assert entries(first.home) == before


def test_other_vectors_for_a_charged_step_are_never_summed_although_the_orchestrators_files_are_gone(
    first: WholeRun, monkeypatch: pytest.MonkeyPatch
):
    before = entries(first.home)
    lose_the_orchestrator(first.home)
    genuine = VirtualWorkerComputer.vector

    def other_bits(self, v, *arguments):
        result = genuine(self, v, *arguments)
        return replace(result, tag=bytes(a ^ 1 for a in result.tag)) if v == 5 else result

    monkeypatch.setattr(VirtualWorkerComputer, "vector", other_bits)
    again = whole_run(first.home, dp_config=RENYI)
    with pytest.raises(RunFailedError, match="not_reproducible"):
        again.train()
    assert again.stage.calls("reduce") == []
    assert entries(first.home) == before


def test_a_closed_account_stops_a_rerun_before_anything_is_computed(first: WholeRun):
    ledger = PrivacyLedger(f"sqlite:///{first.home / 'ledger.sqlite'}")
    ledger.close_account(f"run-{first.session.run_id}")
    ledger.close()
    before = entries(first.home)
    again = whole_run(first.home, dp_config=RENYI)
    with pytest.raises(BudgetError, match="account_closed"):
        again.train()
    assert again.stage.calls("step") == []
    assert entries(first.home) == before
