"""The account that pays where the configuration names none: one for each dataset."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RunTerms
from raycloak.coordinator.ledger.view import data_standing
from raycloak.coordinator.planning.payer import account_of, data_place, existing_account
from raycloak.coordinator.planning.plan import make_plan
from raycloak.metrics.errors import BudgetError

FINGERPRINT = b"f" * 32
MANIFEST = b"m" * 32


def config(**changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "expected_batch_size": 1437.0,
        "steps": 8,
        "dataset": {"kind": "npz", "path": "train.npz"},
        "dp_config": {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "accountant": "rdp"},
    }
    return parse_config(raw | changes)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[PrivacyLedger]:
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")) as opened:
        yield opened


def run(ledger: PrivacyLedger, run_id: str, settings: RunConfig, data: str, fingerprint: bytes = b"") -> str:
    """Register a run as a coordinator does, charge one step, and return its account."""
    view = ledger.view()
    name = account_of(view, settings, data, fingerprint, run_id)
    paying = existing_account(view, settings, name, run_id)
    plan = make_plan(settings, 1437, 100, paying)
    if paying is None:
        accountant = plan.mechanism.accountant
        ledger.open_account(
            name, OpeningTerms(plan.epsilon_cap, plan.delta, accountant), data=DataMarks(fingerprint=fingerprint)
        )
    ledger.register_run(RunTerms(run_id, name, (plan.mechanism,), MANIFEST, DataMarks(fingerprint=fingerprint)))
    ledger.bind_data(run_id, MANIFEST, bytes(32))
    ledger.charge(run_id, 0, bytes(32), MANIFEST)
    return name


@pytest.mark.parametrize("fingerprint", [b"", FINGERPRINT])
def test_guarantee_two_private_runs_on_the_same_data_pay_from_one_account(ledger: PrivacyLedger, fingerprint: bytes):
    place = "data-train.npz-0123456789ab"
    assert run(ledger, "a", config(), place, fingerprint) == run(ledger, "b", config(), place, fingerprint)
    (account,) = ledger.view().accounts
    assert [each.run_id for each in account.runs] == ["a", "b"]
    assert account.fingerprint == fingerprint
    assert run(ledger, "c", config(), "data-other", b"o" * len(fingerprint)) != account.name


def test_a_second_run_beside_a_tight_plan_is_refused_with_what_is_spent(ledger: PrivacyLedger):
    tight = config(dp_config={"noise_multiplier": 10.0, "epsilon_cap": 8.0})
    name = run(ledger, "a", tight, "data-train")
    # Rounded up, as everywhere: see `test_the_status_line`.
    spent = re.escape(epsilon_text(ledger.view().accounts[0].spent_epsilon))
    told = (
        rf"account_not_shared.*plan of run a alone.*charged epsilon {spent} of 8\."
        r".*open NAME --epsilon-cap E --delta 1e-05"
    )
    with pytest.raises(BudgetError, match=told):
        existing_account(ledger.view(), tight, name, "b")
    assert existing_account(ledger.view(), tight, name, "a") is not None, "the run itself may be resumed"


def test_an_account_bound_to_the_data_pays_whatever_its_name(ledger: PrivacyLedger):
    ledger.open_account("patients", OpeningTerms(8.0, 1e-5), data=DataMarks(fingerprint=FINGERPRINT))
    view = ledger.view()
    assert account_of(view, config(), "", FINGERPRINT) == "patients"
    assert account_of(view, config(), "", b"o" * 32) == f"data-{(b'o' * 8).hex()}"
    ledger.open_account("study", OpeningTerms(8.0, 1e-5), data=DataMarks(fingerprint=FINGERPRINT))
    with pytest.raises(BudgetError, match=r"account_ambiguous: the accounts patients, study"):
        account_of(ledger.view(), config(), "", FINGERPRINT)
    assert account_of(ledger.view(), config(ledger={"account": "study"}), "", FINGERPRINT) == "study"
    for name in ("patients", "study"):
        ledger.close_account(name)
    ledger.open_account("last", OpeningTerms(8.0, 1e-5), data=DataMarks(fingerprint=FINGERPRINT))
    assert account_of(ledger.view(), config(), "", FINGERPRINT) == "last"


def test_a_closed_account_is_not_replaced_by_a_fresh_one(ledger: PrivacyLedger):
    ledger.open_account("patients", OpeningTerms(8.0, 1e-5), data=DataMarks(fingerprint=FINGERPRINT))
    ledger.close_account("patients")
    name = account_of(ledger.view(), config(), "", FINGERPRINT)
    with pytest.raises(BudgetError, match="account_closed"):
        existing_account(ledger.view(), config(), name)


def test_a_run_stays_with_its_account_wherever_its_data_has_moved(ledger: PrivacyLedger):
    name = run(ledger, "a", config(), "data-here")
    assert account_of(ledger.view(), config(), "data-there", b"", "a") == name
    assert account_of(ledger.view(), config(), "data-there", b"", "b") == "data-there"


def test_public_data_has_an_account_for_each_run(ledger: PrivacyLedger):
    public = config(dataset={"kind": "digits", "public": True})
    assert data_place(public.dataset, "/") == ""
    assert [account_of(ledger.view(), public, "", FINGERPRINT, run_id) for run_id in "ab"] == ["run-a", "run-b"]


def test_a_place_is_a_file_however_it_is_named(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "train.npz").touch()
    (tmp_path / "linked.npz").symlink_to(tmp_path / "train.npz")
    npz = config().dataset
    assert npz is not None
    same = {
        data_place(npz, tmp_path),
        data_place(npz.model_copy(update={"path": "../train.npz", "features": "x"}), tmp_path / "deep"),
        data_place(npz.model_copy(update={"path": str(tmp_path / "train.npz")}), "/elsewhere"),
        data_place(npz.model_copy(update={"path": "linked.npz"}), tmp_path),
    }
    assert len(same) == 1
    (name,) = same
    assert name.startswith("data-train.npz-")
    assert str(tmp_path) not in name
    assert data_place(npz, tmp_path / "deep") not in same


def test_functions_and_digits_have_a_place(tmp_path: Path):
    (tmp_path / "mine.py").touch()
    function = parse_config(config().model_dump() | {"dataset": {"kind": "module", "function": "mine:rows"}}).dataset
    digits = config(dataset={"kind": "digits"}).dataset
    assert data_place(function, tmp_path).startswith("data-rows-")
    assert data_place(function, tmp_path) != data_place(function, tmp_path / "other")
    assert data_place(digits, tmp_path) == data_place(digits, "/") == "data-digits-train"
    assert data_place(None, tmp_path) == ""


def test_all_accounts_of_one_fingerprint_are_added_up(ledger: PrivacyLedger):
    run(ledger, "a", config(), "", FINGERPRINT)
    ledger.open_account("second", OpeningTerms(4.0, 1e-6), data=DataMarks(fingerprint=FINGERPRINT))
    ledger.open_account("others", OpeningTerms(5.0, 1e-5))
    view = ledger.view()
    standing = data_standing(view, "second")
    assert (standing.runs, standing.epsilon_cap, standing.delta) == (1, 12.0, 1e-5 + 1e-6)
    assert len(standing.accounts) == 2
    assert standing.epsilon_charged == sum(each.spent_epsilon for each in view.accounts) > 0
    assert data_standing(view, "others").accounts == ("others",)
