"""Peers that ask and do not read: what the service holds for them has a size."""

import socket
import ssl
import struct
from contextlib import closing

import pytest

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.service import evidence_pb2 as wire
from raycloak.attestation.service.limits import SMALL_BYTES, ServiceLimits, UnreadAnswers
from raycloak.attestation.trust.channel import SERVER_NAME, client_end
from raycloak.metrics.errors import RefusedError
from tests.attestation.conftest import MANIFEST
from tests.attestation.serving import Site, eventually

ENTRIES, LETTERS = 100, 2000
LIMITS = ServiceLimits(unread_bytes=10**6, unread_address_bytes=500_000)
_HEADERS, _DATA, _SETTINGS, _END_STREAM, _END_HEADERS, _INITIAL_WINDOW = 1, 0, 4, 1, 4, 4


def test_large_answers_are_refused_beyond_either_limit_and_small_ones_never():
    unread = UnreadAnswers(LIMITS)
    large = 200_000
    assert [unread.takes("a", large) for _ in range(3)] == [True, True, False]
    assert [unread.takes("b", large) for _ in range(3)] == [True, True, False]
    assert [unread.takes("c", large) for _ in range(2)] == [True, False]
    assert unread.takes("a", SMALL_BYTES)
    unread.left("b", large)
    assert unread.takes("c", 100_000)
    for address, size in (("a", large), ("a", large), ("a", SMALL_BYTES), ("b", large), ("c", large), ("c", 100_000)):
        unread.left(address, size)
    assert (unread._all, unread._of) == (0, {})


def _frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name, value):
    """Return a header as HPACK writes it without its tables (RFC 7541, 6.2.2)."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


class Deaf:
    """An HTTP/2 client (RFC 9113) whose window is closed: it asks, and takes no byte of an answer."""

    def __init__(self, port, folder):
        end = client_end(IdentityKey.generate(), MANIFEST)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # who serves is no matter here
        context.set_alpn_protocols(["h2"])
        (folder / "end.pem").write_bytes(end.chain_pem + end.key_pem)
        context.load_cert_chain(folder / "end.pem")
        bare = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket = context.wrap_socket(bare, server_hostname=SERVER_NAME)
        settings = struct.pack(">HI", _INITIAL_WINDOW, 0)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))

    def ask_for_the_log(self, stream):
        path = "/raycloak.evidence.v1.Evidence/Log"
        fields = {":method": "POST", ":scheme": "https", ":path": path, ":authority": SERVER_NAME}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        head = b"".join(_literal(*each) for each in fields.items())
        body = wire.LogRequest(limit=ENTRIES).SerializeToString()
        message = b"\0" + len(body).to_bytes(4, "big") + body
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, head) + _frame(_DATA, _END_STREAM, stream, message))

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
