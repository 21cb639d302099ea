"""A member that is revoked during a run gets nothing more, whatever else happens, and the log says so."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycloak.attestation.files.sqlite import Transactions
from raycloak.attestation.orchestrator.admissions import admitted_body
from raycloak.attestation.orchestrator.revocations import count_revocations, revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.metrics.errors import ConfigError
from tests.attestation.conftest import NOW
from tests.attestation.orchestrator.test_orchestrator import Desk, commit, refusal

HOSTING = {"worker-0": (0, 2), "worker-1": (1, 3)}


@pytest.fixture
def desk(session, tmp_path) -> Desk:
    desk = Desk(session, tmp_path / "orchestrator", generated=True, lifetime_s=600)
    desk.admit("worker-0", "worker-1")
    desk.roster()
    return desk


def platform_of(desk: Desk) -> str:
    (platform,) = {body["platform_id"] for kind, body in desk.log() if kind == "admitted"}
    return platform


def take_back(desk: Desk, kind: str, name: str) -> tuple[str, ...]:
    return revoke(state_file(desk.home, desk.run_id), kind, name, reason="stolen", now=NOW + 5)


def open_step(desk: Desk) -> str:
    return refusal(desk.orchestrator.open_step, 1, HOSTING, (), ())


def test_a_revoked_member_gets_no_key_no_roster_entry_and_no_second_admission(desk):
    """All of it without anybody having asked for a review, also from the next incarnation."""
    take_back(desk, "member", "worker-1")
    for _ in range(2):
        assert open_step(desk) == "evidence_expired"
        assert refusal(desk.orchestrator.release, "worker-1", 0, (1,)) == "release_denied"
        commitments = desk.commitments("worker-1", 1, b"c" * 32)
        assert refusal(desk.orchestrator.record_data, commitments) == "release_denied"
        assert refusal(desk.orchestrator.admit, desk.present("worker-1")) == "member_revoked"
        desk.restart()
    assert desk.log()[-1] == ("refused", {"member_id": "worker-1", "code": "member_revoked"})
    desk.orchestrator.release("worker-0", 0, (0, 1, 2, 3))


def test_a_revoked_platform_takes_everybody_on_it_and_admits_nobody_again(desk):
    assert take_back(desk, "platform", platform_of(desk).upper()) == ("worker-0", "worker-1")
    assert open_step(desk) == "evidence_expired"
    assert refusal(desk.orchestrator.admit, desk.present("worker-2")) == "platform_revoked"
    desk.executions += 1
    desk.restart()
    assert refusal(desk.orchestrator.admit, desk.present("worker-0")) == "platform_revoked"


def test_a_revoked_gpu_takes_its_member_off_and_admits_it_nowhere(desk):
    """A GPU can move to another machine."""
    gpu = b"g" * 48
    admission = desk.orchestrator._session.admission
    appraisal = admission.find("worker-1").appraisal
    admission.find("worker-1").appraisal = with_gpu = replace(appraisal, gpus=(SimpleNamespace(platform_id=gpu),))
    body = admitted_body(appraisal, NOW, b"") | {"gpus": [gpu.hex()]}
    with desk.orchestrator._run.books.state.transaction():
        desk.orchestrator._run.books.log.append("admitted", body)
    assert take_back(desk, "gpu", gpu.hex()) == ("worker-1",)
    assert open_step(desk) == "evidence_expired"
    elsewhere = replace(with_gpu, member_id="worker-9", platform_id=b"p" * 16)
    assert desk.orchestrator._run.books.revocations.find(elsewhere).code == "gpu_revoked"
    assert desk.orchestrator._run.books.revocations.find(replace(elsewhere, gpus=())) is None


def test_another_session_may_use_the_name_of_a_revoked_member(desk):
    """Names are given anew in each session; only a machine stays what it is."""
    take_back(desk, "member", "worker-1")
    desk.executions += 1
    desk.restart()
    desk.admit("worker-0", "worker-1")
    assert desk.orchestrator.review().revoked == ()


@pytest.mark.parametrize("kind", ["release", "roster", "order", "data"])
def test_nothing_leaves_for_a_member_revoked_just_before_the_transaction(desk, monkeypatch, kind):
    """The look at the members and the record of what leaves are one transaction."""
    desk.orchestrator.commit((commit(0, b"p" * 32, 1),))
    calls = {
        "release": (desk.orchestrator.release, "worker-1", 0, (1,)),
        "roster": (desk.orchestrator.open_step, 1, HOSTING, (), ()),
        "order": (desk.orchestrator.order_evaluation, 1, b"p" * 32, HOSTING),
        "data": (desk.orchestrator.record_data, desk.commitments("worker-1", 1, b"c" * 32)),
    }
    before = Transactions.transaction
    revoked = []

    def transaction(self):
        if not revoked:
            revoked.append(kind)
            take_back(desk, "member", "worker-1")
        return before(self)

    monkeypatch.setattr(Transactions, "transaction", transaction)
    assert refusal(*calls[kind]) in ("release_denied", "evidence_expired")
    assert revoked
    assert not {"released", "evaluation_ordered"} & {kind for kind, _ in desk.log()[-2:]}
    assert [kind for kind, _ in desk.log()].count("roster") == 1


def test_the_evidence_of_a_member_that_is_revoked_or_expired_is_refused_when_it_comes_again(desk):
    """The stored appraisal answers a lost answer, and no more than that."""
    again = {name: desk.present(name) for name in ("worker-0", "worker-1")}
    for envelope in (*again.values(), *again.values()):
        desk.orchestrator.admit(envelope)
    take_back(desk, "member", "worker-1")
    assert refusal(desk.orchestrator.admit, again["worker-1"]) == "member_revoked"
    assert desk.log()[-1] == ("refused", {"member_id": "worker-1", "code": "member_revoked"})
    desk.now += 601
    assert refusal(desk.orchestrator.admit, again["worker-0"]) == "evidence_expired"
    assert desk.log()[-1] == ("refused", {"member_id": "worker-0", "code": "evidence_expired"})


def test_a_review_names_the_revoked_and_logs_each_once(desk):
    assert desk.orchestrator.review().revoked == ()
    take_back(desk, "member", "worker-1")
    ((member_id, message),) = desk.orchestrator.review().revoked
    assert member_id == "worker-1"
    assert "stolen" in message
    logged = {"kind": "member", "name": "worker-1", "reason": "stolen", "revoked_at": NOW + 5}
    assert desk.log()[-1] == ("revoked", logged)
    desk.orchestrator.expel("worker-1", "revoked")
    assert desk.orchestrator.review().revoked == ()
    assert [kind for kind, _ in desk.log()].count("revoked") == 1


def test_evidence_ages_when_two_thirds_of_its_life_have_passed(desk):
    desk.now += 100
    desk.admit("worker-0")
    assert desk.orchestrator.review().renew_in_s == 300, "worker-1's is older"
    desk.now += 300
    assert desk.orchestrator.review().ages
    desk.admit("worker-1")
    assert desk.orchestrator.review().renew_in_s == 100


def test_revocations_are_counted_beside_the_orchestrator(desk, tmp_path):
    state = state_file(desk.home, desk.run_id)
    assert count_revocations(state) == 0
    take_back(desk, "member", "worker-1")
    take_back(desk, "platform", platform_of(desk))
    assert count_revocations(state) == 2
    assert count_revocations(tmp_path / "absent") == 0


def test_what_cannot_be_revoked_is_named(desk, tmp_path):
    state = state_file(desk.home, desk.run_id)

    def code(kind: str, name: str, file: Path = state) -> str:
        with pytest.raises(ConfigError) as error:
            revoke(file, kind, name, reason="stolen", now=NOW)
        return error.value.code

    assert code("member", "worker-7") == "member_unknown"
    for digits in ("no digits", "", platform_of(desk)[:-2], platform_of(desk) + "00", "ab" * 48):
        assert code("platform", digits) == "platform_id", digits
    assert code("gpu", platform_of(desk)) == "gpu_id"
    # Well formed, and of nobody.
    assert code("platform", "ab" * 16) == code("gpu", "ab" * 48) == "revokes_nobody"
    # Also if the entries have the same digits elsewhere: a key of a member, and its measurement.
    admitted = next(body for kind, body in desk.log() if kind == "admitted")
    assert code("platform", admitted["identity_key"]) == "revokes_nobody"
    assert code("gpu", admitted["claims"]["measres"]) == "revokes_nobody"
    assert code("member", "worker-0", tmp_path / "absent") == "run_unknown"
    assert count_revocations(state) == 0
