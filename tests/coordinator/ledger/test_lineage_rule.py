"""A ledger charges a step only for the model that the run had before it, as attested members signed it."""

from collections.abc import Callable

import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.lineage import INITIAL, Lineage, ModelOrigin, ModelPoint, ModelStanding, SignedStep
from raycloak.attestation.core.messages import open_envelope, seal
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError, ProtocolError
from raycloak.workers.terms.binding import Binding
from raycloak.workers.terms.step_input import step_input
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, mechanism, receipt_of
from tests.released import START, Signers, point_of

FIRST, SECOND = point_of("first"), point_of("second")


class Bench:
    """A ledger with one run of a lineage, whose signers the test holds."""

    def __init__(self, url: str) -> None:
        self.url, self.signers = url, Signers("run-a", MANIFEST)
        self.lineage = Lineage(orchestrator_key=self.signers.orchestrator.public, initial_parameters=START.parameters)
        self.ledger = PrivacyLedger(url)
        self.ledger.open_account("patients", OpeningTerms(CAP, DELTA))
        evaluation = mechanism(query="evaluation", steps=3)
        self.terms = RegistrationTerms("run-a", "patients", (mechanism(), evaluation), MANIFEST, lineage=self.lineage)
        self.ledger.register_run(self.terms)
        self.ledger.bind_data("run-a", MANIFEST, DATA)

    def charge(self, step: int, model: ModelPoint, origin: ModelOrigin = INITIAL, **more) -> None:
        receipt = self.ledger.charge("run-a", step, model.parameters, MANIFEST, origin=origin, **more)
        assert receipt_of(self.ledger, receipt).lineage == self.lineage

    def bind(self, step: int) -> bytes:
        envelope = self.ledger.bind_vectors("run-a", "gradient", step, MANIFEST, bytes([step]) * 32)
        return open_envelope(Binding, envelope, self.ledger.public_key).head

    def released(self, step: int, before: ModelPoint, after: str, **changes) -> SignedStep:
        binding = changes.pop("bound", None) or self.bind(step)
        return self.signers.released(self.signers.roster(step), before, after, binding, **changes)

    def standing(self, finished: int, model: ModelPoint, key: IdentityKey | None = None, **changes) -> ModelOrigin:
        stated = ModelStanding(run_id="run-a", manifest_digest=MANIFEST, finished_steps=finished, model=model)
        return ModelOrigin(standing=seal(stated.model_copy(update=changes), key or self.signers.orchestrator))


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(f"sqlite:///{tmp_path / 'ledger.sqlite'}")


@pytest.fixture
def reduced(bench) -> Bench:
    """Return a run whose first step was charged and bound; its aggregators made `FIRST` of it."""
    bench.charge(0, START)
    bench.bind(0)
    return bench


def code(bench: Bench, step: int, model: ModelPoint, origin: ModelOrigin, **more) -> str:
    """Return the code of a refused charge, which leaves the ledger as it was."""
    before = bench.ledger.view()
    with pytest.raises((BudgetError, ProtocolError)) as refusal:
        bench.charge(step, model, origin, **more)
    assert bench.ledger.view() == before
    return refusal.value.code


def test_guarantee_a_step_is_charged_for_the_model_that_the_one_before_gave(reduced) -> None:
    first = ModelOrigin(released=reduced.released(0, START, "first"))
    reduced.charge(1, FIRST, first)
    reduced.charge(2, SECOND, ModelOrigin(released=reduced.released(1, FIRST, "second")))
    assert reduced.ledger.verify().runs["run-a"].charges["gradient"].keys() == {0, 1, 2}


def test_a_run_starts_from_the_parameters_of_its_manifest(bench) -> None:
    assert code(bench, 0, FIRST, INITIAL) == "lineage_broken"
    assert code(bench, 0, FIRST, bench.standing(0, FIRST)) == "lineage_broken"
    bench.charge(0, START)


def test_a_charge_that_is_there_needs_no_second_proof(reduced) -> None:
    """A resume asks again before it has computed anything."""
    reduced.charge(0, START)
    reduced.charge(1, FIRST, ModelOrigin(released=reduced.released(0, START, "first")))
    reduced.charge(1, FIRST)
    later = PrivacyLedger(reduced.url)
    again = later.charge("run-a", 1, FIRST.parameters, MANIFEST)
    assert receipt_of(later, again).step == 1


def test_another_attempt_and_another_aggregator_may_have_made_it(reduced) -> None:
    others = Signers("run-a", MANIFEST, reduced.signers.orchestrator)
    again = others.released(others.roster(0, attempt=3), START, "first", reduced.bind(0))
    reduced.charge(1, FIRST, ModelOrigin(released=again))


def test_the_batches_of_a_step_are_no_part_of_its_model(reduced) -> None:
    batches = (b"x" * 32, b"y" * 32)
    origin = ModelOrigin(released=reduced.released(0, START, "first"))
    sent = ModelPoint(parameters=step_input(FIRST.parameters, batches), state=b"")
    assert code(reduced, 1, sent, origin) == "lineage_broken"
    assert code(reduced, 1, sent, origin, batches=batches[::-1]) == "lineage_broken"
    reduced.charge(1, sent, origin, batches=batches)


REFUSED: dict[str, tuple[str, Callable[[Bench], tuple[ModelPoint, ModelOrigin]]]] = {
    "nothing signed": ("lineage_missing", lambda b: (FIRST, INITIAL)),
    "a substituted input": (
        "lineage_broken",
        lambda b: (point_of("forged"), ModelOrigin(released=b.released(0, START, "first"))),
    ),
    "the model of the step before": (
        "lineage_broken",
        lambda b: (START, ModelOrigin(released=b.released(0, START, "first"))),
    ),
    "a substituted output": (
        "release_mismatch",
        lambda b: (
            point_of("forged"),
            ModelOrigin(
                released=b.released(0, START, "first").model_copy(
                    update={
                        "ranges": tuple(
                            honest.model_copy(update={"tensors": forged.tensors})
                            for honest, forged in zip(
                                b.released(0, START, "first").ranges,
                                b.released(0, START, "forged").ranges,
                                strict=True,
                            )
                        )
                    }
                )
            ),
        ),
    ),
    "signed by a stranger": (
        "signature",
        lambda b: (FIRST, ModelOrigin(released=b.released(0, START, "first", signed_by=[IdentityKey.generate()] * 2))),
    ),
    "signed by the aggregator of another range": (
        "signature",
        lambda b: (
            FIRST,
            ModelOrigin(released=b.released(0, START, "first", signed_by=b.signers.aggregators[::-1])),
        ),
    ),
    "a release of another step": (
        "lineage_broken",
        lambda b: (
            FIRST,
            ModelOrigin(released=b.signers.released(b.signers.roster(1), START, "first", b.bind(0))),
        ),
    ),
    "a release of other vectors": (
        "lineage_broken",
        lambda b: (FIRST, ModelOrigin(released=b.released(0, START, "first", bound=b"v" * 32))),
    ),
    "an update of another model": (
        "lineage_broken",
        lambda b: (FIRST, ModelOrigin(released=b.released(0, point_of("forged", kept=False), "first"))),
    ),
    "an update by another state": (
        "lineage_broken",
        lambda b: (
            FIRST,
            ModelOrigin(released=b.released(0, ModelPoint(parameters=START.parameters, state=FIRST.state), "first")),
        ),
    ),
    "a statement of a stranger's": ("signature", lambda b: (FIRST, b.standing(1, FIRST, IdentityKey.generate()))),
    "a statement about another step": ("lineage_broken", lambda b: (FIRST, b.standing(2, FIRST))),
    "a statement about another run": ("lineage_broken", lambda b: (FIRST, b.standing(1, FIRST, run_id="run-b"))),
    "a statement about another manifest": (
        "lineage_broken",
        lambda b: (FIRST, b.standing(1, FIRST, manifest_digest=b"n" * 32)),
    ),
    "a statement about another model": ("lineage_broken", lambda b: (SECOND, b.standing(1, FIRST))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_is_charged_for_no_other_model(reduced, name) -> None:
    expected, make = REFUSED[name]
    assert code(reduced, 1, *make(reduced)) == expected
    assert code(reduced, 0, *make(reduced), query="evaluation") == expected


def test_a_step_that_the_ledger_does_not_have_was_forgotten(reduced) -> None:
    origin = ModelOrigin(released=reduced.released(0, START, "first"))
    assert code(reduced, 2, FIRST, origin) == "ledger_rolled_back"
    reduced.charge(1, FIRST, origin)
    unbound = reduced.signers.released(reduced.signers.roster(1), FIRST, "second", b"v" * 32)
    assert code(reduced, 2, SECOND, ModelOrigin(released=unbound)) == "ledger_rolled_back"


def test_a_state_that_was_exchanged_between_two_steps_ends_the_charges(reduced) -> None:
    """The aggregator signs the state that it was given; it is not the one that the step before left."""
    reduced.charge(1, FIRST, ModelOrigin(released=reduced.released(0, START, "first")))
    given = ModelPoint(parameters=FIRST.parameters, state=SECOND.state)
    assert code(reduced, 2, SECOND, ModelOrigin(released=reduced.released(1, given, "second"))) == "lineage_broken"


def test_a_measurement_is_charged_for_the_newest_model(reduced) -> None:
    origin = ModelOrigin(released=reduced.released(0, START, "first"))
    assert code(reduced, 0, START, origin, query="evaluation") == "lineage_broken"
    reduced.charge(0, FIRST, origin, query="evaluation")


def test_a_run_that_goes_on_from_a_package_has_the_orchestrators_word_for_its_model(reduced) -> None:
    """As after a load: parameters and state are those of the package, and the chain goes on from there."""
    reduced.charge(1, FIRST, ModelOrigin(released=reduced.released(0, START, "first")))
    reduced.bind(1)
    loaded = point_of("loaded")
    reduced.charge(2, loaded, reduced.standing(2, loaded))
    other = ModelPoint(parameters=loaded.parameters, state=SECOND.state)
    assert code(reduced, 3, SECOND, ModelOrigin(released=reduced.released(2, other, "second"))) == "lineage_broken"
    reduced.charge(3, SECOND, ModelOrigin(released=reduced.released(2, loaded, "second")))


def test_a_run_keeps_the_lineage_that_it_was_registered_with(reduced) -> None:
    """Workers take no receipt of a run that was registered without its manifest's."""
    for other in (None, reduced.lineage.model_copy(update={"orchestrator_key": b"x" * 32})):
        terms = RegistrationTerms("run-a", "patients", reduced.terms.mechanisms, MANIFEST, lineage=other)
        with pytest.raises(BudgetError, match="run_mismatch"):
            reduced.ledger.register_run(terms)
