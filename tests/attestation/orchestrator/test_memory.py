"""The memory of an orchestrator beside nonces: numbers of collateral, the time, and who is enrolled where."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.orchestrator.collateral_memory import CLOCK_TOLERANCE_S
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.policy.policy import simulated_policy
from tests.attestation.conftest import MEASUREMENT, NOW, Session, StandIn
from tests.attestation.orchestrator.test_orchestrator import COUNT, Desk, Source, refusal
from tests.simulators.tdx import CollateralVariant


@dataclass
class StrictDesk(Desk):
    """A run whose policy admits one worker per platform, judged with collateral of a given evaluation number."""

    evaluation_number: int = 18
    displaces: bool = False
    lasting: frozenset[str] | None = None

    def begin(self) -> None:
        policy = simulated_policy(self.session.vendor, MEASUREMENT).model_copy(update={"workers_per_platform": 1})
        variant = CollateralVariant(evaluation_number=self.evaluation_number)
        collateral = CollateralBundle(tdx=(self.session.vendor.tdx_collateral(int(self.now), variant),))
        rules = policy, collateral
        how = {"displaces": self.displaces, "lasting": self.lasting}
        terms = RunTerms(StandIn.under(policy, COUNT), *rules, **how)
        self.orchestrator.begin(terms, f"execution-{self.executions}")


@pytest.fixture
def strict(session: Session, tmp_path: Path) -> StrictDesk:
    tmp_path.joinpath("strict").mkdir()
    return StrictDesk(session, tmp_path / "strict")


def test_two_workers_on_one_platform_id_are_refused(strict: StrictDesk) -> None:
    strict.admit("worker-0", "aggregator-0")
    assert refusal(strict.admit, "worker-1") == "peer_not_bound"
    assert set(strict.orchestrator.view().admitted) == {"worker-0", "aggregator-0"}
    strict.admit("worker-0")
    strict.members["worker-1"] = Attester("worker-1", Source(strict.session.vendor.platform()))
    strict.admit("worker-1")


def test_who_is_enrolled_survives_a_restart_and_leaves_room_when_expelled(strict: StrictDesk) -> None:
    strict.admit("worker-0")
    strict.restart()
    assert refusal(strict.admit, "worker-1") == "peer_not_bound"
    strict.orchestrator.expel("worker-0", "drained")
    strict.admit("worker-1")


def test_where_members_displace_each_other_the_oldest_on_the_machine_makes_room(strict: StrictDesk) -> None:
    """As at a key service, whose members come one after the other; who is displaced gets no keys from then on."""
    strict.displaces = True
    strict.restart()
    strict.admit("worker-0", "aggregator-0")
    strict.members["worker-2"] = Attester("worker-2", Source(strict.session.vendor.platform()))
    strict.admit("worker-2", "worker-1")
    for _ in range(2):
        assert set(strict.orchestrator.view().admitted) == {"worker-1", "worker-2", "aggregator-0"}
        assert refusal(strict.orchestrator.release, "worker-0", 0, (0,)) == "release_denied"
        strict.orchestrator.release("worker-1", 0, (0,))
        strict.restart()
    expelled = [body for kind, body in strict.log() if kind == "expelled"]
    assert expelled == [{"member_id": "worker-0", "cause": "worker-1 attested on its machine"}]


def on_its_own_machine(desk: StrictDesk, *names: str) -> None:
    for name in names:
        desk.members[name] = Attester(name, Source(desk.session.vendor.platform()))
        desk.admit(name)


def kept(desk: StrictDesk) -> set[str]:
    """Return the members on disk."""
    return {row.member_id for row in desk.orchestrator._run.books.state.members()}


def test_a_service_forgets_whose_evidence_expired_and_whom_nothing_depends_on(strict: StrictDesk) -> None:
    """Here, on disk, and at the next start; before, each member that ever attested was kept for ever."""
    strict.lasting = frozenset({"worker-0"})
    strict.restart()
    on_its_own_machine(strict, "worker-0", "worker-1", "worker-2")
    strict.now += strict.lifetime_s - 10
    on_its_own_machine(strict, "worker-3")
    assert kept(strict) == {"worker-0", "worker-1", "worker-2", "worker-3"}
    strict.now += 10
    on_its_own_machine(strict, "worker-4")
    for _ in range(2):
        assert kept(strict) == {"worker-0", "worker-3", "worker-4"}
        assert refusal(strict.orchestrator.release, "worker-1", 0, (0,)) == "release_denied"
        strict.restart()
    strict.now += 2 * strict.lifetime_s
    strict.restart()
    assert kept(strict) == {"worker-0"}
    assert strict.orchestrator.view().admitted == {}
    strict.admit("worker-0", "worker-1")


def test_a_service_keeps_a_number_of_those_whom_nothing_depends_on(
    strict: StrictDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycloak.attestation.orchestrator.admissions.MAX_PASSING", 2)
    strict.lasting = frozenset({"worker-0"})
    strict.restart()
    on_its_own_machine(strict, "worker-0", "worker-1", "worker-2")
    strict.admit("worker-1")
    strict.now += 1
    on_its_own_machine(strict, "worker-3")
    strict.now += 1
    on_its_own_machine(strict, "worker-4")
    assert kept(strict) == {"worker-0", "worker-1", "worker-3", "worker-4"}, "those after the newest sweep and two more"
    expelled = [body["member_id"] for kind, body in strict.log() if kind == "expelled"]
    assert expelled == ["worker-2"], "who attested again is not the oldest"


def test_a_run_keeps_its_members_when_their_evidence_expires(strict: StrictDesk) -> None:
    strict.admit("worker-0")
    strict.now += 2 * strict.lifetime_s
    on_its_own_machine(strict, "worker-1")
    assert kept(strict) == {"worker-0", "worker-1"}
    assert set(strict.orchestrator.view().admitted) == {"worker-0", "worker-1"}


def test_older_collateral_is_a_rollback_also_after_a_restart(strict: StrictDesk) -> None:
    strict.admit("worker-0")
    strict.evaluation_number = 17
    strict.restart()
    assert strict.orchestrator.view().admitted == {}, "a member is judged again with what the verifier holds now"
    assert refusal(strict.admit, "worker-0") == "collateral_rollback"
    strict.evaluation_number = 19
    strict.restart()
    strict.admit("worker-0")


def test_refused_evidence_raises_no_floor(strict: StrictDesk) -> None:
    strict.admit("worker-0")
    strict.evaluation_number = 19
    strict.restart()
    assert refusal(strict.orchestrator.admit, strict.present("worker-1", b"w" * 32)) == "numerics_mismatch"
    strict.evaluation_number = 18
    strict.restart()
    strict.admit("worker-0")


def test_a_clock_that_jumps_back_admits_nobody(strict: StrictDesk) -> None:
    strict.admit("worker-0")
    strict.now = NOW - CLOCK_TOLERANCE_S - 1
    assert refusal(strict.admit, "worker-0") == "collateral_stale"
    strict.restart()
    assert strict.orchestrator.view().admitted == {}
    strict.now = NOW - CLOCK_TOLERANCE_S
    strict.restart()
    assert set(strict.orchestrator.view().admitted) == {"worker-0"}
