"""The service over real sockets: credentials, versions, errors, streams and their limits."""

import hashlib
import json
import queue
import threading
import time
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.sent_batch import seal_sent
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import TRAILER, error_from_wire
from raycloak.coordinator.client.results import Progress
from raycloak.coordinator.client.service_client import ServiceClient, ServiceCredentials
from raycloak.coordinator.service import watches as watches_module
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.service_errors import (
    FutureFailedError,
    ServiceAuthenticationError,
    ServiceConnectionError,
    ServiceNotFoundError,
    ServiceQueueFullError,
    ServiceRateLimitedError,
    ServiceServerError,
    ServiceValidationError,
)
from tests.coordinator.service.scripted import GIVEN, HASH, SENT, TEXT, digest, sealed_head
from tests.coordinator.service.serving import Authority, Served, metadata, stub

DEADLINE_S = 120


def fails(call):
    """Return the error that a call of a stub ends with, as a client gets it."""
    with pytest.raises(grpc.RpcError) as failure:
        call()
    (info,) = [value for key, value in failure.value.trailing_metadata() if key == TRAILER]
    return error_from_wire(wire.ServiceErrorInfo.FromString(info))


def created(api, token="north", config=GIVEN, key="k"):
    """Create a client; return its id."""
    request = wire.CreateClientRequest(idempotency_key=key, config_json=json.dumps(config))
    return api.CreateClient(request, metadata=metadata(token), timeout=DEADLINE_S).client_id


def test_two_tenants_train_over_tls_and_see_nothing_of_each_other(serve, tmp_path):
    authority = Authority()
    served = serve(tls=authority.write(tmp_path, "server", ["localhost"]))
    credentials = {
        token: ServiceCredentials(token=token, ca=str(tmp_path / "ca.pem")) for token in ("north", "south", "east")
    }
    with (
        ServiceClient(served.address, credentials["north"]) as north,
        ServiceClient(served.address, credentials["south"]) as south,
    ):
        ours, theirs = north.create_training_client(GIVEN), south.create_training_client(GIVEN)
        futures = [(ours.forward_backward(), ours.optim_step()) for _ in range(3)]
        for step, (forward, optim) in enumerate(futures):
            assert forward.result(timeout=DEADLINE_S).step == step
            assert optim.result(timeout=DEADLINE_S).model_digest == digest(step + 1)
        artifact = ours.save_state(metadata={"a": "b"}).result(timeout=DEADLINE_S)
        assert north.pull_artifact(artifact.artifact_id) == b"onetwo"
        with pytest.raises(ServiceNotFoundError):
            south.pull_artifact(artifact.artifact_id)
        with pytest.raises(ServiceNotFoundError):
            south.get_client(ours.client_id)
        assert [each.client_id for each in south.list_clients()] == [theirs.client_id]
        assert north.capabilities().tenant == "north"
        assert north.capabilities().evidence_class == "simulated"
    with pytest.raises(ServiceAuthenticationError, match="unauthenticated"):
        ServiceClient(served.address, credentials["east"])
    # Neither another authority's clients nor a plain connection get an answer.
    with stub(served.address) as api, pytest.raises(grpc.RpcError):
        api.GetCapabilities(wire.CapabilitiesRequest(), metadata=metadata(), timeout=10)


def test_a_client_certificate_names_its_tenant(serve, tmp_path):
    authority = Authority()
    tls = {**authority.write(tmp_path, "server", ["localhost"]), "client_ca": "ca.pem"}
    tenants = {
        "north": {"certificates": ["ward"], "datasets": ["digits"]},
        "south": {"token_sha256": [{"sha256": HASH(b"south").hexdigest()}]},
    }
    served = serve(tls=tls, tenants=tenants)
    ask = wire.CapabilitiesRequest()
    key, certificate = authority.issue("ward")
    with stub(served.address, authority.pem, (key, certificate)) as api:
        said = api.GetCapabilities(ask, metadata=metadata(None), timeout=DEADLINE_S)
        assert (said.tenant, list(said.datasets)) == ("north", ["digits"])
        assert 0 < said.expires_unix_s - time.time() < 86_400
        # A certificate of one tenant with the token of another is of neither.
        error = fails(lambda: api.GetCapabilities(ask, metadata=metadata("south"), timeout=DEADLINE_S))
        assert error.code == "unauthenticated"
    with stub(served.address, authority.pem, authority.issue("stranger")) as api:
        error = fails(lambda: api.GetCapabilities(ask, metadata=metadata(None), timeout=DEADLINE_S))
        assert error.code == "unauthenticated"
        assert api.GetCapabilities(ask, metadata=metadata("south"), timeout=DEADLINE_S).tenant == "south"
    with stub(served.address, authority.pem, Authority("other").issue("ward")) as api:
        with pytest.raises(grpc.RpcError) as failure:
            api.GetCapabilities(ask, metadata=metadata(None), timeout=10)
        assert failure.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def test_credentials_versions_and_errors_have_their_names(serve):
    tenants = {"north": {"token_sha256": [{"sha256": HASH(b"north").hexdigest()}, {"sha256": HASH(b"old").hexdigest(), "expires": "2020-01-01"}]}}  # fmt: skip # noqa: E501
    served = serve(tenants=tenants)
    with stub(served.address) as api:

        def refused(given):
            return fails(lambda: api.GetClient(wire.ClientRequest(client_id="c"), metadata=given, timeout=DEADLINE_S))

        for given in (metadata("no"), metadata(None), metadata(""), metadata("x" * 600)):
            assert isinstance(refused(given), ServiceAuthenticationError)
        assert refused(metadata("old")).code == "expired"
        for version in ("", "0.2.0", "1.1", "x" * 500):
            error = refused(metadata(version=version))
            assert isinstance(error, ServiceConnectionError)
            assert error.code == "other_version"
        error = refused(metadata(request_id="mine-7"))
        assert isinstance(error, ServiceNotFoundError)
        assert (error.request_id, error.resource) == ("mine-7", "client")
        # A request id that is none is replaced, and not written into logs.
        assert refused(metadata(request_id="a b\\n")).request_id not in ("", "a b\\n")
        assert served.refused.count("authentication") == 5
        error = fails(lambda: created(api, config={**GIVEN, "steps": 0}))
        assert isinstance(error, ServiceValidationError)
        assert error.field == "steps"


def test_a_request_beyond_the_limit_is_refused_and_the_service_goes_on(serve):
    served = serve(limits={"request_bytes": 8192})
    with stub(served.address) as api:
        request = wire.CreateClientRequest(idempotency_key="k", config_json=" " * 9000)
        with pytest.raises(grpc.RpcError) as failure:
            api.CreateClient(request, metadata=metadata(), timeout=DEADLINE_S)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        created(api)


def test_a_tenant_that_calls_too_often_is_told_when_to_come_back_and_others_are_served(serve):
    # So rarely that no call becomes due while the test waits for its turn.
    served = serve(limits={"calls_per_second": 0.01, "burst": 2})
    with stub(served.address) as api:

        def ask(tenant):
            return api.GetCapabilities(wire.CapabilitiesRequest(), metadata=metadata(tenant), timeout=DEADLINE_S)

        for _ in range(2):
            ask("north")
        error = fails(lambda: ask("north"))
        assert isinstance(error, ServiceRateLimitedError)
        assert 0 < error.retry_after_s <= 100
        assert ask("south").tenant == "south"


def test_health_and_reflection_answer(serve):
    served = serve()
    with grpc.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="raycloak.service.v1.Training")
        assert health.Check(request, timeout=DEADLINE_S).status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([ask]), metadata=metadata(), timeout=DEADLINE_S
        )
        names = {each.name for each in next(answers).list_services_response.service}
        assert "raycloak.service.v1.Training" in names


def test_an_address_or_a_file_that_cannot_be_used_is_refused(serve, tmp_path):
    served = serve()
    other = {"store": None, "bind": f"127.0.0.1:{served.server.port}"}
    with pytest.raises(ConfigError, match="bind"):
        Served(_folder(tmp_path / "other"), **other)
    with pytest.raises(ConfigError, match="tls"):
        Served(_folder(tmp_path / "third"), tls={"certificate": "none.pem", "key": "none.pem"})


def _folder(path):
    path.mkdir()
    return path


def watched(api, client, since, count, token="north"):
    """Return the next changes of a client."""
    call = api.Watch(wire.WatchRequest(client_id=client, since=since), metadata=metadata(token), timeout=DEADLINE_S)
    found = [next(call) for _ in range(count)]
    call.cancel()
    return found


def durable(changes):
    """Return the (revision, name) of changes that are in the store."""
    found = [getattr(each, each.WhichOneof("what")) for each in changes if each.WhichOneof("what") in ("operation", "client")]  # fmt: skip # noqa: E501
    return [(each.revision, getattr(each, "operation_id", "")) for each in found]


def test_a_watch_goes_on_after_any_revision(serve):
    served = serve()
    with stub(served.address) as api:
        client = created(api)
        call = api.Watch(wire.WatchRequest(client_id=client), metadata=metadata(), timeout=DEADLINE_S)
        done, revisions = set(), []

        def submit(number, kind, payload):
            request = wire.SubmitRequest(client_id=client, idempotency_key=f"k{number}", **{kind: payload})
            return api.Submit(request, metadata=metadata(), timeout=DEADLINE_S).operation_id

        wanted = set()
        for number in range(0, 6, 2):
            wanted.add(submit(number, "forward_backward", wire.ForwardBackward()))
            wanted.add(submit(number + 1, "optim_step", wire.OptimStep()))
        for change in call:
            revisions += [revision for revision, _ in durable([change])]
            if change.HasField("operation") and change.operation.state == "done":
                done.add(change.operation.operation_id)
            if done == wanted:
                break
        call.cancel()
        assert revisions == sorted(set(revisions))
        # Everything again, and the end of it.
        everything = durable(watched(api, client, 0, 7))
        assert {name for _, name in everything} == {*wanted, ""}
        assert durable(watched(api, client, everything[3][0], 3)) == everything[4:]
        assert isinstance(fails(lambda: next(iter(api.Watch(wire.WatchRequest(client_id=client), metadata=metadata("south"), timeout=DEADLINE_S)))), ServiceNotFoundError)  # fmt: skip # noqa: E501


def test_a_watcher_of_a_client_sees_how_fast_a_sample_is_generated(serve):
    served, told = serve(), queue.SimpleQueue()
    with ServiceClient(served.address, "north") as service, service.create_training_client(TEXT) as training:
        training.forward_backward()
        training.optim_step().result(DEADLINE_S)
        training.sample(["a"])
        training.add_progress_callback(told.put)
        until = time.monotonic() + DEADLINE_S
        while not served.sampler.asked and time.monotonic() < until:
            time.sleep(0.01)
        # The sampler may be asked before the client has the service's answer, and with it the name.
        (name,) = served.sampler.asked
        seen = None
        # The first ones may come before the stream of changes is open.
        while seen is None and time.monotonic() < until:
            served.turns.put(lambda: served.desk.reports.sampling(name, 12.5)).result(DEADLINE_S)
            with suppress(queue.Empty):
                seen = told.get(timeout=0.1)
        while seen.phase != "sampling":
            seen = told.get(timeout=DEADLINE_S)
        assert seen == Progress(name, 1, pytest.approx(0.1), 12.5, "sampling")


def test_streams_are_bounded_for_each_tenant(serve):
    served = serve(limits={"watches_per_tenant": 1})
    with stub(served.address) as api:
        client, theirs = created(api), created(api, "south")
        first = api.Watch(wire.WatchRequest(client_id=client), metadata=metadata(), timeout=DEADLINE_S)
        next(first)
        error = fails(lambda: next(api.Watch(wire.WatchRequest(client_id=client), metadata=metadata(), timeout=DEADLINE_S)))  # fmt: skip # noqa: E501
        assert isinstance(error, ServiceQueueFullError)
        assert watched(api, theirs, 0, 1, "south")
        first.cancel()
        until = time.monotonic() + DEADLINE_S
        while served.watches.number and time.monotonic() < until:
            pass
        assert watched(api, client, 0, 1)


def test_a_watcher_that_does_not_read_is_cut_and_comes_back(serve, monkeypatch):
    monkeypatch.setattr(watches_module, "_PASSING_BYTES", 2**19)
    served = serve(limits={"stall_seconds": 1.0})
    with stub(served.address) as api:
        client = created(api)
        call = api.Watch(wire.WatchRequest(client_id=client), metadata=metadata(), timeout=DEADLINE_S)
        next(call)
        text = "x" * 10_000

        def flood():
            change = wire.Change(tokens=wire.Tokens(operation_id="o", text=text))
            until = time.monotonic() + DEADLINE_S
            while served.watches.number and time.monotonic() < until:
                served.watches.publish([(client, change)])

        thread = threading.Thread(target=flood)
        thread.start()
        thread.join(DEADLINE_S)
        assert served.watches.number == 0
        assert fails(lambda: list(call)).code in ("watch_behind", "stalled")
        assert watched(api, client, 0, 1)


def pieces(head, *data):
    """Yield the pieces of a batch."""
    yield wire.BatchPiece(head=head)
    for each in data:
        yield wire.BatchPiece(data=each)


def head_of(client, content, key="b", **fields):
    """Return the head of a batch of one example."""
    return wire.BatchHead(
        **{
            "client_id": client,
            "idempotency_key": key,
            "examples": 1,
            "example_hashes": b"i" * 16,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).digest(),
            **fields,
        }
    )


def sealed(api, client):
    """Return a batch that is sealed for a client, once its run is admitted."""
    until = time.monotonic() + DEADLINE_S
    request = wire.ClientRequest(client_id=client)
    while not (run_id := api.GetClient(request, metadata=metadata(), timeout=DEADLINE_S).run_id):
        assert time.monotonic() < until
    head = sealed_head(client, run_id, row_bytes=10_000)
    return seal_sent(head, [b"0123456789" * 1000], lambda v: Secret(b"k" * 32))


def test_a_batch_arrives_whole_or_not_at_all(serve):
    served = serve(limits={"batch_bytes": 100_000})
    with stub(served.address) as api:
        client = created(api, config=SENT)

        def send(*messages):
            return api.SendBatch(iter(messages), metadata=metadata(), timeout=DEADLINE_S)

        content = sealed(api, client)
        good = head_of(client, content)
        for messages, field in (
            ([], "head"),
            ([wire.BatchPiece(data=b"x")], "head"),
            (pieces(good, content, b"more"), "bytes"),
            (pieces(good, content[:-1]), "sha256"),
            (pieces(good, content[::-1]), "sha256"),
            ([*pieces(good), wire.BatchPiece(head=good)], "head"),
            (pieces(head_of(client, content, bytes=10**9)), "batch"),
            (pieces(head_of(client, b"no batch"), b"no batch"), "batch"),
        ):
            error = fails(lambda messages=messages: send(*messages))
            assert isinstance(error, ServiceValidationError)
            assert error.field == field
        assert [path for path in served.folder.rglob("*") if path.is_file()] == []
        done = send(*pieces(good, content[:4000], content[4000:]))
        assert (done.state, done.forward_backward.examples_sent) == ("done", 1)
        assert send(*pieces(good, content)).operation_id == done.operation_id
        (file,) = [path for path in served.folder.rglob("*") if path.is_file()]
        assert file.read_bytes() == content
        assert file.stat().st_mode & 0o777 == 0o600
        assert isinstance(fails(lambda: send(*pieces(head_of(client, content, key="c"), content))), ServiceValidationError)  # fmt: skip # noqa: E501
        assert [path for path in served.folder.rglob("*") if path.is_file()] == [file]


def test_guarantee_a_batch_that_the_store_may_name_keeps_its_file(serve, tmp_path, monkeypatch):
    """The service fails after its commit and before its answer: the next one goes on with the batch."""
    served = Served(tmp_path)
    with stub(served.address) as api:
        client = created(api, config=SENT)
        content = sealed(api, client)
        good = head_of(client, content)
        monkeypatch.setattr(served.desk.book, "publish", lambda news: 1 / 0)
        assert isinstance(
            fails(lambda: api.SendBatch(pieces(good, content), metadata=metadata(), timeout=DEADLINE_S)),
            ServiceServerError,
        )
    served.stop()
    again = serve()
    with stub(again.address) as api:
        assert api.SendBatch(pieces(good, content), metadata=metadata(), timeout=DEADLINE_S).state == "done"
        (file,) = again.store.batch_files()
        assert (again.folder / file).read_bytes() == content


def test_an_upload_that_stalls_is_cut(serve):
    served = serve(limits={"stall_seconds": 0.5})
    with stub(served.address) as api:
        client = created(api, config=SENT)
        over = threading.Event()

        def slow():
            yield from pieces(head_of(client, b"12345"), b"12")
            over.wait(DEADLINE_S)

        error = fails(lambda: api.SendBatch(slow(), metadata=metadata(), timeout=DEADLINE_S))
        over.set()
        assert "stalled" in error.message
        assert [path for path in served.folder.rglob("*") if path.is_file()] == []


def test_a_store_that_fails_ends_the_service(serve):
    served = serve()
    with stub(served.address) as api, grpc.insecure_channel(served.address) as channel:
        created(api)
        # A full disk, as far as SQLite can tell.
        served.turns.put(lambda: served.store._database.run("PRAGMA max_page_count = 1")).result(DEADLINE_S)
        notes = {**GIVEN, "metadata": {str(number): "x" * 500 for number in range(30)}}
        for _ in range(2):
            assert isinstance(fails(lambda: created(api, config=notes, key="new")), ServiceServerError)
        assert served.turns.failure is not None
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="raycloak.service.v1.Training")
        until = time.monotonic() + DEADLINE_S
        while health.Check(request, timeout=DEADLINE_S).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            assert time.monotonic() < until


def test_an_operation_whose_outcome_cannot_be_recorded_fails_and_no_future_waits_for_ever(serve, monkeypatch):
    served = serve()
    credentials = ServiceCredentials(token="north")
    with ServiceClient(served.address, credentials) as service:
        lost, well = service.create_training_client(GIVEN), service.create_training_client(GIVEN)
        taken = served.desk.reports._released

        def released(client, *said):
            if client.client_id == lost.client_id:
                raise KeyError("a record that is not there")
            taken(client, *said)

        monkeypatch.setattr(served.desk.reports, "_released", released)
        for each in (lost, well):
            each.forward_backward()
        outcome = lost.optim_step()
        with pytest.raises(FutureFailedError, match="report_lost"):
            outcome.result(timeout=DEADLINE_S)
        assert well.optim_step().result(timeout=DEADLINE_S).step == 1
