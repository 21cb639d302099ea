"""Newcomers that fail hold back the next one: longer each time, and no longer once one has finished a step."""

from raycloak.coordinator.membership.members import LONGEST_PAUSE_S, Backoff, Timer


def pause(backoff: Backoff, now: list[float]) -> float:
    """Let seconds pass until the backoff ends; returns how many."""
    started = now[0]
    while backoff.pauses:
        now[0] += 1
    return now[0] - started


def test_pauses_double_up_to_a_minute_and_end_with_a_success():
    now = [0.0]
    backoff = Backoff(Timer(now=lambda: now[0]))
    assert not backoff.pauses, "nothing has failed yet"
    pauses = []
    for _ in range(20):
        backoff.failed()
        pauses.append(pause(backoff, now))
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(pauses[7:]) == {LONGEST_PAUSE_S}
    backoff.failed()
    backoff.succeeded()
    assert not backoff.pauses
    backoff.failed()
    assert pause(backoff, now) == 1
