"""The server's threads, which all clients share: one client cannot take them all, and a full server says so."""

import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.service.connections import ConnectionGuard
from raycloak.attestation.trust.channel import client_end
from raycloak.metrics.errors import RefusedError
from raycloak_lab.adapter import adapter_pb2 as wire
from raycloak_lab.adapter import server
from raycloak_lab.adapter.connection import AdapterAddress, AdapterConnection
from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter
from tests.lab.adapter.conftest import identity

DEADLINE_S = 60
OTHERS = [IdentityKey.generate() for _ in range(5)]
NAMES = {each.public: f"other {number}" for number, each in enumerate(OTHERS)}


def await_true(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def connected(served, key):
    connection = AdapterConnection(AdapterAddress.parse(served.address), key)
    try:
        yield connection
    finally:
        connection.close()


def test_a_client_that_leaves_its_calls_takes_four_threads_at_most(site, monkeypatch):
    """Each call waits for a block under way, and its thread does too, though the client has gone."""
    waiting = []
    with site(others=NAMES) as served, connected(served, OTHERS[0]) as other:
        tokens_left = served.desk.tokens_left
        monkeypatch.setattr(served.desk, "tokens_left", lambda client: waiting.append(client) or tokens_left(client))
        with served.desk._turn:
            for _ in range(5):
                with connected(served, identity()) as leaving:
                    for _ in range(4):
                        before = len(waiting)
                        call = leaving._stub.Describe.future(wire.DescribeRequest())
                        await_true(lambda call=call, before=before: len(waiting) > before or call.done())
                        call.cancel()
                        await_true(lambda: not served.server.open_calls("me"))
            asked = other._stub.Describe.future(wire.DescribeRequest())
            await_true(lambda: "other 0" in waiting or asked.done())
        assert asked.result(DEADLINE_S).projections
    assert waiting == ["me"] * 4 + ["other 0"]


def test_a_call_that_finds_the_server_full_is_refused_as_busy_and_the_session_goes_on(site, encoder):
    given = torch.ones(1, 5, 16)
    with site(others=NAMES) as served, EncryptedAdapter(encoder, served.address) as model:
        expected = model(given)
        with served.desk._turn:
            held = []
            for number, key in enumerate(OTHERS[:4]):
                connection = AdapterConnection(AdapterAddress.parse(served.address), key)
                calls = [connection.start("Describe", wire.DescribeRequest()) for _ in range(4)]
                await_true(lambda number=number: served.server.open_calls(f"other {number}") == 4)
                held.append((connection, calls))
            with pytest.raises(RefusedError) as refusal:
                model(given)
            assert refusal.value.code == "busy"
        for connection, calls in held:
            assert all(call().projections for call in calls)
            connection.close()
        assert torch.allclose(model(given), expected, atol=1e-2)


def test_answers_that_nobody_reads_are_bounded_over_all_clients(site, monkeypatch):
    """Each is in the server's memory, and a client's four are bounded by the number of clients alone."""
    monkeypatch.setattr(server, "_OPEN", 6)
    with site(others=NAMES) as served, connected(served, OTHERS[0]) as one, connected(served, OTHERS[1]) as other:
        with served.desk._turn:
            calls = [each.start("Describe", wire.DescribeRequest()) for each in (one, other) for _ in range(4)]
            await_true(lambda: sum(served.server.open_calls(name) for name in NAMES.values()) == 6)
            with connected(served, identity()) as mine, pytest.raises(RefusedError) as refusal:
                mine.call("Describe", wire.DescribeRequest())
            assert refusal.value.code == "busy"
        answered = []
        for call in calls:
            with suppress(RefusedError):
                answered.append(call())
        assert len(answered) == 6
        assert other.call("Describe", wire.DescribeRequest()).projections


class Gone:
    """The context of a call whose client left before its thread began."""

    def __init__(self, key):
        self._leaf = client_end(key, bytes(32)).chain_pem

    def peer(self):
        return "ipv4:192.0.2.7:443"

    def auth_context(self):
        return {"x509_pem_cert": (self._leaf,)}

    def add_callback(self, _):
        return False

    def cancel(self):
        pass

    def set_trailing_metadata(self, _):
        pass

    def abort(self, *_):
        raise ConnectionError


def test_a_call_that_ended_before_it_began_leaves_no_timer(site):
    """Each timer is a thread for two minutes, and nothing counts those of a client that opens calls and leaves."""
    with site() as served:
        servicer = server._Servicer(served.desk, ConnectionGuard(server._BOUNDS))
        for _ in range(3):
            with pytest.raises(ConnectionError):
                servicer.Describe(iter(()), Gone(identity()))
        timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
        assert all(each.finished.is_set() for each in timers)
        assert servicer.open_calls("me") == 0
