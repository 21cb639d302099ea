"""A step loop that its caller writes: the same vectors and charges as the run's own loop, and an update of any kind."""

import numpy as np
import pytest

from raycloak.coordinator.aggregation.aggregator import decoded_average
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.record.run_list import read_summary
from raycloak.coordinator.training.hand_loop import HandLoop
from raycloak.metrics.errors import BudgetError, ConfigError, RunFailedError
from raycloak.workers.terms.manifest import BY_HAND
from raycloak.workers.terms.receipt import data_root
from tests.protocol import RENYI, WholeRun, computer, keys_of, whole_run

SGD = {"optimizer": {"learning_rate": 0.5}, "dp_config": RENYI}


def loop_of(run: WholeRun) -> HandLoop:
    return HandLoop(run.coordinator.order)


def clear_average(loop: HandLoop, parameters: np.ndarray, step: int) -> np.ndarray:
    """Return the average of all virtual workers' vectors, which are computed here and never masked."""
    admitted, vectors = loop._admitted, computer(loop.plan.mechanism)
    root, digest = data_root(admitted.membership.hosts.commitments), loop._digest(parameters)
    epoch = admitted.manifest.computation.epoch_of("gradient", step)
    clear = [
        vectors.vector(v, keys_of(admitted.manifest.key_context, v, epoch), step, digest, root, parameters).values
        for v in range(loop.plan.mechanism.virtual_workers)
    ]
    terms = loop.plan.mechanism
    return decoded_average(clear, terms.ring_bits, terms.gamma_log2, terms.expected_batch_size, np.float64)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> tuple[WholeRun, HandLoop, list[str], str]:
    """Return a run with two ranges, whose caller writes plain gradient descent; a worker is lost in the second step."""
    run = whole_run(
        tmp_path_factory.mktemp("hand"),
        aggregators=2,
        disturb=lambda call: "dies" if (call.member_id, call.method, call.index) == ("worker-1", "step", 1) else None,
        **SGD,
    )
    loop, digests = loop_of(run), []
    parameters = loop.initial_parameters
    with run.events:
        for step in range(3):
            vectors = loop.vectors(parameters)
            average = loop.aggregate(vectors)
            np.testing.assert_array_equal(average, clear_average(loop, parameters, step))
            parameters = parameters - np.float32(0.5) * average.astype(np.float32)
            digests.append(loop._digest(parameters).hex())
        with pytest.raises(RunFailedError, match="complete"):
            loop.vectors(parameters)
        last = loop.finish(parameters)
    return run, loop, digests, last


def test_guarantee_a_loop_by_hand_releases_the_sum_of_all_vectors(by_hand) -> None:
    """Also after a lost worker; the fixture compares each average with one that was computed in clear."""
    run, loop, digests, last = by_hand
    assert len(set(digests)) == 3
    assert last == digests[-1]
    assert loop.finished_steps == 3
    assert run.left == [("worker-1", "died")]


def test_each_step_is_charged_once_and_committed_with_the_callers_parameters(by_hand) -> None:
    run, loop, digests, _ = by_hand
    committed = [body["released_digest"] for kind, body in run.evidence if kind == "committed"]
    assert committed == digests
    assert len(run.stage.calls("charge")) == 3
    assert loop.plan.mechanism.steps == 3


def test_guarantee_the_vectors_of_a_step_are_aggregated_once(tmp_path) -> None:
    """A second aggregate of one step, or of an older one, would count a step that nobody charged."""
    run = whole_run(tmp_path, **SGD)
    with run.events:
        loop = loop_of(run)
        older = loop.vectors(loop.initial_parameters)
        vectors = loop.vectors(loop.initial_parameters)
        with pytest.raises(ConfigError, match="vectors_used"):
            loop.aggregate(older)
        loop.aggregate(vectors)
        for used in (vectors, older):
            with pytest.raises(ConfigError, match="vectors_used: after 1 steps"):
                loop.aggregate(used)
        assert loop.finished_steps == 1
        loop.aggregate(loop.vectors(loop.initial_parameters - 1))
        loop.finish(loop.initial_parameters)
    assert [body["step"] for kind, body in run.evidence if kind == "committed"] == [0, 1]
    for late in (loop.vectors, loop.finish):
        with pytest.raises(ConfigError, match="loop_over"):
            late(loop.initial_parameters)
    with pytest.raises(ConfigError, match="loop_over"):
        loop.aggregate(vectors)


def test_a_finished_loop_is_listed_with_its_steps_and_what_they_cost(by_hand) -> None:
    run, loop, digests, _ = by_hand
    RunFolder(run.folder, run.coordinator.order.folder.record).mark("done")
    listed = read_summary(run.folder)
    assert (listed.state, listed.steps, listed.planned_steps) == ("done", 3, 3)
    assert listed.epsilon_charged == run.session.control.ledger.view().accounts[0].spent_epsilon
    assert listed.epsilon_claimed == loop.plan.epsilon_outsiders
    assert listed.model_digest == digests[-1]
    events = [each for each in run.told if each["event"] == "step"]
    assert [each["attempts"] for each in events] == [1, 2, 1]
    assert all(each["seconds"] >= each["charge_seconds"] + each["reduce_seconds"] > 0 for each in events)


def test_its_manifest_names_no_update_rule(tmp_path) -> None:
    run = whole_run(tmp_path, dp_config=RENYI)
    with run.events:
        loop = loop_of(run)
    assert loop._admitted.manifest.computation.optimizer.name == BY_HAND
    assert loop._admitted.manifest.lineage is None
    for bad in (loop.initial_parameters[1:], loop.initial_parameters * np.nan):
        with pytest.raises(RunFailedError, match="non_finite_parameters"):
            loop.vectors(bad)
    assert run.stage.calls("charge") == []
    loop.close()


def test_the_cap_ends_a_loop_before_anything_is_computed(tmp_path) -> None:
    run = whole_run(tmp_path, dp_config={**RENYI, "epsilon_cap": 2.0}, steps=40)
    with run.events:
        loop = loop_of(run)
        within = loop.plan.steps_within_cap
        assert within < 40
        for _ in range(within):
            loop.aggregate(loop.vectors(loop.initial_parameters))
        with pytest.raises(BudgetError, match="cap_exceeded"):
            loop.vectors(loop.initial_parameters)
        loop.close()
