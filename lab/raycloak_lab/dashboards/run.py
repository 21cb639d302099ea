"""The dashboard of one run.

Rows follow the questions of a person who watches it. Is it all right? What did it achieve? What is left to spend? Does
it go to plan? Where does time go? Who takes part? Does anything touch disk?
"""

from raycloak_lab.dashboards.panels import (
    ACCOUNT,
    RATE,
    RUN,
    RUN_ANNOTATIONS,
    RUN_VARIABLES,
    Dashboard,
    Panel,
    PromQuery,
    Row,
    age,
    by_label,
    quantile,
)

_SPENT = f"max(raycloak_privacy_budget_spent_ratio{ACCOUNT})"
_CHARGED = f"max(raycloak_privacy_steps_charged_total{ACCOUNT})"
_FINISHED = f"max(raycloak_steps_finished{RUN})"
_PLANNED = f"max(raycloak_steps_planned{RUN})"
_DONE = f"({_FINISHED} / {_PLANNED})"
# A step is charged before it is finished, so one of those that are left may be paid.
_LEFT = f"({_PLANNED} - {_FINISHED} - 1)"
# Each of the three is 1 or 0, so with the weights 4, 2 and 1 the sum names the worst. A ledger that does not answer
# leaves the last two without a value: "or vector(0)" keeps the sum defined.
_ABSENT = f"((1 - max(raycloak_ledger_up and on (instance) raycloak_run_info{RUN})) or vector(1))"
_EXHAUSTED = (
    f"(({_SPENT} * (1 + 1 / {_CHARGED}) > bool 1) * ({_LEFT} > bool 0) * (1 - max(raycloak_run_prepaid{RUN})) "
    "or vector(0))"
)
_WORKER_PHASE = " / ".join(
    f"sum by (phase) (rate(raycloak_worker_phase_duration_seconds_{part}{RUN}{RATE}))" for part in ("sum", "count")
)
_AHEAD = "(({burn} > bool 1.1) or vector(0))"
_LASTED = '(max(last_over_time(raycloak_run_state{{run="$run",state="{state}"}}[$__range])) == 1)'


def burn(window: str, steps: int = 4) -> str:
    """Return what a step cost in ``window``, over what each step that is left may cost; see docs/operations.md."""
    cost = (
        f"max(delta(raycloak_privacy_budget_spent_ratio{ACCOUNT}[{window}])) / "
        f"(max(delta(raycloak_steps_finished{RUN}[{window}])) >= {steps})"
    )
    return f"({cost} * ({_LEFT} > 0) / (1 - {_SPENT}))"


_ENDINGS = (
    (8, "complete"),
    (9, "cap_exceeded"),
    (10, "stopped"),
    (11, "failed"),
    (12, "training"),
    (13, "early_stopped"),
)
# While it trains, by its figures; then by how it ended. A page that is gone without that leaves the last.
VERDICT = (
    f"4 * {_ABSENT} + 2 * {_EXHAUSTED} + {_AHEAD.format(burn=burn('1h'))} "
    'and max(raycloak_run_state{run="$run",state="training"}) == 1 '
    + " ".join(f"or {number} * {_LASTED.format(state=state)}" for number, state in _ENDINGS)
)


def _marked(label: str, mark: str) -> str:
    """Return 1 if the run carries the mark, 0 if it carries the other one."""
    return f'max(raycloak_run_claims_info{{run="$run",{label}="{mark}"}} or raycloak_run_claims_info{RUN} * 0)'


VERDICT_ROW = Row(
    "Verdict",
    (
        Panel(
            "Verdict",
            "Ahead of plan: at the pace of the last hour the account is spent before the plan ends. Exhausted: steps "
            "are left, and the account cannot pay another one. Absent: the ledger does not answer. Gone: the page is "
            "gone, and the run did not say that it ended.",
            "stat",
            (PromQuery(VERDICT, "verdict"),),
            width=6,
            height=5,
            mappings=(
                (0, 0.5, "OK", "green"),
                (0.5, 1.5, "AHEAD OF PLAN", "orange"),
                (1.5, 3.5, "EXHAUSTED", "red"),
                (3.5, 7.5, "LEDGER ABSENT", "dark-red"),
                (7.5, 8.5, "FINISHED", "green"),
                (8.5, 9.5, "FINISHED AT THE CAP", "orange"),
                (9.5, 10.5, "STOPPED", "blue"),
                (10.5, 11.5, "FAILED", "red"),
                (11.5, 12.5, "GONE", "dark-red"),
                (12.5, 13.5, "ENDED EARLY", "green"),
            ),
        ),
        Panel(
            "Privacy",
            "NOT PRIVATE: the run adds no noise and claims nothing about its examples.",
            "stat",
            (PromQuery(_marked("privacy", "NOT_PRIVATE"), "privacy"),),
            width=4,
            height=5,
            mappings=((0, 0.5, "PRIVATE", "green"), (0.5, 1.5, "NOT PRIVATE", "red")),
        ),
        Panel(
            "Exactness",
            "NOT EXACT: operations without a deterministic kernel are allowed, and a repeat may give other bytes.",
            "stat",
            (PromQuery(_marked("exactness", "NOT_EXACT"), "exactness"),),
            width=4,
            height=5,
            mappings=((0, 0.5, "EXACT", "green"), (0.5, 1.5, "NOT EXACT", "orange")),
        ),
        Panel(
            "Evidence class",
            "What the admitted roles proved. A simulated class proves nothing about hardware.",
            "stat",
            (
                PromQuery(
                    f"max by (role, evidence_class) (raycloak_evidence_class_info{RUN})",
                    "{{role}}: {{evidence_class}}",
                ),
            ),
            width=6,
            height=5,
            text="name",
        ),
        Panel(
            "Steps done",
            "Finished over planned, earlier executions included.",
            "gauge",
            (PromQuery(_DONE, "done"),),
            "percentunit",
            4,
            5,
            limits=(0, 1),
        ),
        Panel(
            "How it ended",
            "Stays when the page of the run is gone.",
            "stat",
            (
                PromQuery(
                    f"max by (state) (last_over_time(raycloak_run_state{RUN}[$__range])) == 1",
                    "{{state}}",
                ),
            ),
            width=24,
            height=3,
            text="name",
            phase="ended",
        ),
    ),
)
RESULT_ROW = Row(
    "Result",
    (
        Panel(
            "Public accuracy",
            "Of the released parameters, on the declared public split. A run measures this or a loss.",
            "timeseries",
            (PromQuery(f"max(raycloak_evaluation_accuracy_ratio{RUN})", "accuracy"),),
            "percentunit",
            limits=(None, None),
        ),
        Panel(
            "Public loss",
            "Mean over the declared public split, where no accuracy is measured.",
            "timeseries",
            (PromQuery(f"max(raycloak_evaluation_loss{RUN})", "loss"),),
            limits=(None, None),
            phase="loss",
        ),
        Panel(
            "Age",
            "Since the last commit, and since the newest package: what a resume would lose.",
            "stat",
            (
                age("raycloak_last_commit_timestamp_seconds", "last commit"),
                age("raycloak_last_checkpoint_timestamp_seconds", "newest package"),
                age("raycloak_run_start_timestamp_seconds", "start"),
            ),
            "s",
            4,
            text="value_and_name",
        ),
        Panel(
            "Mechanism",
            "Noise deviation over the clipping norm, and what is trained.",
            "stat",
            (
                PromQuery(f"max(raycloak_noise_multiplier_ratio{RUN})", "noise multiplier"),
                PromQuery(f"max(raycloak_parameters{RUN})", "parameters"),
                PromQuery(f"max(raycloak_virtual_workers{RUN})", "virtual workers"),
            ),
            width=4,
            text="value_and_name",
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
                PromQuery(f"max(raycloak_privacy_epsilon_spent{ACCOUNT})", "spent"),
                PromQuery(f"max(raycloak_privacy_epsilon_cap{ACCOUNT})", "cap"),
            ),
            width=10,
        ),
        Panel(
            "Epsilon charged so far",
            "At the account's delta, and no claim. It is concave in steps; judge the pace by the budget share.",
            "stat",
            (PromQuery(f"max(raycloak_privacy_epsilon_spent{ACCOUNT})", "epsilon"),),
            width=4,
        ),
        Panel(
            "Account",
            "Delta, charged steps, entries in the chain and fencing number of the ledger that answered; and the "
            "witness, if it has one: 1 if it answers, and the entries that its newest head covers.",
            "stat",
            (
                PromQuery(f"max(raycloak_privacy_delta{ACCOUNT})", "delta"),
                PromQuery(_CHARGED, "charged steps"),
                PromQuery(f"max(raycloak_ledger_entries and on (instance) raycloak_run_info{RUN})", "entries"),
                PromQuery(f"max(raycloak_ledger_fencing and on (instance) raycloak_run_info{RUN})", "fencing"),
                PromQuery(f"max(raycloak_ledger_witness_up and on (instance) raycloak_run_info{RUN})", "witness"),
                PromQuery(
                    f"max(raycloak_ledger_witness_entries and on (instance) raycloak_run_info{RUN})", "witnessed"
                ),
            ),
            width=4,
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
        ),
        Panel(
            "Burn",
            "What a step cost, over what each step that is left may cost. Above 1 the account is spent before the plan "
            "ends, by whichever run. No line where a window holds fewer than four steps.",
            "timeseries",
            (PromQuery(burn("5m"), "5 minutes"), PromQuery(burn("1h"), "1 hour"), PromQuery(burn("6h"), "6 hours")),
            steps=((0, "green"), (1.1, "orange"), (1.5, "red")),
        ),
        Panel(
            "Steps still affordable",
            "At the average cost of the steps charged so far, next to the steps still planned.",
            "timeseries",
            (
                PromQuery(f"(1 - {_SPENT}) * {_CHARGED} / ({_SPENT} > 0)", "affordable"),
                PromQuery(f"{_PLANNED} - {_FINISHED}", "planned"),
            ),
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
                quantile(0.5, "raycloak_step_duration_seconds", "", "median"),
                quantile(0.95, "raycloak_step_duration_seconds", "", "95 %"),
            ),
            "s",
        ),
        Panel(
            "Phase time, 95 %",
            "Compute is padded to a fixed amount of work, so its time shows nothing of a batch.",
            "timeseries",
            (quantile(0.95, "raycloak_step_phase_duration_seconds", "phase", "{{phase}}"),),
            "s",
        ),
        Panel(
            "A worker's phases, mean",
            "What workers do in compute, in the order of a step.",
            "timeseries",
            (PromQuery(_WORKER_PHASE, "{{phase}}"),),
            "s",
        ),
        Panel(
            "Masked bytes",
            "Received by the aggregators.",
            "timeseries",
            (PromQuery(f"sum(rate(raycloak_masked_bytes_total{RUN}{RATE}))", "masked"),),
            "Bps",
        ),
        Panel(
            "Attempts and commits",
            "An attempt that failed was followed by another. Releases include those of measurements.",
            "timeseries",
            (
                PromQuery(f"sum(increase(raycloak_step_attempts_total{RUN}{RATE}))", "attempts"),
                PromQuery(f"sum(increase(raycloak_step_attempts_failed_total{RUN}{RATE}))", "failed"),
                PromQuery(f"sum(increase(raycloak_aggregates_released_total{RUN}{RATE}))", "releases"),
                PromQuery(f"sum(increase(raycloak_steps_committed_total{RUN}{RATE}))", "commits"),
            ),
        ),
        Panel(
            "Refused steps",
            "By the ledger or a worker, by code.",
            "timeseries",
            (by_label("raycloak_steps_refused_total", "code"),),
        ),
    ),
)
WORKER_ROW = Row(
    "Workers",
    (
        Panel(
            "Workers",
            "Admitted and alive, next to what is configured and the fewest that the run continues with.",
            "timeseries",
            (
                PromQuery(f"max(raycloak_workers_admitted{RUN})", "admitted"),
                PromQuery(f"max(raycloak_workers_planned{RUN})", "configured"),
                PromQuery(f"max(raycloak_workers_required{RUN})", "required"),
            ),
        ),
        Panel(
            "Failures by cause",
            "Workers lost after admission.",
            "timeseries",
            (by_label("raycloak_worker_failures_total", "cause"),),
        ),
        Panel(
            "Joined and left",
            "Workers that joined after the run began, and that left on request.",
            "timeseries",
            (
                PromQuery(f"sum(increase(raycloak_workers_joined_total{RUN}{RATE}))", "joined"),
                by_label("raycloak_workers_left_total", "cause"),
            ),
        ),
        Panel(
            "Refused at admission",
            "By refusal code.",
            "timeseries",
            (by_label("raycloak_workers_refused_total", "code"),),
        ),
        Panel(
            "Virtual workers moved",
            "To another worker, by failures or by joining and leaving.",
            "timeseries",
            (PromQuery(f"sum(increase(raycloak_virtual_workers_moved_total{RUN}{RATE}))", "moved"),),
            width=16,
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
            phase="ray",
        ),
        Panel(
            "Objects in memory",
            "Shared memory of all nodes.",
            "timeseries",
            (PromQuery('sum by (Location) (ray_object_store_memory{Location!~"SPILLED|MMAP_DISK"})', "{{Location}}"),),
            "bytes",
            12,
            phase="ray",
        ),
    ),
)
RUN_DASHBOARD = Dashboard(
    file="run.json",
    uid="raycloak-run",
    title="raycloak: run",
    description="A training run: verdict, result, budget, steps, workers.",
    variables=RUN_VARIABLES,
    rows=(VERDICT_ROW, RESULT_ROW, BUDGET_ROW, PLAN_ROW, STEP_ROW, WORKER_ROW, STORE_ROW),
    annotations=RUN_ANNOTATIONS,
)
