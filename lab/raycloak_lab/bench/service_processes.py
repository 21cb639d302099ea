"""The processes beside the clients of ``raycloak-lab bench service``: the service, the floor, and the idle clients.

The service is the real one, gRPC server, desk and synced SQLite, on drivers that train nothing. The floor is what any
durable service costs here: one unary call of gRPC, and two synced commits of SQLite behind it.
"""

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.client.service_client import ServiceClient
from raycloak.coordinator.client.training_client import TrainingClient
from raycloak.coordinator.config.home import HOME_VARIABLE
from raycloak.coordinator.config.section import validated
from raycloak.coordinator.service.pipe import (
    Allow,
    Begin,
    Command,
    Computed,
    Ended,
    Ready,
    ReleasedStep,
    Report,
)
from raycloak.coordinator.service.service import TrainingService
from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.coordinator.service.tenants import new_token
from raycloak_lab.bench.attest_processes import BenchServing, Figures, Question, cpu_seconds, raise_open_files
from raycloak_lab.bench.resident_memory import resident

ECHO: Final = "/raycloak.bench.Floor/Echo"
CONFIG: Final[Mapping[str, Any]] = {
    "name": "bench",
    "model": "bench:model",
    "dataset": "digits",
    "expected_batch_size": 1.0,
    "steps": 2**30,
    "dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 1.0},
}
"""A client of the bench. Nothing of it is opened or built."""
_OPEN_FILES: Final = 4096
# About the sizes of a request and of an operation's row.
_ROW: Final = bytes(300)


class _NoOpDrivers:
    """Drivers that compute nothing: each reports every step that it is allowed, at once.

    Attributes:
        tell: the service's, which sets it.
    """

    tell: Callable[[str, Any], None]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, Allow] = {}
        self._held: dict[str, Allow] | None = None

    def start(self, client_id: str, begin: Begin) -> None:
        """See `DriverPort`."""
        with self._lock:
            self._done[client_id] = Allow(computed=0, released=0)
        self.tell(client_id, _READY)

    def send(self, client_id: str, command: Command) -> None:
        """See `DriverPort`."""
        if not isinstance(command, Allow):
            return
        with self._lock:
            if self._held is not None:
                self._held[client_id] = command
                return
            reports = self._due(client_id, command)
        for report in reports:
            self.tell(client_id, report)

    def stop(self, client_id: str) -> None:
        """See `DriverPort`."""
        self.tell(client_id, Ended(ending="stopped", metrics=None))
        self.tell(client_id, Exited(code=0, last_words=""))

    def kill(self, client_id: str) -> None:
        """See `DriverPort`: it has ended when it was stopped."""

    def hold(self) -> None:
        """Report nothing any more."""
        with self._lock:
            self._held = {}

    def go_on(self) -> None:
        """Report what was allowed meanwhile."""
        with self._lock:
            held, self._held = self._held or {}, None
            due = [(client, report) for client, marks in held.items() for report in self._due(client, marks)]
        for client, report in due:
            self.tell(client, report)

    def _due(self, client_id: str, marks: Allow) -> list[Report]:
        """Return the reports of the steps between the former watermarks and these; the lock is held."""
        done, self._done[client_id] = self._done[client_id], marks
        computed = [Computed(step=step, epsilon=None, loss=None) for step in range(done.computed, marks.computed)]
        return [
            *computed,
            *(_RELEASED.model_copy(update={"step": step}) for step in range(done.released, marks.released)),
        ]


_READY: Final = Ready(
    finished_steps=0,
    steps=CONFIG["steps"],
    charged_steps=0,
    delta=None,
    epsilon_cap=None,
    epsilon_planned=None,
    epsilon=None,
    noise_multiplier=None,
    sample_rate=1.0,
    max_grad_norm=1.0,
    accountant="rdp",
    private=False,
    virtual_workers=1,
    evidence_class="simulated",
    account="bench",
    manifest={},
)
_RELEASED: Final = ReleasedStep(
    step=0, model_digest="00" * 32, epsilon=None, seconds=0.0, evaluation_accuracy=None, evaluation_loss=None, loss=None
)


def serve(parent: Channel, folder: str, most_clients: str, most_queued: str) -> None:
    """Serve below ``folder``; the credential is a token.

    Then do as each question says, ``hold`` or ``go_on`` or nothing; answer resident bytes and processor seconds.
    """
    os.environ[HOME_VARIABLE] = folder
    gc.freeze()  # as `raycloak serve` does with its loaded modules
    raise_open_files(_OPEN_FILES)
    token, digest = new_token()
    tenant = {"token_sha256": [{"sha256": digest}], "datasets": ["digits"], "code": [CONFIG["model"]]}
    limits = {
        "active_clients": int(most_clients),
        "clients_per_tenant": int(most_clients),
        "watches_per_tenant": int(most_clients),
        "queued_operations": int(most_queued),
        # What is measured is the work, and not the limit.
        "calls_per_second": 1e6,
        "burst": 10**6,
    }
    settings = validated(
        ServiceSettings,
        {
            "bind": "127.0.0.1:0",
            "datasets": {"digits": {"dataset": {"kind": "digits"}}},
            "tenants": {"bench": tenant},
            "limits": limits,
        },
    )
    drivers = _NoOpDrivers()
    acts: dict[str, Callable[[], None]] = {"hold": drivers.hold, "go_on": drivers.go_on, "": lambda: None}
    with TrainingService(settings, Path(folder), drivers) as service:
        parent.send(BenchServing(address=service.facts.address, credential=token))
        while (question := parent.receive(Question)) is not None:
            acts[question.act]()
            parent.send(Figures(values={"resident": float(resident()), "cpu": cpu_seconds()}))


def floor(parent: Channel, folder: str) -> None:
    """Serve the floor, which needs no credential, until nothing more is asked."""
    asyncio.run(_floor(parent, Path(folder) / "floor.sqlite"))


async def _floor(parent: Channel, path: Path) -> None:
    writer = ThreadPoolExecutor(1)
    database = await asyncio.wrap_future(writer.submit(_database, path))

    async def echo(request: bytes, _: Any) -> bytes:
        await asyncio.wrap_future(writer.submit(_commit_twice, database))
        return request

    handler = grpc.method_handlers_generic_handler(
        ECHO.split("/")[1], {ECHO.split("/")[2]: grpc.unary_unary_rpc_method_handler(echo)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    parent.send(BenchServing(address=f"127.0.0.1:{port}", credential=""))
    await asyncio.to_thread(parent.receive, Question)
    await server.stop(0.0)
    writer.submit(database.close).result()
    writer.shutdown()


def _database(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    # What the service's store asks of its disk.
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE operations (number INTEGER PRIMARY KEY, body BLOB, state TEXT)")
    return database


def _commit_twice(database: sqlite3.Connection) -> None:
    """Record an operation, and its end."""
    number = database.execute("INSERT INTO operations (body, state) VALUES (?, 'queued')", (_ROW,)).lastrowid
    database.execute("UPDATE operations SET state = 'done' WHERE number = ?", (number,))


def idle_clients(parent: Channel, address: str, token: str, count: str) -> None:
    """Attach ``count`` clients, have each do a step, and leave them idle; tell the bytes of memory that each takes.

    The first client is not counted: it loads code, and opens the channel that all share.
    """
    raise_open_files(_OPEN_FILES)
    with ServiceClient(address, token) as service:
        held = [_worked(service)]
        gc.collect()
        before = resident()
        held += [_worked(service) for _ in range(int(count))]
        gc.collect()
        parent.send(Figures(values={"client": (resident() - before) / int(count)}))
        parent.receive(Question)


def _worked(service: ServiceClient) -> TrainingClient:
    client = service.create_training_client(CONFIG)
    client.forward_backward()
    client.optim_step().result(60)
    return client
