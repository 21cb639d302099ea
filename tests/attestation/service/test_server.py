"""The evidence service over real sockets: the whole flow, whom it turns away, and what it withstands."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import open_envelope, parse, seal
from raycloak.attestation.core.roster import Roster, open_roster
from raycloak.attestation.keys.release import KeyPackage, released_body
from raycloak.attestation.log.entries import EntryProof, ExportedLogEntry, SignedHead
from raycloak.attestation.orchestrator.data_commitments import DataCommitments
from raycloak.attestation.orchestrator.hosting import StaticHosting
from raycloak.attestation.orchestrator.peer_desk import PeerDesk
from raycloak.attestation.service import evidence_pb2 as wire
from raycloak.attestation.service.grpc_status import refusal_in
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.attestation.service.wire_messages import to_wire
from raycloak.attestation.trust.channel import SERVER_NAME, ChannelBinding, client_credentials, client_end
from raycloak.metrics.errors import RefusedError
from tests.attestation.conftest import MANIFEST
from tests.attestation.serving import ANSWER, HOSTING, Site, answer, eventually


@pytest.fixture
def site(session, tmp_path):
    with Site(session, tmp_path / "orchestrator").served() as site:
        yield site


def refusal(function, *arguments, **keywords) -> str:
    with pytest.raises(RefusedError) as error:
        function(*arguments, **keywords)
    return error.value.code


def commitments(site, name, attester):
    body = DataCommitments(
        run_id=site.run_id, member_id=name, virtual_workers=HOSTING[name], commitments=(b"c" * 32, b"d" * 32)
    )
    return seal(body, attester.identity)


# --- the flow


def test_a_worker_outside_the_cluster_gets_from_challenge_to_roster_and_log(site):
    with ExitStack() as stack:
        for name in HOSTING:
            client, attester = site.admitted(name)
            stack.callback(client.close)
            release = client.release_keys(0)
            package = open_envelope(KeyPackage, release.package, site.key)
            entry, _ = parse(EntryProof, release.proof).check(site.log_owner, site.run_id)
            assert (entry.kind, entry.content) == ("released", released_body(package))
            assert (package.member_id, package.virtual_workers) == (name, HOSTING[name])
            assert len(attester.hpke.open(package.ciphertext, package.info())) == 2 * 2 * 32
            if name == "worker-0":
                assert refusal(client.roster, commitments(site, name, attester)) == "no_roster"
        envelope, presentations = client.roster(commitments(site, name, attester))
        checks = {"virtual_workers": 4, "minimum_workers": 2, "run_id": site.run_id, "manifest_digest": MANIFEST}
        roster = open_roster(envelope, orchestrator_key=site.key, **checks)
        assert {digest(each.body) for each in presentations} == {m.evidence_digest for m in roster.members}
        assert client.roster()[0] == envelope
        entries, head_line = client.log()
    shown = site.server.figures()
    assert shown.works
    answers = {(method, code): count for method, code, count in shown.calls}
    assert {call: answers[call] for call in (("Attest", "ok"), ("ReleaseKeys", "ok"), ("Log", "ok"))} == {
        ("Attest", "ok"): 2,
        ("ReleaseKeys", "ok"): 2,
        ("Log", "ok"): 1,
    }
    assert answers["Roster", "no_roster"] == 1
    assert sum(shown.waits) == sum(answers.values())
    head = parse(SignedHead, head_line).open(site.log_owner)
    lines = [parse(ExportedLogEntry, line) for line in entries]
    assert (head.length, [line.sequence for line in lines]) == (len(lines), list(range(len(lines))))
    assert [line.kind for line in lines] == [
        "session", "admitted", "released", "data", "data", "admitted", "released", "data", "data", "roster",
    ]  # fmt: skip


def test_the_result_says_what_was_found_and_that_it_is_simulated(site):
    attester = site.attester()
    with site.client(attester) as client:
        result = client.attest(answer(client, attester))
    assert (result.member_id, result.role, result.evidence_class) == ("worker-0", "worker", "simulated")
    assert result.evidence_digest == attester.evidence_digest
    assert result.steps
    assert result.claims["exp"] == result.expires_at
    assert set(result.claims) >= {"eat_nonce", "ueid", "hwmodel", "dbgstat", "submods"}


def test_health_and_reflection_answer_a_peer_of_the_run(site):
    with site.client(site.attester()) as client:
        assert client.is_serving()
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        listed = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=60)))
    names = {service.name for service in listed.list_services_response.service}
    assert names >= {"raycloak.evidence.v1.Evidence", "grpc.health.v1.Health"}


# --- who is at the other end


def test_a_server_with_another_key_than_the_manifests_orchestrator_gets_nothing(site):
    with site.client(site.attester(), orchestrator_key=IdentityKey.generate().public) as client:
        assert refusal(client.challenge) == "release_denied"
    assert [entry.kind for entry in site.run.books.log.entries()] == ["session"]


def test_a_peer_that_does_not_know_the_manifest_is_turned_away_in_the_handshake(site):
    with site.client(site.attester(), manifest_digest=b"x" * 32) as client:
        assert refusal(client.challenge) == "release_denied"


def test_without_a_client_certificate_there_is_no_channel(site):
    honest = client_credentials(client_end(IdentityKey.generate(), MANIFEST), site.key)
    assert _challenged(site, honest) is grpc.StatusCode.PERMISSION_DENIED  # it announces no identity key
    end = client_end(IdentityKey.generate(), MANIFEST)
    stolen_chain = type(end)(end.certificate, end.chain_pem, client_end(IdentityKey.generate(), MANIFEST).key_pem)
    assert _challenged(site, client_credentials(stolen_chain, site.key)) is grpc.StatusCode.UNAVAILABLE


def _challenged(site, credentials) -> grpc.StatusCode:
    options = (("grpc.ssl_target_name_override", SERVER_NAME),)
    with grpc.secure_channel(site.address, credentials, options) as channel:
        call = channel.unary_unary("/raycloak.evidence.v1.Evidence/Challenge")
        with pytest.raises(grpc.RpcError) as error:
            call(wire.ChallengeRequest(member_id="worker-0", role="worker").SerializeToString(), timeout=60)
        return error.value.code()


def test_a_challenge_is_for_the_identity_key_that_certified_the_channel(site):
    attester, other = site.attester(), site.attester()
    with site.client(attester) as client:
        attester.identity, own = other.identity, attester.identity
        assert refusal(client.challenge) == "peer_not_bound"
        attester.identity = own
        assert client.challenge().member_id == "worker-0"


def test_a_presentation_relayed_over_another_channel_is_refused_and_its_nonce_stays_good(site):
    attester, thief = site.attester(), site.attester()
    with site.client(attester) as client, site.client(thief) as relay:
        presentation = answer(client, attester)
        relay.challenge()
        assert refusal(relay.attest, presentation) == "peer_not_bound"
        # The victim's own signature for its channel does not help on the thief's.
        signature = _channel_signature(client, attester, presentation)
        assert _attest_raw(relay, presentation, signature) == "peer_not_bound"
        # Nor does the thief's on the victim's name; the victim itself gets in afterwards.
        assert client.attest(presentation).member_id == "worker-0"


def test_another_channel_of_the_same_identity_needs_a_signature_of_its_own(site):
    attester = site.attester()
    with site.client(attester) as client, site.client(attester) as second:
        presentation = answer(client, attester)
        signature = _channel_signature(client, attester, presentation)
        assert _attest_raw(second, presentation, signature) == "peer_not_bound"
        assert _attest_raw(client, presentation, b"") == "peer_not_bound"
        assert _attest_raw(client, presentation, signature) == ""


def _channel_signature(client, attester, presentation) -> bytes:
    binding = ChannelBinding(
        presentation=digest(presentation.body),
        server_certificate=client._server_certificate,
        client_certificate=client._end.certificate,
    )
    return attester.identity.sign(binding.signed_bytes())


def _attest_raw(client, presentation, signature) -> str:
    try:
        request = wire.AttestRequest(presentation=to_wire(presentation), channel_signature=signature)
        client._stub.Attest(request, timeout=60)
    except grpc.RpcError as error:
        return refusal_in(error.trailing_metadata()).code
    return ""


def test_a_presentation_made_for_another_role_is_refused(site):
    attester = site.attester()
    with site.client(attester) as client:
        challenge = client.challenge("aggregator")
        as_worker = attester.present(challenge.model_copy(update={"role": "worker"}), MANIFEST, ANSWER)
        assert refusal(client.attest, as_worker) == "nonce_foreign"


def test_a_presentation_of_an_earlier_session_is_refused_in_the_next(site):
    attester = site.attester()
    with site.client(attester) as client:
        presentation = answer(client, attester)
        client.attest(presentation)
    site.server.stop(0.2)
    site.begin("execution-2")
    site.server = type(site.server)(site.desk, MANIFEST, "127.0.0.1:0", site.limits)
    with site.client(attester) as client:
        assert refusal(client.release_keys, 0) == "release_denied"
        client.challenge("worker")
        assert refusal(client.attest, presentation) == "nonce_replayed"


def test_keys_and_rosters_go_to_their_member_over_its_own_channel_alone(site):
    client, _ = site.admitted("worker-0")
    other, attester = site.admitted("worker-1")
    with client, other:
        attester.member_id = "worker-0"
        assert refusal(other.release_keys, 0) == "peer_not_bound"
        assert refusal(other.roster) == "peer_not_bound"
        assert refusal(other.challenge) == "peer_not_bound"
        attester.member_id = "worker-1"
        assert refusal(other.release_keys, 0, (0, 1)) == "release_denied"
        assert refusal(other.release_keys, 0, (9,)) == "release_denied"
    with site.client(site.attester("worker-2")) as stranger:
        assert refusal(stranger.release_keys, 0) == "release_denied"
    refused = [entry.content for entry in site.run.books.log.entries() if entry.kind == "release_refused"]
    assert [(body["member_id"], body["code"]) for body in refused] == [
        ("worker-0", "peer_not_bound"),
        ("worker-1", "release_denied"),
        ("worker-1", "release_denied"),
        ("worker-2", "release_denied"),
    ]


def test_a_member_says_what_its_own_slices_are_and_no_others(site):
    """Before, any member could bind the run to the data of a slice that another hosts."""
    client, attester = site.admitted("worker-0")
    fields = {"run_id": site.run_id, "member_id": "worker-0"}
    with client:
        for slices in ((1,), (0, 1), (9,), (2**70,)):
            body = DataCommitments(virtual_workers=slices, commitments=(b"!" * 32,) * len(slices), **fields)
            assert refusal(client.roster, seal(body, attester.identity)) == "release_denied"
    assert "data" not in [entry.kind for entry in site.run.books.log.entries()]


def test_a_service_that_runs_for_long_never_has_rosters_enough(session, tmp_path, monkeypatch):
    """Each member that attests anew makes for another; before, a service ended at the 4,096th, for ever."""
    monkeypatch.setattr("raycloak.attestation.orchestrator.orchestrator.MAX_ATTEMPTS_PER_STEP", 2)
    site = Site(session, tmp_path / "orchestrator")
    desk, places = site.desk, []
    for round_ in range(5):
        for name in HOSTING:
            attester = site.attester(name)
            challenge = site.begun.admission.challenge(name, "worker")
            site.begun.admission.admit(attester.present(challenge, MANIFEST, ANSWER))
            if round_ == 0:
                site.begun.record_data(commitments(site, name, attester))
        roster = open_envelope(Roster, desk.hosting.newest_roster(), site.key)
        places.append((roster.step, roster.attempt))
        if round_ == 3:  # as after a restart
            desk = PeerDesk(site.begun, StaticHosting.of(HOSTING, (), 4))
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    site.run.close()


def test_of_two_presentations_of_one_nonce_at_once_exactly_one_is_admitted(site):
    attester = site.attester()
    with site.client(attester) as first, site.client(attester) as second:
        challenge = first.challenge()
        second._server_certificate = first._server_certificate
        both = [attester.present(challenge, MANIFEST, ANSWER) for _ in range(2)]
        assert both[0] != both[1]
        with ThreadPoolExecutor(2) as pool:
            codes = list(pool.map(_outcome, (first.attest, second.attest), both))
    assert sorted(codes) == ["", "nonce_replayed"]


def _outcome(call, *arguments) -> str:
    try:
        call(*arguments)
    except RefusedError as error:
        return error.code
    return ""


# --- limits


def _limited(session, tmp_path, **limits):
    return Site(session, tmp_path / "orchestrator", ServiceLimits(**limits)).served()


def test_a_message_that_is_too_large_is_refused(session, tmp_path):
    with _limited(session, tmp_path, message_bytes=4096) as site, site.client(site.attester()) as client:
        request = wire.AttestRequest(channel_signature=bytes(5000))
        with pytest.raises(grpc.RpcError) as error:
            client._stub.Attest(request, timeout=60)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.challenge().member_id == "worker-0"


def test_a_peer_that_asks_too_often_is_refused_and_others_are_not(session, tmp_path):
    with (
        _limited(session, tmp_path, identity_rate=1e-6, identity_burst=3) as site,
        site.client(site.attester()) as client,
        site.client(site.attester()) as other,
    ):
        for _ in range(3):
            client.challenge()
        assert refusal(client.challenge) == "rate_limited"
        assert other.challenge().member_id == "worker-0"


def test_an_address_that_asks_too_often_is_refused(session, tmp_path):
    with _limited(session, tmp_path, address_rate=1e-6, address_burst=2) as site:
        for _ in range(2):
            with site.client(site.attester()) as client:
                client.challenge()
        with site.client(site.attester()) as client:
            assert refusal(client.challenge) == "rate_limited"


def test_a_call_is_refused_when_the_orchestrator_does_not_answer_in_time(session, tmp_path):
    with _limited(session, tmp_path, deadline_s=0.3) as site, site.client(site.attester()) as client:
        with site.server._queue._turn:  # another caller keeps the orchestrator busy
            assert refusal(client.challenge) == "deadline"
        eventually(lambda: _outcome(client.challenge) == "")


def test_connections_that_are_idle_half_open_or_slow_do_not_keep_a_good_client_out(session, tmp_path):
    with _limited(session, tmp_path, stranger_s=5.0) as site, ExitStack() as held:
        bare = [held.enter_context(closing(site.connect())) for _ in range(200)]
        for connection in bare[:100]:
            connection.sendall(bytes.fromhex("160301") + os.urandom(2))  # the start of a TLS record
        slow = [held.enter_context(site.client(site.attester(f"slow-{i}"))) for i in range(5)]
        over = threading.Event()
        held.callback(over.set)
        for each in slow:  # a call whose request never comes
            method = each.channel.stream_unary("/raycloak.evidence.v1.Evidence/Attest")
            held.callback(method.future(_after(over)).cancel)
        client, _ = site.admitted()
        held.callback(client.close)
        assert client.release_keys(0)
        for connection in bare:  # the handshake has an end: the service closes them, none hangs
            assert _is_closed_by_peer(connection)


def _after(over):
    over.wait()
    yield b""


def _is_closed_by_peer(connection) -> bool:
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# --- failing closed


def test_a_service_that_is_down_gives_nothing(site):
    client, attester = site.admitted()
    with client:
        site.server.stop(0.1)
        assert refusal(client.release_keys, 0) == "release_denied"
        with site.client(attester) as again:
            assert refusal(again.challenge) == "release_denied"
        site.server = type(site.server)(site.desk, MANIFEST, "127.0.0.1:0", site.limits)


def test_a_service_that_cannot_write_its_record_answers_nothing_any_more(site):
    client, _ = site.admitted()
    with client:
        site.run.books.state.db.execute("PRAGMA query_only = 1")
        assert refusal(client.release_keys, 0) == "release_denied"
        site.run.books.state.db.execute("PRAGMA query_only = 0")
        assert refusal(client.log) == "release_denied"
        eventually(lambda: not client.is_serving())
        assert site.server.failure is not None
        assert not site.server.figures().works


def test_the_text_of_an_unexpected_error_stays_inside(site, monkeypatch):
    monkeypatch.setattr(site.begun.admission, "_transaction", lambda: 1 / 0)
    with site.client(site.attester()) as client, pytest.raises(grpc.RpcError) as error:
        client._stub.Challenge(
            wire.ChallengeRequest(member_id="worker-0", role="worker", identity_key=client._attester.identity.public),
            timeout=60,
        )
    assert "division" not in f"{error.value.details()} {error.value.trailing_metadata()}"
    assert refusal_in(error.value.trailing_metadata()).code == "release_denied"
