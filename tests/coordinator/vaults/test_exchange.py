"""What an end of an exchange refuses of the other one, which may send anything."""

import socket
import threading

import numpy as np
import pytest

from raycloak.attestation.core.messages import parse
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.coordinator.vaults.exchange import (
    MOST_WAITING,
    Answered,
    CallCancelled,
    Called,
    Exchange,
    LeaveWord,
    pack,
    unpack,
)
from raycloak.coordinator.vaults.hosted import Inside
from raycloak.metrics.errors import ProtocolError
from tests.attestation.serving import eventually

ONE = b"a"


class Ends:
    """A hostile end, and an exchange at the other one, which keeps what it is asked."""

    def __init__(self) -> None:
        first, second = socket.socketpair()
        self.socket, self.raw = first, Channel(first)
        self.channel = Channel(second, most_bytes=2**16, most_array_bytes=2**16)
        self.calls, self.words = [], []
        self.exchange = Exchange(self.channel, lambda *taken: self.calls.append(taken), self.words.append)
        self._thread = threading.Thread(target=self.exchange.read_until, args=(lambda: False,))
        self._thread.start()

    def send(self, message, arrays=()):
        self.raw.send(message, arrays)

    def refusal(self, call=0):
        """Return the code of the next refusal, of that call."""
        answer = self.raw.receive(Answered, by=Deadline(60))
        assert answer.call == call
        return parse(Failed, answer.refusal).code

    def close(self) -> None:
        self.raw.finish()
        self._thread.join(60)
        self.raw.close()
        self.channel.close()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


def call(number, *frames, name="text"):
    return Called(call=number, name=name, returns=1, beside=False, frames=frames)


def usable(ends, number):
    """Return whether the exchange still takes a call."""
    ends.send(call(number, ONE))
    ends.send(LeaveWord())
    eventually(lambda: ends.words)
    ends.words.clear()
    return ends.calls[-1][0].call == number


def test_frames_are_packed_and_unpacked_as_they_were():
    frames = (b"a", np.arange(3), (b"names", np.zeros(2), np.ones(1)), (b"none",), ())
    parts, arrays = pack(frames)
    found = unpack(parts, arrays)
    assert found[0] == b"a"
    assert found[1] is frames[1]
    assert found[2][0] == b"names"
    assert [each.tolist() for each in found[2][1:]] == [[0, 0], [1]]
    assert found[3:] == [(b"none",), ()]


@pytest.mark.parametrize(
    ("part", "arrays"), [(None, []), (b"a", [np.zeros(1)]), ((b"a", None), []), ((None,), [np.zeros(1), np.zeros(1)])]
)
def test_frames_without_their_pieces_are_refused_and_the_next_call_is_taken(ends, part, arrays):
    with pytest.raises(ProtocolError):
        unpack([part], arrays)
    ends.send(call(3, part), arrays)
    assert ends.refusal(3) == "malformed"
    assert usable(ends, 4)


def test_a_call_that_was_taken_before_is_refused(ends):
    ends.send(call(5, ONE))
    for number in (5, 4, -1):
        ends.send(call(number, ONE))
        assert ends.refusal(number) == "replayed"
    assert usable(ends, 6)
    assert [each.call for each, _ in ends.calls] == [5, 6]


def test_frames_and_arrays_beyond_a_bound_and_messages_of_no_kind_are_refused_and_the_next_call_is_taken(ends):
    ends.send(call(1, None), [np.zeros(2**14)])
    assert ends.refusal() == "arrays_too_large"
    ends.send(Failed.of(ProtocolError("malformed", "a message of no kind")))
    assert ends.refusal() == "malformed"
    ends.socket.sendall((2**16 + 1).to_bytes(4, "big") + bytes(2**16 + 1))
    assert ends.refusal() == "frame_too_large"
    assert usable(ends, 1)


def test_more_calls_than_are_taken_at_once_are_refused_until_some_are_answered(ends):
    for number in range(1, MOST_WAITING + 2):
        ends.send(call(number, ONE))
    assert ends.refusal(MOST_WAITING + 1) == "busy"
    called, frames = ends.calls[0]
    ends.exchange.answer(called, lambda: frames)
    assert ends.raw.receive(Answered, by=Deadline(60)) == Answered(call=1, frames=(ONE,))
    assert usable(ends, MOST_WAITING + 2)


def test_an_answer_to_no_call_and_a_word_of_no_call_change_nothing(ends):
    ends.send(Answered(call=7, frames=(ONE,)))
    ends.send(CallCancelled(call=7))
    assert usable(ends, 1)


def test_words_about_calls_that_are_not_under_way_are_not_kept(ends):
    inside = Inside(ends.channel)
    for number in range(1000):
        inside._word(CallCancelled(call=number))
    assert not inside._cancelled
    inside._put(call(7, ONE), [])
    inside._word(CallCancelled(call=7))
    assert inside._cancelled == {7}


def test_an_answer_without_its_pieces_is_a_refusal(ends):
    asked = ends.exchange.ask("text", 1, (b"a",))
    assert ends.raw.receive(Called, by=Deadline(60)).frames == (ONE,)
    ends.send(Answered(call=1, frames=(None,)))
    with pytest.raises(ActorRefusal):
        asked.result(60)


def test_calls_that_wait_and_calls_that_come_fail_once_the_other_end_is_lost(ends):
    asked = ends.exchange.ask("text", 1, (b"a",))
    with pytest.raises(TimeoutError):
        asked.result(0.0)
    ends.exchange.lose(MemoryError())
    for fails in (lambda: asked.result(60), lambda: ends.exchange.ask("text", 1, ())):
        with pytest.raises(MemoryError):
            fails()
