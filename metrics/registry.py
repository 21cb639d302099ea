"""The registry of all series that raycloak exports: name, help, kind, labels, privacy class and unit.

Series of class ``secret`` are declared too, so that their names are reserved: the exporter refuses them
(`metrics/exporter.py`). Names follow the Prometheus conventions: base units, ``_total`` on counters, the time of an
event and never its age. Every label is bounded; none names a person, an example or a worker.
"""

import re
import sys
from dataclasses import dataclass, replace
from typing import Literal

from raycloak.metrics.privacy_class import PrivacyClass

Kind = Literal["counter", "gauge", "histogram"]

OTHER = "other"
PHASES = ("admission", "charge", "roster", "compute", "reduce", "commit", "evaluate", "checkpoint", "recover")
# Of a worker's part in a step, in their order.
WORKER_PHASES = ("copy", "model", "sums", "words", "masks", "out")
PRIVACY_MARKS = ("private", "NOT_PRIVATE")
EXACTNESS_MARKS = ("exact", "NOT_EXACT")
TRAINING = "training"
FAILED = "failed"
# While it trains, and then how the execution ended: an ending of the verdict, or a failure.
RUN_STATES = (TRAINING, "complete", "cap_exceeded", "early_stopped", "stopped", FAILED)
# The usual codes, so that each has a zero line from the first scrape on. Tests compare them with those in use.
BUDGET_CODES = (
    "account_closed",
    "cap_exceeded",
    "fenced",
    "ledger_rolled_back",
    "ledger_unavailable",
    "witness_unavailable",
)
LOSS_CAUSES = (
    "deadline",
    "died",
    "gpu_error",
    "header_mismatch",
    "object_lost",
    "out_of_memory",
    "unplaceable",
    "unreachable",
    "worker_error",
)
LEAVE_CAUSES = ("key_share", "left", "preempted", "revoked")
CALLS = ("Challenge", "Attest", "ReleaseKeys", "Roster", "Log")
ANSWERED = "ok"
CLIENT_STATES = ("INITIALIZING", "READY", "BUSY", "ERROR", "TERMINATED")
OPERATIONS = ("forward_backward", "optim_step", "save_state", "load_state", "sample")
OUTCOMES = ("done", "failed", "cancelled")
OPERATION_PHASES = ("queued", "running")
# Kinds of `raycloak.metrics.service_errors`, of errors with which a call can be refused before it is an operation.
REFUSALS = (
    "authentication",
    "permission",
    "not_found",
    "validation",
    "rate_limited",
    "queue_full",
    "budget_exceeded",
    "state",
    "server",
)
GPU_STATES = ("off", "on", "ppcie", "devtools", "simulated")
# Every histogram is of durations: from the phases of the smallest run, a millisecond, to the steps of a large one.
DURATION_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}\Z")


def is_identifier(text: str) -> bool:
    """Return whether ``text`` is a name or code: 1 to 128 characters, no white space, so never a sentence."""
    return _IDENTIFIER.match(text) is not None


@dataclass(frozen=True)
class Label:
    """A label, and the bound on its values.

    Args:
        name: label name.
        values: the closed set of values; empty if any identifier is allowed.
        at_most: distinct values of an open label that one process exports; the rest are counted as ``other``.
        usual: values of an open label that counters and histograms have a zero line of before they happen. Without
            one, the first increment is no increase to Prometheus.
    """

    name: str
    values: tuple[str, ...] = ()
    at_most: int = 64
    usual: tuple[str, ...] = ()

    def fold(self, value: str) -> str:
        """Return ``value``, or ``other`` if it is outside the closed set or is not an identifier.

        Guarantee: free text, such as an exception's message, cannot become a label value.
        """
        allowed = value in self.values if self.values else is_identifier(value)
        return value if allowed else OTHER


@dataclass(frozen=True)
class Series:
    """One family of time series.

    Args:
        name: full name, as a query writes it. It tells the base unit that values have, and by ``_total`` a counter.
        help: one sentence.
        privacy: the class of what its values may depend on.
        labels: in the order in which values are given.
        is_histogram: whether it counts durations by their length.
    """

    name: str
    help: str
    privacy: PrivacyClass = PrivacyClass.DATA_INDEPENDENT
    labels: tuple[Label, ...] = ()
    is_histogram: bool = False

    @property
    def kind(self) -> Kind:
        """The Prometheus type; an info series is a gauge that is always 1."""
        if self.is_histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def buckets(self) -> tuple[float, ...]:
        """The upper bounds of a histogram, ascending, without +Inf; none of another kind."""
        return DURATION_BUCKETS if self.is_histogram else ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in order."""
        return tuple(label.name for label in self.labels)


def privacy_mark(private: bool) -> str:
    """Return the word of metrics and events for a run's privacy: ``private`` or ``NOT_PRIVATE``."""
    return PRIVACY_MARKS[0 if private else 1]


def exactness_mark(exact: bool) -> str:
    """Return their word for bytes that can be reproduced, or cannot: ``exact`` or ``NOT_EXACT``."""
    return EXACTNESS_MARKS[0 if exact else 1]


ACCOUNT = Label("account")

# A process has one run.
_RUN = Label("run", at_most=1)
_ROLE = Label("role", at_most=8)
_NODE = Label("node", at_most=1024)
_GPU = Label("gpu", at_most=64)
_PHYSICAL = PrivacyClass.PHYSICAL
_RELEASED = PrivacyClass.RELEASED
_SECRET = PrivacyClass.SECRET

_OF_RUN = (
    Series(
        "raycloak_run_info",
        "Names the run's account and evidence class; always 1.",
        labels=(Label("account", at_most=1), Label("evidence_class", at_most=8)),
    ),
    Series(
        "raycloak_run_claims_info",
        "Marks the run private or NOT_PRIVATE, and exact or NOT_EXACT; always 1.",
        labels=(Label("privacy", PRIVACY_MARKS), Label("exactness", EXACTNESS_MARKS)),
    ),
    Series("raycloak_run_start_timestamp_seconds", "Unix time at which the run started."),
    Series(
        "raycloak_run_state", "1 for the state of the run, 0 for the others.", _RELEASED, (Label("state", RUN_STATES),)
    ),
    Series("raycloak_run_prepaid", "1 if the ledger charged the whole plan before the first step, else 0."),
    Series("raycloak_steps_planned", "Steps the run is planned for."),
    Series("raycloak_steps_finished", "Steps finished, in earlier executions too."),
    Series("raycloak_steps_committed_total", "Steps whose parameters are committed."),
    Series(
        "raycloak_steps_refused_total",
        "Steps refused before anything was computed.",
        labels=(Label("code", usual=BUDGET_CODES),),
    ),
    Series("raycloak_step_attempts_total", "Attempts at a step or a measurement, retries included."),
    Series("raycloak_step_attempts_failed_total", "Attempts that another one had to follow."),
    Series("raycloak_aggregates_released_total", "Noised aggregates decoded over a full cover."),
    Series("raycloak_parameters", "Trained parameters of the model."),
    Series("raycloak_noise_multiplier_ratio", "Noise deviation over the clipping norm."),
    Series("raycloak_virtual_workers", "Virtual workers, fixed for the run."),
    Series("raycloak_virtual_workers_moved_total", "Virtual workers moved to another worker."),
    Series("raycloak_workers_required", "Fewest workers that the run continues with."),
    Series("raycloak_workers_planned", "Workers that the run is configured for."),
    Series("raycloak_workers_admitted", "Workers admitted and alive."),
    Series("raycloak_workers_refused_total", "Workers refused at admission.", labels=(Label("code"),)),
    Series(
        "raycloak_worker_failures_total",
        "Workers lost after admission, by cause.",
        labels=(Label("cause", at_most=32, usual=LOSS_CAUSES),),
    ),
    Series("raycloak_workers_joined_total", "Workers that joined after the run began."),
    Series(
        "raycloak_workers_left_total",
        "Workers that left between two steps on request, by reason.",
        labels=(Label("cause", at_most=32, usual=LEAVE_CAUSES),),
    ),
    Series(
        "raycloak_evidence_expiry_timestamp_seconds",
        "Unix time at which the earliest evidence of a role expires.",
        _PHYSICAL,
        (_ROLE,),
    ),
    Series(
        "raycloak_collateral_expiry_timestamp_seconds",
        "Unix time at which the first document of the collateral in use ends.",
    ),
    Series(
        "raycloak_evidence_class_info",
        "Evidence class that a role was admitted under; always 1.",
        labels=(_ROLE, Label("evidence_class", at_most=8)),
    ),
    Series(
        "raycloak_evaluation_accuracy_ratio",
        "Accuracy of the released parameters on the declared public split.",
        _RELEASED,
    ),
    Series(
        "raycloak_evaluation_loss",
        "Mean loss of the released parameters on the declared public split, where no accuracy is measured.",
        _RELEASED,
    ),
    Series(
        "raycloak_step_duration_seconds",
        "Wall time of a committed step, all its attempts included.",
        _PHYSICAL,
        is_histogram=True,
    ),
    Series(
        "raycloak_step_phase_duration_seconds",
        "Wall time of one phase of a step.",
        _PHYSICAL,
        (Label("phase", PHASES),),
        is_histogram=True,
    ),
    Series(
        "raycloak_worker_phase_duration_seconds",
        "A worker's time for one phase of an answer, on its device; see docs/metrics.md.",
        _PHYSICAL,
        (Label("phase", WORKER_PHASES),),
        is_histogram=True,
    ),
    Series(
        "raycloak_worker_gpu_memory_peak_bytes",
        "Most memory of one GPU that tensors of any worker took in the last attempt; absent on CPUs.",
        _PHYSICAL,
    ),
    Series("raycloak_masked_bytes_total", "Bytes of masked vectors received."),
    Series("raycloak_last_commit_timestamp_seconds", "Unix time of the last commit.", _PHYSICAL),
    Series("raycloak_last_checkpoint_timestamp_seconds", "Unix time of the last checkpoint.", _PHYSICAL),
)
RUN_SERIES = (
    Series(
        "raycloak_build_info",
        "Versions of raycloak and of what it computes with; always 1.",
        labels=tuple(Label(name, at_most=1) for name in ("version", "python", "ray", "torch")),
    ),
    *(replace(series, labels=(_RUN, *series.labels)) for series in _OF_RUN),
)

LEDGER_SERIES = (
    Series("raycloak_ledger_up", "1 if the ledger answered this scrape, else 0."),
    Series("raycloak_ledger_entries", "Entries in the ledger's hash chain.", _RELEASED),
    Series("raycloak_ledger_fencing", "Fencing number of the ledger instance that answered."),
    Series("raycloak_ledger_accounts", "Accounts in the ledger's answer."),
    Series(
        "raycloak_ledger_witness_up",
        "1 if the witness kept or showed a head when the ledger last asked it, else 0; absent without a witness.",
    ),
    Series(
        "raycloak_ledger_witness_entries",
        "Entries of the ledger that the witness's newest head covers; absent without a witness.",
        _RELEASED,
    ),
    Series(
        "raycloak_privacy_epsilon_spent",
        "Epsilon charged so far at the account's delta; a running charge, and no claim about a run that is stopped.",
        _RELEASED,
        (ACCOUNT,),
    ),
    Series("raycloak_privacy_epsilon_cap", "Hard cap of the account.", labels=(ACCOUNT,)),
    Series("raycloak_privacy_delta", "Delta of every stated epsilon of the account.", labels=(ACCOUNT,)),
    Series(
        "raycloak_privacy_budget_spent_ratio",
        "Share of the budget spent, in the ledger's additive (Renyi) measure at its best order; 1 is the cap.",
        _RELEASED,
        (ACCOUNT,),
    ),
    Series("raycloak_privacy_steps_charged_total", "Steps charged to the account.", _RELEASED, (ACCOUNT,)),
)

GPU_SERIES = (
    Series(
        "raycloak_gpu_utilization_ratio",
        "Share of the last sample period in which a kernel ran.",
        _PHYSICAL,
        (_NODE, _GPU),
    ),
    Series("raycloak_gpu_memory_used_bytes", "GPU memory in use, driver included.", labels=(_NODE, _GPU)),
    Series("raycloak_gpu_memory_total_bytes", "GPU memory installed.", labels=(_NODE, _GPU)),
    Series("raycloak_gpu_power_watts", "Power drawn by the board.", _PHYSICAL, (_NODE, _GPU)),
    Series("raycloak_gpu_temperature_celsius", "Temperature of the GPU die.", _PHYSICAL, (_NODE, _GPU)),
    Series(
        "raycloak_gpu_thermal_slowdown",
        "1 if the GPU holds its clocks down for heat, else 0.",
        _PHYSICAL,
        (_NODE, _GPU),
    ),
    Series(
        "raycloak_gpu_ecc_errors_total",
        "Memory errors over the life of the board.",
        labels=(_NODE, _GPU, Label("kind", ("corrected", "uncorrected"))),
    ),
    Series(
        "raycloak_gpu_confidential_compute_state",
        "1 for the confidential-compute state the driver reports, 0 for the others.",
        labels=(_NODE, Label("state", GPU_STATES)),
    ),
)

SERVICE_SERIES = (
    Series("raycloak_service_up", "1 while the evidence service can write its record, 0 once it refuses everything."),
    Series(
        "raycloak_service_calls_total",
        "Calls that the evidence service answered: ok, or the code of the refusal.",
        labels=(Label("method", CALLS), Label("code", usual=(ANSWERED,))),
    ),
    Series(
        "raycloak_service_wait_seconds",
        "Time from a call's arrival at the orchestrator's queue to its answer.",
        _PHYSICAL,
        is_histogram=True,
    ),
    Series("raycloak_service_waiting_calls", "Calls that wait for the orchestrator."),
    Series(
        "raycloak_service_oldest_call_timestamp_seconds",
        "Unix time at which the longest-waiting call arrived; the time of the scrape if none waits.",
        _PHYSICAL,
    ),
    Series(
        "raycloak_service_collateral_expiry_timestamp_seconds",
        "Unix time at which the first document of the service's collateral ends.",
    ),
)

TRAINING_SERVICE_SERIES = (
    Series("raycloak_training_service_up", "1 if the training service's store answered this scrape, else 0."),
    Series(
        "raycloak_training_service_clients",
        "Clients by status, of all tenants together.",
        labels=(Label("status", CLIENT_STATES),),
    ),
    Series("raycloak_training_service_drivers", "Driver processes, each with the run of one client."),
    Series("raycloak_training_service_samplers", "Processes that generate text."),
    Series("raycloak_training_service_watch_streams", "Streams of changes that clients hold open."),
    Series(
        "raycloak_training_service_queued_operations",
        "Operations that wait for their turn.",
        labels=(Label("kind", OPERATIONS),),
    ),
    Series(
        "raycloak_training_service_oldest_operation_timestamp_seconds",
        "Unix time at which the oldest unfinished operation was submitted; the time of the scrape if there is none.",
        _PHYSICAL,
    ),
    Series(
        "raycloak_training_service_operations_total",
        "Operations that ended since the service was started, by kind and outcome.",
        labels=(Label("kind", OPERATIONS), Label("outcome", OUTCOMES)),
    ),
    Series(
        "raycloak_training_service_operation_phase_duration_seconds",
        "Time that an operation waited for its turn, and time from there to its end.",
        _PHYSICAL,
        (Label("kind", OPERATIONS), Label("phase", OPERATION_PHASES)),
        is_histogram=True,
    ),
    Series(
        "raycloak_training_service_refused_calls_total",
        "Calls that the service refused, by the class of the error.",
        labels=(Label("error", REFUSALS),),
    ),
)

SECRET_SERIES = (
    Series("raycloak_step_examples", "Examples drawn in a step; secret under Poisson sampling.", _SECRET, (_RUN,)),
    Series("raycloak_training_loss", "Loss on private examples.", _SECRET, (_RUN,)),
    Series("raycloak_gradient_norm", "Norm of a gradient before clipping.", _SECRET, (_RUN,), is_histogram=True),
    Series("raycloak_clipped_examples_ratio", "Share of examples whose gradient was clipped.", _SECRET, (_RUN,)),
    Series("raycloak_nonfinite_gradients_total", "Examples whose gradient was not finite.", _SECRET, (_RUN,)),
)

SERIES = RUN_SERIES + LEDGER_SERIES + GPU_SERIES + SERVICE_SERIES + TRAINING_SERVICE_SERIES + SECRET_SERIES
BY_NAME = {series.name: series for series in SERIES}


def markdown_table() -> str:
    """Return all series as the table of docs/metrics.md; ``python -m raycloak.metrics.registry`` prints it."""
    rows = ["| series | kind | labels | class | meaning |", "|---|---|---|---|---|"]
    for series in SERIES:
        labels = ", ".join(f"`{name}`" for name in series.label_names) or "none"
        rows.append(f"| `{series.name}` | {series.kind} | {labels} | {series.privacy} | {series.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown_table())
