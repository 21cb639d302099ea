"""Peers of the evidence service that know the manifest and never finish what they begin."""

import time
from contextlib import ExitStack
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from raycloak.attestation.service import server as module
from raycloak.attestation.service.calls import Room
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.metrics.errors import EvidenceError
from tests.attestation.serving import Site, eventually, tls_connection
from tests.raw_http2 import is_closed, unfinished_calls

ATTEST = "/raycloak.evidence.v1.Evidence/Attest"
MESSAGE = 2**16
DEADLINE_S = 60


@pytest.fixture
def rooms(monkeypatch):
    """Return the rooms for all requests of the services that start."""
    made = []

    class Seen(Room):
        def __init__(self, most):
            super().__init__(most)
            made.append(self)

    monkeypatch.setattr(module, "Room", Seen)
    return made


def test_guarantee_requests_that_never_become_whole_hold_no_more_than_the_room_of_their_address(
    session, tmp_path, rooms
):
    limits = ServiceLimits(
        message_bytes=MESSAGE,
        request_address_bytes=3 * MESSAGE,
        request_bytes=5 * MESSAGE,
        deadline_s=DEADLINE_S,
        stranger_s=DEADLINE_S,
    )
    with Site(session, tmp_path / "orchestrator", limits).served() as site, ExitStack() as held:
        for source in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
            stranger = held.enter_context(tls_connection(site.server.port, tmp_path, source))
            unfinished_calls(stranger, ATTEST, 8, sent=1000, size=MESSAGE - 100)
        (room,) = rooms
        rooms_of = site.server._servicer._rooms._of.values()
        # Of each address three hold room of its own, and five of these six room of all. Of the others nothing is read.
        eventually(lambda: sorted(len(each._waiting) for each in rooms_of) == [5, 13])
        assert room._held == 5 * MESSAGE
        held.close()
        eventually(lambda: room._held == 0)
        client, _ = site.admitted()
        with client:
            assert client.release_keys(0)


def test_a_peer_whose_address_has_no_room_waits_for_it_and_no_longer_than_a_call_may_take(session, tmp_path):
    limits = ServiceLimits(message_bytes=MESSAGE, request_address_bytes=MESSAGE, deadline_s=6.0, stranger_s=DEADLINE_S)
    with Site(session, tmp_path / "orchestrator", limits).served() as site, ExitStack() as held:
        stranger = held.enter_context(tls_connection(site.server.port, tmp_path))
        unfinished_calls(stranger, ATTEST, 1, sent=1000, size=MESSAGE - 100)
        eventually(lambda: site.server._servicer._waiting.total() == 1)
        # So much later, the client waits for room until well after the stranger's call has ended.
        time.sleep(3.0)
        with site.client(site.attester()) as client:
            # The stranger's call has its six seconds, and not more.
            assert client.challenge().member_id == "worker-0"
            assert ("Attest", "malformed", 1) in site.server.figures().calls


def test_the_calls_of_one_address_that_wait_are_bounded_and_others_are_answered(session, tmp_path):
    limits = ServiceLimits(calls_per_address=4, message_bytes=MESSAGE, deadline_s=DEADLINE_S, stranger_s=DEADLINE_S)
    with Site(session, tmp_path / "orchestrator", limits).served() as site, ExitStack() as held:
        stranger = held.enter_context(tls_connection(site.server.port, tmp_path, "127.0.0.2"))
        unfinished_calls(stranger, ATTEST, 8, sent=1000, size=MESSAGE - 100)
        eventually(lambda: ("Attest", "busy", 4) in site.server.figures().calls)
        with site.client(site.attester()) as client:
            assert client.challenge().member_id == "worker-0"
        assert site.server._servicer._waiting == {"127.0.0.2": 4}
        stranger.close()
        eventually(lambda: not site.server._servicer._waiting)


def test_a_connection_on_which_nothing_was_answered_ends_and_that_of_a_member_does_not(session, tmp_path):
    limits = ServiceLimits(stranger_s=1.0, deadline_s=DEADLINE_S)
    with Site(session, tmp_path / "orchestrator", limits).served() as site, ExitStack() as held:
        client, _ = site.admitted()
        held.callback(client.close)
        silent = held.enter_context(tls_connection(site.server.port, tmp_path))
        bare = held.enter_context(site.connect())
        calling = unfinished_calls(held.enter_context(tls_connection(site.server.port, tmp_path)), ATTEST, 1)
        eventually(lambda: is_closed(silent) and is_closed(bare) and is_closed(calling))
        assert client.release_keys(0)


def test_health_has_one_answer_and_no_stream(session, tmp_path):
    with Site(session, tmp_path / "orchestrator").served() as site, site.client(site.attester()) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        request = health_pb2.HealthCheckRequest(service="any")
        assert health.Check(request, timeout=DEADLINE_S).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            next(health.Watch(request, timeout=DEADLINE_S))


class Dropped(grpc.RpcError):
    """gRPC's refusal of a call that a server never looked at."""

    def code(self):
        return grpc.StatusCode.CANCELLED


def test_a_call_that_the_service_dropped_is_refused_as_busy(session, tmp_path):
    with Site(session, tmp_path / "orchestrator").served() as site, site.client(site.attester()) as client:
        with pytest.raises(EvidenceError) as refused:
            client._call(Mock(side_effect=Dropped), health_pb2.HealthCheckRequest())
        assert refused.value.code == "busy"
