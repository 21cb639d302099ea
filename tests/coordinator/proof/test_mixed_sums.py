"""The proof of a run with correlated noise: each charge names the step before, and each binding the sums it mixes."""

from collections.abc import Callable

import pytest

from raycloak.coordinator.ledger.entries import Event, StepCharged, VectorsBound
from raycloak.coordinator.ledger.export import check_extract
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.workers.terms.step_input import step_input
from tests.coordinator.proof.proof_cases import Proved, parts_of, proved, reledgered, relogged, train
from tests.mixed import BANDS, EPOCH, FIELDS

STEPS = EPOCH + 1


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Proved:
    home = tmp_path_factory.mktemp("mixed")
    return proved(home, train(home, **FIELDS | {"steps": STEPS}))


def failures(contents: dict[str, bytes], record: Proved) -> dict[str, str]:
    report = verify_parts(parts_of(contents), record.trust)
    return {claim.name: f"{claim.record}: {claim.says}" for claim in report.failed}


def forged(record: Proved, edit: Callable[[list[Event]], None]) -> dict[str, bytes]:
    """Return a record whose ledger was signed again, and its log with the new entries: as one with both keys may."""
    contents = reledgered(record, edit)
    entries = check_extract(contents["ledger.jsonl"].splitlines(), record.trust.ledger).entries
    bound = {entry.event.step: entry for entry in entries.values() if isinstance(entry.event, VectorsBound)}

    def rename(entries):
        for kind, content in entries:
            if kind == "committed":
                own = bound[content["step"]]
                content |= {"ledger_sequence": own.sequence, "ledger_hash": own.hash.hex()}

    return contents | {"evidence.jsonl": relogged(record, rename)["evidence.jsonl"]}


def charges(events: list[Event]) -> list[int]:
    return [at for at, event in enumerate(events) if isinstance(event, StepCharged)]


def binding_at(events: list[Event], step: int) -> int:
    return next(at for at, each in enumerate(events) if isinstance(each, VectorsBound) and each.step == step)


def test_nothing_fails_without_a_forgery(mixed):
    assert failures(mixed.contents, mixed) == {}
    found = check_extract(mixed.lines("ledger.jsonl"), mixed.trust.ledger).entries.values()
    bound = [entry.event for entry in found if isinstance(entry.event, VectorsBound)]
    assert [len(each.sums) for each in bound] == [1, 2, BANDS, BANDS, 1]


def test_what_is_signed_again_without_a_change_fails_nothing(mixed):
    assert failures(forged(mixed, lambda events: None), mixed) == {}


@pytest.mark.parametrize("step", range(1, STEPS))
@pytest.mark.parametrize("before", ["none", "another", "of an earlier step"])
def test_a_charge_that_names_another_step_before_is_refuted(mixed, step, before):
    """Also of the first step of a key epoch, into which nothing is mixed: the chain goes on."""

    def edit(events):
        places = charges(events)
        inputs = [events[at].input_digest for at in places]
        models = [mixed.manifest.computation.initial_parameters, *released(mixed)]
        assert inputs[step] == step_input(models[step], (), inputs[step - 1])
        earlier = inputs[step - 2] if step > 1 else b"y" * 32
        named = {"none": b"", "another": b"x" * 32, "of an earlier step": earlier}[before]
        for later in range(step, STEPS):
            # All that follow are chained to it, as in a run of another past.
            inputs[later] = step_input(models[later], (), named if later == step else inputs[later - 1])
            events[places[later]] = events[places[later]].model_copy(update={"input_digest": inputs[later]})

    found = failures(forged(mixed, edit), mixed)
    assert found["steps"].startswith(f"gradient step {step}: it was charged for other parameters"), found


def released(record: Proved) -> list[bytes]:
    """Return the digest of the model after each step."""
    found: dict[int, bytes] = {}

    def look(entries):
        found.update(
            {each["step"]: bytes.fromhex(each["released_digest"]) for kind, each in entries if kind == "committed"}
        )

    relogged(record, look)
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize(("step", "age"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_a_binding_that_mixes_another_sum_of_an_earlier_step_is_refuted(mixed, step, age):
    def edit(events):
        at = binding_at(events, step)
        sums = events[at].sums
        events[at] = events[at].model_copy(update={"sums": (*sums[:age], b"x" * 32, *sums[age + 1 :])})

    found = failures(reledgered(mixed, edit), mixed)
    assert "its vectors mix other sums than earlier steps were bound with" in found["ledger"], found


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_binding_whose_own_sum_is_another_than_later_steps_mix_is_refuted(mixed, step):
    def edit(events):
        at = binding_at(events, step)
        events[at] = events[at].model_copy(update={"sums": (b"x" * 32, *events[at].sums[1:])})

    found = failures(reledgered(mixed, edit), mixed)
    assert "its vectors mix other sums than earlier steps were bound with" in found["ledger"], found
