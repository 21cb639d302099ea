"""Room for requests and answers, and requests that never become whole."""

import asyncio

import pytest

from raycloak.attestation.service import evidence_pb2 as wire
from raycloak.attestation.service.calls import Room, Rooms, next_request
from raycloak.metrics.errors import ProtocolError

DEADLINE_S = 60


def test_guarantee_a_room_holds_no_more_than_it_has_and_who_came_first_gets_it_first():
    async def hold():
        room, got = Room(10), []

        async def take(name, size):
            held = await room.take(size)
            got.append(name)
            return held

        first = await take("a", 6)
        waiting = [asyncio.ensure_future(take(name, size)) for name, size in (("b", 6), ("c", 2))]
        await asyncio.sleep(0)
        # The third would have room, but then the second might wait for ever.
        assert got == ["a"]
        first.shrink(4)
        async with asyncio.timeout(DEADLINE_S):
            second = await waiting[0]
        assert not waiting[1].done()
        first.leave()
        first.leave()
        async with asyncio.timeout(DEADLINE_S):
            third = await waiting[1]
        second.leave()
        third.leave()
        assert room.is_empty
        # What never fits has the whole room.
        (await room.take(1000)).leave()
        assert room.is_empty

    asyncio.run(hold())


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "given in the same moment"])
def test_who_leaves_while_waiting_holds_nothing_and_holds_nobody_up(given):
    async def hold():
        room = Room(10)
        first = await room.take(10)
        large, small = (asyncio.ensure_future(room.take(size)) for size in (10, 1))
        await asyncio.sleep(0)
        if given:
            first.leave()
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        first.leave()
        async with asyncio.timeout(DEADLINE_S):
            (await small).leave()
        assert room.is_empty

    asyncio.run(hold())


def test_the_rooms_of_many_names_are_kept_only_while_they_are_used():
    async def hold():
        rooms = Rooms(4)
        kept = await rooms.take("kept", 4)
        for number in range(1000):
            (await rooms.take(str(number), 4)).leave()
        assert len(rooms._of) < 100
        full = asyncio.ensure_future(rooms.take("kept", 1))
        await asyncio.sleep(0)
        assert not full.done()
        kept.leave()
        (await full).leave()

    asyncio.run(hold())


async def _never():
    await asyncio.Event().wait()
    yield wire.LogRequest()


async def _no_message():
    yield wire.LogRequest.FromString(b"\xff")


async def _none():
    for request in ():
        yield request


@pytest.mark.parametrize(("requests", "said"), [(_never, "stalled"), (_no_message, "no message")])
def test_a_request_that_is_none_is_malformed(requests, said):
    async def read():
        await next_request(requests(), 0.01 if requests is _never else DEADLINE_S)

    with pytest.raises(ProtocolError, match=said) as refusal:
        asyncio.run(read())
    assert refusal.value.code == "malformed"


def test_a_call_that_ends_without_a_request_has_none():
    async def read():
        return await next_request(_none(), DEADLINE_S)

    assert asyncio.run(read()) is None
