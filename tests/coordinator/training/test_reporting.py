"""The run's series and what they are told of: the states of a run, and the codes that have zero lines."""

from pathlib import Path

import pytest

from raycloak.attestation.core.evidence import Refusal
from raycloak.coordinator.membership.members import ASKED
from raycloak.coordinator.record.outcome import Ending
from raycloak.metrics.errors import RunFailedError
from raycloak.metrics.registry import (
    BUDGET_CODES,
    FAILED,
    LEAVE_CAUSES,
    LOSS_CAUSES,
    RUN_STATES,
    TRAINING,
)
from tests.metrics.test_collectors import scrape
from tests.protocol import on, trained, whole_run

ROOT = Path(__file__).resolve().parents[3]


def test_the_states_of_a_run_are_the_endings_of_its_verdict():
    assert set(RUN_STATES) - {TRAINING, FAILED} == {ending.value for ending in Ending}


def test_every_refusal_of_evidence_and_every_reason_to_leave_has_a_zero_line(tmp_path):
    (metrics,) = trained(tmp_path).metrics
    refused = [key for key in scrape(metrics) if key[0] == "raycloak_workers_refused_total"]
    assert {dict(labels)["code"] for _, *labels in refused} == set(Refusal)
    assert set(LEAVE_CAUSES) == set(ASKED)


def test_every_zero_line_is_of_a_code_that_is_in_use():
    own = "\n".join(path.read_text() for folder in ("coordinator", "workers") for path in (ROOT / folder).rglob("*.py"))
    assert [code for code in (*BUDGET_CODES, *LOSS_CAUSES, *LEAVE_CAUSES) if f'"{code}"' not in own] == []


def test_a_finished_run_says_so_and_how_far_it_came(tmp_path):
    run = trained(tmp_path, disturb=on("step", "worker-1", "dies", 1))
    assert run.metric("raycloak_run_state", state="complete") == 1
    assert run.metric("raycloak_run_state", state="training") == 0
    assert run.metric("raycloak_steps_finished") == run.finished.steps == 3
    assert run.metric("raycloak_step_attempts_failed_total") == 1
    assert run.metric("raycloak_step_attempts_total") == 4
    assert run.metric("raycloak_worker_failures_total", cause="died") == 1
    assert run.metric("raycloak_collateral_expiry_timestamp_seconds") > 0


def test_a_failed_run_says_so(tmp_path):
    run = whole_run(tmp_path, disturb=lambda call: "dies" if call.method == "step" else None)
    with pytest.raises(RunFailedError):
        run.train()
    assert run.metric("raycloak_run_state", state="failed") == 1
