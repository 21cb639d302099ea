"""The gate between the knowledge of a process and its `/metrics` page.

    RunMetrics ─┐
    LedgerCollector ─┼─ Exporter (declared? not secret?) ── CollectorRegistry ── MetricsServer
    GpuReadingCollector ─┘

Everything goes through one :class:`Exporter`, so a series that is secret or undeclared cannot reach the page.
"""

import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from raycloak.metrics.errors import RefusedError
from raycloak.metrics.registry import BY_NAME, OTHER, SERIES, Kind, Label, Series

LabelValues = tuple[str, ...]
_Bucket = tuple[str, float] | tuple[str, float, Exemplar]
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_FAMILIES: Mapping[Kind, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class MetricSource(Protocol):
    """A source of metrics that can be scraped."""

    @property
    def series(self) -> tuple[Series, ...]:
        """All series that :meth:`collect` may emit."""

    def collect(self) -> Iterable[Metric]:
        """Return families with their current samples; called on a thread of the HTTP server."""


def check_exportable(series: Series, declared: Collection[Series] = SERIES) -> None:
    """Raise unless ``series`` is declared and not secret.

    Raises:
        RefusedError: ``metric_undeclared`` or ``metric_secret``.
    """
    if not series.privacy.exportable:
        raise RefusedError("metric_secret", f"{series.name} depends on private examples and is never exported")
    # What the registry reserves stays what it says, whoever declares it otherwise.
    if series not in declared or BY_NAME.get(series.name, series) != series:
        raise RefusedError("metric_undeclared", f"{series.name} is not declared")


def family(series: Series) -> Metric:
    """Return an empty Prometheus family of ``series``."""
    return _FAMILIES[series.kind](series.name, series.help, labels=series.label_names)


class Exporter(Collector):
    """Gathers sources behind its own registry; the process-wide default registry is not used.

    Guarantee: no sample of a secret or undeclared series is ever in :attr:`registry`'s output.

    Args:
        declared: all series that its process may export.
    """

    def __init__(self, declared: Collection[Series] = SERIES) -> None:
        self._declared = declared
        self._sources: list[MetricSource] = []
        # The default registry of the library takes series from any code of the process.
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def add(self, source: MetricSource) -> None:
        """Export ``source`` from now on.

        Raises:
            RefusedError: ``metric_secret`` or ``metric_undeclared``; then nothing from the source is exported.
        """
        for series in source.series:
            check_exportable(series, self._declared)
        taken = {series.name for other in self._sources for series in other.series}
        assert taken.isdisjoint(series.name for series in source.series), "two sources emit one series"
        self._sources.append(source)

    def describe(self) -> Iterable[Metric]:
        """Return empty families of everything that may be exported."""
        return [family(series) for series in self._declared if series.privacy.exportable]

    def collect(self) -> Iterable[Metric]:
        """Yield the families of all sources.

        Raises:
            RefusedError: ``metric_undeclared`` if a source emits an undeclared family; the scrape then fails.
        """
        for source in self._sources:
            # By the family's own name: a counter's lacks the suffix of its samples.
            declared = {family(series).name for series in source.series}
            for metric in source.collect():
                # A second check, at run time: a source may emit other families than its series say.
                if metric.name not in declared:
                    raise RefusedError("metric_undeclared", f"a source emits {metric.name}, which it did not declare")
                yield metric


class Values:
    """The current values of some series; several threads may use them.

    They live in memory only: the library's own counters write files when its multi-process mode is switched on.
    """

    def __init__(self, series: Iterable[Series]) -> None:
        self._series = {s.name: s for s in series}
        self._numbers: dict[str, dict[LabelValues, float]] = {name: {} for name in self._series}
        self._buckets: dict[str, dict[LabelValues, list[int]]] = {name: {} for name in self._series}
        self._exemplars: dict[tuple[str, LabelValues, int], Exemplar] = {}
        self._lock = threading.Lock()

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, or a counter whose total is kept elsewhere."""
        # Scrapes come on threads of the HTTP server.
        with self._lock:
            self._numbers[name][self._key(name, labels)] = float(value)

    def increment(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add ``by`` >= 0 to a counter."""
        assert by >= 0, "a counter never falls"
        with self._lock:
            key = self._key(name, labels)
            self._numbers[name][key] = self._numbers[name].get(key, 0.0) + by

    def start_at_zero(self, name: str, *labels: str) -> None:
        """Give a counter or a histogram a line of zeros: to Prometheus, a first value is no increase."""
        with self._lock:
            key = self._key(name, labels)
            self._numbers[name].setdefault(key, 0.0)
            if self._series[name].buckets:
                self._buckets[name].setdefault(key, [0] * (len(self._series[name].buckets) + 1))

    def set_histogram(self, name: str, counts: Sequence[int], total: float, *labels: str) -> None:
        """Set a histogram that is kept elsewhere, by the counts of its buckets, +Inf last, and its sum."""
        assert len(counts) == len(self._series[name].buckets) + 1, "one count per bucket"
        with self._lock:
            key = self._key(name, labels)
            self._buckets[name][key], self._numbers[name][key] = list(counts), float(total)

    def observe(self, name: str, value: float, *labels: str, trace_id: str = "") -> None:
        """Put one observation into a histogram.

        Args:
            trace_id: of the trace it was made in, 32 hexadecimal digits: each bucket shows the newest as its exemplar
                to readers of OpenMetrics. Empty for none.
        """
        assert not trace_id or _TRACE_ID.fullmatch(trace_id), "an exemplar names a trace and nothing else"
        bounds = self._series[name].buckets
        with self._lock:
            key = self._key(name, labels)
            counts = self._buckets[name].setdefault(key, [0] * (len(bounds) + 1))
            bucket = bisect_left(bounds, value)
            counts[bucket] += 1
            if trace_id:
                self._exemplars[name, key, bucket] = Exemplar({"trace_id": trace_id}, value, time.time())
            self._numbers[name][key] = self._numbers[name].get(key, 0.0) + value

    def collect(self) -> list[Metric]:
        """Return a family for each series that has a value."""
        with self._lock:
            return [self._family(series) for name, series in self._series.items() if self._numbers[name]]

    def _family(self, series: Series) -> Metric:
        metric = family(series)
        for labels, number in self._numbers[series.name].items():
            if isinstance(metric, HistogramMetricFamily):
                counts = self._buckets[series.name][labels]
                traced = [self._exemplars.get((series.name, labels, place)) for place in range(len(counts))]
                totals = zip((*map(str, series.buckets), "+Inf"), map(float, accumulate(counts)), traced, strict=True)
                buckets: list[_Bucket] = [
                    (bound, n) if shown is None else (bound, n, shown) for bound, n, shown in totals
                ]
                metric.add_metric(labels, buckets, number)
            else:
                assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
                metric.add_metric(labels, number)
        return metric

    def _key(self, name: str, values: tuple[str, ...]) -> LabelValues:
        labels = self._series[name].labels
        assert len(values) == len(labels), f"{name} takes labels {[label.name for label in labels]}"
        folded = tuple(label.fold(value) for label, value in zip(labels, values, strict=True))
        known = self._numbers[name]
        return tuple(_bounded(label, i, folded[i], known) for i, label in enumerate(labels))


def _bounded(label: Label, position: int, value: str, known: Mapping[LabelValues, float]) -> str:
    if label.values:
        return value
    # A bound on memory and on the page: more values than expected are counted together, not dropped.
    seen = {key[position] for key in known} - {OTHER}
    return value if value in seen or len(seen) < label.at_most else OTHER
