"""Strangers at the training service: what they cost, and that tenants go on meanwhile."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from raycloak.attestation.service import connections
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.service_client import ServiceClient
from raycloak.coordinator.service.limits import STRANGER_S
from tests.coordinator.service.scripted import GIVEN
from tests.coordinator.service.serving import metadata, stub
from tests.coordinator.service.test_server import DEADLINE_S, created
from tests.raw_http2 import connect, is_closed, unfinished_calls

SUBMIT = "/raycloak.service.v1.Training/Submit"
CHECK = "/grpc.health.v1.Health/Check"
GIVEN_BACK_S = 10.0
LATE_S = 30.0
"""More for a machine that is busy with other tests."""
MIB = 2**20
LEFT = 0.5
"""Share of what they may cost that may stay: it is the tenant's loop's, which goes on, and the allocator's."""
WARM = 50
"""Steps after which a service's memory grows with what it records alone."""


@contextmanager
def alone(folder, **limits):
    """Yield (port, function of its resident bytes) of a service in a process of its own."""
    command = [sys.executable, "-m", "tests.coordinator.service.served_alone", str(folder), json.dumps(limits)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            status = Path(f"/proc/{process.pid}/status")

            def resident():
                line = next(each for each in status.read_text().splitlines() if each.startswith("VmRSS:"))
                return 1024 * int(line.split()[1])

            yield int(process.stdout.readline()), resident
            process.stdin.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


class Loop:
    """A tenant's loop, which takes steps until it is told to end."""

    def __init__(self, port):
        self.steps, self.error, self._ends, self._port = 0, None, threading.Event(), port
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self.await_steps(WARM)
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()
        assert self.error is None

    def await_steps(self, more):
        """Wait until there are so many more steps."""
        wanted, until = self.steps + more, time.monotonic() + DEADLINE_S
        while self.steps < wanted and self.error is None:
            assert time.monotonic() < until
            time.sleep(0.005)

    def _run(self):
        try:
            with ServiceClient(f"localhost:{self._port}", "north") as service:
                training = service.create_training_client({**GIVEN, "steps": 10**5})
                while not self._ends.wait(0.01):
                    training.forward_backward()
                    training.optim_step().result(DEADLINE_S)
                    self.steps += 1
        except BaseException as error:
            self.error = error
            raise


def cost(folder, attack, count, most, **limits):
    """Have strangers connect; assert what they cost, that it is given back, and that a tenant goes on."""
    with alone(folder, **limits) as (port, resident), Loop(port) as loop, ExitStack() as held:
        before = resident()
        strangers = [held.enter_context(attack(port, number)) for number in range(count)]
        begun, grown = time.monotonic(), resident() - before
        loop.await_steps(1)
        grown = max(grown, resident() - before)
        assert grown <= most, f"{grown / MIB:.1f} MiB"
        while strangers or resident() - before > LEFT * most:
            assert time.monotonic() - begun < GIVEN_BACK_S + LATE_S, (len(strangers), resident() - before)
            strangers = [each for each in strangers if not is_closed(each)]
            time.sleep(0.1)
        loop.await_steps(3)


@pytest.mark.parametrize("path", [SUBMIT, CHECK])
def test_guarantee_twenty_connections_of_strangers_cost_at_most_16_mib_and_it_is_given_back(tmp_path, path):
    """Before, two whose calls have 64 KiB of a request and no more cost 54 MiB, and twenty 281, for good."""
    cost(tmp_path, lambda port, _: unfinished_calls(connect(port), path, 64), 20, 16 * MIB)


def test_guarantee_a_thousand_connections_of_strangers_cost_at_most_64_mib_and_it_is_given_back(tmp_path):
    def attack(port, number):
        return unfinished_calls(connect(port), SUBMIT, 1) if number % 2 else connect(port)

    cost(tmp_path, attack, 1000, 64 * MIB, connections=2048, connections_per_address=2048)


def test_a_connection_without_credentials_ends_within_seconds_and_one_with_a_tenants_call_does_not(serve):
    served = serve()
    with stub(served.address) as api, connect(served.server.port) as silent, ExitStack() as held:
        client = created(api)
        changes = api.Watch(wire.WatchRequest(client_id=client), metadata=metadata(), timeout=DEADLINE_S)
        held.callback(changes.cancel)
        next(changes)
        refused = unfinished_calls(held.enter_context(connect(served.server.port)), SUBMIT, 1)
        begun = time.monotonic()
        while not is_closed(refused):
            assert time.monotonic() - begun < STRANGER_S
            time.sleep(0.05)
        assert not is_closed(silent)
        while not is_closed(silent):
            assert time.monotonic() - begun < STRANGER_S + LATE_S
            time.sleep(0.05)
        assert time.monotonic() - begun > STRANGER_S / 2
        assert changes.is_active()


def test_calls_beyond_those_that_a_server_looks_at_are_dropped_and_a_client_makes_them_again(serve, monkeypatch):
    monkeypatch.setattr(connections, "UNCLAIMED_CALLS", 4)
    served, goes_on = serve(), threading.Event()
    with stub(served.address) as api, ServiceClient(served.address, "north") as service:
        # Nobody looks at a call meanwhile.
        served.server._loop.call_soon_threadsafe(goes_on.wait, DEADLINE_S)
        try:
            ask = wire.ListClientsRequest()
            calls = [api.ListClients.future(ask, metadata=metadata(), timeout=DEADLINE_S) for _ in range(40)]
            until = time.monotonic() + DEADLINE_S
            while not (dropped := [each.code() for each in calls if each.done()]):
                assert time.monotonic() < until
                time.sleep(0.01)
            assert set(dropped) == {grpc.StatusCode.CANCELLED}
            listed = ThreadPoolExecutor(8)
            mine = [listed.submit(service.list_clients) for _ in range(8)]
        finally:
            goes_on.set()
        assert [each.result(DEADLINE_S) for each in mine] == [[]] * 8
        listed.shutdown()


def test_who_has_no_credentials_reads_nothing_but_the_health_of_the_server(serve):
    with grpc.insecure_channel(serve().address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert health.Check(request, timeout=DEADLINE_S).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            next(health.Watch(request, timeout=DEADLINE_S))
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            next(reflection.ServerReflectionInfo(iter([ask]), timeout=DEADLINE_S))
