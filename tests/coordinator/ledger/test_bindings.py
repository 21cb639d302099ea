"""The ledger holds a run to one set of data, and each charged step to one set of vectors."""

from collections.abc import Iterator

import pytest

from raycloak.attestation.core.messages import Envelope, open_envelope
from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.entries import DataBound, Event, Head, StepCharged, VectorsBound, make_entry
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.binding import Binding, check_binding
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    MANIFEST,
    PARAMETERS,
    affordable,
    mechanism,
    opened,
    receipt_of,
    tamper,
)

VECTORS = b"v" * 32


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[PrivacyLedger]:
    """Yield the ledger of `opened`, on each kind of database."""
    instance = opened(ledger_url)
    yield instance
    instance.close()


def bind(ledger: PrivacyLedger, step: int = 0, vectors: bytes = VECTORS) -> Envelope:
    return ledger.bind_vectors("run-a", "gradient", step, MANIFEST, vectors)


def binding_of(ledger: PrivacyLedger, envelope: Envelope) -> Binding:
    return open_envelope(Binding, envelope, ledger.public_key)


def test_no_step_is_charged_before_the_runs_data_is_bound(ledger: PrivacyLedger):
    ledger.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), b"n" * 32))
    before = ledger.view()
    with pytest.raises(BudgetError, match="data_unbound"):
        ledger.charge("run-b", 0, PARAMETERS, b"n" * 32)
    assert ledger.view() == before
    ledger.bind_data("run-b", b"n" * 32, DATA)
    assert receipt_of(ledger, ledger.charge("run-b", 0, PARAMETERS, b"n" * 32)).data_root == DATA


def test_a_run_is_bound_to_one_set_of_data_in_every_instance(ledger_url: str, ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    later = PrivacyLedger(ledger_url)
    before = later.view()
    for instance in (ledger, later):
        with pytest.raises(BudgetError, match=f"data_changed: .*{DATA.hex()}, now {(b'e' * 32).hex()}") as refusal:
            instance.bind_data("run-a", MANIFEST, b"e" * 32)
        assert refusal.value.exit_code == 3
        instance.bind_data("run-a", MANIFEST, DATA)
    assert later.view().head == before.head
    with pytest.raises(BudgetError, match="fenced"):
        ledger.bind_data("run-a", MANIFEST, DATA)
    assert receipt_of(later, later.charge("run-a", 0, PARAMETERS, MANIFEST)).data_root == DATA
    later.verify()
    later.close()


def test_a_charged_step_is_bound_to_one_set_of_vectors_in_every_instance(ledger_url: str, ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    first = bind(ledger)
    check_binding(
        first,
        ledger_key=ledger.public_key,
        run_id="run-a",
        query="gradient",
        step=0,
        manifest_digest=MANIFEST,
        vectors_digest=VECTORS,
        lowest_fencing=ledger.fencing,
    )
    head = ledger.view().head
    assert (binding_of(ledger, first).sequence, binding_of(ledger, first).head) == (head.sequence, head.hash)
    assert bind(ledger) == first
    later = PrivacyLedger(ledger_url)
    assert binding_of(later, bind(later)) == binding_of(ledger, first).model_copy(update={"fencing": later.fencing})
    with pytest.raises(BudgetError, match=f"not_reproducible: .*{(b'w' * 32).hex()}, but {VECTORS.hex()}"):
        bind(later, vectors=b"w" * 32)
    with pytest.raises(BudgetError, match="fenced"):
        bind(ledger)
    assert later.view().head == head
    later.verify()
    later.close()


def test_vectors_are_bound_to_nothing_but_a_charged_step_of_their_run(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    before = ledger.view()
    for arguments, code in (
        (("run-a", "gradient", 1, MANIFEST, VECTORS), "step_not_charged"),
        (("run-a", "evaluation", 0, MANIFEST, VECTORS), "step_not_charged"),
        (("run-a", "gradient", 0, b"n" * 32, VECTORS), "run_mismatch"),
        (("run-x", "gradient", 0, MANIFEST, VECTORS), "run_unknown"),
    ):
        with pytest.raises(BudgetError, match=code):
            ledger.bind_vectors(*arguments)
    for manifest, run_id, code in ((b"n" * 32, "run-a", "run_mismatch"), (MANIFEST, "run-x", "run_unknown")):
        with pytest.raises(BudgetError, match=code):
            ledger.bind_data(run_id, manifest, DATA)
    assert ledger.view() == before


def test_an_exhausted_account_gives_what_it_has(ledger: PrivacyLedger):
    receipts = [ledger.charge("run-a", step, PARAMETERS, MANIFEST) for step in range(affordable())]
    bindings = [bind(ledger, step) for step in range(affordable())]
    with pytest.raises(BudgetError, match="cap_exceeded"):
        ledger.charge("run-a", affordable(), PARAMETERS, MANIFEST)
    assert [ledger.charge("run-a", step, PARAMETERS, MANIFEST) for step in range(affordable())] == receipts
    assert [bind(ledger, step) for step in range(affordable())] == bindings


def test_bindings_are_in_an_accounts_history(ledger: PrivacyLedger):
    ledger.open_account("others", OpeningTerms(CAP, DELTA))
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    bind(ledger)
    kinds = [entry.kind for entry in ledger.history("patients")]
    assert kinds == ["account_opened", "run_registered", "data_bound", "step_charged", "vectors_bound"]
    assert [entry.kind for entry in ledger.history("others")] == ["account_opened"]


@pytest.mark.parametrize(
    "statement", ["UPDATE runs SET data = NULL", "UPDATE runs SET data = 4", "DELETE FROM charged; DELETE FROM runs"]
)
def test_an_instance_that_writes_refuses_a_table_that_forgot_the_data(
    ledger_url: str, ledger: PrivacyLedger, statement: str
):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    for each in statement.split(";"):
        tamper(ledger_url, each)
    with pytest.raises(BudgetError, match=r"chain_broken: .*(data of run run-a|lacks run run-a)"):
        PrivacyLedger(ledger_url)


DATA_AGAIN = DataBound(recorded_at=0, run_id="run-a", manifest_digest=MANIFEST, data_root=b"e" * 32, fencing=1)
BOUND = VectorsBound(
    recorded_at=0, run_id="run-a", query="gradient", step=0, manifest_digest=MANIFEST, vectors_digest=VECTORS, fencing=1
)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (DATA_AGAIN, "binds its run's data a second time"),
        (DATA_AGAIN.model_copy(update={"run_id": "run-x"}), "never registered"),
        (BOUND, "binds vectors of step 0 a second time"),
        (BOUND.model_copy(update={"step": 1}), "step 1, which was not charged before"),
        (BOUND.model_copy(update={"query": "evaluation"}), "step 0, which was not charged before"),
        (BOUND.model_copy(update={"manifest_digest": b"n" * 32}), "another manifest"),
        (BOUND.model_copy(update={"fencing": 0}), "had been replaced"),
    ],
)
def test_a_signed_chain_with_a_binding_that_could_not_have_happened_is_refused(
    ledger: PrivacyLedger, event: Event, why: str
):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    bind(ledger)
    extra = make_entry(ledger.view().head, event, ledger._store.key)
    with pytest.raises(BudgetError, match=f"entry 6: .*{why}"):
        audit([*ledger.history(), extra], ledger.public_key)


def test_a_signed_chain_with_a_charge_before_its_data_is_refused(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    account, run, _, charged = ledger.history()
    assert isinstance(charged.event, StepCharged)
    entries = [account, run]
    for event in (charged.event, DATA_AGAIN):
        entries.append(make_entry(Head(entries[-1].sequence, entries[-1].hash), event, ledger._store.key))
    with pytest.raises(BudgetError, match="entry 3: its run was not bound to its data before"):
        audit(entries, ledger.public_key)
