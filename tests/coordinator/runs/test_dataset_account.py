"""Runs that pay from an account of certain data, and under a witness: whole, in one process."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.coordinator.ledger import location
from raycloak.coordinator.ledger.entries import LedgerKeys
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.data_check import check_data
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.words import verdict_rows
from raycloak.coordinator.runs.rollback import check_pins, log_pins
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.metrics.errors import BudgetError, ConfigError, ProtocolError
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.terms.receipt import Receipt
from raycloak.workers.train_worker import TrainWorker
from tests.coordinator.ledger.witness_server import witness_server
from tests.protocol import HandRun, WholeRun, config, examples, trained, whole_run, worker_setup

DATASET = {"kind": "npz", "path": "examples.npz", "features": "features", "fingerprint_key": "examples.key"}
NO_NOISE = {"enabled": False}
PAYS = {"dataset": DATASET, "ledger": {"account": "patients"}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a state folder with data, the key beside it, and the account `patients` of that data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "examples.key").touch(mode=0o600)
    (tmp_path / "data" / "examples.key").write_text("5a" * 32)
    setup = worker_setup(config(dataset=DATASET), tmp_path)
    fingerprint = data_marks(setup.dataset, setup.dataset.open_slices(setup.base), setup.base).fingerprint
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")) as ledger:
        ledger.open_account("patients", OpeningTerms(20.0, 1e-5), data=DataMarks(fingerprint=fingerprint))
    return tmp_path


def test_a_run_on_the_accounts_own_data_is_paid_and_says_so_in_manifest_receipt_and_ledger(home: Path):
    run = trained(home, **PAYS)
    with closing(PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)) as ledger:
        (account,) = ledger.view().accounts
        assert [each.charged_steps for each in account.runs] == [3]
        ledger.verify()
        key, hash_at = LedgerKeys.of((), ledger.public_key), ledger.hash_at
        (pin,) = log_pins(home, key)
        assert pin.newest == ledger.view().head.sequence
        check_pins([pin], hash_at)
    assert run.finished is not None
    assert run.finished.manifest.dataset_fingerprint == account.data[0].fingerprint
    receipt = Receipt.model_validate_json(run.stage.calls("step")[0].arguments[0].body)
    assert receipt.dataset_fingerprint == account.data[0].fingerprint


def test_guarantee_a_run_that_names_no_account_pays_from_the_one_that_is_bound_to_its_data(home: Path):
    """Known by fingerprint; a second run with another secret finds the same account, and adds to it."""
    held = {"dp_config": {"noise_multiplier": 4.0, "epsilon_cap": 20.0}}
    first = trained(home, dataset=DATASET, **held)
    second = trained(home, dataset=DATASET, secret="cd" * 32, **held)
    assert first.finished is not None
    assert second.finished is not None
    assert first.finished.account == second.finished.account == "patients"
    assert (first.finished.data.runs, second.finished.data.runs) == (1, 2)
    verdict = verdict_of(second.finished, home, 1.0, "complete", ())
    assert verdict.data is not None
    assert verdict.data.epsilon_charged == verdict.privacy_epsilon_charged
    shown = dict(verdict_rows(Verdict.of({"run_dir": str(home), "metrics": verdict.metrics()})))
    assert shown["ε of the account"].startswith("patients: 20.000")
    assert shown["ε of the data"].endswith("charged by 2 runs on patients; all together claim 20.000 at δ = 1e-05")


def test_guarantee_a_second_run_on_data_that_is_known_by_its_place_opens_no_second_budget(tmp_path: Path):
    def run(secret: str) -> WholeRun:
        made = whole_run(tmp_path, secret=secret)
        made.coordinator.order = replace(made.coordinator.order, data="data-examples")
        return made

    first = run("ab" * 32)
    assert first.train().account == "data-examples"
    entries = first.entries
    with pytest.raises(BudgetError, match="account_not_shared: account 'data-examples' is held with pld"):
        run("cd" * 32).train()
    assert first.entries == entries, "nothing is opened, registered or charged for it"
    again = run("ab" * 32)
    assert again.train().account == "data-examples"
    assert again.digests == first.digests, "the same run again is the same run"


def other_data() -> Any:
    features, labels = examples()
    features[:, 2] += 1
    return features, labels


@pytest.mark.parametrize(
    "changes", [lambda: {"data": other_data()}, lambda: {"dataset": {**DATASET, "fingerprint_key": None}}]
)
def test_a_run_on_other_data_ends_before_it_is_registered(home: Path, changes: Callable[[], Any]):
    run = whole_run(home, **{**PAYS, **changes()})
    with pytest.raises(BudgetError, match="dataset_mismatch"):
        run.train()
    assert run.entries == 1
    assert not run.stage.calls("step")


def test_a_run_that_calls_the_accounts_data_public_ends_before_it_is_registered(home: Path):
    run = whole_run(home, dataset={**DATASET, "public": True}, ledger={"account": "patients"}, dp_config=NO_NOISE)
    with pytest.raises(BudgetError, match="account_private"):
        run.train()
    assert run.entries == 1
    assert not run.stage.calls("step")


KNOWN = {
    "by its examples": {"path": "moved.npz"},
    "by its place": {"fingerprint_key": None},
}


@pytest.mark.parametrize("how", KNOWN)
def test_guarantee_data_of_a_private_account_is_released_by_no_run_without_noise_that_names_none(home: Path, how: str):
    """The run would have had an account of its own, which is about nobody."""
    trained(home, **PAYS)
    (home / "data" / "moved.npz").write_bytes((home / "data" / "examples.npz").read_bytes())
    run = whole_run(home, secret="cd" * 32, dataset={**DATASET, **KNOWN[how], "public": True}, dp_config=NO_NOISE)
    entries = run.entries
    with pytest.raises(BudgetError, match="account_private: account 'patients' pays for this data"):
        run.train()
    assert run.entries == entries
    assert not run.stage.calls("step")


def test_guarantee_a_run_that_ends_before_its_first_charge_leaves_no_account(tmp_path: Path):
    """So a cap that was mistyped, or a run that was not meant, is no account that the data has for good."""

    def refused(call: Any) -> None:
        if call.method == "charge":
            raise KeyboardInterrupt

    mistyped = {"dp_config": {"noise_multiplier": 40.0, "epsilon_cap": 0.5}}
    run = whole_run(tmp_path, disturb=refused, dataset=DATASET | {"fingerprint_key": None}, **mistyped)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.stage.calls("admit"), "it got as far as that"
    assert run.entries == 0
    meant = trained(tmp_path, secret="cd" * 32, dataset=DATASET | {"fingerprint_key": None})
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}", create=False)) as ledger:
        (account,) = ledger.view().accounts
        assert account.epsilon_cap != 0.5
        kinds = [entry.kind for entry in ledger.history()]
    assert kinds[:4] == ["account_opened", "run_registered", "data_bound", "step_charged"]
    assert meant.finished is not None


def test_a_very_small_epsilon_is_asked_about_before_anything_is_opened(tmp_path: Path):
    small = {"dp_config": {"noise_multiplier": 900.0, "epsilon_cap": 0.05}}
    run = whole_run(tmp_path, **small)
    with pytest.raises(ConfigError, match="epsilon_small"):
        run.train()
    assert run.entries == 0
    meant = whole_run(tmp_path, **small)
    meant.coordinator.order = replace(meant.coordinator.order, small_epsilon=True)
    assert meant.train().steps == 3


@pytest.mark.parametrize("changed", [False, True])
def test_a_copy_of_the_private_data_is_no_public_split_where_a_fingerprint_tells(home: Path, changed: bool):
    features, labels = examples()
    features[0, 0] += changed
    data = home / "data"
    worker_setup(config(dataset=DATASET), home)
    (data / "copy.npz").write_bytes((data / "examples.npz").read_bytes())
    if changed:
        np.savez(data / "copy.npz", features=features, labels=labels)
    split = {"dataset": {**DATASET, "path": "copy.npz", "public": True}}
    run = whole_run(home, **PAYS, evaluation=split)
    if changed:
        run.train()
        return
    with pytest.raises(ConfigError, match=r"evaluation_private: .*fingerprint"):
        run.train()
    assert run.entries == 1


def test_a_worker_computes_nothing_for_a_receipt_of_other_data(home: Path):
    run = HandRun(home, dataset=DATASET)
    assert len(run.manifest.dataset_fingerprint) == 32
    request = run.request(run.roster())
    assert run.code("worker-0", request) == "receipt_mismatch"
    own = run.receipt(dataset_fingerprint=run.manifest.dataset_fingerprint)
    assert run.code("worker-0", run.request(run.roster(), receipt=own)) == "ok"


def test_a_worker_that_opened_other_data_does_not_take_part(home: Path):
    run = HandRun(home, dataset=DATASET)
    forged = run.manifest.model_copy(update={"dataset_fingerprint": b"x" * 32})
    other = TrainWorker("worker-9", run.source, run.clock)
    other.prepare(run.setup)
    other.compute_known_answer(run.mechanism)
    challenge = run.orchestrator.challenge("worker-9", "worker")
    with pytest.raises(ProtocolError, match="manifest_mismatch: the manifest's dataset_fingerprint"):
        other.present(challenge, run.admission.model_copy(update={"manifest": forged}))


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[str]:
    """Yield the name of an empty witness that answers over HTTP."""
    with witness_server() as server:
        yield server.named_in(tmp_path)


def test_under_a_witness_apart_the_verdict_claims_that_a_rollback_is_noticed(
    tmp_path: Path, witness: str, monkeypatch: pytest.MonkeyPatch
):
    with witness_server() as server:
        (tmp_path / "here").mkdir()
        here = trained(tmp_path / "here", ledger={"witness": server.named_in(tmp_path / "here")})
    assert here.finished is not None
    assert not verdict_of(here.finished, tmp_path, 1.0, "complete", ()).rollback_witness, "it is on this machine"
    monkeypatch.setattr(location, "_machine", lambda _: "another one")
    run = trained(tmp_path, ledger={"witness": witness})
    assert run.finished is not None
    assert verdict_of(run.finished, tmp_path, 1.0, "complete", ()).rollback_witness
    plain = trained(tmp_path / "plain")
    assert plain.finished is not None
    assert not verdict_of(plain.finished, tmp_path, 1.0, "complete", ()).rollback_witness


def test_a_run_ends_by_name_when_its_witness_is_gone_and_the_step_stays_charged(tmp_path: Path):
    folder = tmp_path / "witness"
    folder.mkdir()

    def lose(call: Any) -> None:
        if (call.method, call.index) == ("charge", 1):
            folder.rename(tmp_path / "lost")

    run = whole_run(tmp_path, disturb=lose, ledger={"witness": str(folder)})
    with pytest.raises(BudgetError, match="witness_unavailable"):
        run.train()
    assert len(run.stage.calls("step")) == 3
    assert run.entries == 6


@pytest.mark.parametrize("changed", [False, True])
def test_plan_and_verdict_say_whether_this_very_data_passed_its_owners_check(home: Path, changed: bool):
    settings = config(dataset=DATASET).model_copy(update={"model": None})
    digest = check_data(settings, home / "data").digest.hex()
    run = trained(home, dataset=DATASET, data=other_data() if changed else examples())
    assert run.finished is not None
    told = verdict_of(run.finished, run.folder, 1.0, "complete", ())
    assert run.finished.plan.data_check == told.data_check == (None if changed else digest)
    (line,) = (text for label, text in verdict_rows(told) if label == "data check")
    assert ("NO CHECK ON RECORD" in line) == changed
