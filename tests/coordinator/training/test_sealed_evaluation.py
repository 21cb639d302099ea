"""Evaluation on a sealed split: one value for any hosting, no example for the driver, no answer taken on trust."""

import json

import numpy as np
import pytest

from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.messages import parse, seal
from raycloak.attestation.keys.run_secret import run_id_of
from raycloak.attestation.orchestrator.evaluation_order import EvaluationOrder
from raycloak.attestation.orchestrator.revocations import revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.training.assignment import NewRun, ReplayedRun, ResumedRun
from raycloak.coordinator.training.pace import StopRequest
from raycloak.metrics.errors import ConfigError, DatasetError, RunFailedError
from raycloak.workers.evaluation import EvaluationAnswer, EvaluationReply, Scores
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.sealed import seal_dataset
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import SECRET, VIRTUAL_WORKERS, Call, Fate, WholeRun, config, examples, on, settle, whole_run

KEY, COUNT = Secret(b"e" * 32), 30
NOBODY_JOINS = ["failure.join_timeout_s=0"]


def split():
    features, labels = examples(100)
    return features[-COUNT:], labels[-COUNT:]


def sealed(home, features=6):
    """Seal a split for the runs of ``home``; returns the configuration's section."""
    settle(home)
    vendor = SimulatedVendor.load_or_create(home / "simulator")
    policy = simulated_policy(vendor, code_measurement())
    if not (home / "split").exists():
        rows, labels = split()
        dataset = ArrayDataset(rows[:, :features], labels)
        seal_dataset(dataset, VIRTUAL_WORKERS, policy.digest(), KEY, home / "split", "evaluation")
    (home / "data.key").touch(mode=0o600)
    (home / "data.key").write_text(KEY.reveal().hex())
    dataset = {"kind": "sealed", "path": str(home / "split"), "key_file": str(home / "data.key"), "public": True}
    return {"dataset": dataset, "every": 2}


def evaluated(home, **arguments) -> WholeRun:
    """Return a run of three steps that is measured after the second and at the end."""
    run = whole_run(home, evaluation=sealed(home), **arguments)
    run.train()
    return run


def results(run: WholeRun) -> list[float | None]:
    """Return the figures that progress told after each step, and the verdict's."""
    assert run.finished is not None
    assert run.finished.evaluation is not None
    return [*(report.evaluation_accuracy for report in run.reports), run.finished.evaluation.value]


def orders(run: WholeRun) -> list[tuple[int, str]]:
    """Return steps and digest of each order in the evidence log."""
    found = [body for kind, body in run.evidence if kind == "evaluation_ordered"]
    return [(body["finished_steps"], body["model_digest"]) for body in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> WholeRun:
    return evaluated(tmp_path_factory.mktemp("undisturbed"))


def test_a_sealed_split_gives_what_the_same_split_gives_in_the_clear(undisturbed, tmp_path):
    """At the same moments, and measured once a model."""
    features, labels = split()
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "split.npz", features=features, labels=labels)
    public = {"kind": "npz", "path": "split.npz", "features": "features", "public": True}
    clear = whole_run(tmp_path, evaluation={"dataset": public, "every": 2})
    clear.train()
    assert results(undisturbed) == results(clear)
    assert [each is None for each in results(clear)] == [True, False, False, False]
    assert orders(undisturbed) == [(2, undisturbed.digests[1]), (3, undisturbed.digests[2])]
    assert orders(clear) == []
    events = [event for event in undisturbed.told if event["event"] == "step"]
    assert [event.get("evaluation_accuracy") for event in events] == results(undisturbed)[:3]


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_result_is_the_same_for_any_number_of_workers(tmp_path, loss):
    """8 virtual workers on 1, 2 and 3 hosts; all bits of a mean loss."""
    found = set()
    for workers in (1, 2, 3):
        one = {"num_workers": workers, "secure_aggregation": workers > 1}
        model = {} if loss == "cross_entropy" else {"model": "tests.models:linear_regression"}
        run = evaluated(tmp_path, steps=1, loss=loss, **one, **model)
        assert run.finished is not None
        assert run.finished.evaluation is not None
        found.add((run.finished.evaluation.metric, run.finished.evaluation.value))
    ((metric, _),) = found
    assert metric == ("accuracy" if loss == "cross_entropy" else "loss")


def test_scores_are_added_in_the_order_of_the_slices():
    """If the hosts were added in another order, bits would tell who hosts what."""
    scores = {2: Scores(1.0, ((0, 1, 2), (7, 0, 1))), 0: Scores(1e16, ((0, 1, 3),)), 1: Scores(-1e16, ())}
    assert Scores.added(scores) == Scores.added(dict(sorted(scores.items()))) == Scores(1.0, ((0, 2, 5), (7, 0, 1)))
    assert scores[2].total + scores[0].total + scores[1].total == 0.0


def forging(reply: EvaluationReply) -> tuple[EvaluationReply]:
    """Return another's signature."""
    assert reply.answer is not None
    answer = seal(parse(EvaluationAnswer, reply.answer.body), IdentityKey.generate())
    return (reply.model_copy(update={"answer": answer}),)


def failing(reply: EvaluationReply) -> tuple[EvaluationReply]:
    """Return no answer, and why."""
    return (EvaluationReply(member_id=reply.member_id, code="worker_error"),)


FATES: list[tuple[Fate, str]] = [
    ("dies after", "died"),
    ("hangs", "deadline"),
    (forging, "signature"),
    (lambda reply: (reply.model_copy(update={"answer": None}),), "answer_mismatch"),
    (failing, "worker_error"),
]


@pytest.mark.parametrize(("fate", "code"), FATES, ids=["dies", "hangs", "forges", "is empty", "fails"])
def test_a_worker_lost_in_an_evaluation_costs_a_retry_with_the_new_hosts(tmp_path, undisturbed, fate, code):
    run = evaluated(tmp_path, disturb=on("evaluate", "worker-1", fate), overrides=NOBODY_JOINS)
    assert run.left == [("worker-1", code)]
    assert results(run) == results(undisturbed)
    assert run.digests == undisturbed.digests
    assert [steps for steps, _ in orders(run)] == [2, 2, 3]
    first, again = (parse(EvaluationOrder, run.stage.calls("evaluate")[i].arguments[0].body) for i in (0, 3))
    assert "worker-1" not in {member.member_id for member in again.members}
    given = [(kind, body) for kind, body in run.evidence if kind in ("expelled", "released")]
    after = given[[kind for kind, _ in given].index("expelled") + 1 :]
    moved = [set(body["virtual_workers"]) for _, body in after if body["kind"] == "evaluation"]
    lost = set(first.member("worker-1").virtual_workers)
    assert set().union(*moved) >= lost, "the keys of its slices went to those who took them over"
    assert all(body["member_id"] != "worker-1" for _, body in after)


def test_evaluations_that_fail_everywhere_alike_end_the_run(tmp_path):
    """Another worker would fail as well."""

    def fail(call: Call) -> Fate:
        return (
            (lambda reply: (EvaluationReply(member_id=reply.member_id, code="worker_error"),))
            if call.method == "evaluate"
            else None
        )

    run = whole_run(tmp_path, evaluation=sealed(tmp_path), disturb=fail)
    everywhere = "worker_error: every worker failed in the evaluation after step 1"
    with run.events, pytest.raises(RunFailedError, match=everywhere):
        run.coordinator.run()
    finished = run.coordinator.salvage(destroy=False)
    for actor in run.session.control.actors.values():
        actor.handle.close()
    assert finished is not None
    assert (finished.steps, finished.evaluation) == (2, None), "a run that failed asks its workers nothing more"
    assert len(run.stage.calls("evaluate")) == 3


def test_evidence_that_expired_is_renewed_before_a_model_is_measured(tmp_path, undisturbed):
    """The order is for members with valid evidence: one that was revoked gets none, and its slices move."""

    def take_back(call: Call) -> Fate:
        if (call.method, call.index) == ("order_evaluation", 0):
            state = state_file(tmp_path / "orchestrator", run.session.run_id)
            revoke(state, "member", "worker-2", reason="stolen", now=0)
        return None

    run = whole_run(tmp_path, evaluation=sealed(tmp_path), disturb=take_back, overrides=NOBODY_JOINS)
    run.train()
    assert run.left == [("worker-2", "revoked")]
    assert results(run) == results(undisturbed)
    assert "worker-2" not in {call.member_id for call in run.stage.calls("evaluate")}


def test_a_run_resumes_from_packages_that_state_results_on_a_sealed_split(tmp_path, undisturbed):
    """It is asked to stop while the second model is measured."""
    settings = CheckpointConfig(checkpoint_frequency=1, num_to_keep=1, keep_best="evaluation_accuracy")
    section, stop = sealed(tmp_path), StopRequest()

    def ask_to_stop(call: Call) -> Fate:
        if call.method == "evaluate":
            stop.make()
        return None

    archive = Archive(settings, run_id_of(Secret(bytes.fromhex(SECRET))), tmp_path, lambda line: None)
    first = whole_run(tmp_path, evaluation=section, disturb=ask_to_stop, assignment=NewRun(archive, stop))
    first.train()
    stated = [json.loads(path.read_bytes()) for path in tmp_path.rglob("*.tssp/manifest.json")]
    assert [(each["step"], each["evaluation_accuracy"]) for each in stated] == [(2, results(undisturbed)[1])]
    recorded = Manifest.model_validate_json((first.folder / "manifest.json").read_bytes())
    again = whole_run(tmp_path, evaluation=section, assignment=ResumedRun(recorded, archive))
    again.train()
    assert results(again) == results(undisturbed)[-2:]
    repeat = ReplayedRun(recorded, archive, 0, first.config.steps)
    replayed = whole_run(tmp_path, evaluation=section, assignment=repeat)
    replayed.train()
    assert replayed.digests == undisturbed.digests
    given = [references[0].value for call, references in replayed.stage.log if call.method == "release"]
    assert given
    assert all(release.evaluation is None for release in given)
    assert replayed.stage.calls("evaluate") == replayed.stage.calls("order_evaluation") == []


def test_a_plan_checks_the_split_and_says_how_it_is_kept(tmp_path):
    np.savez(tmp_path / "examples.npz", features=examples()[0], labels=examples()[1])
    np.savez(tmp_path / "public.npz", features=examples()[0] + 1, labels=examples()[1])
    section = sealed(tmp_path)
    plan = plan_of(config(evaluation=section), tmp_path)
    assert dict(plan_rows(plan))["evaluation data"].startswith("sealed: ")
    assert plan.as_json()["evaluation_data"] == "sealed"
    public = {"dataset": {"kind": "npz", "path": "public.npz", "features": "features", "public": True}}
    assert dict(plan_rows(plan_of(config(evaluation=public), tmp_path)))["evaluation data"] == "public, in the clear"
    assert "evaluation data" not in dict(plan_rows(plan_of(config(), tmp_path)))
    undeclared = {"dataset": section["dataset"] | {"public": False}}
    with pytest.raises(ConfigError, match="evaluation_not_public"):
        plan_of(config(evaluation=undeclared), tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(DatasetError, match="evaluation_form"):
        plan_of(config(evaluation=sealed(tmp_path / "other", features=5)), tmp_path)
