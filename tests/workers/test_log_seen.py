"""A worker keeps the newest head of the evidence log it was shown, and takes no key out of another log."""

import shutil

import pytest

from raycloak.coordinator.membership.hosting import Hosts
from raycloak.metrics.errors import EvidenceError, RefusedError
from tests.protocol import HandRun, trained, whole_run


@pytest.fixture
def run(tmp_path):
    return HandRun(tmp_path, workers=2)


def release(run, name="worker-0", seen=0):
    return run.orchestrator.release(name, 0, run.hosting[name], seen)


def code(function, *arguments):
    with pytest.raises(EvidenceError) as error:
        function(*arguments)
    return error.value.code


def put_back(run, state):
    """Put the orchestrator's state back, opened by a new incarnation, which the members do not notice."""
    run.orchestrator.close()
    file = run.home / "orchestrator" / f"{run.run_id}.sqlite"
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    shutil.copy(state, file)
    terms = run.orchestrator._session._terms
    run.orchestrator = run.start_orchestrator()
    run.orchestrator._run._is_new = False
    run.orchestrator.begin(terms, "first")


def copied(run):
    """Return a copy of the orchestrator's state as it is now."""
    copy = run.home / "copy.sqlite"
    run.orchestrator._run.books.state.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(run.home / "orchestrator" / f"{run.run_id}.sqlite", copy)
    return copy


def test_a_worker_takes_the_next_release_of_the_log_it_saw_and_none_without_the_proof(run):
    worker, seen = run.workers["worker-0"], run.workers["worker-0"]._stage._watch.length
    assert seen > 0
    unproven = release(run)
    assert unproven.extends == ()
    assert code(worker.accept_keys, unproven) == "log_forked"
    assert worker._stage._watch.length == seen
    proven = release(run, seen=seen)
    worker.accept_keys(proven)
    assert worker._stage._watch.length == proven.log_length > seen
    assert code(worker.accept_keys, unproven) == "log_forked", "an older head than the newest one"


def test_a_log_that_was_put_back_is_refused_by_the_worker_that_saw_more_of_it(run):
    """Rolled back and grown again under the same keys, so that every signature holds."""
    worker, before = run.workers["worker-0"], copied(run)
    worker.accept_keys(release(run, seen=worker._stage._watch.length))
    seen = worker._stage._watch.length
    put_back(run, before)
    assert code(release, run, "worker-0", seen) == "log_forked", "it has less than the worker saw, and says so"
    while run.orchestrator.log_position().length < seen + 3:
        run.orchestrator.expel("nobody", "")
        release(run, "worker-1")
    assert code(worker.accept_keys, release(run, seen=seen)) == "log_forked"


def test_a_refused_release_of_a_log_that_was_put_back_is_logged(run):
    assert code(release, run, "worker-0", 10_000) == "log_forked"
    newest = next(run.orchestrator._run.books.log.newest("release_refused"))
    assert newest.content == {"member_id": "worker-0", "kind": "virtual_worker", "code": "log_forked"}


def test_a_coordinator_tells_the_orchestrator_what_each_worker_has_seen(tmp_path):
    run = trained(tmp_path, epoch_steps=1)
    seen = {}
    for call in run.stage.calls("release"):
        name, _, _, length = call.arguments
        seen.setdefault(name, []).append(length)
    assert sorted(seen) == ["worker-0", "worker-1", "worker-2"]
    assert all(lengths[0] == 0 and lengths == sorted(set(lengths)) for lengths in seen.values())
    assert all(len(lengths) == 3 for lengths in seen.values())


def test_a_worker_that_is_kept_from_the_proof_leaves_and_takes_no_key(tmp_path, monkeypatch):
    """A party between worker and orchestrator cannot make the worker forget what it saw."""
    run = whole_run(tmp_path, epoch_steps=1)
    genuine = Hosts.release

    def forgetful(self, member_id, virtual_workers):
        self._seen = {}
        return genuine(self, member_id, virtual_workers)

    monkeypatch.setattr(Hosts, "release", forgetful)
    with pytest.raises(RefusedError, match="too_few_workers"):
        run.train()
    assert len(run.reports) == 1
    assert {code for _, code in run.left} == {"log_forked"}
