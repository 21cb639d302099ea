"""The dashboard of the training service."""

from raycloak_lab.dashboards.panels import RATE, Dashboard, Panel, PromQuery, Row, Variable, quantile

_HERE = '{instance=~"$instance"}'
_PHASES = "raycloak_training_service_operation_phase_duration_seconds"


def _phase(name: str) -> str:
    return f'{{instance=~"$instance",phase="{name}"}}'


_NOW = Row(
    "Now",
    (
        Panel(
            "Works",
            "NO: its store does not answer, and it takes no operation.",
            "stat",
            (PromQuery(f"min(raycloak_training_service_up{_HERE})", "works"),),
            width=4,
            height=6,
            mappings=((0, 0.5, "NO", "red"), (0.5, 1.5, "YES", "green")),
            phase="training service",
        ),
        Panel(
            "Oldest operation",
            "Age of the oldest operation that has not ended, of whichever client.",
            "stat",
            (
                PromQuery(
                    f"max(timestamp(raycloak_training_service_oldest_operation_timestamp_seconds{_HERE}) - "
                    f"raycloak_training_service_oldest_operation_timestamp_seconds{_HERE})",
                    "oldest",
                ),
            ),
            "s",
            4,
            6,
            steps=((0, "green"), (600, "orange"), (1800, "red")),
            phase="training service",
        ),
        Panel(
            "Queued operations",
            "Operations that wait for their turn, by kind.",
            "timeseries",
            (PromQuery(f"sum by (kind) (raycloak_training_service_queued_operations{_HERE})", "{{kind}}"),),
            height=6,
            phase="training service",
        ),
        Panel(
            "Clients",
            "By status, of all tenants together.",
            "timeseries",
            (PromQuery(f"sum by (status) (raycloak_training_service_clients{_HERE})", "{{status}}"),),
            height=6,
            phase="training service",
        ),
    ),
)
_OPERATIONS = Row(
    "Operations",
    (
        Panel(
            "Operations ended",
            "A second, by kind and outcome.",
            "timeseries",
            (
                PromQuery(
                    f"sum by (kind, outcome) (rate(raycloak_training_service_operations_total{_HERE}{RATE}))",
                    "{{kind}} {{outcome}}",
                ),
            ),
            "ops",
            12,
            phase="training service",
        ),
        Panel(
            "Time of an operation",
            "From its submission to its turn, and from there to its end.",
            "timeseries",
            (
                quantile(0.5, _PHASES, "", "queued, median", _phase("queued")),
                quantile(0.99, _PHASES, "", "queued, 99 %", _phase("queued")),
                quantile(0.5, _PHASES, "", "running, median", _phase("running")),
                quantile(0.99, _PHASES, "", "running, 99 %", _phase("running")),
            ),
            "s",
            12,
            phase="training service",
        ),
        Panel(
            "Processes and streams",
            "Drivers have a run each; samplers generate text; a stream tells a client of its changes.",
            "timeseries",
            (
                PromQuery(f"sum(raycloak_training_service_drivers{_HERE})", "drivers"),
                PromQuery(f"sum(raycloak_training_service_samplers{_HERE})", "samplers"),
                PromQuery(f"sum(raycloak_training_service_watch_streams{_HERE})", "streams"),
            ),
            width=12,
            phase="training service",
        ),
        Panel(
            "Refused calls",
            "A second, by the class of the error. Refusals of strangers are the service at work.",
            "timeseries",
            (
                PromQuery(
                    f"sum by (error) (rate(raycloak_training_service_refused_calls_total{_HERE}{RATE}))", "{{error}}"
                ),
            ),
            "reqps",
            12,
            phase="training service",
        ),
    ),
)
TRAINING_SERVICE_DASHBOARD = Dashboard(
    file="training-service.json",
    uid="raycloak-training-service",
    title="raycloak: training service",
    description="Clients, operations, waits and processes of a training service.",
    variables=(Variable("instance", "label_values(raycloak_training_service_up, instance)", many=True),),
    rows=(_NOW, _OPERATIONS),
)
