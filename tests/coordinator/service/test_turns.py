"""The desk's thread: time comes to the desk however busy it is, and no failure leaves a caller waiting."""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest

from raycloak.coordinator.service.turns import Turns
from raycloak.metrics.service_errors import ServiceServerError

DEADLINE_S = 120


class Clerk:
    """A desk, and its book, without a store, which counts its ticks."""

    def __init__(self):
        self.ticked = threading.Event()
        self.acts = []
        self.book = self

    def begin(self):
        pass

    def tick(self):
        self.ticked.set()

    @contextmanager
    def turn(self):
        yield
        acts, self.acts = self.acts, []
        for act in acts:
            act()

    @contextmanager
    def part(self):
        yield


@pytest.fixture
def clerk():
    return Clerk()


@pytest.fixture
def turns(clerk):
    turns = Turns(clerk, 64)
    turns.start()
    yield turns
    turns.close()


def test_calls_that_never_cease_do_not_keep_time_from_the_desk(clerk, turns):
    deadline = time.monotonic() + DEADLINE_S
    while not clerk.ticked.wait(0.02) and time.monotonic() < deadline:
        turns.put(lambda: None).result(DEADLINE_S)
    assert clerk.ticked.is_set()


def test_a_defect_after_a_turn_refuses_calls_instead_of_leaving_them(clerk, turns, caplog):
    told = threading.Event()

    def tell():
        told.set()
        raise RuntimeError("the loop of the server is closed")

    turns.when_failed(tell)
    clerk.acts.append(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ServiceServerError, match="store_failed"):
            turns.put(lambda: None).result(DEADLINE_S)
    assert told.wait(DEADLINE_S)
    assert isinstance(turns.failure, ZeroDivisionError)


def test_callers_that_left_and_loops_that_ended_leave_the_desk_at_work(clerk, turns):
    held, goes_on = threading.Event(), threading.Event()
    turns.tell(lambda: (held.set(), goes_on.wait(DEADLINE_S)), lambda: None)
    assert held.wait(DEADLINE_S)

    async def leave():
        asking = asyncio.ensure_future(turns.ask(lambda: 1))
        await asyncio.sleep(0)
        asking.cancel()

    async def stay():
        gone = asyncio.ensure_future(turns.ask(lambda: 1))
        failing, last = (asyncio.ensure_future(turns.ask(each)) for each in (lambda: {}[0], lambda: 2))
        await asyncio.sleep(0)
        gone.cancel()
        goes_on.set()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(KeyError):
                await failing
            return await last

    asyncio.run(leave())
    assert asyncio.run(stay()) == 2
    assert turns.failure is None
