"""The service at the edges of its settings: who pays, uploads at once, credentials that end, its own defects."""

import asyncio
import threading
import time
from types import SimpleNamespace

import grpc
import pytest

from raycloak.attestation.service.connections import ConnectionGuard
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.config.section import validated
from raycloak.coordinator.service import server as server_module
from raycloak.coordinator.service.driver import PacedRun
from raycloak.coordinator.service.limits import ANSWER_BYTES, LIST_BYTES
from raycloak.coordinator.service.pipe import REPORTS
from raycloak.coordinator.service.server import ServiceParts, _TrainingServicer
from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.coordinator.service.store import ArtifactRow
from raycloak.coordinator.service.watches import Watches
from raycloak.coordinator.training.pace import StopRequest
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.metrics.service_errors import ServiceAuthenticationError, ServiceQueueFullError, ServiceServerError
from raycloak.workers.terms.measurement import Released as Measured
from tests.coordinator.service.scripted import HASH, KEYS, SENT, settings
from tests.coordinator.service.serving import metadata, stub
from tests.coordinator.service.test_drivers import REFUSED, both_ends
from tests.coordinator.service.test_server import DEADLINE_S, created, fails, head_of, pieces, sealed


def test_off_loopback_private_data_needs_an_account_that_its_operator_has_opened():
    """The first client would else choose the cap of the data."""
    raw = settings().model_dump(mode="json", exclude_unset=True)
    away = {**raw, "bind": "0.0.0.0:1", "tls": {"certificate": "c", "key": "k"}}
    with pytest.raises(ConfigError, match=r"datasets\.digits\.account"):
        validated(ServiceSettings, away)
    away["datasets"]["digits"]["account"] = "ward"
    assert validated(ServiceSettings, away).datasets["open"].account is None


def test_a_client_is_busy_while_an_operation_has_not_ended(site):
    client = site.create()
    site.run()
    assert site.client(client).status == "READY"
    site.submit(client, "forward_backward")
    assert site.client(client).status == "BUSY"
    assert site.ask(site.store.clients_by_status) == {"BUSY": 1}
    site.run()
    assert site.client(client).status == "READY"
    assert site.ask(site.store.clients_by_status) == {"READY": 1}


def test_a_client_with_work_gives_its_place_up_after_its_turn_and_not_before(make_site):
    site = make_site(limits={"active_clients": 1, "idle_seconds": 0, "turn_seconds": 60})
    first = site.create()
    site.run()
    for kind in ("forward_backward", "optim_step", "forward_backward", "optim_step"):
        site.submit(first, kind)
    site.create()
    site.now = 59
    site.ask(site.desk.tick)
    assert not site.drivers.of[first].stopped
    site.now = 61
    site.ask(site.desk.tick)
    assert site.drivers.of[first].stopped


def test_uploads_at_once_are_bounded_for_each_tenant(serve):
    served = serve(limits={"sends_per_tenant": 1})
    with stub(served.address) as api:
        client = created(api, config=SENT)
        over = threading.Event()

        def slow():
            yield wire.BatchPiece(head=head_of(client, b"12345"))
            over.wait(DEADLINE_S)

        def begun():
            return api.SendBatch.future(slow(), metadata=metadata(), timeout=DEADLINE_S)

        first, until = begun(), time.monotonic() + DEADLINE_S
        while True:
            # Until the first has arrived, another is refused for its content.
            error = fails(lambda: api.SendBatch(iter(()), metadata=metadata(), timeout=DEADLINE_S))
            if isinstance(error, ServiceQueueFullError):
                break
            # The other one was there before it.
            if first.done():
                first = begun()
            assert time.monotonic() < until
        assert error.code == "streams_full"
        theirs = fails(lambda: api.SendBatch(iter(()), metadata=metadata("south"), timeout=DEADLINE_S))
        assert theirs.kind == "validation"
        first.cancel()
        over.set()


def expiring(serve):
    """Return a service whose one tenant has a token that ends in a thousand years."""
    token = {"sha256": HASH(b"north").hexdigest(), "expires": "2999-01-01"}
    return serve(tenants={"north": {"token_sha256": [token], "datasets": ["digits"], "code": ["m:f"], "key_services": KEYS}})  # fmt: skip # noqa: E501


def after_the_end(monkeypatch):
    """Set the clock of streams beyond that end; a call that begins is still in time."""
    monkeypatch.setattr(server_module, "time", SimpleNamespace(time=lambda: 40_000_000_000.0))


class Reader:
    """The context of a caller that reads its answer when the test says so."""

    def __init__(self, token="north"):
        self.token, self._done = token, []

    def peer(self):
        return "ipv4:192.0.2.7:443"

    def invocation_metadata(self):
        return metadata(self.token)

    def auth_context(self):
        return {}

    def add_done_callback(self, done):
        self._done.append(done)

    def read(self):
        for done in self._done:
            done(self)


async def only(request):
    """Yield the one request of a call."""
    yield request


def test_a_tenant_that_does_not_read_its_answers_gets_few_and_others_get_theirs(serve):
    served = serve(limits={"tenant_bytes": LIST_BYTES, "request_bytes": 4096})
    parts = ServiceParts(served.desk, served.turns, served.folder, served.pieces, served.refused.append, "simulated")

    async def ask():
        guard = ConnectionGuard(served.settings.limits.bounds())
        servicer = _TrainingServicer(parts, served.settings, Watches(asyncio.get_running_loop()), guard)
        listed = "x" * (LIST_BYTES - ANSWER_BYTES)
        served.desk.clients = lambda tenant: [wire.Client(name=listed)] if tenant == "north" else []
        readers = [Reader() for _ in range(2)]

        def lists(reader):
            return servicer.ListClients(only(wire.ListClientsRequest()), reader)

        calls = [asyncio.ensure_future(lists(each)) for each in readers]
        async with asyncio.timeout(DEADLINE_S):
            await calls[0]
            await lists(Reader("south"))
            await servicer.GetCapabilities(only(wire.CapabilitiesRequest()), Reader())
            assert not calls[1].done()
            readers[0].read()
            await calls[1]

    asyncio.run(ask())


def test_a_stream_of_changes_ends_with_the_credentials_it_was_opened_with(serve, monkeypatch):
    with stub(expiring(serve).address) as api:
        client = created(api)
        call = api.Watch(wire.WatchRequest(client_id=client), metadata=metadata(), timeout=DEADLINE_S)
        next(call)
        after_the_end(monkeypatch)
        error = fails(lambda: list(call))
        assert isinstance(error, ServiceAuthenticationError)
        assert error.code == "expired"


def test_an_upload_and_a_download_end_with_their_credentials_and_nothing_is_recorded(serve, monkeypatch):
    served = expiring(serve)
    with stub(served.address) as api:
        client = created(api, config=SENT)
        kept = ArtifactRow(client, 0, 1, "package", "ab" * 32, "cd" * 32, "{}", 1.0, 6)
        served.turns.put(lambda: served.store.add(kept)).result(DEADLINE_S)
        content = sealed(api, client)
        head = head_of(client, content)
        after_the_end(monkeypatch)

        def send():
            return api.SendBatch(pieces(head, content), metadata=metadata(), timeout=DEADLINE_S)

        def pull():
            return list(api.PullArtifact(wire.ArtifactRequest(artifact_id=f"{client}.0"), metadata=metadata()))

        assert [fails(send).code, fails(pull).code] == ["expired", "expired"]
        monkeypatch.undo()
        assert [piece.data for piece in pull()] == [b"one", b"two"]
        assert served.turns.put(served.store.batch_files).result(DEADLINE_S) == set()
        assert send().state == "done"


def test_a_package_that_is_gone_is_named_to_who_pulls_it_and_in_the_log(serve, caplog):
    served = serve()
    with stub(served.address) as api:
        client = created(api)
        kept = ArtifactRow(client, 0, 1, "package", "ab" * 32, "cd" * 32, "{}", 1.0, 6)
        served.turns.put(lambda: served.store.add(kept)).result(DEADLINE_S)
        request = wire.ArtifactRequest(artifact_id=f"{client}.0")

        def gone(row):
            yield b"one"
            raise EvidenceError("package_file_missing", f"the {row.package} is not there.", "Save the state again.")

        served.pieces = gone
        error = fails(lambda: list(api.PullArtifact(request, metadata=metadata(), timeout=DEADLINE_S)))
        assert isinstance(error, ServiceServerError)
        assert (error.code, error.remedy) == ("package_file_missing", "Save the state again.")
        assert [each for each in caplog.messages if error.request_id in each and error.code in each]


def test_a_defect_is_in_the_log_by_request_id_and_its_text_reaches_nobody(serve, monkeypatch, caplog):
    served = serve()

    def broken(*_):
        raise KeyError("patient-7")

    monkeypatch.setattr(served.desk, "clients", broken)
    with stub(served.address) as api:
        given = metadata(request_id="mine-8")
        with pytest.raises(grpc.RpcError) as failure:
            api.ListClients(wire.ListClientsRequest(), metadata=given, timeout=DEADLINE_S)
        error = fails(lambda: api.ListClients(wire.ListClientsRequest(), metadata=given, timeout=DEADLINE_S))
        assert isinstance(error, ServiceServerError)
        assert error.request_id == "mine-8"
        assert "patient-7" not in f"{failure.value.details()} {error.message} {error.remedy}"
        assert any("mine-8" in record.getMessage() for record in caplog.records)


def test_a_loss_that_was_bought_for_a_model_is_that_of_the_step_from_this_model():
    """And of no other: a step whose model nobody measured has none."""
    with both_ends() as (service, driver):
        run = PacedRun(REFUSED, driver, StopRequest())
        run._measured(
            Measured(query="evaluation", number=0, after=1, values={"loss": 0.25, "accuracy": 0.5}, deviation={}), 0.75
        )
        for step in (0, 1):
            run._computed(step, 0.5, None)
            run._stepped(StepReport(step + 1, 2, 0.5, 2.0, None, 3, "cd", 0.5))
        spent, *reports = (service.receive(*REPORTS) for _ in range(5))
    assert spent.epsilon == 0.75
    assert [each.loss for each in reports] == [None, None, 0.25, 0.25]
