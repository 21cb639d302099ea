"""Measurements in whole runs of plain objects: noised, paid for, exact, and the same after whatever goes wrong."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycloak.attestation.core.messages import parse, seal
from raycloak.attestation.core.roster import Roster
from raycloak.coordinator.accounting.calibration import composed_epsilon
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.aggregation.aggregator import ReduceRequest
from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.cli.views.verdict import verdict_text
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.ledger.entries import RunRegistered, StepCharged
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.measurements import Schedule
from raycloak.coordinator.planning.plan import make_plan
from raycloak.coordinator.record.verdict import Verdict
from raycloak.coordinator.report.words import released_text
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.coordinator.training.assignment import NewRun, ReplayedRun, ResumedRun
from raycloak.metrics.errors import ConfigError, ProtocolError, RunFailedError
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.run_member import RunMember
from raycloak.workers.terms.measurement import Released, released
from raycloak.workers.vectors.payload import VectorRange
from tests.coordinator.runs.test_resumed_runs import Killed, archive, killed_at, manifest_of
from tests.models import small_model
from tests.protocol import HandRun, WholeRun, config, examples, on, orchestrator_key, trained, whole_run

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MEASURED: dict[str, Any] = {
    "measurements": {
        "class_counts": {"classes": 3, "noise_multiplier": 0.5},
        "evaluation": {"every": 2, "noise_multiplier": 2.0, "loss_bound": 4.0},
    },
    "dp_config": {"noise_multiplier": 2.0, "epsilon_cap": 40.0},
}
BEFORE_THE_LAST = [("class_counts", 0), ("gradient", 0), ("gradient", 1), ("evaluation", 0), ("gradient", 2)]
RELEASES = [*BEFORE_THE_LAST, ("evaluation", 1)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> WholeRun:
    """A run of three steps that counts classes first, and evaluates after two steps and at the end."""
    return trained(tmp_path_factory.mktemp("measured"), **MEASURED)


def charges(run: WholeRun) -> list[tuple[str, int]]:
    ledger = PrivacyLedger(f"sqlite:///{run.home / 'ledger.sqlite'}", create=False)
    ledger.verify()
    found = [(e.event.query, e.event.step) for e in ledger.history() if isinstance(e.event, StepCharged)]
    ledger.close()
    return found


def values(run: WholeRun) -> list[Released]:
    return sorted(run.coordinator.order.folder.released(), key=lambda each: (each.query, each.number))


def truth(parameters: np.ndarray) -> dict[str, float]:
    """Mean loss and accuracy of the small model on the examples."""
    module = small_model().eval()
    torch.nn.utils.vector_to_parameters(torch.tensor(parameters), module.parameters())
    features, labels = (torch.tensor(array) for array in examples())
    with torch.no_grad():
        output = module(features)
        loss = cross_entropy(output, labels).clamp(-4, 4).mean()
    return {"loss": float(loss), "accuracy": float((output.argmax(1) == labels).double().mean())}


# --- what is released


def test_released_counts_and_means_are_the_truth_within_six_deviations(measured: WholeRun):
    """Seven values; a false alarm has probability below 2e-8."""
    counts, first, last = values(measured)
    assert [(each.query, each.number, each.after) for each in (counts, first, last)] == [
        ("class_counts", 0, 0),
        ("evaluation", 0, 2),
        ("evaluation", 1, 3),
    ]
    labels = examples()[1]
    expected = {f"count_{label}": float(np.count_nonzero(labels == label)) for label in range(3)}
    for said, true in ((counts, expected), (last, truth(measured.finished.parameters))):
        assert said.values.keys() == true.keys() == said.deviation.keys()
        for name, value in said.values.items():
            assert 0 < abs(value - true[name]) < 6 * said.deviation[name], name
    assert counts.deviation["count_0"] == pytest.approx(0.5, rel=0.01)
    assert last.deviation["loss"] == pytest.approx(2.0 * math.sqrt(2) * 4.0 / 40, rel=0.01)
    assert last.deviation["accuracy"] == pytest.approx(2.0 * math.sqrt(2) / 40, rel=0.01)


def test_pairs_of_classes_are_released_with_the_evaluation_and_the_verdict_has_their_f1(tmp_path: Path):
    """Eleven values; a false alarm has probability below 3e-8."""
    pairs = {"evaluation": {"noise_multiplier": 2.0, "classes": 3}}
    run = trained(tmp_path, **MEASURED | {"measurements": pairs}, steps=1)
    (last,) = values(run)
    module = small_model().eval()
    torch.nn.utils.vector_to_parameters(torch.tensor(run.finished.parameters), module.parameters())
    features, labels = examples()
    expected = np.zeros((3, 3))
    np.add.at(expected, (labels, module(torch.tensor(features)).argmax(1).numpy()), 1 / 40)
    for (label, predicted), share in np.ndenumerate(expected):
        name = f"share_{label}_{predicted}"
        assert 0 < abs(last.values[name] - share) < 6 * last.deviation[name], name
    assert last.deviation["share_0_0"] == pytest.approx(2.0 * math.sqrt(3) / 40, rel=0.01)
    verdict = verdict_of(run.finished, run.folder, 1.0, "complete", ())
    assert f"macro F1 {last.f1:.3f}" in verdict_text(verdict)
    with pytest.raises(ConfigError, match="cross_entropy"):
        config(measurements=pairs, loss="mse")


def test_every_release_is_charged_once_before_it_is_made_as_an_event_of_its_own(measured: WholeRun):
    assert charges(measured) == RELEASES
    ledger = PrivacyLedger(f"sqlite:///{measured.home / 'ledger.sqlite'}", create=False)
    (registered,) = [e.event for e in ledger.history() if isinstance(e.event, RunRegistered)]
    (run,) = ledger.view().accounts[0].runs
    spent = ledger.view().accounts[0].spent_epsilon
    ledger.close()
    assert registered.mechanisms == measured.finished.manifest.computation.mechanisms
    assert [(each.query, each.charged, each.planned) for each in run.queries] == [
        ("gradient", 3, 3),
        ("class_counts", 1, 1),
        ("evaluation", 2, 2),
    ]
    alone = (Release(0.5, 2.0, 3), Release(1.0, 0.5, 1), Release(1.0, 2.0, 2))
    assert spent == pytest.approx(composed_epsilon(alone, 1e-5, "pld"), rel=1e-9)
    assert measured.finished.charged_epsilon == pytest.approx(measured.finished.plan.epsilon, rel=1e-9)


def test_the_run_tells_what_was_released_with_its_noise_and_nothing_else(measured: WholeRun):
    lines = [line for line in measured.told if line["event"] == "measurement"]
    assert [(line["query"], line["release"], line["value_name"]) for line in lines] == [
        *(("class_counts", 0, f"count_{label}") for label in range(3)),
        *(("evaluation", number, name) for number in range(2) for name in ("loss", "accuracy")),
    ]
    told = {(line["query"], line["release"], line["value_name"]): line["value"] for line in lines}
    expected = {(each.query, each.number, name): v for each in values(measured) for name, v in each.values.items()}
    assert told == expected
    assert all(line["noise_deviation"] > 0 and line["epsilon"] <= 40 for line in lines)


def test_the_verdict_shows_releases_and_counts_them_in_epsilon(measured: WholeRun):
    verdict = verdict_of(measured.finished, measured.folder, 1.0, "complete", ())
    assert verdict.privacy_epsilon == pytest.approx(measured.finished.plan.epsilon_outsiders)
    assert verdict.privacy_epsilon > composed_epsilon((Release(0.5, 2.0, 3),), 1e-5) * 2
    result = {"run_dir": str(measured.folder), "metrics": json.loads(json.dumps(verdict.metrics()))}
    assert [each["query"] for each in result["metrics"]["measurements"]] == ["class_counts", "evaluation", "evaluation"]
    assert Verdict.of(result).measurements == verdict.measurements
    text = verdict_text(verdict)
    assert "private class counts" in text
    assert "private evaluation" in text
    assert "noised, after 3 steps" in text


def test_many_counts_are_shown_in_part():
    many = Released(
        query="class_counts",
        number=0,
        after=0,
        values={f"count_{label}": 10.0 for label in range(100)},
        deviation={f"count_{label}": 1.0 for label in range(100)},
    )
    assert released_text(many) == f"{', '.join(f'{n}: 10 ± 1' for n in range(12))} and 88 more; noised, after 0 steps"


def test_no_value_leaves_a_worker_in_the_clear(measured: WholeRun):
    """Words that workers returned for measurements are spread over the whole ring; a clear sum fills little of it.

    Of 21 uniform words at least one lies in the middle half, but for one case in 2^21; the keys are fixed here.
    """
    calls = [references for call, references in measured.stage.log if call.method == "step"]
    vectors = [reference.value for references in calls for reference in references[1:]]
    words = [word for vector in vectors if len(vector) in (2, 3) for word in vector]
    assert len(words) == 3 * (3 + 2 + 2)
    capacity = 2 ** (8 * words[0].itemsize)
    assert any(capacity // 4 < int(word) < 3 * capacity // 4 for word in words)


# --- exactness and recovery


def test_releases_do_not_depend_on_the_number_of_workers(tmp_path, measured: WholeRun):
    other = trained(tmp_path, num_workers=4, aggregators=2, **MEASURED)
    assert values(other) == values(measured)
    assert other.digests == measured.digests


@pytest.mark.parametrize(
    "disturb",
    [
        on("step", "worker-1", "dies", 0),
        on("step", "worker-0", "dies after", 3),
        on("measure", "aggregator-0-0", "dies", 1),
    ],
    ids=["counting worker", "evaluating worker", "aggregator"],
)
def test_a_loss_during_a_measurement_changes_no_value_and_charges_nothing_twice(tmp_path, measured, disturb):
    run = trained(tmp_path, disturb=disturb, **MEASURED)
    assert run.departures or len({call.member_id for call in run.stage.calls("measure")}) == 2
    assert values(run) == values(measured)
    assert run.digests == measured.digests
    assert charges(run) == RELEASES


@pytest.mark.parametrize(("method", "index"), [("charge", 0), ("measure", 0), ("charge", 3), ("measure", 2)])
def test_a_killed_driver_resumes_with_the_same_values_and_no_second_charge(tmp_path, measured, method, index):
    first = whole_run(tmp_path, assignment=NewRun(archive(tmp_path)), disturb=killed_at(method, index), **MEASURED)
    with pytest.raises(Killed):
        first.train()
    again = ResumedRun(manifest_of(first), archive(tmp_path))
    second = whole_run(tmp_path, assignment=again, **MEASURED)
    second.coordinator.order.folder.path = first.folder
    second.train()
    assert values(second) == values(measured)
    assert second.digests[-1] == measured.digests[-1]
    assert charges(second) == RELEASES


def test_a_release_that_does_not_reproduce_stops_the_run_before_it_is_decoded(tmp_path, measured, monkeypatch):
    first = whole_run(tmp_path, assignment=NewRun(archive(tmp_path)), disturb=killed_at("measure", 1), **MEASURED)
    with pytest.raises(Killed):
        first.train()

    unchanged = RunMember._compute

    def compute(self, roster, *arguments):
        unchanged(self, roster, *arguments)
        if roster.query == "evaluation":
            self._hosted.tags = dict.fromkeys(self._hosted.tags, bytes(16))

    monkeypatch.setattr(RunMember, "_compute", compute)
    again = ResumedRun(manifest_of(first), archive(tmp_path))
    second = whole_run(tmp_path, assignment=again, **MEASURED)
    with pytest.raises(RunFailedError, match="not_reproducible"):
        second.train()
    decoded = [parse(Roster, call.arguments[0].roster.body).query for call in second.stage.calls("measure")]
    assert "evaluation" not in decoded, decoded


def test_a_replay_repeats_measurements_and_charges_nothing(tmp_path):
    first = trained(tmp_path, assignment=NewRun(archive(tmp_path)), secret="cd" * 32, **MEASURED)
    before = charges(first)
    replayed = whole_run(
        tmp_path,
        assignment=ReplayedRun(manifest_of(first), archive(tmp_path), 0, first.config.steps),
        secret="cd" * 32,
        **MEASURED,
    )
    replayed.train()
    assert charges(replayed) == before
    assert len(replayed.stage.calls("measure")) == 3
    assert not (replayed.folder / "measurements.json").exists()


# --- who may ask for what


def test_a_receipt_for_training_does_not_pay_for_a_measurement(tmp_path):
    hand = HandRun(tmp_path, **MEASURED)
    counts = hand.measurements[0]
    roster = hand.orchestrator.open_step(0, hand.hosting, ("aggregator-0",), (), "class_counts")
    whole = (VectorRange(index=0, offset=0, length=3),)
    assert hand.code("worker-0", hand.request(roster, ranges=whole)) == "receipt_mismatch"
    named = hand.receipt(query="class_counts")
    assert hand.code("worker-0", hand.request(roster, ranges=whole, receipt=named)) == "receipt_mismatch"
    paid = hand.receipt(query="class_counts", mechanism_digest=counts.mechanism.digest())
    assert hand.code("worker-0", hand.request(roster, receipt=paid)) == "range_mismatch"
    roster = hand.orchestrator.open_step(0, hand.hosting, ("aggregator-0",), (), "class_counts")
    assert hand.code("worker-0", hand.request(roster, ranges=whole, receipt=paid)) == "ok"


def test_attempts_of_a_query_count_by_themselves_and_are_fenced(tmp_path):
    hand = HandRun(tmp_path, **MEASURED)
    whole = (VectorRange(index=0, offset=0, length=3),)
    paid = hand.receipt(query="class_counts", mechanism_digest=hand.measurements[0].mechanism.digest())
    rosters = [hand.orchestrator.open_step(0, hand.hosting, ("aggregator-0",), (), "class_counts") for _ in range(2)]
    assert [Roster.model_validate_json(each.body).attempt for each in rosters] == [0, 1]
    training = hand.roster()
    assert Roster.model_validate_json(training.body).attempt == 0
    request = hand.request(rosters[1], ranges=whole, receipt=paid)
    assert hand.code("worker-0", request) == hand.code("worker-0", request) == "ok"
    assert hand.code("worker-0", hand.request(rosters[0], ranges=whole, receipt=paid)) == "step_fenced"
    assert hand.code("worker-0", hand.request(training)) == "ok"
    assert hand.code("worker-0", request) == "step_fenced"


def test_an_aggregator_never_takes_one_query_for_another(tmp_path):
    hand = HandRun(tmp_path, **MEASURED)
    request, vectors = hand.compute(hand.roster())
    with pytest.raises(ProtocolError, match="query_unknown"):
        hand.aggregators[0].measure(request, hand.binding(request), *vectors[0])
    body = Roster.model_validate_json(request.roster.body).model_copy(update={"query": "evaluation"})
    other = request.model_copy(update={"roster": seal(body, orchestrator_key())})
    with pytest.raises(ProtocolError, match="query_mismatch"):
        hand.reduce(other, vectors)
    assert isinstance(other, ReduceRequest)


def test_a_run_without_measurements_makes_none(tmp_path):
    hand = HandRun(tmp_path)
    roster = hand.orchestrator.open_step(0, hand.hosting, ("aggregator-0",), (), "evaluation")
    assert hand.code("worker-0", hand.request(roster)) == "query_unknown"


# --- planning


def plan(**changes: Any):
    return make_plan(config(**{**MEASURED, **changes}), 40, 83)


def test_the_target_covers_training_and_every_measurement():
    target = {"dp_config": {"target_epsilon": 30.0}}
    planned, bare = plan(**target), plan(**target, measurements={})
    assert planned.mechanism.noise_multiplier > bare.mechanism.noise_multiplier
    everything = Schedule(planned.mechanism, planned.measurements).releases(3, 3)
    assert 0.997 * 30 <= composed_epsilon(everything, 1e-5, "pld") <= 30
    assert planned.epsilon == composed_epsilon(everything, 1e-5, "pld")
    assert planned.steps_within_cap == 3
    assert planned.epsilon_curve[-1] == (3, planned.epsilon)


def test_the_plan_lists_each_mechanism_with_its_own_epsilon_and_the_total():
    planned = plan()
    fields = json.loads(json.dumps(planned.as_json(), allow_nan=False))
    assert [(each["query"], each["releases"], each["noise_multiplier"]) for each in fields["mechanism_costs"]] == [
        ("gradient", 3, 2.0),
        ("class_counts", 1, 0.5),
        ("evaluation", 2, 2.0),
    ]
    alone = [each.epsilon_alone for each in planned.mechanism_costs]
    assert max(alone) < planned.epsilon < sum(alone)
    assert alone[1] == pytest.approx(composed_epsilon((Release(1.0, 0.5, 1),), 1e-5, "pld"))
    assert [each["mechanism"]["query"] for each in fields["measurements"]] == ["class_counts", "evaluation"]
    rows = dict(plan_rows(planned))
    assert "2 times at noise multiplier 2" in rows["evaluation"]
    assert "gradient" not in dict(plan_rows(plan(measurements={})))


def test_the_cap_counts_what_is_measured_before_a_step():
    before_the_last = (Release(0.5, 2.0, 3), Release(1.0, 0.5, 1), Release(1.0, 2.0, 1))
    cap = composed_epsilon(before_the_last, 1e-5, "rdp") - 1e-6
    capped = {"noise_multiplier": 2.0, "epsilon_cap": cap, "accountant": "rdp"}
    with_counts, without = plan(dp_config=capped), plan(dp_config=capped, measurements={})
    assert without.steps_within_cap == 3
    assert with_counts.steps_within_cap == 2
    assert with_counts.epsilon <= cap


def test_a_cap_without_room_for_the_last_evaluation_ends_the_run_there(tmp_path):
    held = {**MEASURED["dp_config"], "accountant": "rdp"}
    full = composed_epsilon(plan(dp_config=held).releases, 1e-5, "rdp")
    run = trained(tmp_path, **{**MEASURED, "dp_config": held | {"epsilon_cap": full - 1e-6}})
    assert run.finished.steps == 3
    assert run.finished.ending.value == "cap_exceeded"
    assert charges(run) == BEFORE_THE_LAST
    assert run.finished.charged_epsilon == pytest.approx(run.finished.plan.epsilon)


def test_under_pld_a_cap_has_room_for_all_steps_and_measurements_or_the_plan_is_refused():
    full = plan().epsilon
    assert plan(dp_config={"noise_multiplier": 2.0, "epsilon_cap": full}).steps_within_cap == 3
    with pytest.raises(ConfigError, match=r"cap_too_small.*together only if all.*about 2 fit.*accountant: rdp"):
        plan(dp_config={"noise_multiplier": 2.0, "epsilon_cap": full - 1e-6})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"dp_config": {"target_epsilon": 3.0}}, "measurements_too_costly"),
        ({"measurements": {"class_counts": {"classes": 3, "noise_multiplier": 1e-3}}}, "noise_too_small"),
        ({"dp_config": {"noise_multiplier": 2.0, "epsilon_cap": 1.0}}, "cap_too_small"),
    ],
)
def test_measurements_that_do_not_fit_are_refused_with_numbers(changes: dict[str, Any], code: str):
    with pytest.raises(ConfigError, match=code):
        plan(**changes)


def test_the_example_is_planned_within_its_target_and_measures_usefully():
    """Each class has about 144 of the 1,437 images, and a mean over all is off by 0.02."""
    planned = plan_of(load_config(EXAMPLES / "digits_measured.yaml"), EXAMPLES)
    assert 7.99 < planned.epsilon <= 8
    counts, evaluation = planned.measurements
    assert released(counts, 0, 60, np.zeros(10)).deviation["count_0"] < 21
    assert released(evaluation, 0, 60, np.zeros(2)).deviation["accuracy"] < 0.021
    gradient, *others = planned.mechanism_costs
    assert max(each.epsilon_alone for each in others) < 0.5 < gradient.epsilon_alone


def test_public_data_is_measured_without_noise_and_not_here():
    public = {"dp_config": {"enabled": False}, "dataset": {"kind": "digits", "public": True}}
    with pytest.raises(ConfigError, match="measure public data with evaluation"):
        config(**{**MEASURED, **public})


def test_labels_that_cannot_be_counted_end_the_run_before_anything_is_registered(tmp_path):
    features, labels = examples()
    run = whole_run(
        tmp_path,
        data=(features, labels.astype(np.float32)),
        loss="mse",
        model="tests.models:linear_regression",
        **MEASURED,
    )
    with pytest.raises(ConfigError, match="measurement_labels"):
        run.train()
    assert run.stage.calls("register_run") == run.stage.calls("charge") == []
