"""The parts of a dashboard, and the PromQL that several of them share."""

from dataclasses import dataclass
from typing import Literal

# Grafana sets it to at least four scrapes, so that no rate is taken over a single sample.
RATE = "[$__rate_interval]"
RUN = '{run="$run"}'
ACCOUNT = '{account="$account"}'

Phase = Literal["running", "ended", "loss", "gpu", "service", "training service", "ray"]
"""The condition under which a panel's queries have data. It may be a run that trains, has ended, or evaluates a loss
and no accuracy. It may also be the presence of GPUs, an evidence service, a training service, or Ray's own pages."""


@dataclass(frozen=True)
class PromQuery:
    """One PromQL expression and the legend of its series; ``exemplar``: whether the traces behind it are drawn too."""

    expr: str
    legend: str
    exemplar: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel of a dashboard.

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
        phase: when its queries have data; a test holds a real Prometheus to it.
        link: (title, URL) that a click on a value leads to.
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
    phase: Phase = "running"
    link: tuple[str, str] | None = None


@dataclass(frozen=True)
class Row:
    """A titled band of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Annotation:
    """A mark in every panel over time.

    Args:
        at_value: whether the query's value is the time of the mark, in milliseconds.
    """

    name: str
    expr: str
    color: str
    at_value: bool = False


@dataclass(frozen=True)
class Variable:
    """A choice at the top of a dashboard, by the values of a label; ``many`` lets the reader choose several."""

    name: str
    query: str
    many: bool = False


@dataclass(frozen=True)
class Dashboard:
    """A dashboard, which is written to ``file``; ``uid`` is its address in Grafana."""

    file: str
    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()


RUN_VARIABLES = (
    Variable("run", "label_values(raycloak_run_info, run)"),
    Variable("account", 'label_values(raycloak_run_info{run="$run"}, account)'),
)
RUN_ANNOTATIONS = (
    Annotation(
        "Departures",
        f"sum(increase(raycloak_worker_failures_total{RUN}[1m])) + sum(increase(raycloak_workers_left_total{RUN}[1m]))"
        " > 0",
        "red",
    ),
    Annotation("Checkpoints", f"max(raycloak_last_checkpoint_timestamp_seconds{RUN}) * 1000", "blue", at_value=True),
)


def by_label(metric: str, label: str) -> PromQuery:
    """Return the increase of a counter of the run, for the five values of ``label`` that grew most."""
    return PromQuery(f"topk(5, sum by ({label}) (increase({metric}{RUN}{RATE})))", "{{" + label + "}}")


def quantile(q: float, metric: str, label: str, legend: str, selector: str = RUN) -> PromQuery:
    """Return a quantile of a histogram; a series without an observation in the window has no value."""
    by = f"le, {label}" if label else "le"
    expr = f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{selector}{RATE}))) >= 0"
    return PromQuery(expr, legend, exemplar=True)


def age(metric: str, legend: str) -> PromQuery:
    """Return the time since a time of the run."""
    return PromQuery(f"time() - max({metric}{RUN})", legend)
