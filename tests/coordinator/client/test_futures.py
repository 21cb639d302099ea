"""The future by itself: its outcome, waiting, callbacks."""

import threading
import time

import pytest

import raycloak
from raycloak.coordinator.client.futures import Resolver

ERROR = raycloak.FutureFailedError("broken", "it broke.")
SOON = 120.0


class Refuses:
    """A canceller that cancels nothing."""

    def cancel(self, future):
        return False


@pytest.fixture
def resolver():
    return Resolver(Refuses())


def test_a_result_is_waited_for_and_stays(resolver):
    future = resolver.make("optim_step", "k")
    assert not future.done()

    def end():
        until = time.monotonic() + SOON
        while future._callbacks is None and time.monotonic() < until:  # until it is waited for
            time.sleep(0.001)
        resolver.end("k", 5)

    thread = threading.Thread(target=end)
    thread.start()
    assert future.result(SOON) == 5
    thread.join()
    assert (future.done(), future.result(0), future.exception(), future.cancelled()) == (True, 5, None, False)
    assert resolver.pending() == []


def test_a_wait_that_ends_leaves_the_operation_alone(resolver):
    future = resolver.make("optim_step", "k")
    with pytest.raises(raycloak.FutureTimeoutError, match="it goes on"):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    assert not future.done()
    assert future._callbacks is None  # nothing is left of the waits
    resolver.end("k", 5)
    assert future.result(0) == 5


def test_an_error_is_raised_each_time(resolver):
    future = resolver.make("optim_step", "k")
    resolver.end("k", error=ERROR)
    for _ in range(2):
        with pytest.raises(raycloak.FutureFailedError):
            future.result(0)
    assert future.exception(0) is ERROR
    assert "broken" in repr(future)


def test_guarantee_an_outcome_reaches_a_future_once(resolver):
    future = resolver.make("optim_step", "k")
    calls = []
    future.add_done_callback(calls.append)
    assert resolver.make("optim_step", "k") is future
    resolver.end("k", 5)
    resolver.end("k", 6)
    future._end(7, ERROR)
    assert (future.result(0), calls) == (5, [future])


def test_callbacks_run_in_their_order_and_one_that_fails_stops_no_other(resolver, caplog):
    future = resolver.make("optim_step", "k")
    calls = []
    future.add_done_callback(lambda _: calls.append("first"))
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: calls.append("second"))
    resolver.end("k", 5)
    future.add_done_callback(lambda each: calls.append(each.result()))
    assert calls == ["first", "second", 5]
    assert "a callback failed" in caplog.text


def test_a_callback_that_waits_is_told_instead_of_waiting_for_itself(resolver):
    future, other = resolver.make("optim_step", "k"), resolver.make("optim_step", "l")
    errors = []

    def wait(_):
        try:
            other.result(SOON)
        except raycloak.ServiceStateError as error:
            errors.append(error.code)

    future.add_done_callback(wait)

    def serve():
        resolver.runs_in_this_thread()
        resolver.end("k", 5)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(SOON)
    assert errors == ["would_deadlock"]


def test_a_service_that_ends_no_future_is_seen(resolver):
    resolver.make("optim_step", "k")
    assert not resolver.wait_until_none(0.01)
    resolver.fail_all(ERROR)
    assert resolver.wait_until_none(0.01)


def test_a_thread_that_gets_the_number_of_one_that_ended_may_wait(resolver):
    serving = threading.Thread(target=resolver.runs_in_this_thread)
    serving.start()
    serving.join()
    asked = {}
    for _ in range(1000):
        thread = threading.Thread(target=lambda: asked.update({threading.get_ident(): resolver.is_this_thread()}))
        thread.start()
        thread.join()
        if serving.ident in asked:
            break
    assert asked.get(serving.ident) is False
