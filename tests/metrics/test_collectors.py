import math
from dataclasses import replace
from itertools import pairwise

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from raycloak.metrics.collectors import (
    AccountFigures,
    GpuReadingCollector,
    LedgerCollector,
    LedgerFigures,
    RunFacts,
    RunMetrics,
    ServiceCollector,
    ServiceFigures,
    ServiceMetrics,
    ServiceSnapshot,
    WitnessFigures,
    spent_ratio,
)
from raycloak.metrics.exporter import Exporter
from raycloak.metrics.gpu_readings import GpuReading
from raycloak.metrics.registry import (
    ACCOUNT,
    BUDGET_CODES,
    BY_NAME,
    REFUSALS,
    RUN_SERIES,
    SERVICE_SERIES,
    TRAINING_SERVICE_SERIES,
    WORKER_PHASES,
)
from raycloak.metrics.service_errors import KINDS
from tests.metrics.samples import sample_names

FACTS = RunFacts(
    run="0123456789abcdef",
    account="digits",
    evidence_class="simulated",
    steps_planned=200,
    virtual_workers=8,
    workers_required=2,
    workers_planned=3,
    prepaid=False,
    parameters=1210,
    noise_multiplier=1.25,
    refusals=("debug", "revoked"),
    exact=True,
    version="0.1.0",
    ray_version="2.60.0",
    torch_version="2.13.0",
)

SNAPSHOT = ServiceSnapshot({"READY": 3, "BUSY": 1}, 2, 1, 4, {"optim_step": 7}, 1000.0)


def scrape(source):
    exporter = Exporter()
    exporter.add(source)
    page = generate_latest(exporter.registry).decode()
    return {
        (s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(page) for s in f.samples
    }


def names(read):
    return {key[0] for key in read}


def account(name="digits", spent=0.25, steps=50):
    return AccountFigures(name, 8.0, 1e-5, epsilon_spent=3.5, budget_spent_ratio=spent, steps_charged=steps)


def test_a_run_exports_its_facts_before_the_first_step():
    read = scrape(RunMetrics(FACTS, clock=lambda: 1000.0))
    run = ("run", FACTS.run)
    assert read["raycloak_run_info", ("account", "digits"), ("evidence_class", "simulated"), run] == 1
    assert claims(read) == {"privacy": "private", "exactness": "exact", "run": FACTS.run}
    assert read["raycloak_steps_planned", run] == 200
    assert read["raycloak_workers_planned", run] == 3
    assert read["raycloak_run_prepaid", run] == 0
    assert read["raycloak_run_start_timestamp_seconds", run] == 1000
    assert read["raycloak_noise_multiplier_ratio", run] == 1.25
    assert read["raycloak_steps_committed_total", run] == 0
    assert read["raycloak_masked_bytes_total", run] == 0
    assert {dict(key[1:])["torch"] for key in read if key[0] == "raycloak_build_info"} == {"2.13.0"}


def claims(read):
    (labels,) = (dict(key[1:]) for key in read if key[0] == "raycloak_run_claims_info")
    return labels


def test_a_run_that_is_not_private_says_so_and_has_no_noise_multiplier():
    read = scrape(RunMetrics(replace(FACTS, noise_multiplier=None)))
    assert claims(read)["privacy"] == "NOT_PRIVATE"
    assert "raycloak_noise_multiplier_ratio" not in names(read)


def test_a_run_that_is_not_exact_says_so():
    assert claims(scrape(RunMetrics(replace(FACTS, exact=False))))["exactness"] == "NOT_EXACT"


def test_every_run_series_is_reachable_through_a_method():
    metrics = RunMetrics(FACTS, clock=lambda: 7.0)
    metrics.attempt_started()
    metrics.phase_finished("compute", 0.2)
    metrics.worker_stepped({"copy": 0.25, "model": 0.5})
    metrics.worker_stepped({"copy": 0.5})
    metrics.gpu_memory_taken(2**30)
    metrics.aggregate_released()
    metrics.step_committed(0.4)
    metrics.step_refused("cap_exceeded")
    metrics.workers_admitted(3)
    metrics.worker_refused("nonce_replayed")
    metrics.worker_failed("out_of_memory")
    metrics.worker_joined()
    metrics.worker_left("preempted")
    metrics.virtual_workers_moved(2)
    metrics.masked_bytes_received(4840)
    metrics.accuracy_measured(0.93)
    metrics.loss_measured(0.25)
    metrics.evidence_accepted("worker", "simulated", 5000.0)
    metrics.checkpoint_written()
    metrics.collateral_taken(9000.0)
    metrics.attempt_failed()
    metrics.steps_finished(101)
    read = scrape(metrics)
    run = ("run", FACTS.run)
    assert names(read) == {name for series in RUN_SERIES for name in sample_names(series)}
    assert read["raycloak_steps_committed_total", run] == 1
    seconds = [read["raycloak_worker_phase_duration_seconds_sum", ("phase", each), run] for each in WORKER_PHASES]
    assert seconds == [0.75, 0.5, 0, 0, 0, 0]
    assert read["raycloak_worker_gpu_memory_peak_bytes", run] == 2**30
    assert read["raycloak_step_attempts_total", run] == 1
    assert read["raycloak_steps_refused_total", ("code", "cap_exceeded"), run] == 1
    assert read["raycloak_workers_admitted", run] == 3
    assert read["raycloak_workers_refused_total", ("code", "nonce_replayed"), run] == 1
    assert read["raycloak_worker_failures_total", ("cause", "out_of_memory"), run] == 1
    assert read["raycloak_virtual_workers_moved_total", run] == 2
    assert read["raycloak_masked_bytes_total", run] == 4840
    assert read["raycloak_evaluation_accuracy_ratio", run] == 0.93
    assert read["raycloak_evaluation_loss", run] == 0.25
    assert read["raycloak_evidence_expiry_timestamp_seconds", ("role", "worker"), run] == 5000
    assert read["raycloak_evidence_class_info", ("evidence_class", "simulated"), ("role", "worker"), run] == 1
    assert read["raycloak_last_commit_timestamp_seconds", run] == 7
    assert read["raycloak_last_checkpoint_timestamp_seconds", run] == 7
    assert read["raycloak_step_phase_duration_seconds_count", ("phase", "compute"), run] == 1
    assert read["raycloak_step_duration_seconds_sum", run] == 0.4
    assert read["raycloak_collateral_expiry_timestamp_seconds", run] == 9000
    assert read["raycloak_step_attempts_failed_total", run] == 1
    assert read["raycloak_steps_finished", run] == 101


def test_every_counter_and_histogram_of_a_run_has_a_zero_line_before_anything_happens():
    read = scrape(RunMetrics(FACTS))
    counted = {name for series in RUN_SERIES if series.kind != "gauge" for name in sample_names(series)}
    assert counted <= names(read)
    assert not any(value for (name, *_), value in read.items() if name in counted)
    for code in (*BUDGET_CODES, *FACTS.refusals):
        series = "raycloak_steps_refused_total" if code in BUDGET_CODES else "raycloak_workers_refused_total"
        assert (series, ("code", code), ("run", FACTS.run)) in read


def states(read):
    return {dict(key[1:])["state"] for key, value in read.items() if key[0] == "raycloak_run_state" and value}


@pytest.mark.parametrize(
    ("ending", "state"),
    [("complete", "complete"), ("cap_exceeded", "cap_exceeded"), ("stopped", "stopped"), ("state_lost", "failed")],
)
def test_a_run_that_has_ended_says_how(ending, state):
    metrics = RunMetrics(FACTS)
    assert states(scrape(metrics)) == {"training"}
    metrics.ended(ending)
    assert states(scrape(metrics)) == {state}


def test_collateral_that_does_not_say_when_it_ends_has_no_end():
    metrics = RunMetrics(FACTS)
    metrics.collateral_taken(0)
    assert "raycloak_collateral_expiry_timestamp_seconds" not in names(scrape(metrics))


def test_privacy_series_are_read_at_every_scrape():
    spent = iter((0.25, 0.5))
    collector = LedgerCollector(lambda: LedgerFigures((account(spent=next(spent)),), entries=51, fencing=3))
    exporter = Exporter()
    exporter.add(collector)
    first, second = (generate_latest(exporter.registry).decode() for _ in range(2))
    assert 'raycloak_privacy_budget_spent_ratio{account="digits"} 0.25' in first
    assert 'raycloak_privacy_budget_spent_ratio{account="digits"} 0.5' in second


def test_an_answering_ledger_shows_all_its_series():
    read = scrape(LedgerCollector(lambda: LedgerFigures((account(),), entries=51, fencing=3)))
    label = ("account", "digits")
    assert read == {
        ("raycloak_ledger_up",): 1,
        ("raycloak_ledger_entries",): 51,
        ("raycloak_ledger_fencing",): 3,
        ("raycloak_ledger_accounts",): 1,
        ("raycloak_privacy_epsilon_spent", label): 3.5,
        ("raycloak_privacy_epsilon_cap", label): 8,
        ("raycloak_privacy_delta", label): 1e-5,
        ("raycloak_privacy_budget_spent_ratio", label): 0.25,
        ("raycloak_privacy_steps_charged_total", label): 50,
    }


def test_a_witness_shows_whether_it_answers_and_how_far_it_has_come():
    read = scrape(LedgerCollector(lambda: LedgerFigures((), 51, 3, WitnessFigures(answers=False, entries=49))))
    assert read["raycloak_ledger_witness_up",] == 0
    assert read["raycloak_ledger_witness_entries",] == 49


def test_an_absent_ledger_shows_no_privacy_series():
    answers = iter((LedgerFigures((account(),), 51, 3), None))

    def view():
        answer = next(answers)
        if answer is None:
            raise ConnectionError("gone")
        return answer

    collector = LedgerCollector(view)
    assert len(scrape(collector)) > 1
    assert scrape(collector) == {("raycloak_ledger_up",): 0}


def test_of_many_accounts_the_ones_that_spent_most_are_named():
    accounts = tuple(account(f"a{i}", spent=i / 1000) for i in range(ACCOUNT.at_most + 20))
    read = scrape(LedgerCollector(lambda: LedgerFigures(accounts, 0, 1)))
    shown = {dict(key[1:])["account"] for key in read if key[0] == "raycloak_privacy_epsilon_spent"}
    assert shown == {f"a{i}" for i in range(20, ACCOUNT.at_most + 20)}
    assert read["raycloak_ledger_accounts",] == ACCOUNT.at_most + 20


def test_of_accounts_whose_names_are_no_labels_the_one_that_spent_most_is_shown():
    """An alert on the budget must not read another account's figures than those of the one that is nearly spent."""
    accounts = tuple(account(name, spent=spent) for name, spent in (("ward a", 0.1), ("ward b", 0.9), ("ward c", 0.5)))
    read = scrape(LedgerCollector(lambda: LedgerFigures(accounts, 0, 1)))
    assert read["raycloak_privacy_budget_spent_ratio", ("account", "other")] == 0.9


def test_the_spent_ratio_grows_by_the_same_amount_each_step_and_reaches_one_at_the_cap():
    step, caps = (0.01, 0.03, 0.09), (-1.0, 0.6, 1.2)
    ratios = [spent_ratio([n * s for s in step], caps) for n in range(21)]
    assert ratios[0] == 0
    assert ratios[20] == pytest.approx(1.0)
    assert all(after - before == pytest.approx(0.05) for before, after in pairwise(ratios))


def test_the_spent_ratio_of_an_account_that_admits_nothing():
    assert spent_ratio([0.0, 0.0], [-1.0, 0.0]) == 0
    assert spent_ratio([0.1, 0.1], [-1.0, 0.0]) == math.inf


def test_gpu_readings_become_series_and_what_is_unsupported_is_left_out():
    readings = (
        GpuReading("n0", 0, 0.5, 10, 80, 300.5, 41.0, 2, 0, "on", thermal_slowdown=True),
        GpuReading("n1", 0, memory_total_bytes=80),
    )
    read = scrape(GpuReadingCollector(lambda: readings))
    n0 = (("gpu", "0"), ("node", "n0"))
    assert read["raycloak_gpu_utilization_ratio", *n0] == 0.5
    assert read["raycloak_gpu_memory_used_bytes", *n0] == 10
    assert read["raycloak_gpu_power_watts", *n0] == 300.5
    assert read["raycloak_gpu_temperature_celsius", *n0] == 41
    assert read["raycloak_gpu_thermal_slowdown", *n0] == 1
    assert read["raycloak_gpu_ecc_errors_total", ("gpu", "0"), ("kind", "corrected"), ("node", "n0")] == 2
    states = {dict(k[1:])["state"]: v for k, v in read.items() if k[0] == "raycloak_gpu_confidential_compute_state"}
    assert states == {"off": 0, "on": 1, "ppcie": 0, "devtools": 0, "simulated": 0}
    assert {k for k in read if ("node", "n1") in k} == {
        ("raycloak_gpu_memory_total_bytes", ("gpu", "0"), ("node", "n1"))
    }


@pytest.mark.parametrize("read", [tuple, pytest.param(lambda: 1 / 0, id="lost")])
def test_no_gpu_or_no_sampler_exports_no_gpu_series(read):
    assert scrape(GpuReadingCollector(read)) == {}


def test_a_service_shows_its_calls_and_their_waits():
    waits = (0,) * 5 + (3,) + (0,) * 11 + (1,)
    figures = ServiceFigures(True, (("Attest", "ok", 3), ("Log", "rate_limited", 1)), waits, 301.5, 2, 1000.0, 9000.0)
    read = scrape(ServiceCollector(lambda: figures))
    assert names(read) == {name for series in SERVICE_SERIES for name in sample_names(series)}
    assert read["raycloak_service_up",] == 1
    assert read["raycloak_service_calls_total", ("code", "ok"), ("method", "Attest")] == 3
    assert read["raycloak_service_calls_total", ("code", "rate_limited"), ("method", "Log")] == 1
    assert read["raycloak_service_calls_total", ("code", "ok"), ("method", "Roster")] == 0
    assert read["raycloak_service_wait_seconds_bucket", ("le", "0.05")] == 3
    assert read["raycloak_service_wait_seconds_bucket", ("le", "300.0")] == 3
    assert read["raycloak_service_wait_seconds_count",] == 4
    assert read["raycloak_service_wait_seconds_sum",] == 301.5
    assert read["raycloak_service_waiting_calls",] == 2
    assert read["raycloak_service_oldest_call_timestamp_seconds",] == 1000
    assert read["raycloak_service_collateral_expiry_timestamp_seconds",] == 9000


@pytest.mark.parametrize("read", [lambda: None, pytest.param(lambda: 1 / 0, id="lost")])
def test_no_service_exports_no_service_series(read):
    assert scrape(ServiceCollector(read)) == {}


def test_all_sources_of_a_run_share_one_page():
    exporter = Exporter()
    exporter.add(RunMetrics(FACTS))
    exporter.add(LedgerCollector(lambda: LedgerFigures((account(),), 51, 3)))
    exporter.add(GpuReadingCollector(tuple))
    page = generate_latest(exporter.registry).decode()
    assert {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")} <= set(BY_NAME)


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
