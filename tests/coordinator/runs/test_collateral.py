"""A run whose collateral ends in the middle: it continues with newer collateral, or with nobody."""

from dataclasses import replace

import pytest

from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_LIFETIME_S
from raycloak.coordinator.evidence.sources import collateral_of
from raycloak.metrics.errors import EvidenceError, RefusedError
from tests.protocol import Clock, on, whole_run


def aging_run(tmp_path, newer, disturb=None):
    """Time passes beyond the end of the first collateral once the first step is finished."""
    clock = Clock()
    run = whole_run(tmp_path, clock=clock, disturb=disturb)
    vendor_collateral = newer(clock)
    run.change(collateral_now=vendor_collateral)
    told = run.coordinator.order.reporting.progress

    def progress(report):
        told(report)
        if report.step == 1:
            clock.sleep(COLLATERAL_LIFETIME_S + 60)

    order = run.coordinator.order
    run.coordinator.order = replace(order, reporting=replace(order.reporting, progress=progress))
    return run


def vendors(tmp_path):
    """Return what the vendor publishes at the time it is asked."""
    from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor

    def newer(clock):
        vendor = SimulatedVendor.load_or_create(tmp_path / "simulator")
        return lambda: vendor.collateral(int(clock()))

    return newer


@pytest.mark.parametrize("lost", [False, True], ids=["undisturbed", "orchestrator lost"])
def test_newer_collateral_keeps_a_run_going_with_the_same_bytes(lost, undisturbed, tmp_path):
    """Orchestrator and workers judge by it, and so does an orchestrator that starts again."""
    dies = on("open_step", "orchestrator", "dies", 2) if lost else None
    run = aging_run(tmp_path, vendors(tmp_path), dies)
    run.train()
    assert run.digests == undisturbed
    assert run.left == []
    assert run.restarts == [("orchestrator", "died")] * lost
    (taken,) = run.stage.calls("take_collateral")
    admissions = [call.arguments[1].collateral for call in run.stage.calls("present") if len(call.arguments) == 2]
    assert admissions[-1] == taken.arguments[0] != admissions[0]
    assert run.coordinator._training.admitted.membership.admission.terms.collateral == taken.arguments[0]


def test_without_newer_collateral_nobody_computes_any_more(tmp_path):
    run = aging_run(tmp_path, lambda clock: None)
    with pytest.raises(RefusedError):
        run.train()
    assert len(run.reports) == 1
    assert {code for _, code in run.left} <= {"collateral_stale", "peer_expired"}


def test_collateral_that_cannot_be_had_ends_the_run_and_says_so(tmp_path):
    def gone():
        raise EvidenceError("collateral_stale", "the tcbInfo cannot be fetched from a.example: status 503")

    run = aging_run(tmp_path, lambda clock: gone)
    with pytest.raises(EvidenceError, match="status 503"):
        run.train()
    assert len(run.reports) == 1


def test_a_policy_without_a_service_is_judged_by_files_alone(tmp_path):
    assert collateral_of(None, None, tmp_path) is None
