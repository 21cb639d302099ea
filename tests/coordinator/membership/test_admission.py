"""Evidence that ages is renewed between two steps, and who is revoked is out by the next; the bytes stay the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.orchestrator.revocations import revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.metrics.errors import RefusedError, RunFailedError
from tests.protocol import NOW, Call, Clock, Fate, WholeRun, on, whole_run

LIFE_S = 600


def aging(
    home: Path,
    taking: str = "reduce",
    share: float = 5 / 12,
    disturb: Callable[[Call], Fate] | None = None,
    **fields: Any,
):
    """Return a run of which every call of one method takes a share of the evidence's life."""
    clock = Clock()

    def disturbed(call: Call) -> Fate:
        if call.method == taking:
            clock.sleep(share * LIFE_S)
        return disturb(call) if disturb else None

    run = whole_run(home, disturb=disturbed, clock=clock, **fields)
    run.change(policy=run.session.policy.model_copy(update={"evidence_lifetime_s": LIFE_S}))
    return run


def bodies(run: WholeRun, wanted: str) -> list[dict[str, Any]]:
    return [body for kind, body in run.evidence if kind == wanted]


@pytest.fixture(scope="module")
def unaged(tmp_path_factory) -> list[str]:
    """Return the same run under the same policy, at a moment that does not pass. Keys depend on the policy."""
    run = aging(tmp_path_factory.mktemp("unaged"), share=0.0)
    run.train()
    return run.digests


def test_evidence_is_renewed_before_it_expires_and_the_bytes_stay_the_same(tmp_path, unaged):
    """Two thirds of its life have passed before the last step: everybody presents anew, once; the roster changes."""
    run = aging(tmp_path)
    run.train()
    assert run.digests == unaged
    assert run.left == []
    renewed_at = LIFE_S * 5 // 6
    expiry = [body["expires_at"] - NOW for body in bodies(run, "admitted")]
    assert expiry == [LIFE_S] * 4 + [renewed_at + LIFE_S] * 4
    evidence = [{m.evidence_digest for m in roster.members} for roster in run.stage.rosters]
    assert evidence[0] == evidence[1]
    assert not evidence[0] & evidence[-1]
    assert [len(each) for each in (evidence[0], evidence[-1])] == [4, 4]


def test_evidence_that_expires_after_it_was_looked_at_is_renewed_too(tmp_path, unaged):
    """A whole life passes while the first roster of a step is asked for, as when a machine slept."""
    run = aging(tmp_path, "open_step", 1.0)
    disturbed = run.stage.disturb
    run.stage.disturb = lambda call: disturbed(call) if call.index == 0 else None
    run.train()
    assert run.digests == unaged
    assert len(bodies(run, "admitted")) == 8


def test_a_worker_that_cannot_renew_leaves_and_its_virtual_workers_move(tmp_path, unaged):
    run = aging(tmp_path, disturb=on("present", "worker-1", "dies", index=1))
    run.train()
    assert run.left == [("worker-1", "died")]
    assert run.digests == unaged
    assert "worker-1" not in {member.member_id for member in run.stage.rosters[-1].workers}


def test_an_aggregator_whose_fresh_evidence_is_refused_is_replaced(tmp_path, unaged):
    """It answers the second challenge with its evidence of the first."""
    run = aging(tmp_path)
    shown: list[Any] = []

    def replays(*values: Any) -> tuple[Any, ...]:
        shown.extend(values)
        return (shown[0],)

    aging_only = run.stage.disturb

    def disturb(call: Call) -> Fate:
        is_its = (call.method, call.member_id) == ("present", "aggregator-0-0")
        return replays if is_its else aging_only(call)

    run.stage.disturb = disturb
    run.train()
    assert run.left == [("aggregator-0-0", "nonce_replayed")]
    assert run.digests == unaged


def test_a_run_ends_where_no_orchestrator_can_renew(tmp_path):
    """Fail closed: the members' old evidence would have been good for the rest of the run."""
    run = aging(tmp_path, overrides=["failure.max_failures=0"])
    aging_only = run.stage.disturb
    run.stage.disturb = lambda call: "dies" if call.method == "challenge" and run.digests else aging_only(call)
    with pytest.raises(RunFailedError) as failure:
        run.train()
    assert failure.value.code == "unreachable"
    assert len(run.digests) == 2


class Told(list[Any]):
    """A list of progress reports, each followed by what the test does then."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def append(self, report: Any) -> None:
        super().append(report)
        self.then()


def revoking(home: Path, moment: tuple[str, int], name: str, **fields: Any) -> WholeRun:
    """Return a run of which a member is revoked, as by another process, just before a call is made or after a step."""

    def now(method: str, index: int) -> None:
        if (method, index) == moment:
            state = state_file(home / "orchestrator", run.session.run_id)
            revoke(state, "member", name, reason="stolen", now=NOW)

    run = whole_run(home, disturb=lambda call: now(call.method, call.index), **fields)
    run.reports = Told(lambda: now("told", len(run.reports)))
    return run


@pytest.mark.parametrize(
    ("moment", "steps"), [(("bind_vectors", 0), 1), (("open_step", 1), 1), (("told", 1), 1), (("charge", 1), 2)]
)
def test_a_revoked_worker_is_out_by_the_next_step_and_gets_nothing_more(tmp_path, undisturbed, moment, steps):
    """Before the next roster is signed, while it is, when it was but its step has not begun, and when that has."""
    run = revoking(tmp_path, moment, "worker-1")
    run.train()
    assert run.left == [("worker-1", "revoked")]
    assert run.digests == undisturbed
    assert len([call for call in run.stage.calls("step") if call.member_id == "worker-1"]) == steps
    (logged,) = bodies(run, "revoked")
    assert (logged["kind"], logged["name"], logged["reason"]) == ("member", "worker-1", "stolen")
    about = [(kind, body.get("cause")) for kind, body in run.evidence if body.get("member_id") == "worker-1"]
    assert about[-1] == ("expelled", "revoked")


def test_a_revoked_aggregator_is_replaced(tmp_path, undisturbed):
    run = revoking(tmp_path, ("reduce", 1), "aggregator-0-0")
    run.train()
    assert run.left == [("aggregator-0-0", "revoked")]
    assert run.digests == undisturbed


def test_a_run_ends_when_its_only_machine_is_revoked(tmp_path):
    """Nobody is admitted on it any more, so nobody can take a place."""
    run = whole_run(tmp_path)

    def steal() -> None:
        run.session.control.actors["orchestrator"].handle.export_log(str(run.folder / "evidence.jsonl"))
        (platform,) = {body["platform_id"] for body in bodies(run, "admitted")}
        revoke(
            state_file(tmp_path / "orchestrator", run.session.run_id), "platform", platform, reason="stolen", now=NOW
        )

    run.reports = Told(steal)
    with pytest.raises(RefusedError) as refusal:
        run.train()
    assert refusal.value.exit_code == 3
    assert "platform_revoked" in (refusal.value.code + refusal.value.message)
    assert len(run.digests) == 1
