"""An orchestrator that dies at any moment: its next incarnation resumes, and every question may be asked twice."""

import sqlite3
import threading

import pytest

from raycloak.attestation.core.evidence import Presentation
from raycloak.attestation.core.messages import open_envelope, seal
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.metrics.errors import ConfigError, ProtocolError
from tests.attestation.conftest import NOW
from tests.attestation.orchestrator.test_orchestrator import Desk, commit, refusal


@pytest.fixture
def desk(session, tmp_path) -> Desk:
    return Desk(session, tmp_path / "orchestrator", generated=True)


def reopening(desk: Desk, secret: str | None, run_id: str) -> str:
    with pytest.raises(ConfigError) as error:
        open_run(str(desk.home), lambda: NOW, secret, run_id)
    return error.value.code


# --- opening again


def test_an_incarnation_in_the_same_session_knows_members_epochs_commits_and_ratchet(desk):
    desk.admit("worker-0", "worker-1", "aggregator-0")
    desk.orchestrator.release("worker-0", 0, (0, 2))
    desk.roster(1, commit(0, b"p" * 32, 1))
    desk.admit("worker-2")
    before, log = desk.orchestrator.view(), desk.log()
    desk.restart()
    assert desk.orchestrator.view() == before
    assert desk.log() == log, "a restart is no new session"
    assert refusal(desk.orchestrator.release, "worker-0", 1, (0,)) == "release_denied"
    hosting = {"worker-0": (0,), "worker-1": (1,), "worker-2": (2, 3)}
    roster = desk.roster(1, hosting=hosting, aggregators=("aggregator-0",))
    assert (roster.attempt, roster.ratchet) == (1, 1)
    assert [member.joined for member in roster.members] == [0, 0, 1, 0]
    assert [member.mask_key for member in roster.members[:3]] == [
        desk.members[name].agreement.public for name in hosting
    ]


def test_another_session_starts_without_members_and_at_ratchet_zero(desk):
    desk.admit("worker-0", "worker-1")
    desk.roster(1, commit(0, b"p" * 32, 1))
    desk.executions += 1
    desk.restart()
    assert desk.orchestrator.view().admitted == {}
    desk.admit("worker-0", "worker-1")
    roster = desk.roster(1)
    assert (roster.attempt, roster.ratchet) == (1, 0), "attempts never repeat within a run"
    desk.restart(begin=False)
    desk.executions -= 1
    desk.begin()
    assert desk.orchestrator.view().admitted == {}, "an older session does not come back"


def test_a_run_that_is_opened_as_new_is_another_session_whatever_its_name(session, tmp_path):
    tmp_path.joinpath("again").mkdir()
    desk = Desk(session, tmp_path / "again")
    desk.admit("worker-0")
    desk.executions -= 1
    desk.start()
    assert desk.orchestrator.view().admitted == {}


def test_a_run_that_is_opened_as_new_and_left_disturbs_no_execution_under_way(session, tmp_path):
    tmp_path.joinpath("shared").mkdir()
    desk = Desk(session, tmp_path / "shared")
    desk.admit("worker-0", "worker-1")
    desk.roster(1, commit(0, b"p" * 32, 1))
    open_run(str(desk.home), lambda: NOW, str(desk.home / "secret")).close()
    assert desk.roster(1).ratchet == 1, "workers refuse a roster that goes back"
    desk.restart()
    assert set(desk.orchestrator.view().admitted) == {"worker-0", "worker-1"}


def test_an_execution_that_another_one_took_over_from_decides_nothing_any_more(desk):
    desk.admit("worker-0", "worker-1")
    former = desk.orchestrator
    desk.orchestrator = EvidenceOrchestrator(str(desk.home), lambda: desk.now)
    desk.orchestrator.open_run(None, desk.run_id)
    desk.executions += 1
    desk.begin()
    desk.admit("worker-0", "worker-1")
    late = desk.present("worker-2")
    log, hosting = desk.log(), {"worker-0": (0, 2), "worker-1": (1, 3)}
    members = desk.orchestrator._run.books.state.members()
    assert refusal(former.challenge, "worker-2", "worker") == "session_over"
    assert refusal(former.admit, late) == "session_over"
    assert refusal(former.open_step, 0, hosting, (), ()) == "session_over"
    assert refusal(former.release, "worker-0", 0, (0,)) == "session_over"
    assert refusal(former.commit, (commit(0, b"p" * 32, 1),)) == "session_over"
    assert refusal(former.expel, "worker-0", "died") == "session_over"
    assert desk.orchestrator._run.books.state.members() == members
    assert desk.log() == log
    assert (desk.roster().attempt, desk.roster().ratchet) == (0, 0)
    former.close()


def test_restored_evidence_is_appraised_again_and_lives_no_longer_than_before(session, tmp_path):
    desk = Desk(session, tmp_path / "short", generated=True, lifetime_s=60)
    desk.admit("worker-0")
    desk.now += 30
    desk.admit("worker-1")
    desk.restart()
    assert desk.orchestrator.view().earliest_expiry["worker"] == NOW + 60
    desk.now += 30
    desk.restart()
    assert list(desk.orchestrator.view().admitted) == ["worker-1"]
    assert refusal(desk.roster) == "evidence_expired"
    desk.admit("worker-0")
    assert desk.roster().attempt == 0


def test_an_expelled_member_stays_expelled(desk):
    desk.admit("worker-0", "worker-1")
    desk.orchestrator.expel("worker-1", "died")
    desk.restart()
    assert list(desk.orchestrator.view().admitted) == ["worker-0"]
    log = desk.log()
    desk.orchestrator.expel("worker-1", "died")
    assert desk.log() == log


def test_a_run_is_opened_only_with_its_own_secret(session, desk, tmp_path):
    other = tmp_path / "other"
    other.write_text("cd" * 32)
    assert reopening(desk, str(other), desk.run_id) == "run_secret"
    assert reopening(desk, None, "0" * 16) == "run_unknown"
    assert reopening(desk, None, f"../{desk.home.name}/{desk.run_id}") == "run_unknown"
    tmp_path.joinpath("given").mkdir()
    given = Desk(session, tmp_path / "given")
    given.restart()
    assert reopening(given, None, given.run_id) == "secret_destroyed", "it was never in the state directory"


@pytest.mark.parametrize("left", ["nothing", "zeros"])
def test_a_run_whose_secret_is_gone_cannot_be_opened(session, tmp_path, left):
    desk = Desk(session, tmp_path / "gone", generated=True)
    desk.orchestrator.finish(str(tmp_path / "evidence.jsonl"), destroy=True)
    if left == "zeros":
        (desk.home / f"{desk.run_id}.secret").write_text("0" * 64)
    assert reopening(desk, None, desk.run_id) == "secret_destroyed"


def test_a_lock_of_the_former_incarnation_is_waited_for(desk):
    holder = sqlite3.connect(desk.home / f"{desk.run_id}.sqlite", isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    threading.Timer(0.2, lambda: holder.execute("COMMIT")).start()
    desk.executions += 1
    desk.restart()
    assert desk.log()[-1][0] == "session"
    holder.close()


# --- asking twice


def test_the_presentation_of_a_member_gives_its_appraisal_again_also_after_a_restart(desk):
    envelope = desk.present("worker-0")
    appraisal = desk.orchestrator.admit(envelope)
    log = desk.log()
    assert desk.orchestrator.admit(envelope) == appraisal
    desk.restart()
    assert desk.orchestrator.admit(envelope) == appraisal
    assert desk.log() == log
    desk.present("worker-0")
    assert refusal(desk.orchestrator.admit, envelope) == "nonce_replayed", "a newer challenge asks for fresh evidence"
    desk.restart()
    assert refusal(desk.orchestrator.admit, envelope) == "nonce_replayed"


def test_a_nonce_that_something_else_used_up_refuses_after_a_restart(desk):
    envelope = desk.present("worker-0")
    desk.orchestrator.admit(envelope)
    honest = open_envelope(Presentation, envelope, desk.members["worker-0"].identity.public)
    malleated = seal(honest.model_copy(update={"quote": honest.quote + b"\0"}), desk.members["worker-0"].identity)
    desk.restart()
    assert refusal(desk.orchestrator.admit, malleated) == "nonce_replayed"


def test_nonce_decision_and_record_of_an_admission_are_one(desk, monkeypatch):
    """A crash at any point of it leaves either all three or none, so the same question succeeds after it."""
    envelope = desk.present("worker-0")
    log = desk.log()

    def crash(*_):
        raise KeyboardInterrupt

    for place in ("log.evidence_log.EvidenceLog.append", "orchestrator.state.OrchestratorState.keep_member"):
        with monkeypatch.context() as patch:
            patch.setattr(f"raycloak.attestation.{place}", crash)
            with pytest.raises(KeyboardInterrupt):
                desk.orchestrator.admit(envelope)
        desk.restart()
        assert (desk.log(), desk.orchestrator.view().admitted) == (log, {})
    desk.orchestrator.admit(envelope)
    assert [kind for kind, _ in desk.log()] == ["session", "admitted"]


def test_commits_that_are_handed_in_twice_count_once(desk):
    desk.admit("worker-0", "worker-1")
    first = desk.roster(1, commit(0, b"p" * 32, 1))
    again = desk.roster(1, commit(0, b"p" * 32, 1))
    desk.restart()
    after = desk.roster(1, commit(0, b"p" * 32, 1))
    assert [(roster.attempt, roster.ratchet) for roster in (first, again, after)] == [(0, 1), (1, 1), (2, 1)]
    assert [kind for kind, _ in desk.log()].count("committed") == 1


def test_an_attempt_that_is_refused_commits_nothing_and_leaves_the_ratchet(desk, monkeypatch):
    desk.admit("worker-0", "worker-1")
    with monkeypatch.context() as patch:
        patch.setattr("raycloak.attestation.orchestrator.orchestrator.MAX_ATTEMPTS_PER_STEP", 0)
        assert refusal(desk.roster, 1, commit(0, b"p" * 32, 1)) == "attempts_exhausted"
    assert desk.orchestrator.committed() == ()
    assert desk.roster(1).ratchet == 0


# --- committed once, whatever the session


def test_what_was_committed_is_told_with_the_ledgers_head(desk):
    commits = (commit(0, b"p" * 32, 2), commit(1, b"q" * 32, 1))
    desk.orchestrator.commit(commits)
    desk.orchestrator.commit(commits[1:])
    desk.executions += 1
    desk.restart()
    assert desk.orchestrator.committed() == commits
    entries = [content for kind, content in desk.log() if kind == "committed"]
    assert [(each["ledger_sequence"], each["ledger_hash"]) for each in entries] == [(10, "68" * 32), (11, "68" * 32)]


@pytest.mark.parametrize("way", ["commit", "open_step"])
def test_a_step_that_was_committed_with_other_parameters_is_not_reproducible(desk, way):
    desk.orchestrator.commit((commit(0, b"p" * 32, 1),))
    desk.executions += 1
    desk.restart()
    desk.admit("worker-0", "worker-1")
    for name, hosted in (("worker-0", (0, 2)), ("worker-1", (1, 3))):
        desk.open_slices(name, hosted)
    log = desk.log()
    wrong = (commit(0, b"q" * 32, 1),)
    ask = {
        "commit": lambda: desk.orchestrator.commit(wrong),
        "open_step": lambda: desk.roster(1, *wrong),
    }
    with pytest.raises(ProtocolError) as error:
        ask[way]()
    assert error.value.code == "not_reproducible"
    for part in ("step 0", "70" * 32, "71" * 32):
        assert part in error.value.message
    assert desk.log() == log


def test_a_later_session_that_reproduces_a_step_says_so_once(desk):
    desk.orchestrator.commit((commit(0, b"p" * 32, 1),))
    desk.executions += 1
    desk.restart()
    desk.admit("worker-0", "worker-1")
    for _ in range(2):
        assert desk.roster(1, commit(0, b"p" * 32, 3)).ratchet == 1
        desk.restart()
    kinds = [kind for kind, _ in desk.log()]
    assert (kinds.count("committed"), kinds.count("reproduced")) == (1, 1)


# --- the end


def test_a_finish_that_was_cut_off_is_completed_by_the_next_incarnation(session, tmp_path, monkeypatch):
    """Killed after the record and before the export, and killed before the destruction of the secret."""
    desk = Desk(session, tmp_path / "cut", generated=True)
    path = tmp_path / "evidence.jsonl"
    desk.orchestrator.commit((commit(0, b"p" * 32, 1),))

    def crash(*_):
        raise KeyboardInterrupt

    for place in ("log.evidence_log.EvidenceLog.export", "orchestrator.orchestrator.destroy_secret"):
        with monkeypatch.context() as patch:
            patch.setattr(f"raycloak.attestation.{place}", crash)
            with pytest.raises(KeyboardInterrupt):
                desk.orchestrator.finish(str(path), destroy=True)
        desk.restart()
    desk.orchestrator.finish(str(path), destroy=True)
    assert len(read_exported_log(path, desk.key).entries) == len(desk.log()) == 3
    assert not (desk.home / f"{desk.run_id}.secret").exists()
