"""Phases and seconds from events that were written by hand: a step takes 1 + 4 + 2 s, with 1 s before the next."""

import dataclasses

import pytest

from raycloak_lab.bench.chaos.child_run import Left, LineTail, StepSeen
from raycloak_lab.bench.chaos.figures import (
    Kill,
    Lengths,
    longest_step,
    phase_hit,
    recovery,
    spread,
    usual_lengths,
)

USUAL = Lengths(between=1.0, charge=1.0, compute=4.0, reduce=2.0)


def _step(step, time=None, **changed):
    ended = 8.0 * (step + 1) if time is None else time
    seen = StepSeen(ended, step, f"{step:02x}", 4, 1, 7.0, 1.0, 4.0, 2.0)
    return dataclasses.replace(seen, **changed)


def _kill(time, role="worker"):
    return Kill(role, "SIGKILL", time, 7)


STEPS = [_step(0), _step(1), _step(2)]


def test_the_usual_lengths_are_those_of_undisturbed_steps():
    slow = _step(3, 92.0, seconds=67.0, attempts=2)
    assert usual_lengths([*STEPS, slow, _step(4, 100.0)]) == USUAL


@pytest.mark.parametrize(
    ("time", "phase"),
    [(8.5, "between"), (9.5, "charge"), (10.5, "compute"), (13.9, "compute"), (14.1, "reduce"), (15.9, "reduce")],
)
@pytest.mark.parametrize("role", ["worker", "ledger", "driver"])
def test_the_phase_is_the_one_under_way(time, phase, role):
    assert phase_hit(_kill(time, role), STEPS, USUAL) == phase


@pytest.mark.parametrize(("time", "phase"), [(10.5, "compute"), (15.0, "reduce"), (20.5, "compute"), (25.0, "reduce")])
def test_of_several_attempts_the_first_is_judged_by_usual_lengths_and_the_last_by_its_own(time, phase):
    # From 9.0: charge to 10.0, a first attempt to about 16.0, the last one from 20.0 to 26.0.
    assert phase_hit(_kill(time), [_step(0), _step(1, 26.0, seconds=17.0, attempts=2)], USUAL) == phase


def test_a_slow_charge_is_still_the_charge():
    assert (
        phase_hit(_kill(12.0, "ledger"), [_step(0), _step(1, 22.0, seconds=13.0, charge_seconds=7.0)], USUAL)
        == "charge"
    )


def test_a_driver_that_died_is_judged_by_the_step_before_however_late_the_next_one_comes():
    assert phase_hit(_kill(11.0, "driver"), [_step(0), _step(1, 80.0)], USUAL) == "compute"


def test_recovery_ends_with_the_step_hit_the_first_whole_step_and_all_workers():
    steps = [_step(0), _step(1), _step(2, 26.0, workers=3), _step(3, 34.0, workers=3), _step(4, 42.0)]
    found = recovery(_kill(15.5), steps, [Left(3.0, "died"), Left(20.0, "died")], USUAL, workers=4)
    # Step 1 no longer needed the worker: it still counts four, and the loss is noticed in step 2.
    assert (found.commit_s, found.settled_s, found.members_s) == (0.5, 10.5, 26.5)


def test_steps_that_a_new_driver_repeats_are_not_the_step_that_was_hit():
    steps = [_step(0), _step(1), _step(0, 50.0), _step(1, 58.0), _step(2, 66.0)]
    found = recovery(_kill(20.0, "driver"), steps, [], USUAL, workers=4)
    assert (found.commit_s, found.settled_s, found.members_s) == (46.0, 46.0, 46.0)


def test_the_members_of_another_role_are_not_missed():
    found = recovery(_kill(15.5, "ledger"), STEPS, [], USUAL, workers=4)
    assert (found.commit_s, found.settled_s, found.members_s) == (0.5, 8.5, 0.5)


def test_what_did_not_happen_before_the_end_is_none():
    found = recovery(_kill(23.9), STEPS, [], USUAL, workers=4)
    assert (found.settled_s, found.members_s) == (None, None)
    assert found.commit_s == pytest.approx(0.1)


def test_a_spread_leaves_out_what_did_not_happen():
    assert spread([None, *map(float, range(1, 11))]) == spread(map(float, range(10, 0, -1)))
    found = spread(map(float, range(1, 11)))
    assert (found.count, found.median_s, found.p90_s, found.max_s) == (10, 5.5, 9.0, 10.0)
    assert spread([None]) is None


def test_the_longest_step_runs_from_commit_to_commit_and_leaves_out_what_is_reported_apart():
    steps = [*STEPS, _step(3, 60.0), _step(4, 75.0)]
    assert longest_step(steps, apart=[]) == 36.0
    assert longest_step(steps, apart=[30.0]) == 15.0


def test_the_tail_reads_whole_lines_once_and_an_unfinished_one_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    assert not tail.look()
    step = (
        '{"event":"step","time":%d,"step":%d,"model_digest":"ab","workers":4,"attempts":1,"seconds":0.5,'
        '"charge_seconds":0.1,"compute_seconds":0.2,"reduce_seconds":0.1,"epsilon":1.0}\n'
    )
    path.write_text(step % (5, 0) + '{"event":"departure","time":6,"code":"di')
    assert tail.look()
    assert not tail.look()
    # The next execution cuts the unfinished line off.
    path.write_text(step % (5, 0) + '{"event":"departure","time":7,"code":"died"}\n' + step % (8, 1))
    assert tail.look()
    assert [(seen.step, seen.began) for seen in tail.steps] == [(0, 4.5), (1, 7.5)]
    assert tail.departures == [Left(7.0, "died")]
