"""The changes of an account: every change is an entry that anyone can check, and none gives away more epsilon."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.ledger import accounts, cap_authority
from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.cap_authority import CapAuthorisation, SignedCap, authorise
from raycloak.coordinator.ledger.entries import (
    AccountClosed,
    CapChanged,
    CapTransferred,
    Event,
    RunRegistered,
    make_entry,
)
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.ledger.view import AccountView, LedgerView
from raycloak.coordinator.planning.payer import paying_account
from raycloak.metrics.errors import BudgetError, ConfigError, ProtocolError
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    MANIFEST,
    PARAMETERS,
    expected_epsilon,
    mechanism,
    receipt_of,
    tamper,
    unchecked,
)
from tests.protocol import config

AUTHORITY = IdentityKey.generate()
PEOPLE = DataMarks(fingerprint=b"f" * 32)
OTHERS = DataMarks(fingerprint=b"g" * 32)
LATER = 2**40


def begun(url: str) -> PrivacyLedger:
    """Two accounts of one dataset with an authority, `patients` and `study`, and a run of the first, `run-a`."""
    instance = PrivacyLedger(url)
    for name in ("patients", "study"):
        of_people = {"data": PEOPLE, "also": name == "study"}
        instance.open_account(name, OpeningTerms(CAP, DELTA), authority=AUTHORITY.public, **of_people)
    instance.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST, PEOPLE))
    instance.bind_data("run-a", MANIFEST, DATA)
    return instance


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[PrivacyLedger]:
    """The ledger of `begun`, in a file; tests that depend on the database take the URL of each kind."""
    instance = begun(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    yield instance
    instance.close()


def account(ledger: PrivacyLedger, name: str = "patients") -> AccountView:
    return next(each for each in ledger.view().accounts if each.name == name)


def content(ledger: PrivacyLedger) -> LedgerView:
    return ledger.view()


def change_of(ledger: PrivacyLedger, new_cap: float, name: str = "patients", **changes: Any) -> CapAuthorisation:
    """Return the statement that an authority signs to raise the present cap."""
    now = account(ledger, name)
    values = {
        "account": name,
        "ledger_key": ledger.public_key,
        "old_cap": now.epsilon_cap,
        "new_cap": new_cap,
        "follows": now.terms_hash,
        "expires_at": LATER,
    }
    return CapAuthorisation(**values | changes)


def allowed(ledger: PrivacyLedger, new_cap: float, name: str = "patients", **changes: Any) -> SignedCap:
    return authorise(change_of(ledger, new_cap, name, **changes), AUTHORITY)


# --- caps


def test_a_cap_is_lowered_by_command_and_holds_at_once_and_for_every_instance(ledger_url: str):
    ledger, other = begun(ledger_url), PrivacyLedger(ledger_url)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    assert account(other).epsilon_cap == CAP
    ledger.change_cap("patients", expected_epsilon(2))
    for step in (1, 2):
        assert account(other).epsilon_cap == pytest.approx(expected_epsilon(2))
        if step == 1:
            ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        ledger.charge("run-a", 2, PARAMETERS, MANIFEST)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        other.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), MANIFEST, PEOPLE))
    ledger.verify()
    for each in (ledger, other):
        each.close()


def test_the_cap_it_has_changes_nothing_and_what_is_spent_cannot_be_lowered_away(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    before = content(ledger)
    ledger.change_cap("patients", CAP)
    with pytest.raises(BudgetError, match="cap_below_spent"):
        ledger.change_cap("patients", expected_epsilon(1) * 0.999)
    for cap in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="account_terms"):
            ledger.change_cap("patients", cap)
    with pytest.raises(BudgetError, match="account_unknown"):
        ledger.change_cap("nobody", 1.0)
    assert content(ledger) == before


def test_a_cap_is_raised_with_the_signature_of_its_authority_and_the_audit_checks_it_offline(ledger: PrivacyLedger):
    signed = allowed(ledger, 9.0)
    ledger.change_cap("patients", 9.0, signed)
    assert account(ledger).epsilon_cap == 9.0
    event = ledger.history()[-1].event
    assert isinstance(event, CapChanged)
    assert (event.old_cap, event.epsilon_cap, event.authorisation) == (CAP, 9.0, signed)
    assert audit(ledger.history(), ledger.public_key).accounts["patients"].terms.epsilon_cap == 9.0
    ledger.verify()


BAD_AUTHORISATIONS: dict[str, Callable[[PrivacyLedger], SignedCap | None]] = {
    "authorisation_missing": lambda ledger: None,
    "authorisation_forged": lambda ledger: authorise(change_of(ledger, 9.0), IdentityKey.generate()),
    "authorisation_forged edited": lambda ledger: allowed(ledger, 8.5).model_copy(
        update={"authorisation": change_of(ledger, 9.0)}
    ),
    "authorisation_mismatch account": lambda ledger: allowed(ledger, 9.0, "study"),
    "authorisation_mismatch cap": lambda ledger: allowed(ledger, 10.0),
    "authorisation_mismatch ledger": lambda ledger: allowed(ledger, 9.0, ledger_key=b"k" * 32),
    "authorisation_void entry": lambda ledger: allowed(ledger, 9.0, follows=b"h" * 32),
    "authorisation_void cap": lambda ledger: allowed(ledger, 9.0, old_cap=7.0),
    "authorisation_expired": lambda ledger: allowed(ledger, 9.0, expires_at=1),
}


@pytest.mark.parametrize("case", BAD_AUTHORISATIONS)
def test_a_cap_is_not_raised_by_anything_else(ledger: PrivacyLedger, case: str):
    before = content(ledger)
    with pytest.raises(BudgetError, match=f"{case.split()[0]}: ") as refusal:
        ledger.change_cap("patients", 9.0, BAD_AUTHORISATIONS[case](ledger))
    assert refusal.value.exit_code == 3
    assert content(ledger) == before


def test_an_authorisation_is_good_once_even_if_the_cap_comes_back_to_where_it_was(ledger: PrivacyLedger):
    signed = allowed(ledger, 9.0)
    ledger.change_cap("patients", 9.0, signed)
    for cap in (9.0, CAP):
        ledger.change_cap("patients", cap)
        before = content(ledger)
        with pytest.raises(BudgetError, match="authorisation_void"):
            ledger.change_cap("patients", 9.0, signed)
        assert content(ledger) == before


def test_an_authorisation_that_comes_with_a_lower_cap_is_refused_since_nothing_would_check_it(ledger: PrivacyLedger):
    before = content(ledger)
    for cap in (7.0, math.nextafter(CAP, 0.0)):
        with pytest.raises(BudgetError, match="authorisation_mismatch"):
            ledger.change_cap("patients", cap, allowed(ledger, 9.0))
    assert content(ledger) == before


def test_an_account_without_an_authority_can_only_be_lowered(ledger: PrivacyLedger):
    ledger.open_account("plain", OpeningTerms(CAP, DELTA))
    with pytest.raises(BudgetError, match="cap_fixed"):
        ledger.change_cap("plain", 9.0, allowed(ledger, 9.0, "plain"))
    ledger.change_cap("plain", 7.0)
    with pytest.raises(BudgetError, match="cap_fixed"):
        ledger.change_cap("plain", CAP)


def test_a_cap_at_which_the_slack_of_its_runs_does_not_fit_delta_is_refused(ledger: PrivacyLedger):
    half = 0.5 * 0.01 * DELTA / (1 + math.exp(CAP))
    ledger.register_run(
        RegistrationTerms("run-b", "patients", (mechanism(overflow_probability=half),), b"n" * 32, PEOPLE)
    )
    ledger.bind_data("run-b", b"n" * 32, DATA)
    with pytest.raises(BudgetError, match="delta_exceeded"):
        ledger.change_cap("patients", CAP + 1, allowed(ledger, CAP + 1))
    ledger.change_cap("patients", CAP + 0.5, allowed(ledger, CAP + 0.5))
    with pytest.raises(BudgetError, match="delta_exceeded"):
        ledger.register_run(
            RegistrationTerms("run-c", "patients", (mechanism(overflow_probability=half),), b"o" * 32, PEOPLE)
        )
    ledger.verify()


def test_a_run_keeps_the_cap_it_was_planned_for(ledger: PrivacyLedger):
    ledger.change_cap("patients", 7.0)
    ledger.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), b"n" * 32, PEOPLE))
    ledger.bind_data("run-b", b"n" * 32, DATA)
    ledger.change_cap("patients", 6.0)
    assert [run.epsilon_cap for run in account(ledger).runs] == [CAP, 7.0]
    ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST, PEOPLE))


def test_a_plan_takes_the_cap_its_run_was_registered_at_and_no_new_run_on_a_closed_account(ledger: PrivacyLedger):
    settings = config(ledger={"account": "patients"})
    ledger.change_cap("patients", 7.0)
    assert paying_account(ledger.view(), settings).epsilon_cap == 7.0
    assert paying_account(ledger.view(), settings, "run-a").epsilon_cap == CAP
    ledger.close_account("patients")
    assert paying_account(ledger.view(), settings, "run-a").epsilon_cap == CAP
    with pytest.raises(BudgetError, match="account_closed"):
        paying_account(ledger.view(), settings, "run-b")


# --- transfers


def test_a_transfer_takes_from_one_what_it_gives_to_the_other_in_one_entry(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    before = ledger.view().head.sequence
    ledger.transfer("patients", "study", 2.5)
    caps = [account(ledger, name).epsilon_cap for name in ("patients", "study")]
    assert caps == [CAP - 2.5, CAP + 2.5]
    assert ledger.view().head.sequence == before + 1
    assert isinstance(ledger.history("study")[-1].event, CapTransferred)
    assert ledger.history("study")[-1] == ledger.history("patients")[-1]
    ledger.verify()


@pytest.mark.parametrize("amount", [0.1, 1 / 3, 1e-9, 7.3, 2**-40])
def test_the_sum_of_the_caps_never_grows_not_even_by_rounding(ledger: PrivacyLedger, amount: float):
    ledger.change_cap("study", 0.7)
    total = sum(Fraction(each.epsilon_cap) for each in ledger.view().accounts)
    ledger.transfer("patients", "study", amount)
    assert sum(Fraction(each.epsilon_cap) for each in ledger.view().accounts) <= total
    ledger.verify()


def test_what_is_spent_stays_where_it_is(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    before = content(ledger)
    for amount in (CAP - expected_epsilon(1) + 1e-6, CAP, 2 * CAP):
        with pytest.raises(BudgetError, match="cap_below_spent"):
            ledger.transfer("patients", "study", amount)
    for source, target, amount in (("patients", "study", 0.0), ("patients", "study", -1.0), ("study", "study", 1.0)):
        with pytest.raises(ConfigError, match="account_terms"):
            ledger.transfer(source, target, amount)
    with pytest.raises(BudgetError, match="transfer_grows"):
        ledger.transfer("patients", "study", 1e-20)
    assert content(ledger) == before
    ledger.transfer("patients", "study", CAP - expected_epsilon(1) - 1e-6)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        ledger.charge("run-a", 1, PARAMETERS, MANIFEST)
    ledger.verify()


@pytest.mark.parametrize(
    "terms",
    [
        (CAP, DELTA, AUTHORITY.public, OTHERS),
        (CAP, DELTA, AUTHORITY.public, NO_MARKS),
        (CAP, DELTA / 2, AUTHORITY.public, PEOPLE),
        (CAP, DELTA, b"", PEOPLE),
    ],
)
def test_epsilon_does_not_move_to_other_people_or_other_rules(ledger: PrivacyLedger, terms: Any):
    cap, delta, authority, data = terms
    ledger.open_account("other", OpeningTerms(cap, delta), authority=authority, data=data, also=True)
    before = content(ledger)
    for pair in (("patients", "other"), ("other", "patients")):
        with pytest.raises(BudgetError, match="transfer_mismatch"):
            ledger.transfer(*pair, 1.0)
    assert content(ledger) == before


def test_two_accounts_that_are_bound_to_no_data_may_be_about_anybody(ledger: PrivacyLedger):
    for name in ("one", "two"):
        ledger.open_account(name, OpeningTerms(CAP, DELTA))
    with pytest.raises(BudgetError, match="transfer_mismatch"):
        ledger.transfer("one", "two", 1.0)


# --- closing


def test_a_closed_account_takes_no_run_and_no_charge_and_gives_nothing_that_it_has(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.bind_vectors("run-a", "gradient", 0, MANIFEST, b"v" * 32)
    ledger.close_account("patients")
    assert account(ledger).closed
    before = content(ledger)
    attempts: list[Callable[[], object]] = [
        lambda: ledger.charge("run-a", 0, PARAMETERS, MANIFEST),
        lambda: ledger.bind_vectors("run-a", "gradient", 0, MANIFEST, b"v" * 32),
        lambda: ledger.bind_data("run-a", MANIFEST, DATA),
        lambda: ledger.charge("run-a", 1, PARAMETERS, MANIFEST),
        lambda: ledger.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), MANIFEST, PEOPLE)),
        lambda: ledger.change_cap("patients", 7.0),
        lambda: ledger.change_cap("patients", 9.0, allowed(ledger, 9.0)),
        lambda: ledger.transfer("patients", "study", 1.0),
        lambda: ledger.transfer("study", "patients", 1.0),
    ]
    for attempt in attempts:
        with pytest.raises(BudgetError, match="account_closed"):
            attempt()
    assert content(ledger) == before
    ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST, PEOPLE))
    ledger.close_account("patients")
    assert content(ledger) == before
    ledger.verify()


def test_a_closed_account_keeps_the_cap_it_had(ledger_url: str):
    ledger = begun(ledger_url)
    ledger.change_cap("study", 5.0)
    ledger.close_account("study")
    other = PrivacyLedger(ledger_url)
    assert (account(other, "study").epsilon_cap, account(other, "study").closed) == (5.0, True)
    for each in (ledger, other):
        each.close()


# --- data


def test_a_run_on_other_data_is_refused_and_nothing_is_written(ledger: PrivacyLedger):
    before = content(ledger)
    for other, what in ((OTHERS, "is 6767"), (NO_MARKS, "was not computed")):
        with pytest.raises(BudgetError, match=f"dataset_mismatch: .*6666.*{what}"):
            ledger.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), MANIFEST, other))
    with pytest.raises(BudgetError, match=r"dataset_mismatch|run_mismatch"):
        ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST, OTHERS))
    assert content(ledger) == before
    ledger.open_account("free", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-b", "free", (mechanism(),), MANIFEST, OTHERS))
    ledger.bind_data("run-b", MANIFEST, DATA)
    receipt = receipt_of(ledger, ledger.charge("run-b", 0, PARAMETERS, MANIFEST))
    assert receipt.dataset_fingerprint == b"g" * 32


PUBLIC = {"private": False, "noise_multiplier": 0.0, "sigma": 0.0}


def test_an_account_that_is_bound_to_data_pays_for_no_release_without_noise(ledger: PrivacyLedger):
    """Not even beside a noised one, whatever the trainer's file says of the data."""
    before = content(ledger)
    clear = mechanism(**PUBLIC)
    for mechanisms in ((clear,), (mechanism(), clear.model_copy(update={"query": "evaluation"}))):
        with pytest.raises(BudgetError, match="account_private: account 'patients' pays for this data"):
            ledger.register_run(RegistrationTerms("run-b", "patients", mechanisms, MANIFEST, PEOPLE))
    assert content(ledger) == before
    ledger.open_account("free", OpeningTerms(CAP, DELTA), also=True)
    with pytest.raises(BudgetError, match="account_private: account 'patients' pays for this data"):
        ledger.register_run(RegistrationTerms("run-b", "free", (clear,), MANIFEST, PEOPLE))
    ledger.register_run(RegistrationTerms("run-b", "free", (clear,), MANIFEST, OTHERS))


@pytest.mark.parametrize(
    "terms", [(9.0, DELTA, AUTHORITY.public, PEOPLE), (CAP, 1e-6, AUTHORITY.public, PEOPLE),
              (CAP, DELTA, b"", PEOPLE), (CAP, DELTA, AUTHORITY.public, NO_MARKS)],
)  # fmt: skip
def test_an_account_is_opened_once(ledger: PrivacyLedger, terms: Any):
    ledger.change_cap("patients", 7.0)
    before = content(ledger)
    cap, delta, authority, data = terms
    with pytest.raises(BudgetError, match="account_mismatch"):
        ledger.open_account("patients", OpeningTerms(cap, delta), authority=authority, data=data)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA), authority=AUTHORITY.public, data=PEOPLE)
    assert content(ledger) == before


def test_an_authority_has_32_bytes(ledger: PrivacyLedger):
    with pytest.raises(ConfigError, match="account_terms"):
        ledger.open_account("new", OpeningTerms(CAP, DELTA), authority=b"short")


# --- mechanisms


@pytest.mark.parametrize(
    "changes",
    [
        {"honest_share": 0.0},
        {"honest_share": -0.5},
        {"honest_share": 1.0000001},
        {"sigma": 15.999, "gamma_log2": 0, "max_grad_norm": 1e-3, "dimension": 1},
        {"sigma": 0.0},
        {"sigma": 2.0**41},
    ],
)
def test_noise_that_the_argument_does_not_cover_is_refused(ledger: PrivacyLedger, changes: Any):
    before = content(ledger)
    with pytest.raises(ProtocolError, match=r"^mechanism_bounds: "):
        ledger.register_run(RegistrationTerms("run-b", "patients", (unchecked(**changes),), b"n" * 32, PEOPLE))
    assert content(ledger) == before


# --- what the audit says of entries that a ledger would not write


def forged(ledger: PrivacyLedger, event: Event) -> str:
    """Return the audit's verdict on the chain with one more signed entry."""
    extra = make_entry(ledger.view().head, event, ledger._store.key)
    with pytest.raises(BudgetError) as refusal:
        audit([*ledger.history(), extra], ledger.public_key)
    assert f"at entry {extra.sequence}:" in refusal.value.message
    return refusal.value.message


def test_the_audit_holds_every_change_to_the_ledgers_own_rules(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    raised = CapChanged(recorded_at=5, account="patients", old_cap=CAP, epsilon_cap=9.0, authorisation=None)
    late = allowed(ledger, 9.0, expires_at=4)
    moved = CapTransferred(recorded_at=5, source="patients", target="study", source_cap=7.0, target_cap=9.0)
    registered = ledger.history()[2].event
    assert isinstance(registered, RunRegistered)
    cases: list[tuple[Event, str]] = [
        (raised, "authorisation_missing"),
        (raised.model_copy(update={"authorisation": late}), "authorisation_expired"),
        (raised.model_copy(update={"old_cap": 7.0}), "cap_mismatch"),
        (raised.model_copy(update={"epsilon_cap": 0.1}), "cap_below_spent"),
        (raised.model_copy(update={"account": "nobody"}), "never opened"),
        (moved.model_copy(update={"target_cap": 9.5}), "transfer_grows"),
        (moved.model_copy(update={"source_cap": 0.1}), "cap_below_spent"),
        (moved.model_copy(update={"source_cap": 8.5, "target_cap": 7.5}), "transfer_grows"),
        (moved.model_copy(update={"target": "nobody"}), "never opened"),
        (AccountClosed(recorded_at=5, account="study", epsilon_cap=9.0), "with another cap"),
        (registered.model_copy(update={"run_id": "b", "data": OTHERS}), "dataset_mismatch"),
        (registered.model_copy(update={"run_id": "b", "mechanisms": (mechanism(**PUBLIC),)}), "account_private"),
        (registered.model_copy(update={"run_id": "b", "epsilon_cap": 9.0}), "another cap than its account"),
    ]
    for event, why in cases:
        assert why in forged(ledger, event), event
    ledger.close_account("patients")
    assert "account_closed" in forged(ledger, registered.model_copy(update={"run_id": "b"}))
    assert "account_closed" in forged(ledger, AccountClosed(recorded_at=5, account="patients", epsilon_cap=CAP))
    charge = ledger.history()[3].event
    assert "was closed" in forged(ledger, charge.model_copy(update={"step": 1}))


def test_the_rules_are_those_of_one_module(monkeypatch: pytest.MonkeyPatch, ledger: PrivacyLedger):
    """A ledger whose rules were switched off writes entries that the same rules, offline, refuse."""
    with monkeypatch.context() as off:
        off.setattr(accounts, "check_authorisation", lambda *_: None)
        ledger.change_cap("patients", 10.0)
    with pytest.raises(BudgetError, match="authorisation_missing"):
        ledger.verify()
    assert accounts.check_authorisation is cap_authority.check_authorisation


# --- opening


def test_a_ledger_with_a_broken_chain_is_not_written_to(ledger_url: str):
    ledger = begun(ledger_url)
    for step in range(3):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    entry = ledger.history()[4]
    ledger.close()
    edits: list[tuple[str, dict[str, Any], str]] = [
        ("UPDATE entries SET body = :new WHERE sequence = 5", {"new": entry.body + b" "}, "entry 5: its content"),
        ("UPDATE entries SET kind = 'account_opened' WHERE sequence = 5", {}, "entry 5: its content"),
        ("UPDATE charged SET charges = 1", {}, "disagrees with the chain about run run-a"),
        ("UPDATE entries SET sequence = 9 WHERE sequence = 5", {}, "entry 5: entry 6 stands in its place"),
    ]  # fmt: skip
    undo: list[tuple[str, dict[str, Any]]] = [
        ("UPDATE entries SET body = :old WHERE sequence = 5", {"old": entry.body}),
        ("UPDATE entries SET kind = 'step_charged' WHERE sequence = 5", {}),
        ("UPDATE charged SET charges = 3", {}),
        ("UPDATE entries SET sequence = 5 WHERE sequence = 9", {}),
    ]
    for (statement, values, why), (back, old) in zip(edits, undo, strict=True):
        tamper(ledger_url, statement, **values)
        with pytest.raises(BudgetError, match=f"chain_broken: .*{why}"):
            PrivacyLedger(ledger_url)
        tamper(ledger_url, back, **old)
    again = PrivacyLedger(ledger_url)
    again.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST, PEOPLE))
    again.charge("run-a", 3, PARAMETERS, MANIFEST)
    again.close()
