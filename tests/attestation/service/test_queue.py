"""Calls to the orchestrator share a transaction, and none is answered before it is on disk."""

import asyncio
import threading
from contextlib import contextmanager

import pytest

from raycloak.attestation.service.fair_lock import Turn
from raycloak.attestation.service.queue import Afterwards, ServiceQueue
from raycloak.metrics.errors import EvidenceError, ProtocolError


class Book:
    """A book whose transactions note what was answered before their end."""

    def __init__(self) -> None:
        self.ended = 0
        self.fails = False
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @contextmanager
    def transaction(self):
        self.entered.set()
        assert self.may_go_on.wait(120)
        yield
        if self.fails:
            raise OSError("disk full")
        self.ended += 1


@pytest.fixture
def book():
    return Book()


@pytest.fixture
def calls(book):
    queue = ServiceQueue(book.transaction, Turn(), 3)
    yield queue
    book.may_go_on.set()
    queue.close()


def test_calls_that_wait_together_share_a_transaction_and_are_answered_after_it(book, calls):
    async def ask():
        book.may_go_on.clear()
        first = asyncio.ensure_future(calls.run(lambda: book.ended, 120))
        await asyncio.to_thread(book.entered.wait)
        later = [asyncio.ensure_future(calls.run(lambda i=i: (i, book.ended), 120)) for i in range(3)]
        await asyncio.sleep(0)
        assert not first.done()
        book.may_go_on.set()
        return await first, await asyncio.gather(*later)

    assert asyncio.run(ask()) == (0, [(0, 1), (1, 1), (2, 1)])
    assert book.ended == 2


def test_what_is_put_off_happens_once_all_of_its_batch_is_on_disk(book, calls):
    executed = []

    def put_off(i):
        executed.append(i)
        return Afterwards(lambda: (i, book.ended, len(executed)))

    async def ask():
        book.may_go_on.clear()
        first = asyncio.ensure_future(calls.run(lambda: None, 120))
        await asyncio.to_thread(book.entered.wait)
        later = [asyncio.ensure_future(calls.run(lambda i=i: put_off(i), 120)) for i in range(3)]
        await asyncio.sleep(0)
        book.may_go_on.set()
        await first
        return await asyncio.gather(*later)

    assert asyncio.run(ask()) == [(0, 2, 3), (1, 2, 3), (2, 2, 3)]


def test_what_is_put_off_is_not_done_without_a_record_and_fails_for_its_call_alone(book, calls):
    done = []

    def refuse():
        raise ProtocolError("malformed", "no")

    async def ask():
        putting_off = (calls.run(lambda each=each: Afterwards(each), 120) for each in (refuse, lambda: 7))
        error, answer = await asyncio.gather(*putting_off, return_exceptions=True)
        book.fails = True
        with pytest.raises(EvidenceError, match="release_denied"):
            await calls.run(lambda: Afterwards(lambda: done.append(1)), 120)
        return error.code, answer, done

    assert asyncio.run(ask()) == ("malformed", 7, [])


def test_an_error_belongs_to_its_call_alone(calls):
    def refuse():
        raise ProtocolError("malformed", "no")

    async def ask():
        return await asyncio.gather(calls.run(refuse, 120), calls.run(lambda: 7, 120), return_exceptions=True)

    error, answer = asyncio.run(ask())
    assert (error.code, answer) == ("malformed", 7)


def test_a_call_whose_time_is_over_is_not_executed(book, calls):
    done = []

    async def ask():
        book.may_go_on.clear()
        first = asyncio.ensure_future(calls.run(lambda: None, 120))
        await asyncio.to_thread(book.entered.wait)
        with pytest.raises(EvidenceError, match="deadline"):
            await calls.run(lambda: done.append(1), 0.01)
        book.may_go_on.set()
        await first
        await calls.run(lambda: None, 120)

    asyncio.run(ask())
    assert done == []


def test_the_figures_say_how_many_calls_wait_and_for_how_long(book, calls):
    async def ask():
        book.may_go_on.clear()
        first = asyncio.ensure_future(calls.run(lambda: None, 120))
        await asyncio.to_thread(book.entered.wait)
        second = asyncio.ensure_future(calls.run(lambda: None, 120))
        await asyncio.sleep(0.02)
        while_waiting = calls.figures()
        book.may_go_on.set()
        await asyncio.gather(first, second)
        return while_waiting

    waiting, after = asyncio.run(ask()), calls.figures()
    assert waiting.waiting == 2
    assert waiting.oldest_s >= 0.02
    assert sum(waiting.waits) == 0
    assert (after.waiting, after.oldest_s, sum(after.waits)) == (0, 0.0, 2)
    assert after.waited_s >= waiting.oldest_s


def test_more_calls_than_may_wait_are_refused(book, calls):
    async def ask():
        book.may_go_on.clear()
        first = asyncio.ensure_future(calls.run(lambda: None, 120))
        await asyncio.to_thread(book.entered.wait)
        waiting = [asyncio.ensure_future(calls.run(lambda: None, 120)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(EvidenceError, match="busy"):
            await calls.run(lambda: None, 120)
        book.may_go_on.set()
        await asyncio.gather(first, *waiting)

    asyncio.run(ask())


def test_after_a_record_that_could_not_be_written_nothing_is_answered(book, calls):
    told = []
    calls.when_failed(lambda: told.append(1))

    async def ask():
        book.fails = True
        with pytest.raises(EvidenceError, match="release_denied"):
            await calls.run(lambda: "keys", 120)
        book.fails = False
        with pytest.raises(EvidenceError, match="release_denied"):
            await calls.run(lambda: "keys", 120)

    asyncio.run(ask())
    assert told == [1]
    assert isinstance(calls.failure, OSError)
