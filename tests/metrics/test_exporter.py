import threading
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from raycloak.metrics.errors import RefusedError
from raycloak.metrics.exporter import Exporter, Values, check_exportable
from raycloak.metrics.registry import BY_NAME, OTHER, SERIES, Series

UP = BY_NAME["raycloak_ledger_up"]
REFUSED = BY_NAME["raycloak_steps_refused_total"]
PHASE = BY_NAME["raycloak_step_phase_duration_seconds"]


class OneSource:
    def __init__(self, series, families=()):
        self.series = series
        self._families = families

    def collect(self):
        return self._families


def samples(values):
    return {(s.name, *sorted(s.labels.items())): s.value for metric in values.collect() for s in metric.samples}


def test_a_secret_metric_is_refused():
    secret = [s for s in SERIES if not s.privacy.exportable]
    assert secret
    for series in secret:
        exporter = Exporter()
        with pytest.raises(RefusedError) as caught:
            exporter.add(OneSource((UP, series), [GaugeMetricFamily(series.name, "x", value=1)]))
        assert caught.value.code == "metric_secret"
        assert generate_latest(exporter.registry) == b""


def test_an_undeclared_metric_is_refused():
    with pytest.raises(RefusedError) as caught:
        check_exportable(Series("raycloak_invented", "x."))
    assert caught.value.code == "metric_undeclared"


def test_a_series_that_only_borrows_a_declared_name_is_refused():
    with pytest.raises(RefusedError) as caught:
        check_exportable(replace(UP, labels=REFUSED.labels))
    assert caught.value.code == "metric_undeclared"


def test_no_process_declares_anew_what_the_registry_reserves():
    own = Series("raycloak_of_another_process", "x.")
    check_exportable(own, [own])
    (loss,) = (each for each in SERIES if each.name == "raycloak_training_loss")
    public = replace(loss, privacy=UP.privacy)
    with pytest.raises(RefusedError, match="metric_undeclared"):
        check_exportable(public, [public])


def test_a_source_that_emits_more_than_it_declared_fails_the_scrape():
    exporter = Exporter()
    exporter.add(OneSource((UP,), [GaugeMetricFamily("raycloak_training_loss", "x", value=1)]))
    with pytest.raises(RefusedError) as caught:
        generate_latest(exporter.registry)
    assert caught.value.code == "metric_undeclared"


def test_two_sources_cannot_emit_one_series():
    exporter = Exporter()
    exporter.add(OneSource((UP,)))
    with pytest.raises(AssertionError):
        exporter.add(OneSource((UP,)))


def test_the_registry_knows_every_exportable_name_without_a_scrape():
    described = {metric.name for metric in Exporter().describe()}
    assert described == {s.name.removesuffix("_total") for s in SERIES if s.privacy.exportable}


def test_counters_gauges_and_histograms_read_back_from_the_text_format():
    values = Values((UP, REFUSED, PHASE))
    values.set(UP.name, 1)
    values.increment(REFUSED.name, "r", "cap_exceeded")
    values.increment(REFUSED.name, "r", "cap_exceeded", by=2)
    for seconds in (0.0005, 0.001, 0.3, 1000.0):
        values.observe(PHASE.name, seconds, "r", "reduce")
    exporter = Exporter()
    exporter.add(OneSource((UP, REFUSED, PHASE), values.collect()))
    page = generate_latest(exporter.registry).decode()
    read = {
        (s.name, s.labels.get("le")): s.value for family in text_string_to_metric_families(page) for s in family.samples
    }
    assert read["raycloak_ledger_up", None] == 1
    assert read["raycloak_steps_refused_total", None] == 3
    assert read["raycloak_step_phase_duration_seconds_bucket", "0.001"] == 2
    assert read["raycloak_step_phase_duration_seconds_bucket", "0.5"] == 3
    assert read["raycloak_step_phase_duration_seconds_bucket", "300.0"] == 3
    assert read["raycloak_step_phase_duration_seconds_bucket", "+Inf"] == 4
    assert read["raycloak_step_phase_duration_seconds_count", None] == 4
    assert read["raycloak_step_phase_duration_seconds_sum", None] == pytest.approx(1000.3015)
    assert not [name for name, _ in read if name.endswith("_created")]


def test_an_open_label_is_bounded():
    values = Values((REFUSED,))
    at_most = REFUSED.labels[1].at_most
    for i in range(at_most + 10):
        values.increment(REFUSED.name, "r", f"code_{i}")
    values.increment(REFUSED.name, "r", "code_0")
    seen = samples(values)
    assert len(seen) == at_most + 1
    assert seen["raycloak_steps_refused_total", ("code", OTHER), ("run", "r")] == 10
    assert seen["raycloak_steps_refused_total", ("code", "code_0"), ("run", "r")] == 2


def test_free_text_is_counted_as_other():
    values = Values((REFUSED,))
    values.increment(REFUSED.name, "r", "RuntimeError: pixel 7 is 0.3")
    assert list(samples(values)) == [("raycloak_steps_refused_total", ("code", OTHER), ("run", "r"))]


def test_a_counter_never_falls():
    with pytest.raises(AssertionError):
        Values((REFUSED,)).increment(REFUSED.name, "r", "x", by=-1)


def test_counts_from_several_threads_are_all_kept():
    values = Values((REFUSED,))
    threads = [
        threading.Thread(target=lambda: [values.increment(REFUSED.name, "r", "x") for _ in range(500)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(samples(values).values()) == [4000]
