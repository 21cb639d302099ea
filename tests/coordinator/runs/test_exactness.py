"""One run has one result, bit for bit, whatever the workers and their order.

Failures are tested in `tests/coordinator/training/test_step.py` and `test_membership.py`, real models in
`test_one_digest.py`.
"""

import itertools
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.training.assignment import ReplayedRun
from raycloak.metrics.errors import BudgetError, RefusedError
from raycloak.workers.inputs import rows
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import FEW_FAILURES, RENYI, Stage, WholeRun, examples, on, trained, whole_run

WORKERS_AND_RANGES = [(1, 1), (2, 3), (3, 3), (5, 1), (8, 3)]
ARRIVALS = {
    "the other way round": reversed,
    "shuffled": lambda answers: random.Random(7).sample(answers, len(answers)),
}


def digests_everywhere(run: WholeRun) -> list[str]:
    """Return the digest of each step: metrics.jsonl and the evidence log, both on disk, say what progress said."""
    told = [line for line in run.told if line["event"] == "step"]
    logged = [body for kind, body in run.evidence if kind == "committed"]
    steps = list(range(run.config.steps))
    assert [line["step"] for line in told] == [body["step"] for body in logged] == steps
    assert [line["model_digest"] for line in told] == [body["released_digest"] for body in logged] == run.digests
    assert run.finished.model_digest.hex() == run.digests[-1]
    return run.digests


def failure(kind, home, **arguments) -> tuple[Exception, WholeRun]:
    run = whole_run(home, **arguments)
    with pytest.raises(kind) as error:
        run.train()
    return error.value, run


@pytest.mark.parametrize(("workers", "aggregators"), WORKERS_AND_RANGES)
def test_any_number_of_workers_and_ranges_gives_the_same_bytes_at_every_step(
    tmp_path, undisturbed, workers, aggregators
):
    run = trained(tmp_path, num_workers=workers, aggregators=aggregators, secure_aggregation=workers > 1)
    assert digests_everywhere(run) == undisturbed
    assert len(set(undisturbed)) == 3
    assert run.finished.workers == workers
    assert run.finished.masked_bytes == (3 * workers * 83 * 4 if workers > 1 else 0), "a lone worker adds no mask"
    assert run.left == []


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_any_order_of_answers_gives_the_same_bytes(tmp_path, undisturbed, monkeypatch, arrival):
    genuine, order = TrainWorker.step, []

    def spy(self, *arguments):
        order.append(self._attester.member_id)
        return genuine(self, *arguments)

    monkeypatch.setattr(TrainWorker, "step", spy)
    run = whole_run(tmp_path, num_workers=5, aggregators=3)
    run.stage.arrival = ARRIVALS[arrival]
    run.train()
    assert order[:5] != sorted(order[:5]), "the answers come in another order than they were asked for"
    assert digests_everywhere(run) == undisturbed


def test_36_workers_that_each_mask_with_a_few_give_the_bytes_of_two_though_two_die_in_one_step(tmp_path):
    """The two are a replay of the same run, in which all pairs mask, as they do up to 32 workers."""
    settings = {"virtual_workers": 36, "steps": 2, "data": examples(72), "dp_config": RENYI}
    first, second = on("step", "worker-7", "dies", 1), on("step", "worker-9", "dies", 2)
    many = whole_run(
        tmp_path,
        num_workers=36,
        min_workers=34,
        masks={"colluding_workers": 2},
        disturb=lambda call: first(call) or second(call),
        **settings,
    )
    many.train()
    assert [member_id for member_id, _ in many.left] == ["worker-7", "worker-9"]
    circles = [body["circle"] for kind, body in many.evidence if kind == "roster"]
    # A worker that dies takes the order of the circle with it.
    assert len({circle["seed"] for circle in circles}) == 3
    assert circles[0] == circles[1]
    assert {circle["colluding_workers"] for circle in circles} == {2}
    for call in many.stage.calls("step"):
        assert len(call.arguments[1].presentations) <= 2 * circles[0]["reach"] + 2, "neighbours, itself, the aggregator"
    recorded = Manifest.model_validate_json((many.folder / "manifest.json").read_bytes())
    assert recorded.mask_colluders == 2
    archive = Archive(CheckpointConfig(storage="packages"), recorded.run_id, tmp_path, lambda line: None)
    few = trained(tmp_path, num_workers=2, assignment=ReplayedRun(recorded, archive, 0, 2), **settings)
    assert digests_everywhere(many) == few.digests


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adafactor"])
def test_every_update_rule_is_exact_for_any_ranges(tmp_path, optimizer):
    settings = {"optimizer": {"name": optimizer, "learning_rate": 0.01, "schedule": "cosine", "warmup_steps": 1}}
    first = trained(tmp_path / "1", **settings)
    second = trained(tmp_path / "2", num_workers=2, aggregators=4, **settings)
    assert first.digests == second.digests
    assert len(set(first.digests)) == 3


def test_normalised_gradients_are_exact_and_measured_examples_stay_as_they_are(tmp_path):
    measured = {"measurements": {"class_counts": {"classes": 3, "noise_multiplier": 2.0}}}
    settings = {"dp_config": {**RENYI, "epsilon_cap": 40.0, "clipping": "normalised"}, **measured}
    first = trained(tmp_path / "1", **settings)
    second = trained(tmp_path / "2", num_workers=2, aggregators=2, **settings)
    assert first.digests == second.digests
    clipped = trained(tmp_path / "3", **settings | {"dp_config": {**RENYI, "epsilon_cap": 40.0}})
    assert not set(first.digests) & set(clipped.digests)
    assert [each.clipping for each in first.finished.manifest.computation.mechanisms] == ["normalised", "norm"]


@pytest.mark.parametrize("bits", [32, 64])
def test_both_rings_are_exact(tmp_path, bits):
    """And vectors of two micro-batches."""
    settings = {"overrides": [f"ring.bits={bits}"], "micro_batch_size": 4}
    first = trained(tmp_path / "1", **settings)
    second = trained(tmp_path / "2", num_workers=5, aggregators=3, **settings)
    assert first.digests == second.digests
    assert first.finished.masked_bytes == 3 * 3 * 83 * bits // 8


def test_a_repeat_with_the_same_secret_on_the_same_ledger_charges_nothing_new(tmp_path, done):
    before = done.entries
    second = trained(tmp_path, num_workers=2, aggregators=3)
    assert second.digests == done.digests
    assert second.entries == before
    assert second.finished.charged_epsilon == done.finished.charged_epsilon
    assert second.session.run_id == done.session.run_id


def changed_byte():
    features, labels = examples()
    features[21, 3] = np.nextafter(features[21, 3], np.float32(9))
    return features, labels


def test_another_data_byte_is_another_run_from_the_first_step_on(tmp_path, undisturbed):
    """Not by the gradient alone: the noise of the whole step is another, in all 83 coordinates."""
    run = trained(tmp_path / "a", data=changed_byte(), steps=1)
    honest = trained(tmp_path / "b", steps=1)
    assert run.digests[0] != honest.digests[0]
    assert run.session.run_id == honest.session.run_id
    moved = run.finished.parameters - honest.finished.parameters
    assert (moved != 0).all()
    assert np.std(moved) > 0.1 * np.std(honest.finished.parameters - initial(honest))


def initial(run: WholeRun) -> np.ndarray:
    """Return the parameters that the first step started from."""
    _, _, parameters, *_ = run.stage.calls("reduce")[0].arguments
    return parameters


def test_another_data_byte_is_refused_for_a_run_that_began_without_it(tmp_path, done):
    before = done.entries
    error, run = failure(RefusedError, tmp_path, data=changed_byte(), overrides=FEW_FAILURES)
    assert error.code == "too_few_workers"
    assert {code for _, code in run.left} == {"data_changed"}
    assert run.stage.calls("step") == []
    assert run.entries == before


def test_another_secret_is_another_run(tmp_path, plain):
    other = trained(tmp_path, secret="cd" * 32)
    assert other.session.run_id != plain.session.run_id
    assert other.session.orchestrator_key != plain.session.orchestrator_key
    assert not set(other.digests) & set(plain.digests)
    assert other.entries > 3


@pytest.mark.usefixtures("done")
def test_a_run_id_belongs_to_one_manifest(tmp_path):
    """The same secret for another computation would be a second value under related keys."""
    error, run = failure(BudgetError, tmp_path, overrides=["optimizer.learning_rate=0.25"])
    assert error.code == "run_mismatch"
    assert run.stage.calls("step") == []


def test_a_table_gives_the_same_bytes_from_memory_and_from_scratch_files_for_any_number_of_workers(
    tmp_path, monkeypatch
):
    features, labels = examples()
    columns = {f"f{index}": features[:, index] for index in range(features.shape[1])}
    table = pa.table({**columns, "labels": labels})
    digests = []
    for limit, workers, cuts in ((2**28, 3, (0, 40)), (0, 3, (0, 13, 40)), (0, 2, (0, 39, 40))):
        monkeypatch.setattr(rows, "MEMORY_BYTES", limit)
        home = tmp_path / str(len(digests))
        (home / "data" / "table").mkdir(parents=True)
        for start, end in itertools.pairwise(cuts):
            pq.write_table(table.slice(start, end - start), home / "data" / "table" / f"{start:02d}.parquet")
        run = trained(home, dataset={"kind": "parquet", "path": "table"}, num_workers=workers)
        digests.append(digests_everywhere(run))
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == 3


def test_a_run_of_epochs_is_the_run_of_as_many_steps(tmp_path):
    by_steps = trained(tmp_path / "steps", dp_config=RENYI)
    by_epochs = trained(tmp_path / "epochs", dp_config=RENYI, steps=None, epochs=1.5)
    assert len(by_steps.digests) == 3, "40 examples, 20 in a batch"
    assert by_epochs.digests == by_steps.digests
    assert by_epochs.finished.manifest.computation == by_steps.finished.manifest.computation


def test_a_run_takes_more_ranges_by_itself_where_one_does_not_fit_a_node_and_gives_the_same_bytes(
    tmp_path, undisturbed, monkeypatch
):
    monkeypatch.setattr(Stage, "aggregator_rooms", lambda stage: (1_000, 1_000, 1_000, 1_000, 1_000))
    run = trained(tmp_path)
    assert [len(each.aggregators) for each in run.stage.rosters] == [4] * 3, "as many as there are tensors"
    assert digests_everywhere(run) == undisturbed
    chosen = trained(tmp_path / "chosen", aggregators=1)
    assert len(chosen.stage.rosters[-1].aggregators) == 1
