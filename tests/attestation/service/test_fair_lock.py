"""A turn is one thread's at a time, and everybody's in the order in which it was asked for."""

import threading

import pytest

from raycloak.attestation.service.fair_lock import Turn
from tests.attestation.serving import eventually


def waiting(turn):
    return len(turn._waiting)


def test_a_waiting_thread_is_next_and_nobody_overtakes_by_asking_again():
    turn, order = Turn(), []

    def take(name):
        with turn:
            order.append(name)

    threads = []
    with turn:
        for name in "abcde":
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            eventually(lambda: waiting(turn) == len(threads))
    with turn:  # asked for after the five
        order.append("me again")
    for thread in threads:
        thread.join(60)
    assert order == [*"abcde", "me again"]


def test_a_thread_that_has_its_turn_may_take_it_again():
    turn, others = Turn(), []

    def take():
        with turn:
            others.append("in")

    other = threading.Thread(target=take)
    with turn:
        with turn:
            other.start()
            eventually(lambda: waiting(turn) == 1)
        assert not others
    other.join(60)
    assert others == ["in"]


def test_only_one_thread_at_a_time_is_inside():
    turn, inside, most = Turn(), [], []

    def work():
        for _ in range(300):
            with turn:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 1200
    assert max(most) == 1


@pytest.mark.parametrize("given", [False, True], ids=["while it waits", "just as it is given its turn"])
def test_a_thread_that_is_interrupted_while_it_waits_holds_up_nobody(given, monkeypatch):
    turn, own = Turn(), threading.get_ident()

    wait, helper_may_end, taken = turn._changed.wait, threading.Event(), threading.Event()

    def interrupted(timeout=None):
        if given:
            helper_may_end.set()
            wait(60)
        raise KeyboardInterrupt

    def hold():
        with turn:
            taken.set()
            helper_may_end.wait(60)

    helper = threading.Thread(target=hold)
    helper.start()
    taken.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(turn._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), turn:
            pass
    helper_may_end.set()
    helper.join(60)
    assert not helper.is_alive()
    assert (turn._owner, waiting(turn)) == (None, 0)
    with turn:
        assert turn._owner == own
