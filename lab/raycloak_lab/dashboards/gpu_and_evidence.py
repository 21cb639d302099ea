"""The dashboard of what machines report and prove: GPUs, evidence and collateral."""

from raycloak_lab.dashboards.panels import (
    RUN,
    RUN_ANNOTATIONS,
    RUN_VARIABLES,
    Dashboard,
    Panel,
    PromQuery,
    Row,
    Variable,
)


def _gpu(metric: str) -> PromQuery:
    return PromQuery(f'max by (node, gpu) ({metric}{{node=~"$node"}})', "{{node}} {{gpu}}")


EVIDENCE_ROW = Row(
    "Evidence",
    (
        Panel(
            "Evidence still valid for",
            "The earliest expiry of each role. It is renewed at two thirds of its life.",
            "timeseries",
            (PromQuery(f"min by (role) (raycloak_evidence_expiry_timestamp_seconds{RUN}) - time()", "{{role}}"),),
            "s",
            steps=((-1e9, "red"), (0, "orange"), (600, "green")),
            limits=(None, None),
        ),
        Panel(
            "Collateral still valid for",
            "Until the first document of the vendor's collateral ends.",
            "stat",
            (PromQuery(f"min(raycloak_collateral_expiry_timestamp_seconds{RUN}) - time()", "collateral"),),
            "s",
            steps=((-1e9, "red"), (0, "orange"), (86400, "green")),
            limits=(None, None),
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
            text="name",
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
            phase="gpu",
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
            phase="gpu",
        ),
        Panel(
            "Memory of tensors",
            "The most that any worker's tensors took in its last answer.",
            "timeseries",
            (PromQuery(f"max(raycloak_worker_gpu_memory_peak_bytes{RUN})", "peak"),),
            "bytes",
            phase="gpu",
        ),
        Panel("Power", "Board power.", "timeseries", (_gpu("raycloak_gpu_power_watts"),), "watt", 6, phase="gpu"),
        Panel(
            "Temperature",
            "GPU die.",
            "timeseries",
            (_gpu("raycloak_gpu_temperature_celsius"),),
            "celsius",
            6,
            phase="gpu",
        ),
        Panel(
            "Held down for heat",
            "1 while the GPU holds its clocks down because it is too hot.",
            "timeseries",
            (_gpu("raycloak_gpu_thermal_slowdown"),),
            width=6,
            limits=(0, 1),
            phase="gpu",
        ),
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
            width=6,
            phase="gpu",
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
            width=24,
            mappings=((1, 1, "active", "blue"),),
            phase="gpu",
        ),
    ),
)
GPU_DASHBOARD = Dashboard(
    file="gpu-and-evidence.json",
    uid="raycloak-gpu",
    title="raycloak: GPUs and evidence",
    description="What the GPUs do and report, and how long evidence and collateral are valid.",
    variables=(*RUN_VARIABLES, Variable("node", "label_values(raycloak_gpu_memory_total_bytes, node)", many=True)),
    rows=(EVIDENCE_ROW, GPU_ROW),
    annotations=RUN_ANNOTATIONS,
)
