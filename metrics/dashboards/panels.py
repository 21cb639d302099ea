"""The panels of the Grafana dashboard and the PromQL behind them.

Rows follow the questions of a person who watches a run. Is it all right? What is left to spend? Does it go to plan?
Where does time go? Who takes part, on what evidence? Does anything touch disk? What do the GPUs do?
"""

from dataclasses import dataclass

# Grafana sets it to at least four scrapes, so that no rate is taken over a single sample.
RATE = "[$__rate_interval]"

_RUN = '{run="$run"}'
_ACCOUNT = '{account="$account"}'
_SPENT = f"max(raycloak_privacy_budget_spent_ratio{_ACCOUNT})"
_CHARGED = f"max(raycloak_privacy_steps_charged_total{_ACCOUNT})"
_DONE = f"(max(raycloak_steps_committed_total{_RUN}) / max(raycloak_steps_planned{_RUN}))"
# Each of the three is 1 or 0, so with the weights 4, 2 and 1 the sum names the worst. A ledger that does not answer
# leaves the last two without a value: "or vector(0)" keeps the sum defined.
_ABSENT = f"((1 - max(raycloak_ledger_up and on (instance) raycloak_run_info{_RUN})) or vector(1))"
_EXHAUSTED = f"(({_SPENT} * (1 + 1 / {_CHARGED}) > bool 1) or vector(0))"
_AHEAD = f"((({_SPENT} > bool 1.1 * {_DONE}) * ({_DONE} > bool 0.02)) or vector(0))"
VERDICT = f"4 * {_ABSENT} + 2 * {_EXHAUSTED} + {_AHEAD}"


@dataclass(frozen=True)
class PromQuery:
    """One PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel of the dashboard.

    Args:
        title, description: shown to the reader.
        kind: Grafana panel type.
        queries: its PromQL, drawn in this order.
        unit: Grafana unit id.
        width, height: in grid cells; a row is 24 wide.
        steps: thresholds as (from value, color), the first from minus infinity.
        mappings: (lowest, highest, text, color) for values shown as words.
        text: ``value`` or ``name``, which a stat panel writes.
        limits: lowest and highest value of the scale, where fixed.
    """

    title: str
    description: str
    kind: str
    queries: tuple[PromQuery, ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    steps: tuple[tuple[float, str], ...] = ((0, "green"),)
    mappings: tuple[tuple[float, float, str, str], ...] = ()
    text: str = "value"
    limits: tuple[float | None, float | None] = (0, None)


@dataclass(frozen=True)
class Row:
    """A titled band of panels."""

    title: str
    panels: tuple[Panel, ...]


def _by_label(metric: str, label: str) -> PromQuery:
    return PromQuery(f"sum by ({label}) (increase({metric}{_RUN}{RATE}))", "{{" + label + "}}")


def _quantile(q: float, metric: str, label: str, legend: str) -> PromQuery:
    by = f"le, {label}" if label else "le"
    return PromQuery(f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{_RUN}{RATE})))", legend)


def _gpu(metric: str, function: str = "max") -> PromQuery:
    return PromQuery(f'{function} by (node, gpu) ({metric}{{node=~"$node"}})', "{{node}} {{gpu}}")


VERDICT_ROW = Row(
    "Verdict",
    (
        Panel(
            "Verdict",
            "Absent: the ledger does not answer. Exhausted: the account cannot pay one more step of average cost. "
            "Ahead of plan: the share spent is more than 1.1 times the share of steps done.",
            "stat",
            (PromQuery(VERDICT, "verdict"),),
            width=6,
            height=5,
            mappings=(
                (0, 0.5, "OK", "green"),
                (0.5, 1.5, "AHEAD OF PLAN", "orange"),
                (1.5, 3.5, "EXHAUSTED", "red"),
                (3.5, 7.5, "LEDGER ABSENT", "dark-red"),
            ),
        ),
        Panel(
            "Evidence class",
            "What the admitted roles proved. A simulated class proves nothing about hardware.",
            "stat",
            (
                PromQuery(
                    f"max by (role, evidence_class) (raycloak_evidence_class_info{_RUN})",
                    "{{role}}: {{evidence_class}}",
                ),
            ),
            width=6,
            height=5,
            text="name",
        ),
        Panel(
            "Steps done",
            "Committed over planned.",
            "gauge",
            (PromQuery(_DONE, "done"),),
            "percentunit",
            4,
            5,
            limits=(0, 1),
        ),
        Panel(
            "Epsilon charged so far",
            "At the account's delta, and no claim. It is concave in steps; judge the pace by the budget share below.",
            "stat",
            (PromQuery(f"max(raycloak_privacy_epsilon_spent{_ACCOUNT})", "epsilon"),),
            width=4,
            height=5,
        ),
        Panel(
            "Public accuracy",
            "Of the released parameters, on the declared public split.",
            "stat",
            (PromQuery(f"max(raycloak_evaluation_accuracy_ratio{_RUN})", "accuracy"),),
            "percentunit",
            4,
            5,
        ),
    ),
)
BUDGET_ROW = Row(
    "Budget",
    (
        Panel(
            "Budget spent",
            "Share in the ledger's additive measure; the ledger refuses the step that would take it above 1.",
            "gauge",
            (PromQuery(_SPENT, "spent"),),
            "percentunit",
            6,
            steps=((0, "green"), (0.8, "orange"), (1, "red")),
            limits=(0, 1),
        ),
        Panel(
            "Epsilon against the cap",
            "Both at the account's delta.",
            "timeseries",
            (
                PromQuery(f"max(raycloak_privacy_epsilon_spent{_ACCOUNT})", "spent"),
                PromQuery(f"max(raycloak_privacy_epsilon_cap{_ACCOUNT})", "cap"),
            ),
            width=12,
        ),
        Panel(
            "Account",
            "Delta, charged steps, entries in the chain and fencing number of the ledger that answered.",
            "stat",
            (
                PromQuery(f"max(raycloak_privacy_delta{_ACCOUNT})", "delta"),
                PromQuery(_CHARGED, "charged steps"),
                PromQuery(f"max(raycloak_ledger_entries and on (instance) raycloak_run_info{_RUN})", "entries"),
                PromQuery(f"max(raycloak_ledger_fencing and on (instance) raycloak_run_info{_RUN})", "fencing"),
            ),
            width=6,
            text="value_and_name",
        ),
    ),
)
PLAN_ROW = Row(
    "Spend against plan",
    (
        Panel(
            "Shares of budget and plan",
            "A budget line well above the step line runs out before the plan ends.",
            "timeseries",
            (PromQuery(_SPENT, "budget spent"), PromQuery(_DONE, "steps done")),
            "percentunit",
            12,
        ),
        Panel(
            "Steps still affordable",
            "At the average cost of the steps charged so far, next to the steps still planned.",
            "timeseries",
            (
                PromQuery(f"(1 - {_SPENT}) * {_CHARGED} / {_SPENT}", "affordable"),
                PromQuery(f"max(raycloak_steps_planned{_RUN}) - max(raycloak_steps_committed_total{_RUN})", "planned"),
            ),
            width=12,
        ),
    ),
)
STEP_ROW = Row(
    "Steps and phases",
    (
        Panel(
            "Step time",
            "All attempts of a committed step.",
            "timeseries",
            (
                _quantile(0.5, "raycloak_step_duration_seconds", "", "median"),
                _quantile(0.95, "raycloak_step_duration_seconds", "", "95 %"),
            ),
            "s",
        ),
        Panel(
            "Phase time, 95 %",
            "Compute is padded to a fixed amount of work, so its time shows nothing of a batch.",
            "timeseries",
            (_quantile(0.95, "raycloak_step_phase_duration_seconds", "phase", "{{phase}}"),),
            "s",
        ),
        Panel(
            "Masked bytes",
            "Received by the aggregators.",
            "timeseries",
            (PromQuery(f"sum(rate(raycloak_masked_bytes_total{_RUN}{RATE}))", "masked"),),
            "Bps",
        ),
        Panel(
            "Attempts and commits",
            "Attempts above commits are retries after a failure. Releases must never exceed commits for long.",
            "timeseries",
            (
                PromQuery(f"sum(increase(raycloak_step_attempts_total{_RUN}{RATE}))", "attempts"),
                PromQuery(f"sum(increase(raycloak_aggregates_released_total{_RUN}{RATE}))", "releases"),
                PromQuery(f"sum(increase(raycloak_steps_committed_total{_RUN}{RATE}))", "commits"),
            ),
            width=12,
        ),
        Panel(
            "Refused steps",
            "By the ledger or a worker, by code.",
            "timeseries",
            (_by_label("raycloak_steps_refused_total", "code"),),
            width=12,
        ),
    ),
)
WORKER_ROW = Row(
    "Workers and evidence",
    (
        Panel(
            "Workers",
            "Admitted and alive, next to the fewest that the run continues with.",
            "timeseries",
            (
                PromQuery(f"max(raycloak_workers_admitted{_RUN})", "admitted"),
                PromQuery(f"max(raycloak_workers_required{_RUN})", "required"),
            ),
        ),
        Panel(
            "Failures by cause",
            "Workers lost after admission.",
            "timeseries",
            (_by_label("raycloak_worker_failures_total", "cause"),),
        ),
        Panel(
            "Joined and left",
            "Workers that joined after the run began, and that left on request.",
            "timeseries",
            (
                PromQuery(f"sum(increase(raycloak_workers_joined_total{_RUN}{RATE}))", "joined"),
                _by_label("raycloak_workers_left_total", "cause"),
            ),
        ),
        Panel(
            "Refused at admission",
            "By refusal code.",
            "timeseries",
            (_by_label("raycloak_workers_refused_total", "code"),),
        ),
        Panel(
            "Evidence still valid for",
            "The earliest expiry of each role.",
            "stat",
            (PromQuery(f"min by (role) (raycloak_evidence_expiry_timestamp_seconds{_RUN}) - time()", "{{role}}"),),
            "s",
            12,
            6,
            steps=((-1e9, "red"), (0, "orange"), (600, "green")),
            text="value_and_name",
            limits=(None, None),
        ),
        Panel(
            "Virtual workers moved",
            "To another worker, by failures or by joining and leaving.",
            "timeseries",
            (PromQuery(f"sum(increase(raycloak_virtual_workers_moved_total{_RUN}{RATE}))", "moved"),),
            width=12,
            height=6,
        ),
    ),
)
STORE_ROW = Row(
    "Object store",
    (
        Panel(
            "Objects on disk",
            "Spilled objects are plain files. Only masked vectors and released parameters are ever in the store; spill "
            "still means that the plan's object-store size was too small.",
            "timeseries",
            (PromQuery('sum by (Location) (ray_object_store_memory{Location=~"SPILLED|MMAP_DISK"})', "{{Location}}"),),
            "bytes",
            12,
            steps=((0, "green"), (1, "red")),
        ),
        Panel(
            "Objects in memory",
            "Shared memory of all nodes.",
            "timeseries",
            (PromQuery('sum by (Location) (ray_object_store_memory{Location!~"SPILLED|MMAP_DISK"})', "{{Location}}"),),
            "bytes",
            12,
        ),
    ),
)
GPU_ROW = Row(
    "GPU",
    (
        Panel(
            "Utilization",
            "Share of time in which a kernel ran. In confidential-compute mode profiling counters are off, but this "
            "one is not.",
            "timeseries",
            (_gpu("raycloak_gpu_utilization_ratio"),),
            "percentunit",
            limits=(0, 1),
        ),
        Panel(
            "Memory used",
            "Share of the memory that is installed.",
            "timeseries",
            (
                PromQuery(
                    'max by (node, gpu) (raycloak_gpu_memory_used_bytes{node=~"$node"}) / '
                    'max by (node, gpu) (raycloak_gpu_memory_total_bytes{node=~"$node"})',
                    "{{node}} {{gpu}}",
                ),
            ),
            "percentunit",
            limits=(0, 1),
        ),
        Panel("Power", "Board power.", "timeseries", (_gpu("raycloak_gpu_power_watts"),), "watt"),
        Panel("Temperature", "GPU die.", "timeseries", (_gpu("raycloak_gpu_temperature_celsius"),), "celsius"),
        Panel(
            "Memory errors",
            "Over the life of the board.",
            "timeseries",
            (
                PromQuery(
                    'max by (node, gpu, kind) (raycloak_gpu_ecc_errors_total{node=~"$node"})',
                    "{{node}} {{gpu}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Confidential compute",
            "State the driver reports. Devtools and simulated protect nothing. It is a report, not evidence.",
            "state-timeline",
            (
                PromQuery(
                    'max by (node, state) (raycloak_gpu_confidential_compute_state{node=~"$node"}) == 1',
                    "{{node}}: {{state}}",
                ),
            ),
            mappings=((1, 1, "active", "blue"),),
        ),
    ),
)
ROWS = (VERDICT_ROW, BUDGET_ROW, PLAN_ROW, STEP_ROW, WORKER_ROW, STORE_ROW, GPU_ROW)
