"""The dashboard of all runs and all accounts. The recording rules compute its burn."""

from raycloak_lab.dashboards.panels import Dashboard, Panel, PromQuery, Row

_TO_RUN = ("Open the run", "/d/raycloak-run?var-run=${__field.labels.run}&${__url_time_range}")
_TO_ACCOUNT = ("Open a run of the account", "/d/raycloak-run?var-account=${__field.labels.account}&${__url_time_range}")

NOW_ROW = Row(
    "Now",
    (
        Panel(
            "Runs that train",
            "Pages that Prometheus reads, of runs that have not ended.",
            "stat",
            (PromQuery('sum(max by (run) (raycloak_run_state{state="training"}))', "runs"),),
            width=6,
            height=4,
        ),
        Panel(
            "Ledgers that do not answer",
            "Runs whose ledger is away charge nothing, and wait.",
            "stat",
            (PromQuery("sum(raycloak_ledger_up == bool 0)", "ledgers"),),
            width=6,
            height=4,
            steps=((0, "green"), (1, "red")),
        ),
        Panel(
            "Alerts",
            "Of raycloak, firing now. docs/operations.md has a runbook for each.",
            "stat",
            (PromQuery('count(ALERTS{alertname=~"Raycloak.*",alertstate="firing"}) or vector(0)', "alerts"),),
            width=6,
            height=4,
            steps=((0, "green"), (1, "red")),
        ),
        Panel(
            "Not private",
            "Runs that are marked NOT_PRIVATE, which public data alone allows.",
            "stat",
            (PromQuery('count(raycloak_run_claims_info{privacy="NOT_PRIVATE"}) or vector(0)', "runs"),),
            width=6,
            height=4,
            steps=((0, "green"), (1, "orange")),
        ),
    ),
)
RUNS_ROW = Row(
    "Runs",
    (
        Panel(
            "Steps done",
            "Finished over planned.",
            "bargauge",
            (
                PromQuery(
                    "max by (run) (raycloak_steps_finished) / max by (run) (raycloak_steps_planned)",
                    "{{run}}",
                ),
            ),
            "percentunit",
            limits=(0, 1),
            link=_TO_RUN,
        ),
        Panel(
            "State",
            "Of each run that Prometheus reads.",
            "state-timeline",
            (PromQuery("max by (run, state) (raycloak_run_state) == 1", "{{run}}: {{state}}"),),
            mappings=((1, 1, "now", "blue"),),
            link=_TO_RUN,
        ),
        Panel(
            "How runs ended",
            "In the time that is shown; it stays when their pages are gone.",
            "stat",
            (
                PromQuery(
                    'max by (run, state) (last_over_time(raycloak_run_state{state!="training"}[$__range])) == 1',
                    "{{run}}: {{state}}",
                ),
            ),
            text="name",
            phase="ended",
            link=_TO_RUN,
        ),
        Panel(
            "Burn of the last hour",
            "What a step cost, over what each step that is left may cost. Needs the recording rules.",
            "timeseries",
            (PromQuery("run:raycloak_budget_burn:ratio1h", "{{run}} on {{account}}"),),
            steps=((0, "green"), (1.1, "orange"), (1.5, "red")),
            link=_TO_RUN,
        ),
        Panel(
            "Workers",
            "Admitted and alive.",
            "timeseries",
            (PromQuery("max by (run) (raycloak_workers_admitted)", "{{run}}"),),
            link=_TO_RUN,
        ),
        Panel(
            "Evidence and marks",
            "Evidence class, privacy and exactness of each run.",
            "stat",
            (
                PromQuery(
                    "max by (run, evidence_class, privacy, exactness) (raycloak_run_claims_info * on (run) "
                    "group_left (evidence_class) max by (run, evidence_class) (raycloak_run_info))",
                    "{{run}}: {{evidence_class}}, {{privacy}}, {{exactness}}",
                ),
            ),
            text="name",
            link=_TO_RUN,
        ),
    ),
)
ACCOUNTS_ROW = Row(
    "Accounts",
    (
        Panel(
            "Budget spent",
            "Share in the ledger's additive measure, of every account that a page names; at 1 the ledger refuses.",
            "bargauge",
            (PromQuery("max by (account) (raycloak_privacy_budget_spent_ratio)", "{{account}}"),),
            "percentunit",
            12,
            steps=((0, "green"), (0.8, "orange"), (1, "red")),
            limits=(0, 1),
            link=_TO_ACCOUNT,
        ),
        Panel(
            "Epsilon charged",
            "At the account's delta; a running charge, and no claim.",
            "timeseries",
            (
                PromQuery("max by (account) (raycloak_privacy_epsilon_spent)", "{{account}}"),
                PromQuery("max by (account) (raycloak_privacy_epsilon_cap)", "{{account}}: cap"),
            ),
            width=12,
            link=_TO_ACCOUNT,
        ),
        Panel(
            "Accounts",
            "In the answers of the ledgers. A page names the 64 that have spent most.",
            "stat",
            (PromQuery("max by (instance) (raycloak_ledger_accounts)", "{{instance}}"),),
            width=12,
            height=4,
        ),
        Panel(
            "Entries",
            "In each ledger's chain.",
            "stat",
            (PromQuery("max by (instance) (raycloak_ledger_entries)", "{{instance}}"),),
            width=12,
            height=4,
        ),
    ),
)
FLEET_DASHBOARD = Dashboard(
    file="fleet.json",
    uid="raycloak-fleet",
    title="raycloak: fleet",
    description="All runs and all accounts.",
    variables=(),
    rows=(NOW_ROW, RUNS_ROW, ACCOUNTS_ROW),
)
