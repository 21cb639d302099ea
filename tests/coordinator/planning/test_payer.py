"""The account that pays where the configuration names none: one for each dataset."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.ledger import PrivacyLedger, RunStart
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.ledger.view import data_standing
from raycloak.coordinator.planning.payer import (
    LEAST_EPSILON,
    PayingAccount,
    account_of,
    data_name,
    existing_account,
    opening_terms,
    require_meant,
)
from raycloak.coordinator.planning.plan import make_plan
from raycloak.metrics.errors import BudgetError, ConfigError

MANIFEST = b"m" * 32


def known(name: bytes) -> DataMarks:
    """Return marks of data that have only a fingerprint."""
    return DataMarks(fingerprint=name * 32)


def placed(name: bytes) -> DataMarks:
    """Return marks of data that have only a place."""
    return DataMarks(places=name * 16)


PEOPLE = known(b"f")


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


def run(ledger: PrivacyLedger, run_id: str, settings: RunConfig, data: DataMarks, name: str = "data-own") -> str:
    """Charge the first step of a run as a coordinator does, and return its account."""
    view = ledger.view()
    account = account_of(view, settings, data, name, run_id)
    paying = existing_account(view, settings, account, run_id)
    plan = make_plan(settings, 1437, 100, paying)
    opens = opening_terms(settings, paying, plan.mechanism.accountant)
    terms = RegistrationTerms(run_id, account, (plan.mechanism,), MANIFEST, data, opens=opens)
    ledger.charge(run_id, 0, bytes(32), MANIFEST, start=RunStart(terms, bytes(32)))
    return account


@pytest.mark.parametrize("of", [known, placed])
def test_guarantee_two_private_runs_on_the_same_data_pay_from_one_account(
    ledger: PrivacyLedger, of: Callable[[bytes], DataMarks]
):
    first, other = of(b"f"), of(b"o")
    assert run(ledger, "a", config(), first) == run(ledger, "b", config(), first, "data-renamed")
    (account,) = ledger.view().accounts
    assert [each.run_id for each in account.runs] == ["a", "b"]
    assert account.data == (first,)
    assert run(ledger, "c", config(), other, "data-other") != account.name


def test_a_second_run_beside_a_tight_plan_is_refused_with_what_is_spent(ledger: PrivacyLedger):
    tight = config(dp_config={"noise_multiplier": 10.0, "epsilon_cap": 8.0})
    name = run(ledger, "a", tight, placed(b"t"))
    # Rounded up, as everywhere: see `test_the_status_line`.
    spent = re.escape(epsilon_text(ledger.view().accounts[0].spent_epsilon))
    told = (
        rf"account_not_shared.*plan of run a alone.*charged epsilon {spent} of 8\."
        r".*open NAME --epsilon-cap E --delta 1e-05 --also"
    )
    with pytest.raises(BudgetError, match=told):
        existing_account(ledger.view(), tight, name, "b")
    assert existing_account(ledger.view(), tight, name, "a") is not None, "the run itself may be resumed"


def test_an_account_bound_to_the_data_pays_whatever_its_name(ledger: PrivacyLedger):
    ledger.open_account("patients", OpeningTerms(8.0, 1e-5), data=PEOPLE)
    view = ledger.view()
    assert account_of(view, config(), PEOPLE, "") == "patients"
    assert account_of(view, config(), known(b"o"), "") == f"data-{(b'o' * 8).hex()}"
    assert account_of(view, config(), NO_MARKS, "", "x") == "run-x"
    ledger.open_account("study", OpeningTerms(8.0, 1e-5), data=PEOPLE, also=True)
    with pytest.raises(BudgetError, match="account_ambiguous: the accounts patients, study"):
        account_of(ledger.view(), config(), PEOPLE, "")
    assert account_of(ledger.view(), config(ledger={"account": "study"}), PEOPLE, "") == "study"
    for name in ("patients", "study"):
        ledger.close_account(name)
    ledger.open_account("last", OpeningTerms(8.0, 1e-5), data=PEOPLE, also=True)
    assert account_of(ledger.view(), config(), PEOPLE, "") == "last"


def test_the_account_that_knows_the_examples_pays_before_the_one_of_their_place(ledger: PrivacyLedger):
    ledger.open_account("people", OpeningTerms(8.0, 1e-5), data=PEOPLE)
    ledger.open_account("place", OpeningTerms(8.0, 1e-5), data=placed(b"p"))
    both = PEOPLE.model_copy(update={"places": b"p" * 16})
    assert account_of(ledger.view(), config(), both, "") == "people"


def test_a_closed_account_is_not_replaced_by_a_fresh_one(ledger: PrivacyLedger):
    ledger.open_account("patients", OpeningTerms(8.0, 1e-5), data=PEOPLE)
    ledger.close_account("patients")
    name = account_of(ledger.view(), config(), PEOPLE, "")
    with pytest.raises(BudgetError, match="account_closed"):
        existing_account(ledger.view(), config(), name)


def test_a_run_stays_with_its_account_wherever_its_data_has_moved(ledger: PrivacyLedger):
    name = run(ledger, "a", config(), placed(b"h"))
    assert account_of(ledger.view(), config(), placed(b"t"), "data-there", "a") == name
    assert account_of(ledger.view(), config(), placed(b"t"), "data-there", "b") == "data-there"


def test_public_data_has_an_account_for_each_run(ledger: PrivacyLedger):
    public = config(dataset={"kind": "digits", "public": True})
    assert data_name(public.dataset, "/") == ""
    assert [account_of(ledger.view(), public, PEOPLE, "", run_id) for run_id in "ab"] == ["run-a", "run-b"]


def test_the_name_of_an_account_tells_the_file_and_not_its_folder(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    npz = config().dataset
    assert npz is not None
    same = {
        data_name(npz, tmp_path),
        data_name(npz.model_copy(update={"path": "../train.npz", "features": "x"}), tmp_path / "deep"),
        data_name(npz.model_copy(update={"path": str(tmp_path / "train.npz")}), "/elsewhere"),
    }
    assert len(same) == 1
    (name,) = same
    assert re.fullmatch("data-train.npz-[0-9a-f]{12}", name)
    assert str(tmp_path) not in name
    assert data_name(npz, tmp_path / "deep") not in same


def test_functions_buckets_and_digits_name_their_account(tmp_path: Path):
    (tmp_path / "mine.py").touch()
    function = parse_config(config().model_dump() | {"dataset": {"kind": "module", "function": "mine:rows"}}).dataset
    digits = config(dataset={"kind": "digits"}).dataset
    assert data_name(function, tmp_path).startswith("data-rows-")
    assert data_name(function, tmp_path) != data_name(function, tmp_path / "other")
    assert data_name(digits, tmp_path) == data_name(digits, "/") == "data-digits-train"
    bucket = {"kind": "parquet", "path": "s3://hospital/patients?region=eu-west-1", "labels": "y"}
    assert data_name(config(dataset=bucket).dataset, tmp_path).startswith("data-patients-")
    assert data_name(None, tmp_path) == ""


def test_all_accounts_of_one_fingerprint_are_added_up(ledger: PrivacyLedger):
    run(ledger, "a", config(), PEOPLE)
    ledger.open_account("second", OpeningTerms(4.0, 1e-6), data=PEOPLE, also=True)
    ledger.open_account("others", OpeningTerms(5.0, 1e-5))
    view = ledger.view()
    standing = data_standing(view, "second")
    assert (standing.runs, standing.epsilon_cap, standing.delta) == (1, 12.0, 1e-5 + 1e-6)
    assert len(standing.accounts) == 2
    assert standing.epsilon_charged == sum(each.spent_epsilon for each in view.accounts) > 0
    assert data_standing(view, "others").accounts == ("others",)


@pytest.mark.parametrize("cap", [0.08, 0.0999, 0.1, 8.0])
def test_a_very_small_cap_is_asked_about_before_it_becomes_that_of_the_data(ledger: PrivacyLedger, cap: float):
    asked = config(dp_config={"noise_multiplier": 900.0, "epsilon_cap": cap, "accountant": "rdp"})
    public = config(dataset={"kind": "digits", "public": True}, dp_config=asked.dp_config.model_dump())
    opened = PayingAccount(cap, "rdp")
    for settings, account, meant in ((asked, opened, False), (public, None, False), (asked, None, True)):
        require_meant(settings, account, meant)
    if cap >= LEAST_EPSILON:
        require_meant(asked, None, False)
        return
    with pytest.raises(ConfigError, match=rf"epsilon_small: .* {cap:g} is below 0\.1.*raycloak run CONFIG --yes"):
        require_meant(asked, None, False)
