"""The dashboard of the evidence service, standalone or of a run."""

from raycloak_lab.dashboards.panels import RATE, Dashboard, Panel, PromQuery, Row, Variable, quantile

_HERE = '{instance=~"$instance"}'

SERVICE_ROW = Row(
    "Service",
    (
        Panel(
            "Works",
            "NO: it could not write its record, and refuses every call since.",
            "stat",
            (PromQuery(f"min(raycloak_service_up{_HERE})", "works"),),
            width=4,
            height=6,
            mappings=((0, 0.5, "NO", "red"), (0.5, 1.5, "YES", "green")),
            phase="service",
        ),
        Panel(
            "Collateral still valid for",
            "Until the first document of the vendor's collateral ends.",
            "stat",
            (
                PromQuery(
                    f"min(raycloak_service_collateral_expiry_timestamp_seconds{_HERE}) - time()",
                    "collateral",
                ),
            ),
            "s",
            4,
            6,
            steps=((-1e9, "red"), (0, "orange"), (86400, "green")),
            limits=(None, None),
            phase="service",
        ),
        Panel(
            "Share refused",
            "Of the calls of a few scrapes. Refusals of strangers are the service at work.",
            "timeseries",
            (
                PromQuery(
                    f'1 - sum(rate(raycloak_service_calls_total{{instance=~"$instance",code="ok"}}{RATE})) / '
                    f"(sum(rate(raycloak_service_calls_total{_HERE}{RATE})) > 0)",
                    "refused",
                ),
            ),
            "percentunit",
            height=6,
            limits=(0, 1),
            phase="service",
        ),
        Panel(
            "Waiting calls",
            "Those in execution included; at pending_calls more are refused.",
            "timeseries",
            (PromQuery(f"sum(raycloak_service_waiting_calls{_HERE})", "waiting"),),
            height=6,
            phase="service",
        ),
        Panel(
            "Calls",
            "Answers by method and code.",
            "timeseries",
            (
                PromQuery(
                    f"sum by (method, code) (rate(raycloak_service_calls_total{_HERE}{RATE}))",
                    "{{method}} {{code}}",
                ),
            ),
            "reqps",
            12,
            phase="service",
        ),
        Panel(
            "Wait for an answer",
            "From a call's arrival at the orchestrator's queue, and the age of the one that waits longest now.",
            "timeseries",
            (
                quantile(0.5, "raycloak_service_wait_seconds", "", "median", _HERE),
                quantile(0.99, "raycloak_service_wait_seconds", "", "99 %", _HERE),
                PromQuery(
                    f"max(timestamp(raycloak_service_oldest_call_timestamp_seconds{_HERE}) - "
                    f"raycloak_service_oldest_call_timestamp_seconds{_HERE})",
                    "oldest",
                ),
            ),
            "s",
            12,
            steps=((0, "green"), (5, "red")),
            phase="service",
        ),
    ),
)
SERVICE_DASHBOARD = Dashboard(
    file="service.json",
    uid="raycloak-service",
    title="raycloak: evidence service",
    description="Calls, refusals and waits of the evidence service.",
    variables=(Variable("instance", "label_values(raycloak_service_up, instance)", many=True),),
    rows=(SERVICE_ROW,),
)
