"""A running training service: its store, desk, drivers, sampler, server and metrics, from start to end."""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from raycloak.attestation.processes.program import Exited
from raycloak.attestation.sealed.package_keys import SIGNER_PUBLIC_FILE, PackageSigner
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.config import home
from raycloak.coordinator.evidence.sources import configured_policy
from raycloak.coordinator.record.batch_files import FOLDER
from raycloak.coordinator.record.run_reader import EventTail
from raycloak.coordinator.service.databases import OwnedFolder, open_database
from raycloak.coordinator.service.desk import Desk
from raycloak.coordinator.service.drivers import DriverProcesses
from raycloak.coordinator.service.operation_queues import MOST_SAMPLES
from raycloak.coordinator.service.packages import SavedPackage
from raycloak.coordinator.service.pipe import ReleasedStep, Report
from raycloak.coordinator.service.ports import DriverPort
from raycloak.coordinator.service.sampling.sampler import Sampler, SamplerLimits, service_recipient
from raycloak.coordinator.service.server import ServiceParts, TrainingServer
from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.coordinator.service.store import Store
from raycloak.coordinator.service.turns import Turns
from raycloak.coordinator.service.watches import Watches
from raycloak.metrics.collectors import ServiceMetrics, ServiceSnapshot
from raycloak.metrics.exporter import Exporter
from raycloak.metrics.server import MetricsServer
from raycloak.metrics.service_errors import ServiceError, ServiceServerError

STREAMS_GRACE_S: Final = 5.0
"""For calls under way when the service ends; each takes milliseconds, but for uploads, which are sent again."""
DRIVERS_GRACE_S: Final = 600.0
"""For the step that each driver finishes when the service ends: for so long the next service would wait for it too. A
step that was killed is charged already, and a resume repeats it without a second charge."""
_KILLED_S: Final = 30.0  # for the kernel to end a process and give its memory back
_LOOK_S: Final = 0.1
_LOG = logging.getLogger(__name__)
_SNAPSHOT_S: Final = 5.0  # a scrape waits no longer for the desk


class RunRecords:
    """The records that runs have written; see `raycloak.coordinator.service.ports.Records`."""

    def steps(self, run_dir: str) -> Mapping[int, ReleasedStep]:
        """See `Records`."""
        names = ("step", "model_digest", "epsilon", "seconds", "evaluation_accuracy", "evaluation_loss")
        return {
            event["step"]: ReleasedStep.model_validate({"loss": None} | {name: event.get(name) for name in names})
            for event in EventTail(Path(run_dir)).read()
            if event["event"] == "step"
        }

    def keeps_batches(self, run_dir: str) -> bool:
        """See `Records`."""
        return bool(run_dir) and (Path(run_dir) / FOLDER).exists()

    def package_bytes(self, location: str, package_digest: bytes) -> int:
        """See `Records`."""
        return SavedPackage(location, package_digest).bytes


@dataclass(frozen=True, slots=True)
class TrainingServiceFacts:
    """The facts that a started service says of itself.

    Attributes:
        address: ``host:port`` where it listens.
        evidence: ``SIMULATED`` if the policy of its runs accepts simulated evidence, else ``hardware``.
        memory: that its calls take at most, and what they have.
    """

    address: str
    metrics_url: str
    evidence: str
    tenants: int
    store: str
    memory: str


class TrainingService:
    """A running service.

    Args:
        base: folder that relative paths and ``module:function`` names of the settings start from.
        drivers: that train; a process for each client if absent.

    Raises:
        ConfigError: what the settings name cannot be used, or another service owns the store.
    """

    def __init__(self, settings: ServiceSettings, base: Path, drivers: DriverPort | None = None) -> None:
        policy = configured_policy(settings.run.get("policy"), settings.run.get("collateral"), base)
        # Of the policy and not of a run: a run's own evidence is its tenant's business.
        evidence = "simulated" if policy is None or policy.accepts_simulated else "hardware"
        folder = home.training_service_folder()
        with ExitStack() as stack:
            # Also where the store is elsewhere: the files that clients send have one owner as well.
            owned = OwnedFolder(folder)
            stack.callback(owned.close)
            database = open_database(settings.store or f"sqlite:///{folder / 'store' / 'service.sqlite'}")
            stack.callback(database.close)
            store = Store(database)
            batches = folder / "batches"
            batches.mkdir(mode=0o700, exist_ok=True)
            # Made here if this is the site's first use of it, as the sampler looks for its public file.
            PackageSigner.load_or_create(home.home() / "signer")
            self._sampler = Sampler(
                SamplerLimits(waiting=MOST_SAMPLES * len(settings.tenants)),
                folder,
                home.home() / "signer" / SIGNER_PUBLIC_FILE,
                # Not through the desk's thread: text is not durable, and it decides nothing.
                lambda *piece: self._desk.reports.tokens(*piece),
                self._rate,
                self._sampled,
            )
            self._processes: DriverPort = drivers or DriverProcesses(folder / "logs")
            self._metrics = ServiceMetrics(self._snapshot)

            def make(watches: Watches) -> ServiceParts:
                self._desk = Desk(
                    settings,
                    base,
                    store,
                    self._processes,
                    self._sampler,
                    batches,
                    watches.publish,
                    self._metrics,
                    RunRecords(),
                    service_recipient(folder),
                )
                self._turns = Turns(self._desk, settings.limits.waiting_calls)
                self._processes.tell = self._reported
                return ServiceParts(
                    self._desk,
                    self._turns,
                    batches,
                    lambda row: SavedPackage(row.package, bytes.fromhex(row.package_digest)).pieces(),
                    self._metrics.call_refused,
                    evidence,
                )

            exporter = Exporter()
            exporter.add(self._metrics)
            self._page = MetricsServer(exporter.registry, settings.metrics.bind)
            stack.callback(self._page.close)
            self._server = TrainingServer(make, settings, base)
            # Last, as it starts drivers: what fails before leaves everything as it was.
            self._turns.start()
            self._stack = stack.pop_all()
        host = settings.bind.rpartition(":")[0]
        self.facts = TrainingServiceFacts(
            address=f"{host}:{self._server.port}",
            metrics_url=self._page.url,
            evidence=evidence.replace("simulated", "SIMULATED"),
            tenants=len(settings.tenants),
            store="PostgreSQL" if settings.store is not None and "postgres" in settings.store else "SQLite",
            memory=self._server.memory,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def failure(self) -> BaseException | None:
        """The error after which nothing can be recorded any more; None while the service works."""
        return self._turns.failure

    def stop(self) -> None:
        """End streams, end each driver after its step or after `DRIVERS_GRACE_S`, and give the store up."""
        self._server.stop(STREAMS_GRACE_S)
        # Where the store has failed, nothing can be recorded: drivers end when their input ends with this process.
        with suppress(ServiceServerError):
            self._turns.put(self._desk.drivers.stop).result()
            if not self._drivers_end(DRIVERS_GRACE_S):
                for client_id in self._turns.put(lambda: list(self._desk.drivers.of)).result():
                    self._processes.kill(client_id)
                    _LOG.warning("client %s: its driver did not end its step in time and was killed", client_id)
                self._drivers_end(_KILLED_S)
        # Before the sampler: the samples that it drops are generated again when the service is back.
        self._turns.close()
        self._sampler.close()
        self._stack.close()

    def _drivers_end(self, seconds: float) -> bool:
        """Wait, at most so long, until all drivers have ended; return whether they have."""
        until = time.monotonic() + seconds
        while self._turns.put(lambda: len(self._desk.drivers.of)).result():
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True

    def _reported(self, client_id: str, said: Report | Exited) -> None:
        reports = self._desk.reports
        self._turns.tell(lambda: reports.report(client_id, said), lambda: reports.give_up(client_id))

    def _rate(self, operation_id: str, tokens_per_second: float) -> None:
        # Through the desk's thread, which knows the sample's step. A rate that is lost is followed by the next.
        self._turns.tell(lambda: self._desk.reports.sampling(operation_id, tokens_per_second), lambda: None)

    def _sampled(self, operation_id: str, completions: list[wire.Completion], cause: ServiceError | None) -> None:
        client_id, reports = operation_id.rpartition(".")[0], self._desk.reports
        self._turns.tell(lambda: reports.sampled(operation_id, completions, cause), lambda: reports.give_up(client_id))

    def _snapshot(self) -> ServiceSnapshot:
        """Ask the desk for the figures of a scrape."""

        def figures() -> ServiceSnapshot:
            queued, oldest = self._desk.queued_by_kind()
            return ServiceSnapshot(
                clients=self._desk.book.store.clients_by_status(),
                drivers=len(self._desk.drivers.of),
                samplers=self._sampler.processes,
                watch_streams=self._server.watches,
                queued=queued,
                oldest_unix_s=oldest,
            )

        return self._turns.put(figures).result(_SNAPSHOT_S)
