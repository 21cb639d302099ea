"""A log of any length becomes figures of the newest steps, and neither a pause nor a repeated step counts."""

import sys
from itertools import pairwise

import pytest

from raycloak.coordinator.record.run_course import CURVE_POINTS, INCIDENTS, RATED, Curve, RunCourse
from raycloak.coordinator.record.run_reader import EventTail
from tests.coordinator.record.run_logs import LoggedRun


def course(run):
    return RunCourse.of(EventTail(run.path).read())


def test_a_log_without_an_event_has_no_figures():
    empty = RunCourse.of(())
    assert (empty.steps, empty.planned_steps, empty.times(), empty.executions) == (0, None, None, 0)
    assert (empty.seconds_left(1.0), empty.seconds_silent(1.0), empty.epsilon.points) == (None, None, [])


def test_rates_and_the_time_left_follow_committed_steps():
    run = LoggedRun()
    run.admit(steps=10)
    for step in range(4):
        run.step(step, after=2.0)
    found, now = course(run), run.time.now
    assert (found.steps, found.planned_steps, found.workers) == (4, 10, 3)
    times = found.times()
    assert (times.whole, times.charge, times.compute, times.reduce) == pytest.approx((2.0, 0.2, 1.0, 0.4))
    assert (times.other, times.masked_bytes) == pytest.approx((0.4, 1000))
    assert found.seconds_left(now) == pytest.approx(12.0)
    # It counts down until the next step is there.
    assert found.seconds_left(now + 5.0) == pytest.approx(7.0)
    assert found.seconds_left(now + 50.0) == 0.0
    assert found.seconds_silent(now + 5.0) == pytest.approx(5.0)


def test_time_between_two_executions_counts_nowhere():
    """The guarantee of `RunCourse.times`."""
    run = LoggedRun()
    run.admit(steps=10)
    for step in range(4):
        run.step(step, after=2.0)
    run.time.now += 86_400.0
    run.admit(steps=10)
    assert course(run).times() is None
    run.step(2, after=1.0)
    run.step(3, after=1.0)
    found = course(run)
    assert found.times().whole == pytest.approx(1.0)
    assert found.seconds_left(run.time.now) == pytest.approx(6.0)
    assert (found.executions, found.resumed_at, found.repeated, found.steps) == (2, 2, 2, 4)
    assert [point for point, _ in found.epsilon.points] == [1, 2, 3, 4]


def test_rates_are_of_the_newest_steps():
    run = LoggedRun()
    run.admit(steps=1000)
    for step in range(10):
        run.step(step, after=60.0)
    for step in range(10, 10 + RATED):
        run.step(step, after=0.5)
    assert course(run).times().whole == pytest.approx(0.5)


def test_a_clock_that_was_set_back_gives_no_rate():
    run = LoggedRun()
    run.admit(steps=10)
    run.step(0, after=-5.0)
    assert course(run).times() is None


def test_results_losses_of_members_and_restarts_are_counted_and_told():
    run = LoggedRun()
    run.write("departure", code="evidence_expired")
    run.admit()
    run.step(0, evaluation_accuracy=0.5)
    run.step(1, attempts=3, workers=2)
    run.write("restart", role="ledger", cause="died", seconds=1.0)
    run.write("join", workers=3)
    run.write("metric", steps=2, value_name="recall", value=0.25)
    run.step(2, evaluation_accuracy=0.25)
    found = course(run)
    assert (found.metric, found.quality.points) == ("accuracy", [(1, 0.5), (3, 0.25)])
    assert (found.quality.most, found.quality.least, found.quality.last) == ((1, 0.5), (3, 0.25), (3, 0.25))
    assert (dict(found.departures), dict(found.restarts)) == ({"evidence_expired": 1}, {"ledger": 1})
    assert (found.joins, found.retried, found.own_metrics) == (1, 2, {"recall": 0.25})
    assert [each.says for each in found.incidents] == [
        "a member left: evidence_expired",
        "step 2 took 3 attempts",
        "the ledger was started again: died",
        "a member joined, 3 now",
    ]


@pytest.mark.parametrize(
    "event",
    [
        {"event": "step"},
        {"event": "step", "step": "x", "time": "y"},
        {"event": "step", "step": True},
        {"event": "admitted", "steps_planned": None, "workers": "three"},
        {"event": "metric"},
        {"event": "of_a_later_version", "step": 7},
    ],
)
def test_an_event_that_says_less_than_expected_changes_nothing(event):
    assert (RunCourse.of([event]).steps, RunCourse.of([event]).planned_steps) == (0, None)


def test_the_memory_of_a_course_does_not_grow_with_the_run():
    found = RunCourse.of([{"event": "admitted", "time": 0.0, "steps_planned": 10**6}])
    for step in range(50_000):
        found.take(
            {
                "event": "step",
                "time": float(step),
                "step": step,
                "epsilon": step / 1e4,
                "evaluation_loss": 1.0,
                "attempts": 2,
            }
        )
    assert found.steps == 50_000
    assert max(len(found.epsilon.points), len(found.quality.points)) <= CURVE_POINTS + 1
    assert (len(found.incidents), found.retried) == (INCIDENTS, 50_000)
    assert sys.getsizeof(found._timed) < 4096


def test_a_thinned_curve_still_covers_the_run_evenly():
    curve = Curve()
    for step in range(1, 20_001):
        curve.add(step, float(step))
    steps = [step for step, _ in curve.points]
    gaps = [after - before for before, after in pairwise(steps)]
    assert (steps[0], steps[-1]) == (1, 20_000)
    assert max(gaps) <= 4 * 20_000 / CURVE_POINTS
    assert (curve.least, curve.most) == ((1, 1.0), (20_000, 20_000.0))
