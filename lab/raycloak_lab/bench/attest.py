"""Measures how many workers the evidence service attests per second, each over a new mutual-TLS connection.

One attestation is a TLS handshake, Challenge, a SIMULATED quote, Attest and ReleaseKeys, by a worker that is new to the
service. The worker's keys, its channel's among them, exist before. The service runs in a process of its own, this
process is the workers, and both share the machine's cores. Beside them, connections can be held that never become an
attestation (`attest_processes.py`).
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from raycloak.attestation.attester.attester import Attester, CpuEvidence
from raycloak.attestation.processes.child import Child
from raycloak.attestation.service.client import EvidenceClient
from raycloak.attestation.simulators.tdx_platform import SimulatedPlatform
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.attestation.trust.channel import ChannelEnd, client_end
from raycloak.metrics.errors import ConfigError, RaycloakError
from raycloak_lab.bench import attest_processes as processes
from raycloak_lab.bench.attest_processes import ANSWER, MANIFEST, cpu_seconds, figures, raise_open_files

CALLS: Final = 3
"""The calls of one attestation: Challenge, Attest and ReleaseKeys."""
MOST_EMPTY: Final = 400
"""The number of connections with empty calls, which suffices for their average."""


@dataclass(frozen=True, slots=True)
class AttestBench:
    """The result of the measurement.

    Attributes:
        attestations: number finished. refused: number refused for any reason. concurrency: number at a time.
        held_idle, held_half_open, held_slow: other connections that were open when the measurement ended: bare TCP,
            with the start of a TLS record, and with a call whose request never comes.
        reopened: held connections that the service had closed during the measurement.
        per_second: finished attestations.
        p50_ms, p99_ms, max_ms: time from the start of a connection to the keys.
        service_cpu_ms, worker_cpu_ms, held_cpu_ms: processor time per attestation of the three processes.
        service_mib: resident memory of the service at its peak.
        transport_service_cpu_ms, transport_worker_cpu_ms: processor time of a connection with three empty calls,
            measured just before with as many at a time. It is the share of TLS, HTTP/2 and gRPC in an attestation.
        transport_per_second: number of such connections, an upper limit for attestations.
    """

    evidence: str
    attestations: int
    refused: int
    concurrency: int
    held_idle: int
    held_half_open: int
    held_slow: int
    reopened: int
    per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    service_cpu_ms: float
    worker_cpu_ms: float
    held_cpu_ms: float
    service_mib: float
    transport_service_cpu_ms: float
    transport_worker_cpu_ms: float
    transport_per_second: float


@dataclass(frozen=True, slots=True)
class _Source:
    """The one machine that all simulated workers share."""

    platform: SimulatedPlatform

    def collect(self, report_data: bytes) -> CpuEvidence:
        return CpuEvidence(self.platform.quote(report_data, code_measurement()))


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker that is about to connect."""

    attester: Attester
    end: ChannelEnd

    @classmethod
    def new(cls, name: str, source: _Source) -> "_Worker":
        attester = Attester(name, source)
        return cls(attester, client_end(attester.identity, MANIFEST))


@dataclass(frozen=True, slots=True)
class _Service:
    address: str
    orchestrator_key: bytes

    def attest(self, worker: _Worker) -> None:
        """Perform one full attestation over a connection of its own."""
        with self._connected(worker) as client:
            client.attest(worker.attester.present(client.challenge(), MANIFEST, ANSWER))
            client.release_keys(0)

    def reach(self, worker: _Worker) -> None:
        """Make as many calls over a connection of its own, none of which asks the orchestrator anything."""
        with self._connected(worker) as client:
            for _ in range(CALLS):
                client.is_serving()

    def _connected(self, worker: _Worker) -> EvidenceClient:
        return EvidenceClient(
            self.address,
            manifest_digest=MANIFEST,
            orchestrator_key=self.orchestrator_key,
            attester=worker.attester,
            end=worker.end,
        )


def bench_attest(connections: int, concurrency: int, held: int) -> AttestBench:
    """Attest ``connections`` simulated workers, ``concurrency`` at a time, beside ``held`` other connections.

    Raises:
        ConfigError: ``bench_input``; ``open_files`` if the system allows too few open files.
        RunFailedError: ``child_ended`` or ``child_overdue`` if a process of the bench did not start or answer.
    """
    if connections < 1 or concurrency < 1 or held < 0:
        raise ConfigError(
            "bench_input",
            "the bench needs at least 1 connection, 1 at a time and 0 held.",
            "Raise --connections, --concurrency or --held.",
        )
    raise_open_files(held + 1024)
    with tempfile.TemporaryDirectory(prefix="raycloak-bench-") as folder:
        source = _Source(SimulatedVendor.load_or_create(Path(folder) / "simulator").platform())
        warm_up = [_Worker.new(f"warm-up-{i}", source) for i in range(8)]
        empty = [_Worker.new(f"empty-{i}", source) for i in range(min(connections, MOST_EMPTY))]
        # A worker has its keys before it connects, so that the clock starts at the connection.
        workers = [_Worker.new(f"worker-{i}", source) for i in range(connections)]
        with Child(f"{processes.__name__}:serve", folder, str(held)) as service:
            serving = service.receive(processes.BenchServing, by=processes.soon())
            with Child(f"{processes.__name__}:hold", serving.address, str(held)) as holder:
                # It answers once they are open.
                figures(holder)
                target = _Service(serving.address, bytes.fromhex(serving.credential))
                _all(target.attest, warm_up, 2)
                return _measure(target, (empty, workers), concurrency, service, holder)


def _measure(
    target: _Service, workers: tuple[list[_Worker], list[_Worker]], concurrency: int, service: Child, holder: Child
) -> AttestBench:
    # First, how far the machine itself goes: connections that ask the orchestrator nothing.
    empty = _timed(target.reach, workers[0], concurrency, service)
    held_before = figures(holder)
    full = _timed(target.attest, workers[1], concurrency, service)
    held = figures(holder)
    seconds = full.seconds
    ranked = sorted(1e3 * each for each in seconds) or [float("nan")]
    return AttestBench(
        evidence="SIMULATED",
        attestations=len(seconds),
        refused=full.refused,
        concurrency=concurrency,
        held_idle=int(held["idle"]),
        held_half_open=int(held["half_open"]),
        held_slow=int(held["slow"]),
        reopened=int(held["reopened"] - held_before["reopened"]),
        per_second=len(seconds) / full.wall_s,
        p50_ms=statistics.median(ranked),
        p99_ms=ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))],
        max_ms=ranked[-1],
        service_cpu_ms=full.service_cpu_ms,
        worker_cpu_ms=full.worker_cpu_ms,
        held_cpu_ms=1e3 * (held["cpu"] - held_before["cpu"]) / len(workers[1]),
        service_mib=figures(service)["mib"],
        transport_service_cpu_ms=empty.service_cpu_ms,
        transport_worker_cpu_ms=empty.worker_cpu_ms,
        transport_per_second=len(empty.seconds) / empty.wall_s,
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    """The work of many workers: seconds of each that was not refused, and processor time per worker."""

    seconds: list[float]
    refused: int
    wall_s: float
    service_cpu_ms: float
    worker_cpu_ms: float


def _timed(act: Callable[[_Worker], None], workers: list[_Worker], concurrency: int, service: Child) -> _Timed:
    before, own, began = figures(service)["cpu"], cpu_seconds(), time.perf_counter()
    seconds, refused = _all(act, workers, concurrency)
    wall, own = time.perf_counter() - began, cpu_seconds() - own
    each = 1e3 / len(workers)
    return _Timed(seconds, refused, wall, each * (figures(service)["cpu"] - before), each * own)


def _all(act: Callable[[_Worker], None], workers: Iterable[_Worker], concurrency: int) -> tuple[list[float], int]:
    """Let each worker act; return the seconds of each that was not refused, and the number of refusals."""
    waiting: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        waiting.put(worker)
    seconds: list[float] = []
    refused: list[str] = []

    def work() -> None:
        while True:
            try:
                worker = waiting.get_nowait()
            except Empty:
                return
            started = time.perf_counter()
            try:
                act(worker)
            except RaycloakError as refusal:
                refused.append(refusal.code)
            else:
                seconds.append(time.perf_counter() - started)

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds, len(refused)
