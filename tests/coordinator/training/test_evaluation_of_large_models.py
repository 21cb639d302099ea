"""A public split of a model that no driver runs: workers measure it, each slice with the same bits on every host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.attestation.core.messages import parse
from raycloak.attestation.orchestrator.evaluation_order import EvaluationOrder
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.training import evaluation
from raycloak.metrics.errors import ConfigError, DatasetError, RaycloakError, RunFailedError
from raycloak.workers.evaluation import EvaluationAnswer, EvaluationReply
from raycloak.workers.inputs.datasets import Dataset
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models import models
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import VIRTUAL_WORKERS, Call, Fate, WholeRun, config, examples, on, whole_run, worker_setup

COUNT = 30
NOBODY_JOINS = ["failure.join_timeout_s=0"]


def section(home: Path, count: int = COUNT, features: int = 6, **fields: Any) -> dict[str, Any]:
    """Write a split for the runs of ``home``; returns the configuration's section."""
    rows, labels = examples(100)
    (home / "data").mkdir(parents=True, exist_ok=True)
    np.savez(home / "data" / "split.npz", features=rows[-count:, :features], labels=labels[-count:])
    public = {"kind": "npz", "path": "split.npz", "features": "features", "public": True}
    return {"dataset": public, "every": 2, **fields}


def measured(home: Path, **arguments: Any) -> WholeRun:
    """Return a run of three steps that is measured after the second and at the end."""
    run = whole_run(home, **{"evaluation": section(home), **arguments})
    run.train()
    return run


def results(run: WholeRun) -> tuple[float, float | None, list[float | None]]:
    """Return value and F1 of the verdict, and what progress told after each step."""
    assert run.finished is not None
    assert run.finished.evaluation is not None
    found = run.finished.evaluation
    return found.value, found.f1, [report.evaluation_accuracy for report in run.reports]


def refuse(*_: Any) -> None:
    raise AssertionError("the driver built the model")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is too large for a driver."""
    monkeypatch.setattr(models, "LARGEST_IN_DRIVER", 0)
    monkeypatch.setattr(evaluation, "build_model", refuse)


@pytest.fixture(scope="module")
def by_driver(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return measured(tmp_path_factory.mktemp("driver"))


@pytest.mark.usefixtures("large")
def test_workers_find_what_the_driver_finds_of_a_smaller_model_and_change_nothing_else(
    tmp_path: Path, by_driver: WholeRun
) -> None:
    run = measured(tmp_path)
    assert results(run) == results(by_driver)
    assert results(run)[1] is not None, "F1 comes with an accuracy"
    assert run.digests == by_driver.digests
    ordered = [body["finished_steps"] for kind, body in run.evidence if kind == "evaluation_ordered"]
    assert ordered == [2, 3]
    assert not by_driver.stage.calls("evaluate")


@pytest.mark.usefixtures("large")
def test_guarantee_a_result_has_the_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    found = set()
    for workers in (1, 2, 3):
        one = {"num_workers": workers, "secure_aggregation": workers > 1, "steps": 1}
        run = measured(tmp_path / str(workers), loss="mse", model="tests.models:linear_regression", **one)
        found.add(results(run)[0])
    assert len(found) == 1


def elsewhere(reply: EvaluationReply) -> tuple[EvaluationReply]:
    """Return an answer about another worker's slices."""
    assert reply.answer is not None
    answer = parse(EvaluationAnswer, reply.answer.body)
    forged = reply.answer.model_copy(update={"body": answer.model_copy(update={"scores": ()}).encode()})
    return (reply.model_copy(update={"answer": forged}),)


FATES: list[tuple[Fate, str]] = [("dies after", "died"), ("hangs", "deadline"), (elsewhere, "signature")]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("fate", "code"), FATES, ids=["dies", "hangs", "forges"])
def test_a_worker_lost_in_an_evaluation_costs_a_retry_by_others(
    tmp_path: Path, by_driver: WholeRun, fate: Fate, code: str
) -> None:
    run = measured(tmp_path, disturb=on("evaluate", "worker-1", fate), overrides=NOBODY_JOINS)
    assert run.left == [("worker-1", code)]
    assert results(run) == results(by_driver)
    again = parse(EvaluationOrder, run.stage.calls("evaluate")[3].arguments[0].body)
    assert "worker-1" not in {member.member_id for member in again.members}
    assert {v for member in again.members for v in member.virtual_workers} == set(range(VIRTUAL_WORKERS))


@pytest.mark.usefixtures("large")
def test_an_evaluation_that_fails_everywhere_alike_ends_the_run_by_name(tmp_path: Path) -> None:
    def fail(call: Call) -> Fate:
        failed = EvaluationReply(member_id=call.member_id, code="out_of_memory")
        return (lambda reply: (failed,)) if call.method == "evaluate" else None

    run = whole_run(tmp_path, evaluation=section(tmp_path), disturb=fail)
    with run.events, pytest.raises(RunFailedError, match="every worker failed in the evaluation after step 1"):
        run.coordinator.run()
    finished = run.coordinator.salvage(destroy=False)
    for actor in run.session.control.actors.values():
        actor.handle.close()
    assert finished is not None
    assert (finished.steps, finished.evaluation) == (2, None)


@pytest.mark.usefixtures("large")
def test_guarantee_an_answer_counts_only_if_it_is_of_the_drivers_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node whose copy of the file is another one."""

    def other(dataset: Dataset, ids: np.ndarray) -> bytes:
        return bytes(32)

    monkeypatch.setattr("raycloak.workers.evaluation.slice_digest", other)
    run = whole_run(tmp_path, evaluation=section(tmp_path))
    with run.events, pytest.raises(RunFailedError, match="answer_mismatch: every worker failed in the evaluation"):
        run.coordinator.run()
    for actor in run.session.control.actors.values():
        actor.handle.close()


def prepared(setup: WorkerSetup, **split: Any) -> bool:
    """Return whether a worker opens the split of ``setup`` to measure on it."""
    assert setup.evaluation is not None
    changed = setup.evaluation.model_copy(update=split)
    worker = TrainWorker("worker-0", None, lambda: 0.0)  # type: ignore[arg-type]
    return worker.prepare(setup.model_copy(update={"evaluation": changed})).measures


def test_guarantee_a_worker_opens_no_split_in_the_clear_that_is_not_public_or_where_its_private_data_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results on it are exact, whatever the driver says of it."""
    setup = worker_setup(config(evaluation=section(tmp_path)), tmp_path)
    assert not prepared(setup), "the driver measures a small model"
    monkeypatch.setattr(models, "LARGEST_IN_DRIVER", 0)
    assert prepared(setup)
    with pytest.raises(ConfigError, match="evaluation_not_public"):
        prepared(setup, public=False)
    base = Path(setup.base)
    (base / "link.npz").symlink_to("examples.npz")
    (base / "hard.npz").hardlink_to(base / "examples.npz")
    for path in ("examples.npz", "link.npz", "hard.npz", "../data/*.npz"):
        with pytest.raises(ConfigError, match="evaluation_private"):
            prepared(setup, path=path)
    public = setup.model_copy(update={"dataset": setup.dataset.model_copy(update={"public": True})})
    assert prepared(public, path="examples.npz")


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"features": 5}, DatasetError, "evaluation_form"),
        ({"count": VIRTUAL_WORKERS - 1}, DatasetError, "dataset_small"),
    ],
    ids=["form", "size"],
)
def test_a_split_that_workers_cannot_measure_on_is_refused_before_anything_is_charged(
    tmp_path: Path, fields: dict[str, Any], error: type[RaycloakError], code: str
) -> None:
    run = whole_run(tmp_path, evaluation=section(tmp_path, **fields))
    with pytest.raises(error) as refused:
        run.train()
    assert refused.value.code == code
    assert run.stage.calls("charge") == []


def test_metrics_of_the_users_own_need_outputs_so_the_driver_measures_a_large_model_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "LARGEST_IN_DRIVER", 0)
    run = measured(tmp_path, evaluation=section(tmp_path, metrics=["auc"]), steps=1)
    assert not run.stage.calls("evaluate")
    assert run.finished is not None
    assert run.finished.evaluation is not None
    assert set(run.finished.evaluation.own) == {"auc"}


@pytest.mark.usefixtures("large")
def test_a_plan_says_who_measures_a_large_model_and_checks_the_form_of_the_split(tmp_path: Path) -> None:
    def notes(**fields: Any) -> str:
        settings = config(evaluation=section(tmp_path, **fields))
        return " ".join(plan_of(settings, Path(worker_setup(settings, tmp_path).base)).warnings)

    assert "the workers measure it on the evaluation split" in notes()
    assert "the driver runs it on the evaluation split" in notes(metrics=["auc"])
    with pytest.raises(DatasetError, match="evaluation_form"):
        notes(features=5)
