"""The series of a training service: the state of its store at every scrape, and counts since it was started.

No series names a tenant, a client or a run: the page has no access control, and one tenant's times are not another's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from prometheus_client.core import Metric

from raycloak.metrics.exporter import Values
from raycloak.metrics.registry import (
    CLIENT_STATES,
    OPERATION_PHASES,
    OPERATIONS,
    OUTCOMES,
    REFUSALS,
    TRAINING_SERVICE_SERIES,
    Series,
)

_COUNTED = tuple(series for series in TRAINING_SERVICE_SERIES if series.kind != "gauge")
_GAUGES = tuple(series for series in TRAINING_SERVICE_SERIES if series.kind == "gauge")


@dataclass(frozen=True)
class ServiceSnapshot:
    """The figures of a training service at one moment.

    Args:
        clients: their number by status, of all tenants together.
        drivers: driver processes. samplers: processes that generate text. watch_streams: that clients hold open.
        queued: operations that wait for their turn, by kind.
        oldest_unix_s: submission of the oldest operation that has not ended; now, if there is none.
    """

    clients: Mapping[str, int]
    drivers: int
    samplers: int
    watch_streams: int
    queued: Mapping[str, int]
    oldest_unix_s: float


class ServiceMetrics:
    """The series of a training service; several threads may report to it.

    Guarantee: a service whose store does not answer shows as ``raycloak_training_service_up 0`` and none of its
    figures. A number from an earlier scrape is never repeated.

    Args:
        snapshot: asks the store; it returns within a few seconds or raises, since a scrape waits for it.
    """

    series: tuple[Series, ...] = TRAINING_SERVICE_SERIES

    def __init__(self, snapshot: Callable[[], ServiceSnapshot]) -> None:
        self._snapshot = snapshot
        self._counted = Values(_COUNTED)
        for kind, outcome in product(OPERATIONS, OUTCOMES):
            self._counted.start_at_zero("raycloak_training_service_operations_total", kind, outcome)
        for kind, phase in product(OPERATIONS, OPERATION_PHASES):
            self._counted.start_at_zero("raycloak_training_service_operation_phase_duration_seconds", kind, phase)
        for error in REFUSALS:
            self._counted.start_at_zero("raycloak_training_service_refused_calls_total", error)

    def operation_ended(self, kind: str, outcome: str, queued_s: float, running_s: float | None) -> None:
        """Count an operation that ended.

        Args:
            queued_s: seconds from its submission to its turn, or to its end if its turn never came.
            running_s: seconds from there to its end; None if its turn never came.
        """
        series = "raycloak_training_service_operation_phase_duration_seconds"
        self._counted.increment("raycloak_training_service_operations_total", kind, outcome)
        # The service may have been restarted on a clock that was set back meanwhile.
        self._counted.observe(series, max(0.0, queued_s), kind, OPERATION_PHASES[0])
        if running_s is not None:
            self._counted.observe(series, max(0.0, running_s), kind, OPERATION_PHASES[1])

    def call_refused(self, error: str) -> None:
        """Count a call that was refused with a `ServiceError` of the kind ``error``."""
        self._counted.increment("raycloak_training_service_refused_calls_total", error)

    def collect(self) -> Iterable[Metric]:
        """Ask the store, and return all families, or ``raycloak_training_service_up 0`` and the counts."""
        values = Values(_GAUGES)
        try:
            found = self._snapshot()
        except Exception:  # noqa: BLE001 - whatever kept it from answering, a reader of the page has no figures
            values.set("raycloak_training_service_up", 0)
            return [*values.collect(), *self._counted.collect()]
        values.set("raycloak_training_service_up", 1)
        for status in CLIENT_STATES:
            values.set("raycloak_training_service_clients", found.clients.get(status, 0), status)
        values.set("raycloak_training_service_drivers", found.drivers)
        values.set("raycloak_training_service_samplers", found.samplers)
        values.set("raycloak_training_service_watch_streams", found.watch_streams)
        for kind in OPERATIONS:
            values.set("raycloak_training_service_queued_operations", found.queued.get(kind, 0), kind)
        values.set("raycloak_training_service_oldest_operation_timestamp_seconds", found.oldest_unix_s)
        return [*values.collect(), *self._counted.collect()]
