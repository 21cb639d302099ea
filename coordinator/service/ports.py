"""The desk's view of what is beside it: drivers, which train, samplers, which write text, and the records of runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.pipe import Begin, Command, ReleasedStep, Report
from raycloak.coordinator.service.store import OperationRow


@dataclass(frozen=True, slots=True)
class Stored:
    """The changes of a client that one call of the desk has stored.

    Attributes:
        operations: that changed, as they are now. Nobody changes these rows any more.
        client_changed: revision of the newest change of the client itself, of this call or an earlier one.
    """

    operations: tuple[OperationRow, ...]
    client_changed: int


News: TypeAlias = tuple[str, wire.Change | Stored]
"""A client, and what its watchers are told: of what is in the store, or a change that is kept nowhere."""


class DriverPort(Protocol):
    """The driver processes, one for each client that has a place.

    What a driver reports comes to `DriverReports.report`, in order. `raycloak.attestation.processes.program.Exited`
    comes last. No method waits for a process.

    Attributes:
        tell: the function that reports go to, from any thread: client and report.
    """

    tell: Callable[[str, Report | Exited], None]

    def start(self, client_id: str, begin: Begin) -> None:
        """Start the driver of a client that has none, and give it its first line."""

    def send(self, client_id: str, command: Command) -> None:
        """Send a command; one to a driver that has ended is dropped."""

    def stop(self, client_id: str) -> None:
        """End the driver after its step, so that another can resume its run."""

    def kill(self, client_id: str) -> None:
        """End the driver at once; a resume repeats what was not sealed. From any thread."""


class SamplerPort(Protocol):
    """The sampler. What comes of a sample goes to `DriverReports`: outcomes, text and tokens per second."""

    def submit(self, operation_id: str, tenant: str, package: str, run_dir: str, request: wire.Sample) -> None:
        """Generate text from released weights of the run in ``run_dir``.

        Args:
            tenant: whose share of the sampler it takes.
            package: a package of the run, or a copy of weights, whose name ends with `COPY_SUFFIX`.
        """

    def cancel(self, operation_id: str) -> None:
        """End a sample early; what comes of it is of no interest any more."""


class Records(Protocol):
    """The records that runs have written."""

    def steps(self, run_dir: str) -> Mapping[int, ReleasedStep]:
        """Return the finished steps of a run, by their numbers from 0."""

    def keeps_batches(self, run_dir: str) -> bool:
        """Return whether a run's directory still has the batches that a client has sent."""

    def package_bytes(self, location: str, package_digest: bytes) -> int:
        """Return the size of a saved package as the one file that a client pulls; EvidenceError, ConfigError."""


class Measured(Protocol):
    """The meter of operations; see `raycloak.metrics.collectors.ServiceMetrics`."""

    def operation_ended(self, kind: str, outcome: str, queued_s: float, running_s: float | None) -> None:
        """Count an operation that ended."""
