"""One step: receipts come first, and the bytes stay the same no matter who is lost on the way."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from raycloak.attestation.core.messages import Envelope
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.membership import hosting
from raycloak.coordinator.membership.hosting import moved
from raycloak.metrics.errors import BudgetError, ProtocolError, RefusedError, RunFailedError, SenderError
from raycloak.workers.messages import StepReply
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.protocol import VIRTUAL_WORKERS, Call, Fate, WholeRun, on, trained, whole_run


def answering(code: str) -> Fate:
    """Return a worker that computes nothing and says why."""
    return lambda reply, *vectors: (
        reply.model_copy(update={"code": code, "header": None}),
        *(vector[:0] for vector in vectors),
    )


NOBODY_JOINS = ["failure.join_timeout_s=0"]


def failure(kind, home, **arguments) -> tuple[Exception, WholeRun]:
    run = whole_run(home, **arguments)
    with pytest.raises(kind) as error:
        run.train()
    return error.value, run


def hosting_of(roster) -> dict[str, tuple[int, ...]]:
    return {worker.member_id: worker.virtual_workers for worker in roster.workers}


def committed(run: WholeRun) -> list[str]:
    """Return digests of the committed steps as the evidence log has them; each step is there once."""
    bodies = [body for kind, body in run.evidence if kind == "committed"]
    assert [body["step"] for body in bodies] == list(range(len(bodies)))
    return [body["released_digest"] for body in bodies]


def several(*fates):
    """Return the first fate that one of ``fates`` has for a call."""
    return lambda call: next((found for fate in fates if (found := fate(call))), None)


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, int]]:
    """Return (step, virtual worker) of every vector that is computed, in order; known answers left out."""
    seen: list[tuple[int, int]] = []
    genuine = VirtualWorkerComputer.vector

    def spy(self, v, keys, step, model, root, parameters, *rest):
        if model != bytes(32):
            seen.append((step, v))
        return genuine(self, v, keys, step, model, root, parameters, *rest)

    monkeypatch.setattr(VirtualWorkerComputer, "vector", spy)
    return seen


# --- who is lost on the way


FATES = [
    ("dies", "died"),
    ("dies after", "died"),
    ("hangs", "deadline"),
    ("garbles", "malformed"),
    (answering("out_of_memory"), "out_of_memory"),
]


@pytest.mark.parametrize(
    ("fate", "code", "step"),
    [*((*fate, 1) for fate in FATES), ("dies after", "died", 0), ("hangs", "deadline", 2)],
    ids=["dies", "dies after", "hangs", "garbles", "out of memory", "in the first step", "in the last step"],
)
def test_a_worker_lost_in_a_step_is_named_and_the_bytes_are_those_of_an_undisturbed_run(
    tmp_path, undisturbed, computed, fate, code, step
):
    """Its virtual workers move, the attempt grows, and nobody else's vector is computed again."""
    run = trained(tmp_path, disturb=on("step", "worker-1", fate, step))
    assert run.digests == undisturbed
    assert run.left == [("worker-1", code)]
    assert run.stage.stopped == {"worker-1"}, "also one that hangs or refuses, so that no late answer comes"
    before, after = (roster for roster in run.stage.rosters if roster.step == step)
    assert (before.attempt, after.attempt) == (0, 1)
    assert (before.ratchet, after.ratchet) == (max(step - 1, 0), step), "the first roster is asked for a step ahead"
    taken = moved(hosting_of(before), hosting_of(after))
    lost = hosting_of(before)["worker-1"]
    assert sorted(v for each in taken.values() for v in each) == list(lost)
    expected = VIRTUAL_WORKERS + (0 if fate in ("dies", "hangs", "garbles") else len(lost))
    assert len([v for at, v in computed if at == step]) == expected
    assert [outcome.commit.attempts for outcome in run.finished.outcomes] == [1 + (at == step) for at in range(3)]
    assert run.metric("raycloak_step_attempts_total") == 4
    to_newcomer = 0 if step == 2 else VIRTUAL_WORKERS // 3
    assert run.metric("raycloak_virtual_workers_moved_total") == len(lost) + to_newcomer


@pytest.mark.parametrize(("fate", "step"), [("dies", 0), ("dies after", 2), ("hangs", 0)])
def test_a_lost_aggregator_is_replaced_and_no_vector_is_computed_again(tmp_path, undisturbed, computed, fate, step):
    run = trained(tmp_path, aggregators=3, disturb=on("reduce", "aggregator-1-1", fate, step))
    assert run.digests == undisturbed
    assert run.left == [("aggregator-1-1", "deadline" if fate == "hangs" else "died")]
    assert run.stage.stopped == {"aggregator-1-1"}
    assert len(computed) == 3 * VIRTUAL_WORKERS
    before, after = (roster for roster in run.stage.rosters if roster.step == step)
    assert [each.member_id for each in before.aggregators] == ["aggregator-0-0", "aggregator-1-1", "aggregator-2-2"]
    assert [each.member_id for each in after.aggregators] == ["aggregator-0-0", "aggregator-1-3", "aggregator-2-2"]
    assert run.metric("raycloak_aggregates_released_total") == 3


def test_vectors_lost_with_a_node_cost_an_attempt_and_no_aggregator(tmp_path, undisturbed):
    run = trained(tmp_path, disturb=on("reduce", "aggregator-0-0", "lacks", 1))
    assert run.digests == undisturbed
    assert run.left == []
    assert run.finished.outcomes[1].commit.attempts == 2


def test_a_model_lost_with_its_node_ends_the_run_by_name(tmp_path):
    def lose(call: Call) -> Fate:
        if (call.method, call.index) != ("step", 2):
            return None
        for reduced, references in run.stage.log:
            for each in references if reduced.method == "reduce" else ():
                each.error = ActorLost("object_lost")
        return "lacks"

    run = whole_run(tmp_path, disturb=lose)
    with pytest.raises(RunFailedError, match="state_lost") as error:
        run.train()
    assert error.value.step == 2
    assert "--resume" in error.value.remedy
    assert run.left == []


def test_losses_in_every_attempt_of_a_step_still_give_the_same_bytes(tmp_path, undisturbed):
    """One of five workers dies, another hangs, then an aggregator dies; two workers finish the step."""
    run = trained(
        tmp_path,
        num_workers=5,
        disturb=several(
            on("step", "worker-0", "dies", 1),
            on("step", "worker-3", "hangs", 2),
            on("reduce", "aggregator-0-0", "dies", 1),
            on("step", "worker-4", "dies after", 4),
        ),
    )
    assert run.digests == undisturbed
    assert [name for name, _ in run.left] == ["worker-0", "worker-3", "aggregator-0-0", "worker-4"]
    assert [roster.attempt for roster in run.stage.rosters if roster.step == 1] == [0, 1, 2, 3, 4]
    assert [len(roster.workers) for roster in run.stage.rosters if roster.step == 1] == [5, 4, 3, 3, 2]
    assert run.finished.workers == 5
    assert committed(run) == run.digests


def test_another_hosting_order_changes_nothing(tmp_path, undisturbed, monkeypatch):
    """Virtual workers handed out the other way round, to workers in the other order."""
    genuine = hosting.rehost

    def reversed_hosting(current, workers, count):
        placed = genuine({}, workers, count)
        return {worker: tuple(sorted(count - 1 - v for v in hosted)) for worker, hosted in reversed(placed.items())}

    monkeypatch.setattr(hosting, "rehost", reversed_hosting)
    run = trained(tmp_path)
    assert 7 in hosting_of(run.stage.rosters[0])["worker-0"]
    assert run.digests == undisturbed


# --- when it cannot continue


def all_workers(fate: Fate):
    return lambda call: fate if call.method == "step" else None


def test_all_workers_failing_alike_is_one_error_with_their_code(tmp_path):
    error, _ = failure(RunFailedError, tmp_path, disturb=all_workers(answering("out_of_memory")))
    assert (error.code, error.step) == ("out_of_memory", 0)
    assert "micro_batch_size" in error.remedy
    assert error.spent_epsilon is not None, "one step was charged"
    assert error.spent_epsilon > 0
    error, run = failure(RunFailedError, tmp_path / "dead", disturb=all_workers("dies"))
    assert error.code == "died"
    assert len(run.left) == 3, "that all die at once is taken for a lost node the first time, and for a cause then"


def test_a_worker_whose_header_is_no_header_leaves_and_the_bytes_stay(tmp_path, undisturbed):
    def garbled(reply, *vectors):
        return (reply.model_copy(update={"header": Envelope(body=b"{}", signature=reply.header.signature)}), *vectors)

    run = trained(tmp_path, disturb=on("step", "worker-1", garbled, 1))
    assert run.digests == undisturbed
    assert run.left == [("worker-1", "header_mismatch")]


def test_all_workers_failing_for_different_reasons_is_told_of_each(tmp_path):
    fates = {"worker-0": "dies", "worker-1": answering("out_of_memory"), "worker-2": "hangs"}
    error, _ = failure(
        RefusedError,
        tmp_path,
        overrides=NOBODY_JOINS,
        disturb=lambda call: fates[call.member_id] if call.method == "step" else None,
    )
    assert error.code == "too_few_workers"
    for reason in ("worker-0: died", "worker-1: out_of_memory", "worker-2: deadline"):
        assert reason in error.message


def test_fewer_workers_than_needed_end_the_run_with_every_reason_named(tmp_path):
    lost = several(on("step", "worker-0", "hangs"), on("step", "worker-2", answering("worker_error")))
    error, run = failure(RefusedError, tmp_path, overrides=NOBODY_JOINS, disturb=lost)
    assert error.code == "too_few_workers"
    assert "worker-0: deadline" in error.message
    assert "worker-2: worker_error" in error.message
    error, run = failure(
        RefusedError,
        tmp_path / "three",
        min_workers=3,
        overrides=NOBODY_JOINS,
        disturb=on("step", "worker-1", "dies", 1),
    )
    assert error.code == "too_few_workers"
    assert len(run.digests) == 1


def test_more_failures_than_allowed_end_the_run(tmp_path):
    def dying_aggregators(call: Call) -> Fate:
        return "dies" if call.method == "reduce" else None

    error, run = failure(RunFailedError, tmp_path, overrides=["failure.max_failures=2"], disturb=dying_aggregators)
    assert error.code == "too_many_failures"
    assert len(run.departures) == 3


def perturb_recomputation(monkeypatch) -> None:
    """Flip one bit of a vector for the worker that computes it a second time."""
    genuine = VirtualWorkerComputer.vector
    seen = set()

    def second_differs(self, v, keys, step, model, root, parameters, *rest):
        result = genuine(self, v, keys, step, model, root, parameters, *rest)
        if model != bytes(32) and (v, step) in seen:
            result.values[0].vector[0] ^= 1
            return replace(result, tag=bytes(a ^ 1 for a in result.tag))
        seen.add((v, step))
        return result

    monkeypatch.setattr(VirtualWorkerComputer, "vector", second_differs)


@pytest.mark.parametrize(
    ("complete", "allowed"),
    [(True, False), (False, False), (False, True)],
    ids=["after a whole attempt", "after a partial one", "not exact"],
)
def test_a_recomputed_vector_with_another_tag_stops_the_run(tmp_path, monkeypatch, complete, allowed):
    """Also if the attempt of the first one failed: its masked vector is out, and may yet be completed.

    Also of a run that is not exact: two values under one noise leak their difference in any run.
    """
    perturb_recomputation(monkeypatch)
    first = on("reduce", "aggregator-0-0", "dies") if complete else on("step", "worker-2", "dies")
    error, run = failure(
        RunFailedError,
        tmp_path,
        num_workers=4,
        allow_nondeterministic=allowed,
        disturb=several(first, on("step", "worker-1", "dies", 1)),
    )
    assert (error.code, error.step) == ("not_reproducible", 0)
    assert run.digests == []
    assert not any(call.method == "reduce" and call.index for call in run.stage.calls("reduce"))


def flip(reply: StepReply, vector: np.ndarray):
    changed = vector.copy()
    changed[5] ^= np.uint32(4)
    return reply, changed


def test_a_vector_changed_on_its_way_is_refused_and_only_its_sender_leaves(tmp_path, undisturbed, computed):
    run = trained(tmp_path, disturb=on("step", "worker-1", flip, 1))
    assert run.left == [("worker-1", "payload_tag")]
    assert run.digests == undisturbed
    assert len(computed) == 3 * VIRTUAL_WORKERS + 3, "the others mask their vectors again"


def test_an_aggregator_that_accuses_everybody_ends_the_run_with_each_accusation_named(tmp_path):
    """It can keep workers out, but not in silence, and not below the fewest the run needs."""

    def accuse(self, verified, *_):
        raise SenderError("payload_tag", "not what it tagged", member_id=verified.roster.workers[0].member_id)

    run = whole_run(tmp_path, overrides=["failure.max_failures=4"])
    make = run.stage._make_aggregator

    def make_liar(member_id):
        liar = make(member_id)
        liar._average = accuse.__get__(liar)
        return liar

    run.stage._make_aggregator = make_liar
    with pytest.raises(RefusedError, match="too_few_workers") as error:
        run.train()
    assert all(f"{name}: payload_tag" in error.value.message for name, _ in run.left)
    assert [code for _, code in run.left] == ["payload_tag"] * 5
    assert all(len(roster.workers) >= 2 for roster in run.stage.rosters)
    assert run.digests == []


def test_an_accusation_of_somebody_who_takes_no_part_costs_nobody_the_run_but_the_accuser(tmp_path):
    def accuse(*_):
        raise SenderError("payload_tag", "not what it tagged", member_id="worker-9")

    run = whole_run(tmp_path)
    make = run.stage._make_aggregator

    def make_liar(member_id):
        liar = make(member_id)
        liar.reduce = accuse
        return liar

    run.stage._make_aggregator = make_liar
    with pytest.raises(ProtocolError, match="payload_tag"):
        run.train()
    assert run.left == []


def test_released_parameters_that_are_not_finite_stop_the_run_and_name_the_step(tmp_path):
    error, _ = failure(
        RunFailedError, tmp_path, overrides=["optimizer.learning_rate=3e38", "dp_config.max_grad_norm=100"]
    )
    assert (error.code, error.step) == ("non_finite_parameters", 0)


# --- the order of things


def test_every_step_is_charged_before_any_worker_is_asked(tmp_path):
    run = trained(tmp_path, disturb=on("step", "worker-1", "dies", 1))
    order = [call for call, _ in run.stage.log if call.method in ("charge", "step", "reduce")]
    charged: list[int] = []
    for call in order:
        if call.method == "charge":
            charged.append(call.arguments[1])
        elif call.method == "step":
            receipt = call.arguments[0]
            assert f'"step":{charged[-1]}'.encode() in receipt.body
    assert charged == [0, 1, 2]
    assert order[0].method == "charge"


@pytest.mark.parametrize("epoch_steps", [1, 3, 100])
def test_each_step_takes_one_roster_and_is_committed_once(tmp_path, epoch_steps):
    """Rosters are asked for a step ahead, but for the first of an epoch, which rests on fresh evidence."""
    run = trained(tmp_path, epoch_steps=epoch_steps, steps=4)
    assert [(roster.step, roster.attempt) for roster in run.stage.rosters] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    ratchets = [roster.ratchet for roster in run.stage.rosters]
    assert ratchets == [step if step % epoch_steps == 0 else step - 1 for step in range(4)]
    assert committed(run) == run.digests


def test_no_worker_is_asked_for_a_step_that_the_ledger_refuses(tmp_path):
    def empty(*_):
        raise BudgetError("cap_exceeded", "spent")

    run = whole_run(tmp_path)
    run.session.control.actors["ledger"].handle.charge = empty
    with pytest.raises(BudgetError, match="cap_exceeded"):
        run.train()
    assert run.stage.calls("step") == []
    assert run.digests == []


def test_a_ledger_that_is_put_back_while_the_run_charges_it_stops_the_run(tmp_path):
    """Without a witness too: what it forgot was released, and the next steps would be charged in its place."""
    run = whole_run(tmp_path)
    ledger, database = run.session.control.actors["ledger"].handle, tmp_path / "ledger.sqlite"
    genuine = ledger.charge

    def put_back(run_id, step, *arguments):
        with closing(sqlite3.connect(database)) as live, closing(sqlite3.connect(tmp_path / "older")) as older:
            if step == 1:
                live.backup(older)
            if step == 2:
                older.backup(live)
        return genuine(run_id, step, *arguments)

    ledger.charge = put_back
    with pytest.raises(BudgetError, match=r"ledger_rolled_back: .* step 2 is not the next one after 1 charged"):
        run.train()
    assert len(run.stage.calls("reduce")) == 2
    assert len(run.digests) == 2


def test_nothing_is_reduced_unless_its_vectors_are_bound(tmp_path):
    """Two executions that differ would else decode two values, whose difference has no noise."""

    def differ(*_):
        raise BudgetError("not_reproducible", "other vectors")

    run = whole_run(tmp_path)
    run.session.control.actors["ledger"].handle.bind_vectors = differ
    with pytest.raises(RunFailedError, match="not_reproducible"):
        run.train()
    assert len(run.stage.calls("step")) == 3
    assert run.stage.calls("reduce") == []


def test_no_aggregator_is_asked_before_the_vectors_are_bound(plain):
    calls = [call for call, _ in plain.stage.log]
    asked = [call.method for call in calls if "aggregator" in call.member_id or call.method == "bind_vectors"]
    assert asked[asked.index("bind_vectors") :] == ["bind_vectors", "reduce"] * 3


@pytest.mark.parametrize(
    ("fate", "method", "asked"),
    [
        ("dies", "charge", "step"),
        ("dies after", "charge", "step"),
        ("dies after", "bind_vectors", "reduce"),
        ("hangs", "bind_vectors", "reduce"),
    ],
)
def test_what_waited_for_a_lost_answer_is_asked_again_once(tmp_path, undisturbed, fate, method, asked):
    lost = ("ledger", method, 1)
    run = trained(tmp_path, disturb=lambda call: fate if (call.member_id, call.method, call.index) == lost else None)
    assert run.digests == undisturbed
    assert [name for name, _ in run.restarts] == ["ledger"]
    at_once = 3 if asked == "step" else 1
    assert len(run.stage.calls(asked)) == 3 * at_once
    assert {outcome.commit.attempts for outcome in run.finished.outcomes} == {1}


def test_nothing_is_reduced_before_every_worker_has_answered(tmp_path):
    """A reduce with an unready reference would hold up every later attempt."""
    run = trained(tmp_path, disturb=on("step", "worker-1", "hangs", 1))
    for call in run.stage.calls("reduce"):
        _, _, _, _, *vectors = call.arguments
        assert len(vectors) == len(call.arguments[0].headers)
        assert all(isinstance(vector, np.ndarray) and vector.size == 83 for vector in vectors)


def test_an_outcome_states_bytes_and_times(tmp_path):
    run = trained(tmp_path, aggregators=3)
    for outcome in run.finished.outcomes:
        assert outcome.masked_bytes == 3 * 83 * 4
        assert 0 < outcome.slowest_worker_seconds <= outcome.seconds
        parts = outcome.charge_seconds + outcome.compute_seconds + outcome.reduce_seconds
        assert parts <= outcome.seconds
    assert run.finished.masked_bytes == 3 * 3 * 83 * 4
    assert [outcome.commit.step for outcome in run.finished.outcomes] == [0, 1, 2]
    assert [outcome.commit.released_digest.hex() for outcome in run.finished.outcomes] == run.digests
