"""A change of the ledger's record is noticed and named."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.entries import GENESIS, Head, RunRegistered, StepCharged, _link, make_entry
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    MANIFEST,
    PARAMETERS,
    mechanism,
    opened,
    receipt_of,
    tamper,
    unchecked,
)


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[PrivacyLedger]:
    """The ledger of `opened`, on each kind of database."""
    instance = opened(ledger_url)
    yield instance
    instance.close()


def test_history_is_the_chain_and_can_be_checked_elsewhere(ledger: PrivacyLedger):
    ledger.open_account("others", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-b", "others", (mechanism(),), MANIFEST))
    ledger.bind_data("run-b", MANIFEST, DATA)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    entries = ledger.history()
    assert [entry.sequence for entry in entries] == list(range(1, 9))
    assert entries[0].previous == GENESIS
    assert audit(entries, ledger.public_key).head == ledger.view().head
    assert audit(entries, ledger.public_key).runs["run-b"].charges == {"gradient": {0: 7}}
    assert [entry.kind for entry in ledger.history("others")] == [
        *("account_opened", "run_registered", "data_bound", "step_charged")
    ]


@pytest.mark.parametrize("column", ["previous", "kind", "body", "hash", "signature"])
def test_changing_any_field_of_an_entry_breaks_the_chain_there(ledger_url: str, ledger: PrivacyLedger, column: str):
    for step in range(3):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    value = getattr(ledger.history()[3], column)
    change = value + "x" if isinstance(value, str) else bytes([value[0] ^ 1]) + value[1:]
    tamper(ledger_url, f"UPDATE entries SET {column} = :change WHERE sequence = 4", change=change)
    with pytest.raises(BudgetError, match="chain_broken: the ledger cannot be trusted at entry 4"):
        ledger.verify()


def test_a_cheaper_charge_that_is_hashed_again_is_not_signed(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    *others, entry = ledger.history()
    event = entry.event
    assert isinstance(event, StepCharged)
    body = event.model_copy(update={"charged_epsilon": 0.1}).encode()
    forged = replace(entry, body=body, hash=_link(entry.sequence, entry.previous, entry.kind, body))
    with pytest.raises(BudgetError, match="entry 4: it is not signed"):
        audit([*others, forged], ledger.public_key)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DELETE FROM entries WHERE sequence = 4", "entry 4: entry 5 stands in its place"),
        ("DELETE FROM entries WHERE sequence >= 6", "row of run run-a"),
        ("UPDATE entries SET sequence = 9 WHERE sequence = 7", "entry 7: entry 9 stands in its place"),
        ("UPDATE entries SET step = 7 WHERE sequence = 4", "entry 4: it is filed under another run, query or step"),
        ("UPDATE charged SET charges = 1", "row of run run-a"),
        ("DELETE FROM charged", "row of run run-a"),
        ("INSERT INTO charged VALUES ('run-a', 'evaluation', 0)", "row of run run-a"),
        ("UPDATE entries SET query = 'evaluation' WHERE sequence = 4", "entry 4: it is filed under another run, query"),
        ("UPDATE runs SET fencing = 0", "row of run run-a"),
        ("UPDATE runs SET data = NULL", "row of run run-a"),
        ("UPDATE entries SET step = 7 WHERE sequence = 7", "entry 7: it is filed under another run, query or step"),
        ("DELETE FROM runs", "row of run run-a"),
        ("INSERT INTO runs VALUES ('ghost', 'patients', 9, 0, 3)", "a run that the chain does not"),
        ("INSERT INTO accounts VALUES ('ghost', 9, 9)", "table of accounts"),
    ],
)
def test_verify_names_what_does_not_follow(ledger_url: str, ledger: PrivacyLedger, statement: str, named: str):
    for step in range(3):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    ledger.bind_vectors("run-a", "gradient", 0, MANIFEST, b"v" * 32)
    ledger.verify()
    tamper(ledger_url, statement)
    with pytest.raises(BudgetError, match=named):
        ledger.verify()


def test_terms_are_never_read_unsigned(ledger_url: str, ledger: PrivacyLedger):
    body = ledger.history()[0].body
    ledger.close()
    tamper(ledger_url, "UPDATE entries SET body = :body WHERE sequence = 1", body=body.replace(b"8.0", b"9.0"))
    with pytest.raises(BudgetError, match="entry 1: its content does not match its hash"):
        PrivacyLedger(ledger_url)
    reader = PrivacyLedger(ledger_url, create=False)
    with pytest.raises(BudgetError, match="entry 1: its content does not match its hash"):
        reader.view()
    reader.close()


def test_a_signed_chain_that_could_not_have_happened_is_refused(ledger: PrivacyLedger):
    receipt = receipt_of(ledger, ledger.charge("run-a", 0, PARAMETERS, MANIFEST))
    entries = ledger.history()
    charge = entries[-1].event
    assert isinstance(charge, StepCharged)
    for change, why in (
        ({}, "charges step 0 a second time"),
        ({"step": 20}, "was not planned"),
        ({"step": 1, "run_id": "run-x"}, "never registered"),
        ({"step": 1, "mechanism_digest": b"x" * 32}, "another mechanism"),
        ({"step": 1, "fencing": 0}, "had been replaced"),
        ({"step": 1}, "not what the charges add up to"),
    ):
        extra = make_entry(ledger.view().head, charge.model_copy(update=change), ledger._store.key)
        with pytest.raises(BudgetError, match=why):
            audit([*entries, extra], ledger.public_key)
    assert receipt.sequence == 4


@pytest.mark.parametrize(
    "claim",
    [{"sigma": 1e5}, {"max_grad_norm": 1.1}, {"honest_share": 7 / 8}, {"sample_rate": 0.0}, {"micro_batches": 0}],
)
def test_a_signed_registration_whose_mechanism_is_not_what_it_claims_is_refused(
    ledger: PrivacyLedger, claim: dict[str, float]
):
    *others, entry, _ = ledger.history()
    event = entry.event
    assert isinstance(event, RunRegistered)
    claimed = event.model_copy(update={"mechanisms": (unchecked(**claim),)})
    head = Head(others[-1].sequence, others[-1].hash)
    with pytest.raises(BudgetError, match="entry 2: its body is a mechanism of query gradient has"):
        audit([*others, make_entry(head, claimed, ledger._store.key)], ledger.public_key)
