"""Sessions as a client sees them on the wire: replays, other clients' sessions, limits, and keys that end."""

import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import grpc
import numpy as np
import pytest
import torch

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import IdentityKey
from raycloak.metrics.errors import RefusedError
from raycloak_lab.adapter import adapter_pb2 as wire
from raycloak_lab.adapter import registration, server, session
from raycloak_lab.adapter.connection import AdapterAddress, AdapterConnection
from raycloak_lab.adapter.encrypted_adapter import EncryptedAdapter
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.parameters import SET_F
from tests.lab.adapter.conftest import NAMES, TOKENS, identity

STATES = np.ones((4, 16))


class Once:
    """A stream of one message, which can be sent again."""

    def __init__(self, **fields):
        self.message = wire.ApplyRequest(**fields)

    def __iter__(self):
        return iter([self.message])


def code(call):
    with pytest.raises(RefusedError) as refusal:
        call()
    return refusal.value.code


@pytest.fixture
def talk(site, encoder):
    """Return a session, its channel, and a function that makes a good request for it."""
    with site(others={OTHER.public: "other"}) as served, EncryptedAdapter(encoder, served.address) as model:
        own = model._session

        def request(**changes):
            batch, _ = own._keys.encrypt(STATES)
            fields = {
                "session": own._name,
                "sequence": 1,
                "fingerprint": own._keys.fingerprint,
                "projections": NAMES[:2],
                "batch": batch,
            }
            return Once(**{**fields, **changes})

        yield served, own._connection, request


OTHER = IdentityKey.generate()


def test_a_request_is_answered_once(talk):
    served, connection, request = talk
    first = request()
    assert len(connection.call("Apply", iter(first)).answers) == 2
    assert code(lambda: connection.call("Apply", iter(first))) == "replayed"
    # A request that was lost on its way leaves a gap, which gives nobody anything.
    connection.call("Apply", iter(request(sequence=3)))
    assert code(lambda: connection.call("Apply", iter(request(sequence=2)))) == "replayed"
    assert served.desk.tokens_left("me") == 2**20 - 2 * TOKENS


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("keys_of_another_session", {"fingerprint": bytes(32)}),
        ("keys_of_another_session", {"session": "0" * 32}),
        ("projection_unknown", {"projections": ["layers.9.query"]}),
        ("projection_unknown", {"projections": []}),
        ("projection_unknown", {"projections": [NAMES[0], NAMES[0]]}),
        ("ciphertext_size", {"batch": b""}),
        ("ciphertext_size", {"batch": bytes(131_103)}),
        ("ciphertext_zero", {"batch": bytes(131_104)}),
        ("ciphertext_residue", {"batch": b"\xff" * 131_104}),
    ],
)
def test_bad_input_has_a_named_refusal_and_the_session_goes_on(talk, expected, changes):
    _, connection, request = talk
    assert code(lambda: connection.call("Apply", iter(request(**changes)))) == expected
    connection.call("Apply", iter(request(sequence=2)))


def residue_bytes(count):
    return count * SET_F.degree * 8


@pytest.mark.parametrize(
    ("expected", "spoil"),
    [
        ("encryption_set", lambda keys: bytes(32) + keys[32:]),
        ("key_steps", lambda keys: keys[:32] + bytes(8) + keys[40:]),
        ("ciphertext_zero", lambda keys: keys[: -residue_bytes(3)] + bytes(residue_bytes(3))),
        ("ciphertext_residue", lambda keys: keys[:-8] + b"\xff" * 8),
    ],
)
def test_keys_that_cannot_be_used_are_refused_by_name_and_end_their_session(
    site, encoder, monkeypatch, expected, spoil
):
    class Spoiled(ClientKeys):
        def __init__(self, shape):
            super().__init__(shape)
            self.released = spoil(self.released)
            self.fingerprint = digest(self.released)

    monkeypatch.setattr(session, "ClientKeys", Spoiled)
    with site() as served:
        assert code(lambda: EncryptedAdapter(encoder, served.address)) == expected
        assert not served.worker._sessions


def test_keys_other_than_their_contract_states_are_refused(site, encoder, monkeypatch):
    """The client's log would name keys that it did not release."""
    seal = registration.seal_released

    def other(key, name, keys):
        return seal(key, name, bytes([keys[0] ^ 1]) + keys[1:])

    monkeypatch.setattr(registration, "seal_released", other)
    with site() as served:
        assert code(lambda: EncryptedAdapter(encoder, served.address)) == "key_package_mismatch"
        assert not served.worker._sessions


def test_a_server_of_another_parameter_set_is_refused_before_keys_are_made(site, encoder, monkeypatch):
    monkeypatch.setattr(server, "SET_F", dataclasses.replace(SET_F, name="P"))
    monkeypatch.setattr(session, "ClientKeys", lambda shape: pytest.fail("keys were made"))
    with site() as served:
        assert code(lambda: EncryptedAdapter(encoder, served.address)) == "encryption_set"


def test_another_client_cannot_use_or_close_a_session(talk):
    served, connection, request = talk
    stranger = AdapterConnection(AdapterAddress.parse(served.address), OTHER)
    assert code(lambda: stranger.call("Apply", iter(request()))) == "keys_of_another_session"
    close = wire.CloseRequest(session=request().message.session)
    assert code(lambda: stranger.call("Close", close)) == "keys_of_another_session"
    stranger.close()
    connection.call("Apply", iter(request()))


def test_keys_end_with_their_session(talk):
    served, connection, request = talk
    connection.call("Apply", iter(request()))
    connection.call("Close", wire.CloseRequest(session=request().message.session))
    assert not served.worker._sessions
    assert code(lambda: connection.call("Apply", iter(request(sequence=2)))) == "keys_of_another_session"


def test_a_second_registration_is_refused(talk):
    served, connection, request = talk
    sealed = bytes(served.desk.sealed_bytes)
    again = wire.RegisterRequest(
        sealed_keys=sealed[: 2**18], session=request().message.session, fingerprint=request().message.fingerprint
    )
    pieces = range(2**18, len(sealed), 2**18)
    rest = [wire.RegisterRequest(sealed_keys=sealed[start : start + 2**18]) for start in pieces]
    assert code(lambda: connection.call("Register", chain([again], rest))) == "keys_of_another_session"


def test_a_client_has_a_bounded_number_of_sessions_and_idle_ones_end(site, encoder):
    now = [0.0]
    with site(sessions=4, idle_s=60.0, clock=lambda: now[0]) as served:
        first = EncryptedAdapter(encoder, served.address)
        assert code(lambda: EncryptedAdapter(encoder, served.address)) == "busy"
        now[0] = 61.0
        with EncryptedAdapter(encoder, served.address):
            assert len(served.worker._sessions) == 1
        first.close()


def test_idle_keys_are_dropped_though_nobody_asks_for_anything(site, encoder):
    now = [0.0]
    with site(idle_s=0.3, clock=lambda: now[0]) as served:
        left = EncryptedAdapter(encoder, served.address)
        assert served.worker._sessions
        now[0] = 1.0
        deadline = time.monotonic() + 60
        while served.worker._sessions:
            assert time.monotonic() < deadline, "the keys outlived their session"
            time.sleep(0.02)
        left.close()


def test_a_client_that_reads_nothing_is_cut_off_and_others_are_answered(site, encoder, monkeypatch):
    """Its connection takes what it sends, and gives nothing back: the answer cannot leave the server."""
    newest = []

    class ByHand(threading.Timer):
        """A timer whose time is over when the test says so. The newest alone is kept: it holds its call's memory."""

        def start(self):
            newest[:] = [self]

    monkeypatch.setattr(threading, "Timer", ByHand)
    # Half an answer is in the client's window, which it does not move on.
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
    channel = grpc.secure_channel
    monkeypatch.setattr(grpc, "secure_channel", lambda *given: channel(*given[:2], (*given[2], *narrow)))
    with (
        site(others={OTHER.public: "other"}) as served,
        Relay(served.server.port) as relay,
        EncryptedAdapter(encoder, served.address.replace(str(served.server.port), str(relay.port))) as model,
        ThreadPoolExecutor(1) as pool,
    ):
        states = torch.ones(1, 5, 16)
        model(states)
        charged, apply = served.desk.tokens_left("me"), served.desk.apply

        def apply_unread(*asked):
            # Not before: a request as long as this needs the server's leave to go on, which is among what is read.
            relay.reads.clear()
            return apply(*asked)

        monkeypatch.setattr(served.desk, "apply", apply_unread)
        unread = pool.submit(code, lambda: model(states))
        deadline = time.monotonic() + 60
        while served.desk.tokens_left("me") == charged:
            assert time.monotonic() < deadline, "the request was not answered"
            time.sleep(0.02)
        assert served.server.open_calls("me") == 1
        (timer,) = newest
        other = AdapterConnection(AdapterAddress.parse(served.address), OTHER)
        assert other.call("Describe", wire.DescribeRequest()).projections
        other.close()
        assert served.server.open_calls("me") == 1
        assert (timer.interval, timer.finished.is_set()) == (server._CALL_S, False)
        timer.function()
        while served.server.open_calls("me"):
            assert time.monotonic() < deadline, "the answer waits for ever"
            time.sleep(0.02)
        relay.reads.set()
        assert unread.result(60) == "adapter_unreachable"


class Relay:
    """A connection in between, which passes the server's bytes on while ``reads`` is set."""

    def __init__(self, port):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = port
        self.port = self._listener.getsockname()[1]
        self.reads = threading.Event()
        self.reads.set()
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reads.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._threads:
            each.join(60)
        for each in self._sockets:
            each.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                there = socket.create_connection(("127.0.0.1", self._server))
                self._sockets.append(there)
                for one, other, gate in ((client, there, None), (there, client, self.reads)):
                    self._threads.append(threading.Thread(target=self._pass, args=(one, other, gate)))
                    self._threads[-1].start()

    def _pass(self, one, other, gate):
        with suppress(OSError):
            while content := one.recv(65536):
                if gate is not None:
                    gate.wait()
                other.sendall(content)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_a_client_without_a_certificate_of_a_known_key_is_told_nothing(site):
    with site() as served:
        known = AdapterConnection(AdapterAddress.parse(served.address), identity())
        assert known.call("Describe", wire.DescribeRequest()).projections
        known.close()
        stranger = AdapterConnection(AdapterAddress.parse(served.address), OTHER)
        for method, message in {
            "Describe": wire.DescribeRequest(),
            "Begin": wire.BeginRequest(),
            "Register": wire.RegisterRequest(),
            "Apply": wire.ApplyRequest(),
            "Close": wire.CloseRequest(),
        }.items():
            sent = iter([message]) if method in ("Register", "Apply") else message
            assert code(lambda method=method, sent=sent: stranger.call(method, sent)) == "peer_not_bound"
        stranger.close()


def silent(connection, method):
    """Open a call of any method and send nothing; returns the call, which waits."""
    ended = threading.Event()
    stub = connection._channel.stream_unary(f"/raycloak.adapter.v1.Adapter/{method}")
    call = stub.future(iter(lambda: ended.wait() and None, None))
    call.add_done_callback(lambda _: ended.set())
    return call


@pytest.mark.parametrize("method", ["Describe", "Begin", "Register", "Apply", "Close"])
def test_strangers_who_send_nothing_hold_no_thread(site, method):
    with site() as served:
        address = AdapterAddress.parse(served.address)
        strangers = [AdapterConnection(address, IdentityKey.generate()) for _ in range(6)]
        calls = [silent(each, method) for each in strangers for _ in range(3)]
        for call in calls:
            assert call.exception(timeout=60) is not None
        known = AdapterConnection(address, identity())
        assert known.call("Describe", wire.DescribeRequest()).projections
        for each in [known, *strangers]:
            each.close()


def test_an_empty_stream_is_malformed_and_no_failure_of_the_server(site, caplog):
    with site() as served:
        known = AdapterConnection(AdapterAddress.parse(served.address), identity())
        assert code(lambda: known.call("Apply", iter(()))) == "malformed"
        assert code(lambda: known.call("Register", iter(()))) == "malformed"
        known.close()
    assert not caplog.records
