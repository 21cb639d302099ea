"""The series of a training service: its store's figures at a scrape, and counts that name no tenant."""

import pytest

from raycloak.metrics.registry import REFUSALS, TRAINING_SERVICE_SERIES
from raycloak.metrics.service_errors import KINDS
from raycloak.metrics.training_service import ServiceMetrics, ServiceSnapshot
from tests.metrics.samples import sample_names
from tests.metrics.test_collectors import names, scrape

SNAPSHOT = ServiceSnapshot({"READY": 3, "BUSY": 1}, 2, 1, 4, {"optim_step": 7}, 1000.0)


def test_every_series_is_there_from_the_first_scrape_on():
    read = scrape(ServiceMetrics(lambda: SNAPSHOT))
    assert names(read) == {name for series in TRAINING_SERVICE_SERIES for name in sample_names(series)}
    assert read["raycloak_training_service_up",] == 1
    assert read["raycloak_training_service_clients", ("status", "READY")] == 3
    assert read["raycloak_training_service_clients", ("status", "ERROR")] == 0
    assert read["raycloak_training_service_drivers",] == 2
    assert read["raycloak_training_service_samplers",] == 1
    assert read["raycloak_training_service_watch_streams",] == 4
    assert read["raycloak_training_service_queued_operations", ("kind", "optim_step")] == 7
    assert read["raycloak_training_service_queued_operations", ("kind", "sample")] == 0
    assert read["raycloak_training_service_oldest_operation_timestamp_seconds",] == 1000
    assert read["raycloak_training_service_operations_total", ("kind", "sample"), ("outcome", "done")] == 0
    assert read["raycloak_training_service_refused_calls_total", ("error", "rate_limited")] == 0


def test_operations_are_counted_with_the_time_of_each_phase():
    metrics = ServiceMetrics(lambda: SNAPSHOT)
    metrics.operation_ended("optim_step", "done", 2.0, 0.04)
    metrics.operation_ended("optim_step", "cancelled", 4.0, None)
    metrics.operation_ended("optim_step", "failed", -1.0, 0.2)
    metrics.call_refused("rate_limited")
    read = scrape(metrics)
    phases = "raycloak_training_service_operation_phase_duration_seconds"
    kind = ("kind", "optim_step")
    for outcome in ("done", "cancelled", "failed"):
        assert read["raycloak_training_service_operations_total", kind, ("outcome", outcome)] == 1
    assert read[f"{phases}_count", kind, ("phase", "queued")] == 3
    assert read[f"{phases}_sum", kind, ("phase", "queued")] == 6
    assert read[f"{phases}_count", kind, ("phase", "running")] == 2
    assert read[f"{phases}_bucket", kind, ("le", "0.05"), ("phase", "running")] == 1
    assert read["raycloak_training_service_refused_calls_total", ("error", "rate_limited")] == 1


def test_guarantee_a_silent_store_shows_no_figure_of_an_earlier_scrape():
    answers = iter([SNAPSHOT])
    metrics = ServiceMetrics(lambda: next(answers))
    assert scrape(metrics)["raycloak_training_service_drivers",] == 2
    metrics.operation_ended("sample", "done", 0.0, 1.0)
    read = scrape(metrics)
    assert read["raycloak_training_service_up",] == 0
    assert "raycloak_training_service_drivers" not in names(read)
    assert read["raycloak_training_service_operations_total", ("kind", "sample"), ("outcome", "done")] == 1


def test_a_refusal_has_a_kind_of_the_tree_of_errors():
    assert set(REFUSALS) < set(KINDS)


@pytest.mark.parametrize("series", TRAINING_SERVICE_SERIES, ids=lambda each: each.name)
def test_no_label_can_name_a_tenant_a_client_or_a_run(series):
    assert all(label.values for label in series.labels), "each is one of a closed set"
