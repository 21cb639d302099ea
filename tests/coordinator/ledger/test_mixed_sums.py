"""A ledger that charges a run with correlated noise: one charge a round, one past, one set of sums, one account."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.counted_noise import mixed_norm
from raycloak.attestation.core.lineage import INITIAL, Lineage, ModelOrigin, ModelPoint, ModelStanding
from raycloak.attestation.core.messages import open_envelope, seal
from raycloak.coordinator.ledger.audit import audit
from raycloak.coordinator.ledger.entries import VectorsBound, make_entry
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError, ProtocolError
from raycloak.workers.terms.binding import Binding
from raycloak.workers.terms.mechanism import AccountantName, Mechanism
from raycloak.workers.terms.step_input import step_input
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, mechanism, receipt_of, register
from tests.released import START, Signers, point_of

COEFFICIENTS = (2**16, 2**15, 2**14)
BANDS, STEPS = len(COEFFICIENTS), 20


def mixed(noise_multiplier: float = 2.6, **changes: Any) -> Mechanism:
    """Return the full-batch mechanism with correlated noise: seven rounds of three steps, the last one cut short."""
    sigma = noise_multiplier * float(mixed_norm(COEFFICIENTS)) * 2**20 / math.sqrt(8) * 1.001
    values = {"coefficients": COEFFICIENTS, "noise_multiplier": noise_multiplier, "sigma": sigma}
    return mechanism(**values | changes)


def model_of(step: int) -> ModelPoint:
    """Return the model that a step starts from."""
    return point_of(str(step)) if step else START


def sum_of(step: int) -> bytes:
    return bytes([step]) * 32


def sums_of(step: int) -> tuple[bytes, ...]:
    """Return what a step is bound with: its own sum and those of the steps before it."""
    return tuple(sum_of(each) for each in range(step, max(-1, step - BANDS), -1))


class Bench:
    """A ledger with one run that mixes sums, whose orchestrator the test plays."""

    def __init__(self, url: str, chosen: Mechanism | None = None, accountant: AccountantName = "rdp") -> None:
        self.signers, self.inputs = Signers("run-a", MANIFEST), list[bytes]()
        self.lineage = Lineage(orchestrator_key=self.signers.orchestrator.public, initial_parameters=START.parameters)
        self.ledger = PrivacyLedger(url)
        self.ledger.open_account("patients", OpeningTerms(CAP, DELTA, accountant))
        self.register(chosen or mixed())

    def register(self, chosen: Mechanism, run_id: str = "run-a", lineage: bool = True) -> None:
        own = self.lineage if lineage else None
        self.ledger.register_run(RegistrationTerms(run_id, "patients", (chosen,), MANIFEST, lineage=own))
        self.ledger.bind_data(run_id, MANIFEST, DATA)

    def origin(self, step: int) -> ModelOrigin:
        """Return the orchestrator's word for the model that a step starts from."""
        stated = ModelStanding(run_id="run-a", manifest_digest=MANIFEST, finished_steps=step, model=model_of(step))
        return ModelOrigin(standing=seal(stated, self.signers.orchestrator)) if step else INITIAL

    def input_of(self, step: int, before: bytes | None = None) -> bytes:
        known = self.inputs[step - 1] if step else b""
        return step_input(model_of(step).parameters, (), known if before is None else before)

    def charge(self, step: int, before: bytes | None = None, origin: ModelOrigin | None = None) -> float:
        """Charge a step, and return epsilon; ``before`` stands for the input of the step before."""
        given = self.input_of(step, before)
        shown = origin or self.origin(step)
        receipt = receipt_of(self.ledger, self.ledger.charge("run-a", step, given, MANIFEST, origin=shown))
        self.inputs[step:] = [given]
        return receipt.charged_epsilon

    def bind(self, step: int, sums: tuple[bytes, ...] | None = None) -> Binding:
        given = sums_of(step) if sums is None else sums
        envelope = self.ledger.bind_vectors("run-a", "gradient", step, MANIFEST, bytes([99 - step]) * 32, given)
        return open_envelope(Binding, envelope, self.ledger.public_key)

    def take(self, steps: int) -> None:
        for step in range(steps):
            self.charge(step)
            self.bind(step)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    yield made
    made.ledger.close()


def refused(bench: Bench, call, *arguments) -> str:
    """Return the code of a refusal that leaves the ledger as it was."""
    before = bench.ledger.view()
    with pytest.raises(BudgetError) as refusal:
        call(*arguments)
    assert bench.ledger.view() == before
    return refusal.value.code


# --- one past


def test_guarantee_each_charge_names_the_step_that_was_charged_before(bench: Bench):
    bench.take(4)
    for before in (b"", b"x" * 32, bench.inputs[2], bench.inputs[0]):
        assert refused(bench, bench.charge, 4, before) == "lineage_broken"
    bench.charge(4)
    bench.ledger.verify()


def test_a_first_step_names_none(bench: Bench):
    assert refused(bench, bench.charge, 0, b"x" * 32) == "lineage_broken"
    bench.charge(0)


def test_a_release_of_the_step_before_is_one_of_its_chained_input(bench: Bench):
    """The aggregators sign the input that the step was charged for: the model's digest alone is another one."""
    bench.take(2)
    bound = bench.ledger.history()[-1].hash

    def released(signed: bytes) -> ModelOrigin:
        roster = bench.signers.roster(1)
        return ModelOrigin(released=bench.signers.released(roster, model_of(1), "2", bound, input_digest=signed))

    for signed in (model_of(1).parameters, bench.input_of(1, b"x" * 32)):
        assert refused(bench, bench.charge, 2, None, released(signed)) == "lineage_broken"
    bench.charge(2, None, released(bench.inputs[1]))


def test_a_run_of_independent_noise_names_no_step_before(tmp_path: Path):
    bench = Bench(f"sqlite:///{tmp_path / 'plain.sqlite'}", mechanism())
    bench.charge(0)
    assert refused(bench, bench.charge, 1) == "lineage_broken"
    bench.charge(1, b"")
    bench.ledger.close()


# --- one set of sums


def test_a_step_is_bound_with_the_sums_that_it_mixes(bench: Bench):
    bench.take(5)
    assert bench.bind(4).sums == sums_of(4) == (sum_of(4), sum_of(3), sum_of(2))
    assert bench.ledger.verify().runs["run-a"].sums == {step: sum_of(step) for step in range(5)}


@pytest.mark.parametrize("age", range(1, BANDS))
def test_guarantee_no_step_mixes_another_sum_of_an_earlier_one(bench: Bench, age: int):
    """A sum that was computed again as another would be released a second time, with the noise of one step alone."""
    bench.take(5)
    bench.charge(5)
    others = {sum_of(step) for step in range(5) if step != 5 - age} | {b"x" * 32, b""}
    for other in others:
        forged = (*sums_of(5)[:age], other, *sums_of(5)[age + 1 :])
        assert refused(bench, bench.bind, 5, forged) == "not_reproducible"
    assert bench.bind(5).sums == sums_of(5)
    bench.ledger.verify()


def test_a_bound_step_keeps_its_sums(bench: Bench):
    bench.take(3)
    for other in ((), sums_of(2)[:1], (b"x" * 32, *sums_of(2)[1:]), (*sums_of(2), b"x" * 32)):
        assert refused(bench, bench.bind, 2, other) == "not_reproducible"
    assert bench.bind(2).sums == sums_of(2)


def test_no_sum_is_mixed_of_a_step_that_was_not_bound(bench: Bench):
    bench.take(2)
    bench.charge(2)
    bench.charge(3)
    assert refused(bench, bench.bind, 3) == "not_reproducible"
    # Before the first step there is none.
    assert refused(bench, bench.bind, 2, (*sums_of(2), sum_of(9))) == "not_reproducible"
    bench.bind(2)
    bench.bind(3)


@pytest.mark.parametrize("age", range(1, BANDS))
def test_a_signed_chain_in_which_a_step_mixes_another_sum_is_refused(bench: Bench, age: int):
    bench.take(4)
    bench.charge(4)
    forged = (*sums_of(4)[:age], b"x" * 32, *sums_of(4)[age + 1 :])
    event = VectorsBound(
        recorded_at=0,
        run_id="run-a",
        query="gradient",
        step=4,
        manifest_digest=MANIFEST,
        vectors_digest=b"v" * 32,
        sums=forged,
        fencing=bench.ledger.fencing,
    )
    head, key = bench.ledger.view().head, bench.ledger._store.key
    with pytest.raises(BudgetError, match=f"entry {head.sequence + 1}: its vectors mix other sums"):
        audit([*bench.ledger.history(), make_entry(head, event, key)], bench.ledger.public_key)
    honest = event.model_copy(update={"sums": sums_of(4)})
    audit([*bench.ledger.history(), make_entry(head, honest, key)], bench.ledger.public_key)


# --- one account


def test_guarantee_no_other_private_run_is_on_the_account_of_a_run_that_mixes_sums(bench: Bench):
    bench.take(1)
    for other in (mechanism(), mixed()):
        with pytest.raises(BudgetError, match=r"account_not_shared: run run-a has correlated noise"):
            bench.register(other, "run-b")
    bench.register(mechanism(private=False, noise_multiplier=0.0, sigma=0.0), "public")
    bench.register(mixed())
    bench.ledger.verify()


def test_a_run_that_mixes_sums_takes_no_account_that_another_has(tmp_path: Path):
    bench = Bench(f"sqlite:///{tmp_path / 'ledger.sqlite'}", mechanism())
    with pytest.raises(BudgetError, match=r"account_not_shared: run run-b has correlated noise"):
        bench.register(mixed(), "run-b")
    # Two that mix nothing share it.
    bench.register(mechanism(), "run-b")
    bench.ledger.close()


def test_a_signed_chain_with_two_such_runs_on_an_account_is_refused(bench: Bench):
    registered = next(entry.event for entry in bench.ledger.history() if entry.kind == "run_registered")
    head, key = bench.ledger.view().head, bench.ledger._store.key
    second = make_entry(head, registered.model_copy(update={"run_id": "run-b"}), key)
    with pytest.raises(BudgetError, match=f"entry {head.sequence + 1}: .*account_not_shared"):
        audit([*bench.ledger.history(), second], bench.ledger.public_key)


def test_a_run_that_mixes_sums_has_a_lineage(bench: Bench):
    with pytest.raises(BudgetError, match=r"lineage_missing: run run-b has correlated noise"):
        bench.register(mixed(), "run-b", lineage=False)
    with pytest.raises(BudgetError, match="lineage_missing"):
        register(bench.ledger, "run-b", mixed())


# --- one charge a round


def plain(url: str, chosen: Mechanism, accountant: AccountantName) -> list[float]:
    """Return what steps of independent noise add up to, as far as the cap allows."""
    ledger, found = PrivacyLedger(url), list[float]()
    ledger.open_account("patients", OpeningTerms(CAP, DELTA, accountant))
    register(ledger, "run-a", chosen)
    for step in range(chosen.steps):
        try:
            receipt = receipt_of(ledger, ledger.charge("run-a", step, b"p" * 32, MANIFEST))
        except BudgetError:
            break
        found.append(receipt.charged_epsilon)
    ledger.close()
    return found


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("noise", [2.6, 1.4])
def test_guarantee_a_round_costs_one_step_and_a_cap_ends_a_run_where_a_round_begins(
    tmp_path: Path, accountant: AccountantName, noise: float
):
    """A unit takes part in one step of a round; the first one that is charged pays for it."""
    rounds = -(-STEPS // BANDS)
    alone = mechanism(
        noise_multiplier=noise, sigma=noise * 2**20 / math.sqrt(8) * 1.001, steps=rounds, accountant=accountant
    )
    expected = plain(f"sqlite:///{tmp_path / 'plain.sqlite'}", alone, accountant)
    bench = Bench(f"sqlite:///{tmp_path / 'mixed.sqlite'}", mixed(noise, accountant=accountant), accountant)
    assert (len(expected) == rounds) == (noise == 2.6)
    stated = [bench.charge(step) for step in range(min(STEPS, BANDS * len(expected)))]
    assert stated == pytest.approx([expected[step // BANDS] for step in range(len(stated))], rel=1e-9)
    assert expected == sorted(set(expected))
    if len(stated) < STEPS:
        assert len(stated) % BANDS == 0
        assert refused(bench, bench.charge, len(stated)) == "cap_exceeded"
    assert bench.ledger.view().accounts[0].spent_epsilon == stated[-1] <= CAP
    bench.ledger.verify()
    bench.ledger.close()


def test_claims_of_correlated_noise_are_held_to_its_parts(bench: Bench):
    """The largest part has 34 units, so batches of 33 are cut, and sums without their norm's noise are not paid for."""
    with pytest.raises(BudgetError, match=r"mechanism_inconsistent: .* cuts batches to 33"):
        bench.register(mixed(micro_batch_size=33), "run-b")
    for sigma in (mechanism().sigma, mixed().sigma / 1.002):
        with pytest.raises(ProtocolError, match="does not pay for the noise"):
            mixed(sigma=sigma)
