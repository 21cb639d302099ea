"""The ledger charges before anything happens, once, and within the cap."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.accounting.releases import overflow_bound
from raycloak.coordinator.accounting.renyi import step_rdp
from raycloak.coordinator.ledger.accounts import Account, opening
from raycloak.coordinator.ledger.entries import Head, RunRegistered
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import (
    OpeningTerms,
    PricedRun,
    RegistrationTerms,
    check_cap,
    check_claims,
    epsilon_at,
    registration,
)
from raycloak.coordinator.ledger.store import LedgerStore
from raycloak.metrics.errors import BudgetError, ConfigError, ProtocolError, RefusedError
from raycloak.workers.terms.receipt import check_receipt
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    IN_USE,
    MANIFEST,
    PARAMETERS,
    affordable,
    epsilon_at_orders,
    expected_epsilon,
    mechanism,
    opened,
    receipt_of,
    spent,
    unchecked,
)


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[PrivacyLedger]:
    """The ledger of `opened`, on each kind of database."""
    instance = opened(ledger_url)
    yield instance
    instance.close()


def test_a_receipt_is_for_exactly_the_step_and_passes_the_workers_check(ledger: PrivacyLedger):
    envelope = ledger.charge("run-a", 3, PARAMETERS, MANIFEST)
    receipt = check_receipt(
        envelope,
        ledger_key=ledger.public_key,
        run_id="run-a",
        step=3,
        input_digest=PARAMETERS,
        manifest_digest=MANIFEST,
        account="patients",
        mechanism_digest=mechanism().digest(),
        lowest_fencing=ledger.fencing,
    )
    assert receipt.charged_epsilon == pytest.approx(expected_epsilon(1))
    assert (receipt.sequence, receipt.head) == (ledger.view().head.sequence, ledger.view().head.hash)


def test_the_account_spends_what_the_accountant_says(ledger: PrivacyLedger):
    assert spent(ledger) == 0.0
    for step in range(5):
        receipt = receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST))
        assert receipt.charged_epsilon == pytest.approx(expected_epsilon(step + 1), rel=1e-12)
        assert spent(ledger) == receipt.charged_epsilon


def test_the_spent_ratio_grows_evenly_and_reaches_one_where_the_cap_refuses(ledger: PrivacyLedger):
    ratios = [ledger.view().accounts[0].spent_ratio]
    for step in range(affordable()):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
        ratios.append(ledger.view().accounts[0].spent_ratio)
    assert ratios == pytest.approx([step * ratios[1] for step in range(affordable() + 1)], rel=0.02)
    assert ratios[0] == 0
    assert ratios[-1] <= 1 < ratios[-1] + ratios[1]


def test_the_same_four_get_the_same_receipt_and_are_charged_once(ledger: PrivacyLedger):
    first = ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 1, PARAMETERS, MANIFEST)
    before = ledger.view()
    assert ledger.charge("run-a", 0, PARAMETERS, MANIFEST) == first
    assert ledger.view() == before


def test_other_parameters_for_a_charged_step_are_refused(ledger: PrivacyLedger):
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    before = ledger.view()
    with pytest.raises(BudgetError, match="step_already_charged") as refusal:
        ledger.charge("run-a", 0, b"q" * 32, MANIFEST)
    assert refusal.value.exit_code == 3
    assert ledger.view() == before


def test_the_step_that_would_cross_the_cap_is_refused_and_nothing_is_written(ledger: PrivacyLedger):
    allowed = affordable()
    assert 1 < allowed < 20
    first = ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    for step in range(1, allowed):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    before = ledger.view()
    assert before.accounts[0].spent_epsilon <= CAP
    with pytest.raises(BudgetError, match=r"cap_exceeded.*patients.*cap 8"):
        ledger.charge("run-a", allowed, PARAMETERS, MANIFEST)
    assert ledger.view() == before
    assert ledger.charge("run-a", 0, PARAMETERS, MANIFEST) == first


def test_runs_of_one_account_share_its_cap(ledger: PrivacyLedger):
    ledger.register_run(RegistrationTerms("run-b", "patients", (mechanism(),), b"n" * 32))
    ledger.bind_data("run-b", b"n" * 32, DATA)
    for step in range(affordable()):
        run_id, manifest = (("run-a", MANIFEST), ("run-b", b"n" * 32))[step % 2]
        ledger.charge(run_id, step, PARAMETERS, manifest)
    for run_id, manifest in (("run-a", MANIFEST), ("run-b", b"n" * 32)):
        with pytest.raises(BudgetError, match="cap_exceeded"):
            ledger.charge(run_id, affordable(), PARAMETERS, manifest)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        ledger.register_run(RegistrationTerms("run-c", "patients", (mechanism(),), b"o" * 32))
    ledger.verify()


def test_runs_of_other_accounts_do_not(ledger: PrivacyLedger):
    ledger.open_account("others", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-b", "others", (mechanism(),), MANIFEST))
    ledger.bind_data("run-b", MANIFEST, DATA)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    patients, others = ledger.view().accounts
    assert (patients.spent_epsilon, others.spent_epsilon) == (0.0, pytest.approx(expected_epsilon(1)))


def test_different_mechanisms_add_up_in_renyi_divergence_not_in_epsilon(ledger: PrivacyLedger):
    quiet = mechanism(noise_multiplier=9.0, sigma=9.0 * 2**20 / math.sqrt(8) * 1.001)
    ledger.register_run(RegistrationTerms("run-b", "patients", (quiet,), MANIFEST))
    ledger.bind_data("run-b", MANIFEST, DATA)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-b", 0, PARAMETERS, MANIFEST)
    both = [a + b for a, b in zip(step_rdp(1.0, 2.6, IN_USE), step_rdp(1.0, 9.0, IN_USE), strict=True)]
    assert spent(ledger) == pytest.approx(epsilon_at_orders(both), rel=1e-12)
    assert spent(ledger) < expected_epsilon(1) + expected_epsilon(1, 9.0)


def test_public_runs_write_entries_and_cost_nothing(ledger: PrivacyLedger):
    ledger.register_run(
        RegistrationTerms("open", "patients", (mechanism(private=False, noise_multiplier=0.0, sigma=0.0),), MANIFEST)
    )
    ledger.bind_data("open", MANIFEST, DATA)
    for step in range(20):
        receipt = receipt_of(ledger, ledger.charge("open", step, PARAMETERS, MANIFEST))
        assert receipt.charged_epsilon == 0.0
    assert ledger.view().head.sequence == 5 + 20
    ledger.verify()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run-x", 0, PARAMETERS, MANIFEST), "run_unknown"),
        (("run-a", 0, PARAMETERS, b"n" * 32), "run_mismatch"),
        (("run-a", 20, PARAMETERS, MANIFEST), "step_not_planned"),
        (("run-a", -1, PARAMETERS, MANIFEST), "step_not_planned"),
    ],
)
def test_charges_that_fit_no_run_are_refused(ledger: PrivacyLedger, arguments: tuple[Any, ...], code: str):
    before = ledger.view()
    with pytest.raises(BudgetError, match=code):
        ledger.charge(*arguments)
    assert ledger.view() == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run-a", "patients", (mechanism(steps=30),), MANIFEST), "run_mismatch"),
        (("run-a", "patients", (mechanism(),), b"n" * 32), "run_mismatch"),
        (("run-b", "nobody", (mechanism(),), MANIFEST), "account_unknown"),
        (("run-b", "patients", (unchecked(noise_multiplier=2.7),), MANIFEST), "mechanism_bounds"),
        (("run-b", "patients", (unchecked(honest_share=7 / 8),), MANIFEST), "mechanism_bounds"),
        (("run-b", "patients", (unchecked(honest_share=1.1e6, sigma=1.0),), MANIFEST), "mechanism_bounds"),
        (("run-b", "patients", (unchecked(sample_rate=0.0),), MANIFEST), "mechanism_bounds"),
        (("run-b", "patients", (mechanism(noise_multiplier=0.01),), MANIFEST), "mechanism_inconsistent: .* hides"),
        (("run-b", "patients", (mechanism(micro_batch_size=99),), MANIFEST), "mechanism_inconsistent: .* cuts batches"),
        (
            ("run-b", "patients", (mechanism(), mechanism(query="evaluation", virtual_workers=9)), MANIFEST),
            "mechanism_bounds",
        ),
        (("run-b", "patients", (mechanism(overflow_probability=1e-10),), MANIFEST), "delta_exceeded"),
    ],
)
def test_runs_that_cannot_be_charged_honestly_are_refused(ledger: PrivacyLedger, arguments: Any, code: str):
    before = ledger.view()
    with pytest.raises(RefusedError, match=code):
        ledger.register_run(RegistrationTerms(*arguments))
    assert ledger.view() == before


def test_a_cap_holds_to_the_last_bit():
    terms = opening("patients", OpeningTerms(CAP, DELTA))
    run = registration(RegistrationTerms("run-b", "patients", (mechanism(),), MANIFEST), terms, fixed=False)
    terms = Account.of(terms, Head()).with_run(run).terms
    charged = [PricedRun.of(run).spend({"gradient": 3})]
    exact = epsilon_at(terms, charged)
    assert check_cap(terms.model_copy(update={"epsilon_cap": exact}), charged) == exact
    with pytest.raises(BudgetError, match="cap_exceeded"):
        check_cap(terms.model_copy(update={"epsilon_cap": math.nextafter(exact, 0)}), charged)


def test_a_release_is_charged_as_noisy_as_it_claims(ledger: PrivacyLedger):
    (event,) = [e.event for e in ledger.history() if isinstance(e.event, RunRegistered) and e.event.run_id == "run-a"]
    assert event.step_rdp == (step_rdp(1.0, 2.6, IN_USE),)
    assert PricedRun.of(event).spend({"gradient": 1}).releases[0].noise_multiplier == 2.6


def test_what_a_mechanism_claims_of_cuts_may_be_short_of_nothing():
    cut = overflow_bound(100, 0.5, 20 * 8, 88)
    claimed = {"sample_rate": 0.5, "micro_batch_size": 88, "overflow_probability": cut}
    check_claims("run-b", mechanism(**claimed))
    with pytest.raises(BudgetError, match="mechanism_inconsistent"):
        check_claims("run-b", mechanism(**claimed | {"overflow_probability": cut / 8}))


def test_the_slack_of_all_runs_together_stays_within_its_share_of_delta(ledger: PrivacyLedger):
    third = 0.4 * 0.01 * DELTA / (1 + math.exp(CAP))
    ledger.register_run(RegistrationTerms("run-b", "patients", (mechanism(overflow_probability=third),), MANIFEST))
    ledger.bind_data("run-b", MANIFEST, DATA)
    ledger.register_run(RegistrationTerms("run-c", "patients", (mechanism(overflow_probability=third),), MANIFEST))
    ledger.bind_data("run-c", MANIFEST, DATA)
    with pytest.raises(BudgetError, match="delta_exceeded"):
        ledger.register_run(RegistrationTerms("run-d", "patients", (mechanism(overflow_probability=third),), MANIFEST))
    assert ledger.view().accounts[0].delta_slack <= 0.01 * DELTA


def test_opening_and_registering_again_change_nothing(ledger: PrivacyLedger):
    before = ledger.view()
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST))
    assert ledger.view() == before


@pytest.mark.parametrize("terms", [(9.0, DELTA), (CAP, 1e-6)])
def test_an_account_with_other_terms_is_refused(ledger: PrivacyLedger, terms: tuple[float, float]):
    with pytest.raises(BudgetError, match="account_mismatch"):
        ledger.open_account("patients", OpeningTerms(*terms))


@pytest.mark.parametrize("terms", [(-1.0, DELTA), (math.inf, DELTA), (math.nan, DELTA), (1.0, 0.0), (1.0, 1.0)])
def test_terms_that_make_no_sense_are_refused(ledger: PrivacyLedger, terms: tuple[float, float]):
    with pytest.raises(ConfigError, match="account_terms"):
        ledger.open_account("new", OpeningTerms(*terms))


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[2J"])
def test_an_account_has_a_name_that_can_be_printed(ledger: PrivacyLedger, name: str):
    with pytest.raises(ConfigError, match="account_terms") as refusal:
        ledger.open_account(name, OpeningTerms(CAP, DELTA))
    assert str(refusal.value).isprintable()


def test_status_resolves_a_lost_reply_without_charging(ledger: PrivacyLedger):
    assert not ledger.status("run-a", 0).charged
    receipt = receipt_of(ledger, ledger.charge("run-a", 0, PARAMETERS, MANIFEST))
    status = ledger.status("run-a", 0)
    assert (status.charged, status.input_digest, status.sequence) == (True, PARAMETERS, receipt.sequence)


def test_a_later_instance_takes_the_run_over_and_the_older_one_is_fenced(ledger_url: str, ledger: PrivacyLedger):
    old = receipt_of(ledger, ledger.charge("run-a", 0, PARAMETERS, MANIFEST))
    later = PrivacyLedger(ledger_url)
    assert later.fencing > ledger.fencing
    assert later.public_key == ledger.public_key
    new = receipt_of(later, later.charge("run-a", 0, PARAMETERS, MANIFEST))
    assert new == old.model_copy(update={"fencing": later.fencing})
    for step in (0, 1):
        with pytest.raises(BudgetError, match="fenced"):
            ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    with pytest.raises(BudgetError, match="fenced"):
        ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST))
    assert later.view().accounts[0].runs[0].charged_steps == 1
    later.verify()
    later.close()


def test_instances_of_different_runs_do_not_fence_each_other(ledger_url: str, ledger: PrivacyLedger):
    other = opened(ledger_url, "run-b")
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    other.charge("run-b", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 1, PARAMETERS, MANIFEST)
    assert [run.charged_steps for run in other.view().accounts[0].runs] == [2, 1]
    other.close()


def test_an_instance_that_reads_takes_no_number_and_cannot_charge(ledger_url: str, ledger: PrivacyLedger):
    reader = PrivacyLedger(ledger_url, create=False)
    assert reader.fencing == 0
    assert reader.view().accounts == ledger.view().accounts
    with pytest.raises(BudgetError, match="ledger_read_only"):
        reader.charge("run-a", 0, PARAMETERS, MANIFEST)
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    reader.close()


def test_threads_that_race_get_one_charge_per_step(ledger: PrivacyLedger):
    receipts: list[list[Envelope]] = [[] for _ in range(4)]

    def charge(into: list[Envelope]) -> None:
        into.extend(ledger.charge("run-a", step, PARAMETERS, MANIFEST) for step in range(8))

    threads = [threading.Thread(target=charge, args=(into,)) for into in receipts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(len(into) == 8 and into == receipts[0] for into in receipts)
    assert ledger.view().accounts[0].runs[0].charged_steps == 8
    ledger.verify()


def test_view_does_not_wait_for_a_writer(ledger: PrivacyLedger):
    before = ledger.view()
    with ledger._store.write() as rows:
        rows.open_lease()
        assert ledger.view() == before


def test_a_new_instance_continues_without_the_accountant_once_its_predecessors_lock_is_gone(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Opacus takes seconds to import, and a stopped process holds its lock until it is killed."""
    former = opened(ledger_url)
    first = former.charge("run-a", 0, PARAMETERS, MANIFEST)
    holder, locked = LedgerStore(ledger_url), ExitStack()
    locked.enter_context(holder.write())
    release = threading.Timer(0.2, locked.close)
    release.start()
    monkeypatch.setattr(
        "raycloak.coordinator.ledger.rules.release_rdp", lambda *_: pytest.fail("the accountant is not needed")
    )
    successor = PrivacyLedger(ledger_url)
    release.join(60)
    again = receipt_of(successor, successor.charge("run-a", 0, PARAMETERS, MANIFEST))
    assert (again.sequence, again.head) == (receipt_of(former, first).sequence, receipt_of(former, first).head)
    assert again.fencing > receipt_of(former, first).fencing
    assert receipt_of(successor, successor.charge("run-a", 1, PARAMETERS, MANIFEST)).sequence == again.sequence + 1
    for each in (holder, former, successor):
        each.close()


def with_measurements(url: str) -> PrivacyLedger:
    """A ledger with one run of three mechanisms: 20 steps, 4 evaluations, one count of classes."""
    counts = mechanism(query="class_counts", steps=1, dimension=10, **noise(8.0))
    evaluation = mechanism(query="evaluation", steps=4, dimension=2, **noise(6.0))
    ledger = PrivacyLedger(url)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(), evaluation, counts), MANIFEST))
    ledger.bind_data("run-a", MANIFEST, DATA)
    return ledger


def noise(multiplier: float) -> dict[str, Any]:
    return {"noise_multiplier": multiplier, "sigma": multiplier * 2**20 / math.sqrt(8) * 1.001}


def test_each_mechanism_of_a_run_is_charged_as_an_event_of_its_own(ledger_url: str):
    ledger = with_measurements(ledger_url)
    receipts = [
        receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST, query))
        for query, step in (("class_counts", 0), ("gradient", 0), ("evaluation", 0), ("evaluation", 1))
    ]
    assert [(receipt.query, receipt.step) for receipt in receipts] == [
        ("class_counts", 0),
        ("gradient", 0),
        ("evaluation", 0),
        ("evaluation", 1),
    ]
    assert len({receipt.mechanism_digest for receipt in receipts}) == 3
    costs = [(1, 2.6), (2, 6.0), (1, 8.0)]
    total = [
        sum(count * rdp for (count, _), rdp in zip(costs, column, strict=True))
        for column in zip(*(step_rdp(1.0, z, IN_USE) for _, z in costs), strict=True)
    ]
    assert spent(ledger) == pytest.approx(epsilon_at_orders(total), rel=1e-12)
    (run,) = ledger.view().accounts[0].runs
    assert [(each.query, each.charged, each.planned) for each in run.queries] == [
        ("gradient", 1, 20),
        ("evaluation", 2, 4),
        ("class_counts", 1, 1),
    ]
    assert (run.charged_steps, run.planned_steps) == (1, 20)
    ledger.verify()
    ledger.close()


def test_a_step_of_one_mechanism_does_not_pay_for_the_same_step_of_another(ledger_url: str):
    ledger = with_measurements(ledger_url)
    first = ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
    assert not ledger.status("run-a", 0, "evaluation").charged
    evaluation = ledger.charge("run-a", 0, b"q" * 32, MANIFEST, "evaluation")
    assert ledger.status("run-a", 0, "evaluation").input_digest == b"q" * 32
    before = ledger.view()
    assert ledger.charge("run-a", 0, PARAMETERS, MANIFEST) == first
    assert ledger.charge("run-a", 0, b"q" * 32, MANIFEST, "evaluation") == evaluation
    with pytest.raises(BudgetError, match="step_already_charged"):
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST, "evaluation")
    assert ledger.view() == before
    ledger.close()


def test_a_mechanism_is_released_as_often_as_planned_and_no_other_exists(tmp_path: Path, ledger: PrivacyLedger):
    with pytest.raises(BudgetError, match="step_not_planned"):
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST, "evaluation")
    other = with_measurements(f"sqlite:///{tmp_path / 'other.sqlite'}")
    other.charge("run-a", 0, PARAMETERS, MANIFEST, "class_counts")
    with pytest.raises(BudgetError, match="step_not_planned"):
        other.charge("run-a", 1, PARAMETERS, MANIFEST, "class_counts")
    other.close()


def test_a_run_names_each_of_its_mechanisms_once(ledger: PrivacyLedger):
    for mechanisms in ((), (mechanism(), mechanism(steps=3))):
        with pytest.raises(ProtocolError, match="mechanism_bounds"):
            ledger.register_run(RegistrationTerms("run-b", "patients", mechanisms, MANIFEST))


def test_measurements_and_steps_share_one_cap(ledger_url: str):
    ledger = with_measurements(ledger_url)
    for step in range(4):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST, "evaluation")
    (measured,), (step_cost,) = step_rdp(1.0, 6.0, IN_USE), step_rdp(1.0, 2.6, IN_USE)
    allowed = next(steps for steps in range(20) if epsilon_at_orders([4 * measured + (steps + 1) * step_cost]) > CAP)
    assert 0 < allowed < affordable()
    for step in range(allowed):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        ledger.charge("run-a", allowed, PARAMETERS, MANIFEST)
    ledger.close()


def test_a_lease_says_to_the_second_when_its_instance_charged_last(
    ledger: PrivacyLedger, monkeypatch: pytest.MonkeyPatch
):
    renewed = []
    for step in range(4):
        at = int(time.time()) + 100 * (1 + step // 2)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda at=at: at + 0.5)
            ledger.charge("run-a", step, PARAMETERS, MANIFEST)
        lease = ledger.view().accounts[0].runs[0].lease
        assert lease is not None
        renewed.append(lease.renewed_at - at)
    assert renewed == [0, 0, 0, 0]


def test_a_lock_that_is_not_given_in_time_is_a_refusal(ledger_url: str, monkeypatch: pytest.MonkeyPatch):
    holder, waiting = opened(ledger_url), opened(ledger_url, "run-b")
    with holder._store.write(), monkeypatch.context() as patch:
        patch.setattr("raycloak.coordinator.ledger.engine.LOCK_DEADLINE_S", 0.1)
        with pytest.raises(BudgetError, match=r"ledger_unavailable.*lock"):
            waiting.charge("run-b", 0, PARAMETERS, MANIFEST)
    waiting.charge("run-b", 0, PARAMETERS, MANIFEST)
    for ledger in (holder, waiting):
        ledger.close()


def test_an_entry_that_cannot_be_read_again_is_never_appended(ledger: PrivacyLedger):
    """Such a mechanism passes every rule: a copied message is not validated, and no comparison refuses a NaN."""
    before = ledger.view()
    unread = mechanism().model_copy(update={"overflow_probability": math.nan})
    with pytest.raises(ProtocolError, match="malformed"):
        ledger.register_run(RegistrationTerms("run-b", "patients", (unread,), b"n" * 32))
    assert ledger.view() == before
    ledger.verify()
    ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
