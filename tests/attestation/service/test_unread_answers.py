"""Peers that ask and do not read: what the service holds for them has a size."""

import struct
from contextlib import closing

import pytest

from raycloak.attestation.service import evidence_pb2 as wire
from raycloak.attestation.service.limits import SMALL_BYTES, ServiceLimits, UnreadAnswers
from raycloak.metrics.errors import RefusedError
from tests.attestation.serving import Site, eventually, tls_connection
from tests.raw_http2 import DATA, END_STREAM, INITIAL_WINDOW, frame, headers, message, opened

ENTRIES, LETTERS = 100, 2000
LIMITS = ServiceLimits(unread_bytes=10**6, unread_address_bytes=500_000)


def test_large_answers_are_refused_beyond_either_limit_and_small_ones_beyond_twice_as_much():
    unread = UnreadAnswers(LIMITS)
    large = 200_000
    assert [unread.takes("a", large) for _ in range(3)] == [True, True, False]
    assert [unread.takes("b", large) for _ in range(3)] == [True, True, False]
    assert [unread.takes("c", large) for _ in range(2)] == [True, False]
    small = [unread.takes("a", SMALL_BYTES) for _ in range(20)]
    assert small == sorted(small, reverse=True)
    assert 2 * large + sum(small) * SMALL_BYTES <= 2 * LIMITS.unread_address_bytes < 2 * large + 10 * SMALL_BYTES
    unread.left("b", large)
    assert not unread.takes("c", large)
    for address, size in [("a", large), ("a", large), ("b", large), ("c", large)] + [("a", SMALL_BYTES)] * sum(small):
        unread.left(address, size)
    assert (unread._all, unread._of) == (0, {})


def test_guarantee_small_answers_that_nobody_reads_have_a_size_too():
    unread = UnreadAnswers(LIMITS)
    taken = sum(unread.takes(str(number // 5), SMALL_BYTES) for number in range(100))
    assert taken * SMALL_BYTES <= 2 * LIMITS.unread_bytes < (taken + 1) * SMALL_BYTES


class Deaf:
    """An HTTP/2 client (RFC 9113) whose window is closed: it asks, and takes no byte of an answer."""

    def __init__(self, port, folder):
        self._socket = opened(tls_connection(port, folder), struct.pack(">HI", INITIAL_WINDOW, 0))

    def ask_for_the_log(self, stream):
        request = message(wire.LogRequest(limit=ENTRIES).SerializeToString())
        asked = headers("/raycloak.evidence.v1.Evidence/Log", stream, "https")
        self._socket.sendall(asked + frame(DATA, END_STREAM, stream, request))

    def close(self):
        self._socket.close()


@pytest.fixture
def site(session, tmp_path, monkeypatch):
    counted = []
    made = UnreadAnswers.__init__
    monkeypatch.setattr(UnreadAnswers, "__init__", lambda self, limits: (counted.append(self), made(self, limits))[1])
    site = Site(session, tmp_path / "orchestrator", LIMITS)
    with site.run.books.state.transaction():
        for _ in range(ENTRIES):
            site.run.books.log.append("long", {"text": "y" * LETTERS})
    with site.served():
        site.unread = counted[0]
        yield site


def test_a_peer_that_does_not_read_cannot_have_the_service_hold_more_than_its_limit(site, tmp_path):
    """Before, every answer was held until the connection was closed for its age: 160 of them took 1.3 GB."""
    answers = []
    takes = site.unread.takes
    site.unread.takes = lambda *asked: answers.append(takes(*asked)) or answers[-1]
    with closing(Deaf(site.server.port, tmp_path)) as deaf:
        for i in range(6):
            deaf.ask_for_the_log(2 * i + 1)
        eventually(lambda: len(answers) == 6)
        assert answers == [True, True, False, False, False, False]
        held = site.unread._all
        assert ENTRIES * LETTERS < held / 2 < LIMITS.unread_address_bytes / 2
        client, _ = site.admitted("worker-0")
        with client:
            client.release_keys(0)
            with pytest.raises(RefusedError) as error:
                client.log()
            assert error.value.code == "busy"
            assert len(client.log(0, 10)[0]) == 10, "what is small is given"
            deaf.close()
            eventually(lambda: site.unread._all == 0)
            assert len(client.log()[0]) > ENTRIES
    eventually(lambda: (site.unread._all, site.unread._of) == (0, {}))
