"""The guard of connections: which end, when, and that it touches nothing else."""

import ctypes
import socket
import time
from contextlib import ExitStack

import pytest

from raycloak.attestation.service import connections as module
from raycloak.attestation.service.connections import ConnectionBounds, ConnectionGuard, network_of
from tests.raw_http2 import connect, is_closed

BOUNDS = ConnectionBounds(
    connections=100, per_address=2, calls=8, message_bytes=4096, stranger_s=6.0, idle_s=30.0, decision_s=10.0
)
DEADLINE_S = 60
_SET_DUMPABLE = 4


class Site:
    """A port that this process listens on, and its guard, which looks when the test says so."""

    def __init__(self, stack, monkeypatch, bounds=BOUNDS):
        monkeypatch.setattr(module, "_LOOK_S", 3600.0)
        self.now, self._stack, self.accepted = 1000.0, stack, []
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listener.getsockname()[1]
        self.guard = ConnectionGuard(bounds, lambda: self.now)
        self.guard.start(self.port)
        stack.callback(self.guard.stop)

    def connected(self, source="127.0.0.1"):
        """Return a connection, seen by the guard, and gRPC's name for its other end."""
        near = self._stack.enter_context(connect(self.port, source))
        self.accepted.append(self._stack.enter_context(self._listener.accept()[0]))
        self.guard.look()
        return near, "ipv4:{}:{}".format(*near.getsockname())

    def after(self, seconds):
        """Let time pass, and the guard look."""
        self.now += seconds
        self.guard.look()


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def site(stack, monkeypatch):
    return Site(stack, monkeypatch)


def test_guarantee_a_connection_without_an_admitted_call_ends(site):
    silent, _ = site.connected()
    site.after(5.9)
    assert not is_closed(silent)
    late, _ = site.connected()
    site.after(0.2)
    assert is_closed(silent)
    assert not is_closed(late)
    site.after(5.9)
    assert is_closed(late)
    # What has ended is gone at the next look, as the other side closes it.
    assert site.guard.connections == 2


def test_a_connection_with_an_admitted_call_stays_and_afterwards_has_the_time_of_an_idle_one(site):
    near, peer = site.connected()
    with site.guard.call(peer) as call:
        call.admit()
        site.after(1000)
        assert not is_closed(near)
    site.after(35.9)
    assert not is_closed(near)
    site.after(0.2)
    assert is_closed(near)


def test_a_call_that_is_being_decided_keeps_its_connection_for_a_while_and_not_for_ever(site):
    near, peer = site.connected()
    with site.guard.call(peer):
        site.after(15.9)
        assert not is_closed(near)
        site.after(0.2)
        assert is_closed(near)


@pytest.mark.parametrize("decision_s", [0.0, 10.0])
def test_a_connection_whose_call_was_refused_ends_once_it_knows_unless_another_was_admitted(
    stack, monkeypatch, decision_s
):
    bounds = ConnectionBounds(
        connections=9, per_address=9, calls=8, message_bytes=4096, stranger_s=6.0, idle_s=30.0, decision_s=decision_s
    )
    site = Site(stack, monkeypatch, bounds)
    (refused, stranger), (admitted, member) = site.connected(), site.connected()
    for peer in (stranger, member):
        with site.guard.call(peer) as call:
            call.refuse()
    with site.guard.call(member) as call:
        call.admit()
    site.after(0.9)
    assert [is_closed(refused), is_closed(admitted)] == [False, False]
    site.after(0.2)
    assert [is_closed(refused), is_closed(admitted)] == [True, False]


def test_a_stranger_that_sends_more_than_a_first_call_needs_ends_at_the_next_look(site):
    (much, _), (little, _) = site.connected(), site.connected()
    (member, peer) = site.connected()
    with site.guard.call(peer) as call:
        call.admit()
    little.sendall(bytes(1000))
    for near in (much, member):
        near.sendall(bytes(module._STRANGER_BYTES + 1))
    until = time.monotonic() + DEADLINE_S
    while not is_closed(much):
        for each in site.accepted:
            is_closed(each)  # which reads what is there
        site.after(0)
        assert time.monotonic() < until
    assert [is_closed(little), is_closed(member)] == [False, False]


def test_guarantee_an_address_has_no_more_than_its_bound_once_half_of_all_places_are_taken(stack, monkeypatch):
    bounds = ConnectionBounds(connections=10, per_address=2, calls=8, message_bytes=4096, stranger_s=60.0, idle_s=30.0)
    site = Site(stack, monkeypatch, bounds)
    ours = [site.connected("127.0.0.1") for _ in range(4)]
    with site.guard.call(ours[0][1]) as call:
        call.admit()
        (other, _) = site.connected("127.0.0.2")
        assert not any(is_closed(near) for near, _ in ours)
        site.now += 1
        newest, _ = site.connected("127.0.0.1")
        # The strangers that came first go first, so that somebody new has the time to be admitted.
        assert [is_closed(near) for near, _ in ours] == [False, True, True, True]
        assert [is_closed(other), is_closed(newest)] == [False, False]


def test_of_an_address_whose_connections_are_all_at_work_the_newest_goes(stack, monkeypatch):
    """An older one would come back, and push out the next."""
    bounds = ConnectionBounds(connections=4, per_address=2, calls=8, message_bytes=4096, stranger_s=60.0, idle_s=30.0)
    site = Site(stack, monkeypatch, bounds)
    found = []
    for _ in range(3):
        near, peer = site.connected()
        call = stack.enter_context(site.guard.call(peer))
        call.admit()
        found.append(near)
        site.now += 1
    site.after(0)
    assert [is_closed(near) for near in found] == [False, False, True]


def test_nothing_but_the_servers_own_connections_is_touched(site, stack):
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    there = stack.enter_context(connect(listener.getsockname()[1]))
    here = stack.enter_context(listener.accept()[0])
    pair = [stack.enter_context(each) for each in socket.socketpair()]
    near, _ = site.connected()
    site.after(1000)
    assert is_closed(near)
    assert not any(is_closed(each) for each in (there, here, *pair))
    again, _ = site.connected()
    assert not is_closed(again)


def test_a_process_that_nobody_may_look_into_guards_its_connections_too(site):
    prctl = ctypes.CDLL(None).prctl
    near, _ = site.connected()
    assert prctl(_SET_DUMPABLE, 0, 0, 0, 0) == 0
    try:
        late, _ = site.connected()
        site.after(6.1)
    finally:
        prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    assert [is_closed(near), is_closed(late)] == [True, True]


def test_the_calls_of_connections_that_are_gone_are_forgotten(site):
    near, peer = site.connected()
    with site.guard.call(peer), site.guard.call("ipv4:192.0.2.7:443"):
        assert len(site.guard._calls) == 2
    near.close()
    site.after(module._FORGET_S + 1)
    # The other end of a connection is seen until this side is closed as well.
    assert list(site.guard._calls) == [("127.0.0.1", int(peer.rpartition(":")[2]))]
    site.after(60)
    site.guard.stop()


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        ("ipv4:192.0.2.7:443", ("192.0.2.7", 443)),
        ("ipv6:%5B2001:db8::1%5D:443", ("2001:db8::1", 443)),
        ("ipv6:%5Bfe80::1%25eth0%5D:443", ("fe80::1", 443)),
        ("ipv6:[::ffff:192.0.2.7]:443", ("192.0.2.7", 443)),
        ("unix:/run/socket", ("unix", 0)),
    ],
)
def test_a_place_has_one_spelling(peer, place):
    assert module._place_of(peer) == place


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("ipv4:192.0.2.7", "192.0.2.7"),
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::1%eth0]", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:3::1]", "2001:db8:1:3::/64"),
        ("ipv6:[::ffff:192.0.2.7]", "192.0.2.7"),
        ("unix:/run/socket", "unix:/run/socket"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(host, counted):
    """Or a limit on the calls of an address would be none: a customer has 2^64 of them."""
    assert network_of(host) == counted
