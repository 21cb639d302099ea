"""The dashboard of encrypted adapters' servers."""

from raycloak_lab.dashboards.panels import RATE, Dashboard, Panel, PromQuery, Row

ADAPTERS_ROW = Row(
    "Encrypted adapters",
    (
        Panel(
            "Tokens left",
            "Of the projection that has the least left, for all clients together. No restart gives any back.",
            "stat",
            (PromQuery("min by (instance) (raycloak_adapter_tokens_left)", "{{instance}}"),),
            width=6,
            steps=((0, "red"), (1, "green")),
        ),
        Panel(
            "Calls",
            "A second, by method and code. Any code but ok is a refusal.",
            "timeseries",
            (PromQuery(f"sum by (method, code) (rate(raycloak_adapter_calls_total{RATE}))", "{{method}} {{code}}"),),
            "reqps",
            6,
        ),
        Panel(
            "Tokens and sessions",
            "Tokens charged a second, by whole blocks, and open sessions.",
            "timeseries",
            (
                PromQuery(f"sum by (instance) (rate(raycloak_adapter_tokens_total{RATE}))", "tokens {{instance}}"),
                PromQuery("max by (instance) (raycloak_adapter_sessions)", "sessions {{instance}}"),
            ),
            width=6,
        ),
        Panel(
            "Time of blocks",
            "Seconds a second, by phase. A server that is busy all the time is at 1.",
            "timeseries",
            (
                PromQuery(
                    f"sum by (instance, phase) (rate(raycloak_adapter_busy_seconds_total{RATE}))",
                    "{{phase}} {{instance}}",
                ),
            ),
            width=6,
        ),
    ),
)
ADAPTER_DASHBOARD = Dashboard(
    file="adapter.json",
    uid="raycloak-adapter",
    title="raycloak: encrypted adapters",
    description="The servers of encrypted adapters.",
    variables=(),
    rows=(ADAPTERS_ROW,),
)
