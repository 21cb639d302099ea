"""The sources of the metrics page: the run as the coordinator reports it; ledger, GPUs and services at scrape time.

Nothing here imports the rest of raycloak. The wiring passes in callables that reach the ledger, the samplers and the
services.
"""

import math
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, TypeVar

from prometheus_client.core import Metric

from raycloak.metrics.exporter import Values
from raycloak.metrics.gpu_readings import GpuReading
from raycloak.metrics.registry import (
    ACCOUNT,
    ANSWERED,
    CALLS,
    CLIENT_STATES,
    FAILED,
    GPU_SERIES,
    GPU_STATES,
    LEDGER_SERIES,
    OPERATION_PHASES,
    OPERATIONS,
    RUN_SERIES,
    RUN_STATES,
    SERVICE_SERIES,
    TRAINING,
    TRAINING_SERVICE_SERIES,
    Series,
    exactness_mark,
    privacy_mark,
)

F = TypeVar("F")


@dataclass(frozen=True)
class AccountFigures:
    """The figures of one account, as the ledger states them.

    Args:
        name: account name, an identifier (`registry.is_identifier`).
        epsilon_cap, delta: fixed when the account was opened.
        epsilon_spent: epsilon of all charges at ``delta``.
        budget_spent_ratio: see :func:`spent_ratio`; 1 is the cap.
        steps_charged: steps charged so far, never falling.
    """

    name: str
    epsilon_cap: float
    delta: float
    epsilon_spent: float
    budget_spent_ratio: float
    steps_charged: int


@dataclass(frozen=True)
class WitnessFigures:
    """The state of a ledger's witness, as the ledger last found it.

    Args:
        answers: whether it kept or showed a head when it was last asked.
        entries: entries of the ledger that its newest head covers.
    """

    answers: bool
    entries: int


@dataclass(frozen=True)
class LedgerFigures:
    """The figures that a ledger instance answers to a scrape; ``witness`` is None where there is none."""

    accounts: tuple[AccountFigures, ...]
    entries: int
    fencing: int
    witness: WitnessFigures | None = None


@dataclass(frozen=True)
class ServiceFigures:
    """The figures of an evidence service since it was started.

    Args:
        works: False once it could not write its record.
        calls: (method, code, number of answers); the code is ``ok`` where nothing was refused.
        waits: how many answered calls had waited how long, by the buckets of `DURATION_BUCKETS`; more in the last.
        waited_seconds: the sum of those times.
        waiting: calls that wait now.
        oldest_unix_s: arrival of the one that has waited longest; now, if none waits.
        collateral_expiry_unix_s: end of its collateral; 0 if it does not say.
    """

    works: bool
    calls: tuple[tuple[str, str, int], ...]
    waits: tuple[int, ...]
    waited_seconds: float
    waiting: int
    oldest_unix_s: float
    collateral_expiry_unix_s: float = 0.0


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


@dataclass(frozen=True)
class RunFacts:
    """The public facts that hold for the whole run.

    Args:
        run: run id.
        account: account that pays.
        evidence_class: weakest class among the admitted, for example ``simulated``.
        steps_planned: planned steps.
        virtual_workers: V.
        workers_required: fewest workers that the run continues with.
        workers_planned: workers that it is configured for.
        prepaid: whether the ledger charged the whole plan before the first step.
        parameters: trained parameters.
        noise_multiplier: z; None if the run is declared not private, and so marked NOT_PRIVATE.
        refusals: codes of refused evidence.
        exact: whether every operation has a deterministic kernel; otherwise the run is marked NOT_EXACT.
        version, ray_version, torch_version: of the software.
    """

    run: str
    account: str
    evidence_class: str
    steps_planned: int
    virtual_workers: int
    workers_required: int
    workers_planned: int
    prepaid: bool
    parameters: int
    noise_multiplier: float | None
    refusals: tuple[str, ...]
    exact: bool
    version: str
    ray_version: str
    torch_version: str


def spent_ratio(spent: Sequence[float], caps: Sequence[float]) -> float:
    """Return the share of a Rényi filter's budget that is spent, at the order that admits most.

    For charges of one mechanism the best order does not move, so the ratio grows by the same amount each step. Epsilon
    itself is concave, and would look as if spending slowed down. The filter refuses the charge that takes the ratio
    above 1.

    Args:
        spent: Rényi divergence spent at each order of the account's grid.
        caps: what each order may spend in all; an order with a cap <= 0 admits nothing.

    Returns:
        A ratio >= 0; infinity if something is spent and no order admits anything.
    """
    if not any(spent):
        return 0.0
    return min((s / cap for s, cap in zip(spent, caps, strict=True) if cap > 0), default=math.inf)


class RunMetrics:
    """The run's own series, updated by the coordinator with plain calls.

    Counters start at zero with the process; Prometheus' ``rate`` treats a restart as a reset.
    """

    series: tuple[Series, ...] = RUN_SERIES

    def __init__(self, facts: RunFacts, clock: Callable[[], float] = time.time) -> None:
        self._run = facts.run
        self._clock = clock
        self._values = Values(RUN_SERIES)
        put, run = self._values.set, facts.run
        put("raycloak_build_info", 1, facts.version, platform.python_version(), facts.ray_version, facts.torch_version)
        put("raycloak_run_info", 1, run, facts.account, facts.evidence_class)
        marks = privacy_mark(facts.noise_multiplier is not None), exactness_mark(facts.exact)
        put("raycloak_run_claims_info", 1, run, *marks)
        put("raycloak_run_start_timestamp_seconds", clock(), run)
        put("raycloak_run_prepaid", facts.prepaid, run)
        put("raycloak_steps_planned", facts.steps_planned, run)
        put("raycloak_steps_finished", 0, run)
        put("raycloak_virtual_workers", facts.virtual_workers, run)
        put("raycloak_workers_required", facts.workers_required, run)
        put("raycloak_workers_planned", facts.workers_planned, run)
        put("raycloak_workers_admitted", 0, run)
        put("raycloak_parameters", facts.parameters, run)
        if facts.noise_multiplier is not None:
            put("raycloak_noise_multiplier_ratio", facts.noise_multiplier, run)
        self.ended(TRAINING)
        # Present from the first scrape on: without a zero, rate() misses the first increment.
        for series in RUN_SERIES:
            if series.kind != "gauge":
                for labels in product(*(label.values or label.usual for label in series.labels[1:])):
                    self._values.start_at_zero(series.name, self._run, *labels)
        for code in facts.refusals:
            self._values.start_at_zero("raycloak_workers_refused_total", self._run, code)

    def ended(self, ending: str) -> None:
        """Set how the execution ended: one of ``registry.RUN_STATES``, or the code of the error that ended it."""
        present = ending if ending in RUN_STATES else FAILED
        # Every state, so that one that has ended is exported as 0 and not as its last value.
        for state in RUN_STATES:
            self._values.set("raycloak_run_state", state == present, self._run, state)

    def attempt_started(self) -> None:
        """Count an attempt at a step."""
        self._values.increment("raycloak_step_attempts_total", self._run)

    def attempt_failed(self) -> None:
        """Count an attempt that another one has to follow."""
        self._values.increment("raycloak_step_attempts_failed_total", self._run)

    def steps_finished(self, count: int) -> None:
        """Set the finished steps, earlier executions included."""
        self._values.set("raycloak_steps_finished", count, self._run)

    def phase_finished(self, phase: str, seconds: float, trace_id: str = "") -> None:
        """Observe that a phase of a step took ``seconds``; a name outside ``registry.PHASES`` counts as ``other``.

        Args:
            trace_id: of the step's trace; empty where traces are off.
        """
        self._values.observe("raycloak_step_phase_duration_seconds", seconds, self._run, phase, trace_id=trace_id)

    def worker_stepped(self, seconds: Mapping[str, float]) -> None:
        """Observe one worker's seconds by ``registry.WORKER_PHASES`` in an attempt."""
        for phase, spent in seconds.items():
            self._values.observe("raycloak_worker_phase_duration_seconds", spent, self._run, phase)

    def gpu_memory_taken(self, peak_bytes: int) -> None:
        """Set the most memory that any worker's tensors took on its GPU in an attempt."""
        self._values.set("raycloak_worker_gpu_memory_peak_bytes", peak_bytes, self._run)

    def aggregate_released(self) -> None:
        """Count a noised aggregate that was decoded."""
        self._values.increment("raycloak_aggregates_released_total", self._run)

    def step_committed(self, seconds: float) -> None:
        """Count a step that was committed, ``seconds`` after it began."""
        self._values.increment("raycloak_steps_committed_total", self._run)
        self._values.observe("raycloak_step_duration_seconds", seconds, self._run)
        self._values.set("raycloak_last_commit_timestamp_seconds", self._clock(), self._run)

    def step_refused(self, code: str) -> None:
        """Count a step that the ledger or a worker refused with the stable ``code``."""
        self._values.increment("raycloak_steps_refused_total", self._run, code)

    def workers_admitted(self, count: int) -> None:
        """Set the number of workers that are admitted and alive."""
        self._values.set("raycloak_workers_admitted", count, self._run)

    def worker_refused(self, code: str) -> None:
        """Count a worker that was refused at admission with the stable ``code``."""
        self._values.increment("raycloak_workers_refused_total", self._run, code)

    def worker_failed(self, cause: str) -> None:
        """Count an admitted worker that was lost; ``cause`` is a code such as ``out_of_memory``."""
        self._values.increment("raycloak_worker_failures_total", self._run, cause)

    def worker_joined(self) -> None:
        """Count a worker that joined after the run began."""
        self._values.increment("raycloak_workers_joined_total", self._run)

    def worker_left(self, cause: str) -> None:
        """Count a worker that left between two steps on request; ``cause`` is a code such as ``preempted``."""
        self._values.increment("raycloak_workers_left_total", self._run, cause)

    def virtual_workers_moved(self, count: int) -> None:
        """Count virtual workers that changed their host."""
        self._values.increment("raycloak_virtual_workers_moved_total", self._run, by=count)

    def masked_bytes_received(self, count: int) -> None:
        """Count bytes of masked vectors that arrived."""
        self._values.increment("raycloak_masked_bytes_total", self._run, by=count)

    def accuracy_measured(self, ratio: float) -> None:
        """Set the accuracy in [0, 1] of the released parameters on the public split."""
        self._values.set("raycloak_evaluation_accuracy_ratio", ratio, self._run)

    def loss_measured(self, loss: float) -> None:
        """Set the mean loss of the released parameters on the public split."""
        self._values.set("raycloak_evaluation_loss", loss, self._run)

    def evidence_accepted(self, role: str, evidence_class: str, expiry_unix_s: float) -> None:
        """Set the class and the expiry of the evidence of ``role`` that expires first."""
        self._values.set("raycloak_evidence_class_info", 1, self._run, role, evidence_class)
        self._values.set("raycloak_evidence_expiry_timestamp_seconds", expiry_unix_s, self._run, role)

    def collateral_taken(self, expiry_unix_s: float) -> None:
        """Set when the collateral in use ends; 0 if it does not say, which leaves the series as it is."""
        if expiry_unix_s:
            self._values.set("raycloak_collateral_expiry_timestamp_seconds", expiry_unix_s, self._run)

    def checkpoint_written(self) -> None:
        """Set the time of the last checkpoint to now."""
        self._values.set("raycloak_last_checkpoint_timestamp_seconds", self._clock(), self._run)

    def collect(self) -> Iterable[Metric]:
        """Return the families of the run, as `exporter.MetricSource` asks."""
        return self._values.collect()


class _AtScrape(ABC, Generic[F]):
    """Series whose figures are asked for at every scrape; a number from an earlier one is never repeated.

    Args:
        read: asks for the figures; it returns within a few seconds or raises, since a scrape waits for it.
    """

    series: tuple[Series, ...]

    def __init__(self, read: Callable[[], F | None]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Ask, and return the families that have a value."""
        values = Values(self.series)
        try:
            figures = self._read()
        except Exception:  # noqa: BLE001 - whatever kept it from answering, a reader of the page has no figures
            figures = None
        self._put(values, figures)
        return values.collect()

    @abstractmethod
    def _put(self, values: Values, figures: F | None) -> None: ...


class LedgerCollector(_AtScrape[LedgerFigures]):
    """The privacy series, read from the ledger at every scrape.

    Guarantee: a ledger that does not answer shows as ``raycloak_ledger_up 0`` and no privacy series at all. A number
    from an earlier scrape is never repeated.

    If a ledger has many accounts, only those that have spent the largest shares are exported.
    """

    series = LEDGER_SERIES

    def _put(self, values: Values, figures: LedgerFigures | None) -> None:
        values.set("raycloak_ledger_up", figures is not None)
        if figures is None:
            return
        values.set("raycloak_ledger_entries", figures.entries)
        values.set("raycloak_ledger_fencing", figures.fencing)
        values.set("raycloak_ledger_accounts", len(figures.accounts))
        if figures.witness is not None:
            values.set("raycloak_ledger_witness_up", figures.witness.answers)
            values.set("raycloak_ledger_witness_entries", figures.witness.entries)
        # The label's bound would fold all further accounts into one, with the figures of the last.
        most_spent = sorted(figures.accounts, key=lambda account: account.budget_spent_ratio, reverse=True)
        # The one that has spent the most comes last: names that are no labels are folded into one as well.
        for account in reversed(most_spent[: ACCOUNT.at_most]):
            values.set("raycloak_privacy_epsilon_spent", account.epsilon_spent, account.name)
            values.set("raycloak_privacy_epsilon_cap", account.epsilon_cap, account.name)
            values.set("raycloak_privacy_delta", account.delta, account.name)
            values.set("raycloak_privacy_budget_spent_ratio", account.budget_spent_ratio, account.name)
            values.set("raycloak_privacy_steps_charged_total", account.steps_charged, account.name)


class GpuReadingCollector(_AtScrape[Sequence[GpuReading]]):
    """The GPU series of all nodes, read at every scrape; readings that NVML does not support are left out.

    A lost node takes its sampler along. The run reports the loss itself, and here nothing is shown.
    """

    series = GPU_SERIES

    def _put(self, values: Values, figures: Sequence[GpuReading] | None) -> None:
        for reading in figures or ():
            labels = (reading.node, str(reading.index))
            numbers = {
                "raycloak_gpu_utilization_ratio": reading.utilization_ratio,
                "raycloak_gpu_memory_used_bytes": reading.memory_used_bytes,
                "raycloak_gpu_memory_total_bytes": reading.memory_total_bytes,
                "raycloak_gpu_power_watts": reading.power_watts,
                "raycloak_gpu_temperature_celsius": reading.temperature_celsius,
                "raycloak_gpu_thermal_slowdown": reading.thermal_slowdown,
            }
            for name, value in numbers.items():
                if value is not None:
                    values.set(name, value, *labels)
            errors = {"corrected": reading.ecc_corrected_total, "uncorrected": reading.ecc_uncorrected_total}
            for kind, count in errors.items():
                if count is not None:
                    values.set("raycloak_gpu_ecc_errors_total", count, *labels, kind)
            # Every state, so that one that has ended is exported as 0 and not as its last value.
            for state in GPU_STATES if reading.confidential_state is not None else ():
                present = state == reading.confidential_state
                values.set("raycloak_gpu_confidential_compute_state", present, reading.node, state)


class ServiceCollector(_AtScrape[ServiceFigures]):
    """The series of an evidence service, read at every scrape; none where nothing is served or nobody answers."""

    series = SERVICE_SERIES

    def _put(self, values: Values, figures: ServiceFigures | None) -> None:
        if figures is None:
            return
        values.set("raycloak_service_up", figures.works)
        for method in CALLS:
            values.start_at_zero("raycloak_service_calls_total", method, ANSWERED)
        for method, code, count in figures.calls:
            values.set("raycloak_service_calls_total", count, method, code)
        values.set_histogram("raycloak_service_wait_seconds", figures.waits, figures.waited_seconds)
        values.set("raycloak_service_waiting_calls", figures.waiting)
        values.set("raycloak_service_oldest_call_timestamp_seconds", figures.oldest_unix_s)
        if figures.collateral_expiry_unix_s:
            values.set("raycloak_service_collateral_expiry_timestamp_seconds", figures.collateral_expiry_unix_s)


class ServiceMetrics(_AtScrape[ServiceSnapshot]):
    """The series of a training service; several threads may report to it.

    No series names a tenant, a client or a run: the page has no access control, and one tenant's times are not
    another's.

    Guarantee: a service whose store does not answer shows as ``raycloak_training_service_up 0`` and none of its
    figures. A number from an earlier scrape is never repeated.

    Args:
        read: asks the store.
    """

    series = TRAINING_SERVICE_SERIES

    def __init__(self, read: Callable[[], ServiceSnapshot]) -> None:
        super().__init__(read)
        self._counted = Values(self.series)
        # Present from the first scrape on.
        for series in self.series:
            if series.kind != "gauge":
                for labels in product(*(label.values for label in series.labels)):
                    self._counted.start_at_zero(series.name, *labels)

    def operation_ended(self, kind: str, outcome: str, queued_s: float, running_s: float | None) -> None:
        """Count an operation that ended.

        Args:
            queued_s: seconds from its submission to its turn, or to its end if its turn never came.
            running_s: seconds from there to its end; None if its turn never came.
        """
        series = "raycloak_training_service_operation_phase_duration_seconds"
        self._counted.increment("raycloak_training_service_operations_total", kind, outcome)
        for phase, seconds in zip(OPERATION_PHASES, (queued_s, running_s), strict=True):
            if seconds is not None:
                # The service may have been restarted on a clock that was set back meanwhile.
                self._counted.observe(series, max(0.0, seconds), kind, phase)

    def call_refused(self, error: str) -> None:
        """Count a call that was refused with a `ServiceError` of the kind ``error``."""
        self._counted.increment("raycloak_training_service_refused_calls_total", error)

    def collect(self) -> Iterable[Metric]:
        """Ask the store, and return all families, or ``raycloak_training_service_up 0`` and the counts."""
        return [*super().collect(), *self._counted.collect()]

    def _put(self, values: Values, figures: ServiceSnapshot | None) -> None:
        values.set("raycloak_training_service_up", figures is not None)
        if figures is None:
            return
        for status in CLIENT_STATES:
            values.set("raycloak_training_service_clients", figures.clients.get(status, 0), status)
        values.set("raycloak_training_service_drivers", figures.drivers)
        values.set("raycloak_training_service_samplers", figures.samplers)
        values.set("raycloak_training_service_watch_streams", figures.watch_streams)
        for kind in OPERATIONS:
            values.set("raycloak_training_service_queued_operations", figures.queued.get(kind, 0), kind)
        values.set("raycloak_training_service_oldest_operation_timestamp_seconds", figures.oldest_unix_s)
