"""The spans of whole runs in one process: which parts, inside which, with which figures."""

import pytest
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from raycloak.coordinator.training.assignment import NewRun, ResumedRun
from raycloak.metrics.events import FIELD_BY_NAME
from raycloak.metrics.exporter import Exporter
from raycloak.metrics.registry import WORKER_PHASES
from raycloak.workers.device.step_clock import StepUsage
from tests.coordinator.planning.test_measurements import MEASURED
from tests.coordinator.runs.test_resumed_runs import Killed, archive, killed_at, manifest_of
from tests.protocol import RENYI, on, trained, whole_run
from tests.spans import Kept, attributes


@pytest.fixture(scope="module")
def retried(tmp_path_factory):
    """A run of three steps, whose worker-1 dies in the second and whose ledger dies in the third."""
    kept = Kept()

    def disturb(call):
        return on("step", "worker-1", "dies", 1)(call) or on("bind_vectors", "ledger", "dies", 2)(call)

    run = trained(tmp_path_factory.mktemp("run"), disturb=disturb, traces=kept, dp_config=RENYI)
    return run, kept


def test_the_spans_of_a_run_are_its_parts(retried):
    _, kept = retried
    charge = ("charge", [("roster", [])])

    def compute(workers):
        return "compute", [("worker", [])] * workers

    assert kept.trees == [
        ("prepare", []),
        ("admit", []),
        ("train", []),
        ("step", [charge, ("attempt", [compute(3), ("reduce", [])])]),
        (
            "step",
            [charge, ("attempt", [compute(3)]), ("roster", []), ("attempt", [compute(2), ("reduce", [])])],
        ),
        ("step", [charge, ("attempt", [compute(3), ("reduce", [("recover", [])])])]),
        ("finish", [("commit", [])]),
    ]


def test_spans_tell_steps_attempts_workers_and_failures(retried):
    run, kept = retried
    run_id = run.session.run_id
    assert kept.named("step") == [
        {"run": run_id, "step": 0, "attempts": 1},
        {"run": run_id, "step": 1, "attempts": 2},
        {"run": run_id, "step": 2, "attempts": 1},
    ]
    attempts = kept.named("attempt")
    assert [(each["attempt"], each.get("code")) for each in attempts] == [
        (1, None), (1, "repeated"), (2, None), (1, None),
    ]  # fmt: skip
    died = [each for each in kept.named("worker") if "code" in each]
    assert died == [{"member": "worker-1", "code": "died"}]
    assert kept.named("recover") == [{"role": "ledger", "cause": "died"}]
    for each in kept.ended:
        assert all(FIELD_BY_NAME[name].privacy.exportable for name in attributes(each))


def test_the_phases_of_steps_name_the_traces_that_they_were_measured_in(retried, tmp_path):
    """To readers of OpenMetrics alone; without traces nothing is named."""
    run, kept = retried
    steps = {f"{each.context.trace_id:032x}" for each in kept.ended if each.name == "step"}
    named = exemplars(run)
    assert {phase for phase, _ in named} == {"charge", "compute", "reduce"}
    assert {trace for _, trace in named} <= steps
    assert exemplars(trained(tmp_path, steps=1, dp_config=RENYI)) == set()


def exemplars(run):
    """Return phase and trace of each exemplar on the page."""
    exporter = Exporter()
    exporter.add(run.metrics[0])
    page = generate_latest(exporter.registry).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {(each.labels["phase"], each.exemplar.labels["trace_id"]) for each in samples if each.exemplar}


def test_a_worker_took_as_long_as_it_says_within_what_was_waited(tmp_path):
    kept = Kept()

    def lie(*answer):
        reply, *vectors = answer
        lies = {"seconds": float("nan"), "usage": StepUsage(model_seconds=1e9, masks_seconds=-1.0)}
        return reply.model_copy(update=lies), *vectors

    trained(tmp_path, disturb=on("step", "worker-0", lie), traces=kept, steps=1, dp_config=RENYI)
    (compute,) = (each for each in kept.ended if each.name == "compute")
    for each in kept.ended:
        if each.name == "worker":
            assert compute.start_time <= each.start_time <= each.end_time <= compute.end_time
            for phase in WORKER_PHASES:
                assert 0 <= attributes(each)[f"{phase}_seconds"] <= (compute.end_time - compute.start_time) / 1e9


def test_a_resumed_run_shows_what_it_repeats_and_its_checkpoints(tmp_path):
    """The driver is killed in the third step; a package of two steps is sealed before."""
    first, second = Kept(), Kept()
    run = whole_run(
        tmp_path, assignment=NewRun(archive(tmp_path)), disturb=killed_at("charge", 3), traces=first,
        steps=5, dp_config=RENYI,
    )  # fmt: skip
    with pytest.raises(Killed):
        run.train()
    assert [each["step"] for each in first.named("step")] == [0, 1, 2, 3]
    assert first.named("step")[-1]["code"] == "unexpected"
    assert first.named("checkpoint") == [{"steps": 2}]
    again = ResumedRun(manifest_of(run), archive(tmp_path))
    resumed = trained(tmp_path, assignment=again, traces=second, steps=5, dp_config=RENYI)
    steps = [each["step"] for each in second.named("step")]
    assert steps == list(range(5 - len(resumed.digests), 5))
    assert {each["run"] for each in second.named("step")} == {run.session.run_id}


def test_measurements_and_evaluations_have_spans(tmp_path):
    kept = Kept()
    run = trained(tmp_path, **MEASURED | {"steps": 1}, traces=kept)
    assert [(each["query"], each["release"]) for each in kept.named("measurement")] == [
        (each.commit.query, each.commit.step) for each in run.finished.measurement_outcomes
    ]
    assert kept.named("measurement")
