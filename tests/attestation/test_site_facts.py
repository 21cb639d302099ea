"""What the runs of one site share: a new run begins with the floors and the clock of the runs before it."""

from pathlib import Path

from attestation.attester import Attester
from attestation.fact_book import CLOCK_TOLERANCE_S
from attestation.orchestrator import open_run
from attestation.policy import simulated_policy
from attestation.run_terms import RunTerms
from attestation.simulator import CollateralVariant
from metrics.errors import EvidenceError
from tests.attestation.conftest import MANIFEST, MEASUREMENT, NOW, Session
from tests.attestation.test_attester import Source
from tests.attestation.test_orchestrator import ANSWER, COMPUTATION, COUNT


def admit(session: Session, home: Path, number: int, now: int = NOW) -> str | None:
    """One worker presents itself to a new run of its own, whose verifiers hold collateral of that evaluation number."""
    run = open_run(str(home), lambda: now, None)
    collateral = session.vendor.collateral(now, CollateralVariant(evaluation_number=number))
    policy = simulated_policy(session.vendor, MEASUREMENT)
    admission = run.begin(RunTerms(MANIFEST, COMPUTATION, COUNT, ANSWER, policy, collateral), "execution").admission
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
