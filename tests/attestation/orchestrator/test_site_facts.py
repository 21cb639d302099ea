"""The facts that runs of one site share: a new run begins with the floors and the clock of the runs before it."""

from pathlib import Path

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.orchestrator.collateral_memory import CLOCK_TOLERANCE_S
from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.metrics.errors import EvidenceError
from tests.attestation.attester.test_attester import Source
from tests.attestation.conftest import MANIFEST, MEASUREMENT, NOW, Session, StandIn
from tests.attestation.orchestrator.test_orchestrator import ANSWER, COUNT
from tests.simulators.tdx import CollateralVariant


def admit(session: Session, home: Path, number: int, now: int = NOW) -> str | None:
    """Admit one worker to a new run of its own, whose verifiers hold collateral of that evaluation number."""
    run = open_run(str(home), lambda: now, None)
    collateral = session.vendor.collateral(now, CollateralVariant(evaluation_number=number))
    policy = simulated_policy(session.vendor, MEASUREMENT)
    admission = run.begin(RunTerms(StandIn.under(policy, COUNT), policy, collateral), "execution").admission
    attester = Attester("worker-0", Source(session.platform))
    try:
        admission.admit(attester.present(admission.challenge("worker-0", "worker"), MANIFEST, ANSWER))
    except EvidenceError as error:
        return error.code
    finally:
        run.close()
    return None


def test_a_new_run_refuses_collateral_older_than_an_earlier_run_saw(session: Session, tmp_path: Path) -> None:
    assert [admit(session, tmp_path, number) for number in (18, 17)] == [None, "collateral_rollback"]
    assert [admit(session, tmp_path, number) for number in (19, 18, 19)] == [None, "collateral_rollback", None]
    assert admit(session, tmp_path / "another site", 17) is None


def test_a_new_run_refuses_a_clock_before_that_of_an_earlier_run(session: Session, tmp_path: Path) -> None:
    assert admit(session, tmp_path, 18) is None
    assert admit(session, tmp_path, 18, NOW - CLOCK_TOLERANCE_S) is None
    assert admit(session, tmp_path, 18, NOW - CLOCK_TOLERANCE_S - 1) == "collateral_stale"
