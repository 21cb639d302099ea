"""The watchers: every change in its order, at once where a future waits for it, and little memory for each."""

import asyncio
import random
import tracemalloc
from dataclasses import replace

import pytest

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service import watches as module
from raycloak.coordinator.service.ports import Stored
from raycloak.coordinator.service.store import OperationRow, OperationState
from raycloak.coordinator.service.watches import Watches
from raycloak.metrics.service_errors import ServiceError
from tests.coordinator.service.scripted import TEXT

DEADLINE_S = 120
TEXTS = {"prompts": ["a"], "max_tokens": 3, "top_p": 1.0, "completions": 1}


class Follower:
    """A watcher that takes what it is told now and then, and the store's pages where it must."""

    def __init__(self, site, client, watches, choose):
        self.site, self.client, self.choose, self.underway = site, client, choose, []
        self.watches, self.watch = watches, watches.open(client)
        self.since, self.told, self.reads, self.taken = 0, {}, 0, 0

    def publish(self, news):
        """Send the news of a turn on their way, on which the store may overtake them."""
        self.underway.append(news)
        if self.choose.random() < 0.5:
            self.hear(self.choose.randrange(len(self.underway) + 1))
            self.take()

    def hear(self, count):
        """Hear the next news."""
        for _ in range(count):
            self.watches._tell(self.underway.pop(0))
            assert len(self.watch._rows) * module._ROW_BYTES <= module._ROWS_BYTES

    def take(self):
        """Take what is there."""
        changes = self.watch.stored(self.since)
        if changes is None:
            self.reads += 1
            changes = self.site.desk.changes("north", self.client, self.since).changes
        else:
            self.taken += len(changes)
        for change in changes:
            what = getattr(change, change.WhichOneof("what"))
            assert what.revision > self.since, "changes come in their order, and none twice"
            self.since = what.revision
            self.told[getattr(what, "number", -1)] = what
        self.check()

    def check(self):
        """Assert that nothing below the newest revision was left out."""
        for row in self.site.store.changes(self.client, 0, 10**6, 2**30)[0]:
            if row.revision <= self.since:
                assert self.told[row.number].revision == row.revision
                assert self.told[row.number].state == row.state
        changed = self.site.store.client(self.client).changed
        if changed <= self.since:
            assert self.told[-1].revision == changed


def act(site, client, choose):
    """Do something with a client, or have its driver do something."""
    kind = choose.choice(["forward_backward", "optim_step", "optim_step", "sample", "save_state", "cancel", "run"])
    try:
        if kind == "run":
            site.run()
        elif kind == "cancel":
            number = choose.randrange(site.store.client(client).next_number or 1)
            site.ask(site.desk.cancel, "north", client, f"{client}.{number}")
        else:
            site.submit(client, kind, **(TEXTS if kind == "sample" else {}))
    except ServiceError:
        pass


@pytest.mark.parametrize("most", [2, 4, module._ROWS_BYTES // module._ROW_BYTES])
def test_guarantee_changes_are_told_in_their_order_and_none_is_left_out(make_site, monkeypatch, most):
    monkeypatch.setattr(module, "_ROWS_BYTES", most * module._ROW_BYTES)

    async def follow(seed):
        choose = random.Random(seed)
        site = make_site()
        site.database.run("PRAGMA synchronous = OFF")
        client = site.create(config=TEXT, steps=10**6)
        follower = Follower(site, client, Watches(asyncio.get_running_loop()), choose)
        site.desk.book.publish = follower.publish
        for _ in range(60):
            act(site, client, choose)
            if choose.random() < 0.3:
                follower.take()
        follower.hear(len(follower.underway))
        follower.watch.look()
        follower.take()
        newest = site.store.client(client)
        assert follower.since == newest.revision
        assert set(follower.told) == {-1, *range(newest.next_number)}
        follower.watches.close(client, follower.watch)
        return follower

    followers = [asyncio.run(follow(seed)) for seed in range(4)]
    assert sum(each.reads for each in followers) > 4
    assert most == 2 or sum(each.taken for each in followers) > 5


def row(number, revision, state, result=b""):
    """Return an operation's row."""
    return OperationRow("c1", number, f"k{number}", b"", "forward_backward", state, revision, 0.0, b"", result=result)


def traced(watch):
    """Return by how many bytes a watcher grows when it is told more than it takes."""
    piece, grown = wire.Change(tokens=wire.Tokens(operation_id="c1.5", text="text")), 0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(2_000):
            watch.tell(piece)
            watch.tell(Stored((row(number, number, OperationState.RUNNING, b"%1000d" % number),), 0))
            grown = max(grown, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    return grown


def test_guarantee_a_watcher_that_takes_nothing_holds_little(monkeypatch):
    monkeypatch.setattr(module, "_LATER_S", 10 * DEADLINE_S)

    async def watch():
        watches = Watches(asyncio.get_running_loop())
        watch = watches.open("c1")
        # A quarter is for operations that are written meanwhile.
        assert traced(watch) < module.WATCH_BYTES * 3 // 4
        assert watch.is_behind
        pieces = list(watch.passing())
        assert len(pieces) > 1000, "some seconds of text"
        assert pieces[0].tokens.text == "text"
        watch.tell(pieces[0])
        assert list(watch.passing()) == pieces[:1]
        watches.close("c1", watch)

    asyncio.run(watch())


def test_an_end_is_told_at_once_without_a_look_at_the_store(monkeypatch):
    # Whatever is told in time is told at once, also where this thread has to wait for its turn.
    monkeypatch.setattr(module, "_LATER_S", 10 * DEADLINE_S)

    async def watch():
        watches = Watches(asyncio.get_running_loop())
        watch = watches.open("c1")
        assert await watch.wait(0)
        assert watch.stored(0) is None, "the store is read first"
        running, other = row(0, 3, OperationState.RUNNING), row(1, 4, OperationState.RUNNING)
        watches.publish([("c1", Stored((running,), 2)), ("c1", Stored((other,), 2))])
        assert not await watch.wait(0.01), "nothing has ended"
        watches.publish([("c1", Stored((replace(running, state=OperationState.DONE, revision=5),), 6))])
        assert await watch.wait(DEADLINE_S)
        told = watch.stored(2)
        assert [(each.operation.number, each.operation.state) for each in told] == [
            (1, OperationState.RUNNING),
            (0, OperationState.DONE),
        ]
        assert watch.stored(5) == []
        watches.close("c1", watch)
        assert watches.number == 0

    asyncio.run(watch())


def test_what_ends_nothing_is_told_soon_after_from_the_store():
    async def watch():
        watches = Watches(asyncio.get_running_loop())
        watch = watches.open("c1")
        assert await watch.wait(0)
        assert watch.stored(0) is None
        # An operation that runs, and the client's own change.
        for stored, since in ((Stored((row(0, 3, OperationState.RUNNING),), 2), 2), (Stored((), 4), 3)):
            watches.publish([("c1", stored)])
            assert await watch.wait(DEADLINE_S)
            assert watch.stored(since) is None
        watches.close("c1", watch)

    asyncio.run(watch())


def test_an_end_behind_a_change_of_the_client_is_told_from_the_store():
    async def watch():
        watches = Watches(asyncio.get_running_loop())
        watch = watches.open("c1")
        assert watch.stored(0) is None
        watch.tell(Stored((), 3))
        watch.tell(Stored((row(0, 4, OperationState.DONE),), 3))
        assert watch.stored(2) is None
        watches.close("c1", watch)

    asyncio.run(watch())
