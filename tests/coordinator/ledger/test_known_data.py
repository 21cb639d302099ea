"""One dataset has one account, whoever asks for another: the ledger decides it, and the audit checks it again."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from raycloak.attestation.core.data_marks import CODE_BYTES, NO_MARKS, PLACE_BYTES, DataMarks, joined
from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.ledger import ledger as ledger_module
from raycloak.coordinator.ledger.audit import AuditedChain, audit
from raycloak.coordinator.ledger.entries import AccountOpened, Event, Head, RunRegistered, make_entry
from raycloak.coordinator.ledger.export import check_extract
from raycloak.coordinator.ledger.ledger import PrivacyLedger, RunStart
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.ledger.view import data_standing
from raycloak.metrics.errors import BudgetError
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, PARAMETERS, mechanism, tamper

TERMS = OpeningTerms(CAP, DELTA)
PUBLIC = {"private": False, "noise_multiplier": 0.0, "sigma": 0.0}
KEY, OTHER_KEY = b"k" * 32, b"K" * 32


def codes(numbers: Sequence[int]) -> bytes:
    return joined({number.to_bytes(CODE_BYTES, "big") for number in numbers})


def places(*names: str) -> bytes:
    return joined({name.encode().ljust(PLACE_BYTES) for name in names})


PEOPLE = DataMarks(key=KEY, fingerprint=b"f" * 32, sketch=codes(range(64)), places=places("train.npz"))
ONE_MORE = DataMarks(key=KEY, fingerprint=b"g" * 32, sketch=codes(range(1, 65)), places=places("copy.npz"))
MOVED = PEOPLE.model_copy(update={"places": places("elsewhere.npz")})
REPLACED = DataMarks(key=KEY, fingerprint=b"h" * 32, sketch=codes(range(900, 964)), places=places("train.npz"))
UNKEYED = DataMarks(places=places("train.npz"))
REKEYED = DataMarks(key=OTHER_KEY, fingerprint=b"i" * 32, sketch=codes(range(64)), places=places("train.npz"))
STRANGERS = DataMarks(key=KEY, fingerprint=b"s" * 32, sketch=codes(range(500, 564)), places=places("others.npz"))

SAME = {
    "the very examples": MOVED,
    "many of the examples": ONE_MORE,
    "the place": REPLACED,
    "the place, without a key": UNKEYED,
}


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[PrivacyLedger]:
    """A ledger where a run on PEOPLE has opened `patients`."""
    instance = PrivacyLedger(ledger_url)
    charge(instance, terms("run-a", data=PEOPLE, opens=TERMS))
    yield instance
    instance.close()


def terms(run_id: str, account: str = "patients", **changes: Any) -> RegistrationTerms:
    return RegistrationTerms(run_id, account, **{"mechanisms": (mechanism(),), "manifest_digest": MANIFEST, **changes})


def charge(ledger: PrivacyLedger, run: RegistrationTerms, step: int = 0) -> None:
    ledger.charge(run.run_id, step, PARAMETERS, run.manifest_digest, start=RunStart(run, DATA))


def kinds(ledger: PrivacyLedger) -> list[str]:
    return [entry.kind for entry in ledger.history()]


# --- which account pays


@pytest.mark.parametrize("what", SAME)
def test_guarantee_known_data_is_charged_to_no_other_account(ledger: PrivacyLedger, what: str):
    """Neither by a run that opens one, nor to one that somebody opened without saying that it is beside another."""
    data, before = SAME[what], kinds(ledger)
    shared = what.partition(",")[0]
    told = rf"account_known: account '{{}}' cannot pay for this data: it has {shared} of account 'patients'"
    for attempt in (ledger.outlook, ledger.register_run, lambda run: charge(ledger, run)):
        with pytest.raises(BudgetError, match=told.format("fresh") + r".*ledger\.account: patients.*--also"):
            attempt(terms("run-b", "fresh", data=data, opens=TERMS))
    assert kinds(ledger) == before
    ledger.open_account("named", TERMS)
    with pytest.raises(BudgetError, match=told.format("named")):
        charge(ledger, terms("run-b", "named", data=data))
    with pytest.raises(BudgetError, match=told.format("bound")):
        ledger.open_account("bound", TERMS, data=data)
    charge(ledger, terms("run-b", data=data))
    ledger.verify()


def test_other_data_has_an_account_of_its_own(ledger: PrivacyLedger):
    charge(ledger, terms("run-b", "fresh", data=STRANGERS, opens=TERMS))
    charge(ledger, terms("run-c", "nothing-known", opens=TERMS))
    assert [each.name for each in ledger.view().accounts] == ["patients", "fresh", "nothing-known"]
    assert data_standing(ledger.view(), "patients").accounts == ("patients",)
    ledger.verify()


@pytest.mark.parametrize("bound", [NO_MARKS, MOVED])
def test_one_more_budget_for_the_same_people_is_opened_deliberately(ledger: PrivacyLedger, bound: DataMarks):
    ledger.open_account("study", TERMS, data=bound, also=True)
    charge(ledger, terms("run-b", "study", data=MOVED))
    standing = data_standing(ledger.view(), "patients")
    assert standing.accounts == ("patients", "study")
    assert (standing.runs, standing.epsilon_cap, standing.delta) == (2, 2 * CAP, 2 * DELTA)
    ledger.verify()


def test_an_account_learns_what_its_runs_show_and_knows_it_ever_after(ledger: PrivacyLedger, ledger_url: str):
    """From one row more to the next, and from a place to the key that is first named there."""
    charge(ledger, terms("run-b", data=ONE_MORE))
    charge(ledger, terms("run-b2", data=ONE_MORE))
    charge(ledger, terms("run-c", "others", data=DataMarks(places=places("others.npz")), opens=TERMS))
    charge(ledger, terms("run-d", "others", data=STRANGERS))
    with closing(PrivacyLedger(ledger_url)) as again:
        shown = {each.name: each.data for each in again.view().accounts}
        assert shown == {
            "patients": (PEOPLE, ONE_MORE),
            "others": (DataMarks(places=places("others.npz")), STRANGERS),
        }
        moved = STRANGERS.model_copy(update={"places": places("somewhere")})
        with pytest.raises(BudgetError, match=r"account_known: .*account 'others'"):
            charge(again, terms("run-e", "fresh", data=moved, opens=TERMS))


def test_a_closed_account_still_knows_its_data(ledger: PrivacyLedger):
    ledger.close_account("patients")
    with pytest.raises(BudgetError, match="account_known"):
        charge(ledger, terms("run-b", "fresh", data=PEOPLE, opens=TERMS))


# --- keys


def test_guarantee_another_fingerprint_key_gives_no_fresh_identity(ledger: PrivacyLedger):
    elsewhere = REKEYED.model_copy(update={"places": places("elsewhere.npz")})
    told = f"fingerprint_key_unknown: .*keys {KEY.hex()[:16]}; .*the key {OTHER_KEY.hex()[:16]}"
    for data, where in ((REKEYED, "account 'patients' is known by data at this place, and "), (elsewhere, "")):
        for account in ("patients", "fresh"):
            with pytest.raises(BudgetError, match=told) as refusal:
                charge(ledger, terms("run-b", account, data=data, opens=None if account == "patients" else TERMS))
            assert where in str(refusal.value)
        with pytest.raises(BudgetError, match=told):
            ledger.open_account("fresh", TERMS, data=data)
    ledger.verify()


def test_a_key_is_changed_by_a_command_and_both_keys_are_known_from_then_on(ledger: PrivacyLedger):
    ledger.add_data("patients", REKEYED)
    ledger.add_data("patients", REKEYED)
    assert kinds(ledger).count("data_known") == 1
    charge(ledger, terms("run-b", data=REKEYED))
    with pytest.raises(BudgetError, match="account_known"):
        charge(ledger, terms("run-c", "fresh", data=REKEYED.model_copy(update={"places": b""}), opens=TERMS))
    charge(ledger, terms("run-c", data=PEOPLE))
    ledger.verify()


def test_an_account_is_given_no_data_of_another(ledger: PrivacyLedger):
    ledger.open_account("others", TERMS, data=STRANGERS)
    with pytest.raises(BudgetError, match="account_known: account 'others' cannot pay for this data"):
        ledger.add_data("others", PEOPLE)
    with pytest.raises(BudgetError, match="account_unknown"):
        ledger.add_data("nobody", PEOPLE)


def test_an_account_opened_for_this_very_data_or_beside_others_takes_another_key(ledger: PrivacyLedger):
    """As sealed data has it, whose fingerprint is its header's and whose key is its owner's."""
    sealed = DataMarks(key=OTHER_KEY, fingerprint=b"z" * 32, sketch=codes(range(700, 764)))
    ledger.open_account("sealed", TERMS, data=DataMarks(fingerprint=b"z" * 32))
    charge(ledger, terms("run-b", "sealed", data=sealed))
    ledger.open_account("beside", TERMS, also=True)
    charge(ledger, terms("run-c", "beside", data=REKEYED))
    ledger.verify()


# --- releases without noise


@pytest.mark.parametrize("what", SAME)
def test_guarantee_known_data_is_released_with_noise_alone(ledger: PrivacyLedger, what: str):
    clear = {"mechanisms": (mechanism(**PUBLIC),), "data": SAME[what], "public": True}
    for account, opens in (("run-b", TERMS), ("patients", None)):
        with pytest.raises(BudgetError, match="account_private: account 'patients' pays for this data, and run run-b"):
            charge(ledger, terms("run-b", account, opens=opens, **clear))
    ledger.open_account("beside", TERMS, also=True)
    with pytest.raises(BudgetError, match="account_private"):
        charge(ledger, terms("run-b", "beside", **clear))


@pytest.mark.parametrize("data", [STRANGERS, NO_MARKS], ids=["of others", "without marks"])
def test_an_account_of_known_data_pays_for_no_release_without_noise_whatever_the_run_says_of_its_data(
    ledger: PrivacyLedger, data: DataMarks
):
    with pytest.raises(BudgetError, match="account_private: account 'patients' pays for this data, and run run-b"):
        charge(ledger, terms("run-b", mechanisms=(mechanism(**PUBLIC),), data=data, public=True))


def test_public_data_is_nobodys_and_each_run_on_it_has_an_account(ledger: PrivacyLedger):
    for run_id, each in (("one", mechanism(**PUBLIC)), ("two", mechanism())):
        charge(ledger, terms(run_id, f"run-{run_id}", mechanisms=(each,), data=STRANGERS, public=True, opens=TERMS))
    assert [each.data for each in ledger.view().accounts[1:]] == [(), ()]
    with pytest.raises(BudgetError, match="account_known: account 'run-three'"):
        charge(ledger, terms("three", "run-three", data=PEOPLE, public=True, opens=TERMS))
    ledger.verify()


# --- the first charge


def test_guarantee_a_run_and_the_account_that_it_opens_are_there_only_with_its_first_charge(
    ledger: PrivacyLedger, monkeypatch: pytest.MonkeyPatch
):
    """A cap that was mistyped leaves nothing that the next run would find."""
    before, tiny = kinds(ledger), OpeningTerms(1e-3, DELTA)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        charge(ledger, terms("run-b", "strangers", data=STRANGERS, opens=tiny))
    ledger.outlook(terms("run-b", "strangers", data=STRANGERS, opens=TERMS))
    with monkeypatch.context() as patched:
        patched.setattr(ledger_module.Rows, "count_charge", _lost)
        with pytest.raises(ConnectionError):
            charge(ledger, terms("run-b", "strangers", data=STRANGERS, opens=TERMS))
    assert kinds(ledger) == before
    assert [each.name for each in ledger.view().accounts] == ["patients"]
    # What was undone is remembered by nobody: the entries of its places are others now.
    charge(ledger, terms("run-c", "others", data=STRANGERS, opens=replace(TERMS, epsilon_cap=3.0)))
    assert kinds(ledger)[len(before) :] == ["account_opened", "run_registered", "data_bound", "step_charged"]
    charge(ledger, terms("run-c", "others", data=STRANGERS, opens=TERMS), step=1)
    assert ledger.view().accounts[1].epsilon_cap == 3.0
    ledger.verify()


def _lost(*_: object) -> None:
    raise ConnectionError


def test_the_start_of_a_run_that_began_must_be_the_same(ledger: PrivacyLedger):
    charge(ledger, terms("run-a", data=MOVED, opens=TERMS), step=1)
    for other, code in (
        (terms("run-a", data=STRANGERS), "run_mismatch"),
        (terms("run-a", "others", data=PEOPLE), "run_mismatch"),
        (terms("run-a", data=PEOPLE, prepaid=True), "run_mismatch"),
    ):
        with pytest.raises(BudgetError, match=code):
            charge(ledger, other, step=2)
    with pytest.raises(BudgetError, match="data_changed"):
        ledger.charge("run-a", 2, PARAMETERS, MANIFEST, start=RunStart(terms("run-a", data=PEOPLE), b"e" * 32))


def test_of_two_runs_that_would_open_an_account_the_second_is_held_to_its_terms(ledger: PrivacyLedger):
    charge(ledger, terms("run-b", "others", data=STRANGERS, opens=TERMS))
    with pytest.raises(BudgetError, match="account_mismatch"):
        charge(ledger, terms("run-c", "others", data=STRANGERS, opens=replace(TERMS, epsilon_cap=9.0)))
    charge(ledger, terms("run-c", "others", data=STRANGERS, opens=TERMS))
    assert [each.run_id for each in ledger.view().accounts[1].runs] == ["run-b", "run-c"]


# --- the unit


def test_an_account_counts_epsilon_for_one_unit_that_its_first_run_fixes(ledger: PrivacyLedger):
    with pytest.raises(BudgetError, match="unit_mismatch: account 'patients' counts epsilon for one row"):
        charge(ledger, terms("run-b", data=PEOPLE, mechanisms=(mechanism(unit="person", rows_per_unit=8),)))
    assert [entry.event.unit for entry in ledger.history() if isinstance(entry.event, RunRegistered)] == ["row"]


# --- the audit


def resigned(events: Sequence[Event]) -> AuditedChain:
    """Audit a chain of these events, signed as its owner could sign them."""
    key, head, entries = IdentityKey.generate(), Head(), []
    for event in events:
        entries.append(make_entry(head, event, key))
        head = Head(entries[-1].sequence, entries[-1].hash)
    return audit(entries, key.public)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"data": MOVED}, "account_known"),
        ({"data": UNKEYED, "public": True}, "account_known"),
        ({"data": REKEYED}, "fingerprint_key_unknown"),
        ({"data": PEOPLE, "mechanisms": (mechanism(**PUBLIC),), "public": True}, "account_private"),
    ],
)
def test_guarantee_the_audit_holds_every_run_to_the_account_of_its_data(
    ledger: PrivacyLedger, changes: dict[str, Any], code: str
):
    charge(ledger, terms("run-b", "others", data=STRANGERS, opens=TERMS))
    events = [entry.event for entry in ledger.history()]
    opened, registered, *rest = events[4:]
    assert isinstance(registered, RunRegistered)
    resigned(events)
    if "mechanisms" in changes:
        changes = changes | {"orders": (), "step_rdp": ((),)}
    forged = registered.model_copy(update=changes)
    with pytest.raises(BudgetError, match=f"chain_broken: .*entry 6.*{code}"):
        resigned([*events[:4], opened, forged, *rest])


def test_the_audit_holds_every_opening_and_the_unit_to_the_rules(ledger: PrivacyLedger):
    charge(ledger, terms("run-b", data=PEOPLE))
    events = [entry.event for entry in ledger.history()]
    opened, registered = events[0], events[4]
    assert isinstance(opened, AccountOpened)
    assert isinstance(registered, RunRegistered)
    second = opened.model_copy(update={"account": "second", "data": PEOPLE})
    with pytest.raises(BudgetError, match=r"entry 8.*account_known"):
        resigned([*events, second])
    resigned([*events, second.model_copy(update={"also": True})])
    with pytest.raises(BudgetError, match=r"entry 5.*unit_mismatch"):
        resigned([*events[:4], registered.model_copy(update={"unit": "person"})])


@pytest.mark.parametrize("changes", [{"unit": "person"}, {"mechanisms": (mechanism(unit="person", rows_per_unit=8),)}])
def test_guarantee_an_audited_account_counts_for_the_unit_that_its_runs_charge(
    ledger: PrivacyLedger, changes: dict[str, Any]
):
    opened, registered, *_ = [entry.event for entry in ledger.history()]
    assert isinstance(registered, RunRegistered)
    resigned([opened, registered])
    with pytest.raises(BudgetError, match=r"entry 2.*another unit"):
        resigned([opened, registered.model_copy(update=changes)])


def test_an_extract_is_accepted_though_it_lacks_the_account_that_brought_a_key(ledger: PrivacyLedger):
    ledger.open_account("beside", TERMS, data=REKEYED, also=True)
    # Both keys are known by now, so that it is no new one to the account that has the place.
    charge(ledger, terms("run-b", data=REKEYED))
    ledger.verify()
    checked = check_extract(ledger.extract("patients"), ledger.public_key)
    assert checked.audited.known.accounts == {"patients": (PEOPLE, REKEYED)}


def test_a_table_that_forgets_what_an_account_knows_is_refused(ledger: PrivacyLedger, ledger_url: str):
    tamper(ledger_url, "DELETE FROM known")
    with pytest.raises(BudgetError, match=r"chain_broken: .*table of known data"):
        ledger.verify()
    with pytest.raises(BudgetError, match=r"chain_broken: .*table of known data"):
        PrivacyLedger(ledger_url)
