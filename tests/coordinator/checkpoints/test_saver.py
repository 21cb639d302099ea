"""Checkpoints of a running training: nothing waits for the storage, and the newest is never lost."""

import resource
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from pyarrow import fs

from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.sealed.package_keys import PackageSigner, RecipientPublic
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.checkpoints.archive import Restorer
from raycloak.coordinator.checkpoints.saver import RETRY_S, Checkpoints
from raycloak.coordinator.checkpoints.storage import MANIFEST, PackageStorage
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.manifest import run_terms
from raycloak.coordinator.runs.local_session import local_session
from raycloak.metrics.errors import ConfigError, EvidenceError, RunFailedError
from raycloak.workers.terms.manifest import TensorSpec
from tests.coordinator.checkpoints.test_storage import needs_moto
from tests.coordinator.checkpoints.tssp_cases import TENSORS, Site, run_manifest, snapshot
from tests.protocol import secret_file

DEADLINE_S = 120.0


class Stuck(PackageStorage):
    """A storage that does not answer until it is let go."""

    def __init__(self, storage):
        super().__init__(storage._filesystem, storage._root)
        self.go = threading.Event()

    def draft(self, step):
        assert self.go.wait(DEADLINE_S)
        return super().draft(step)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Counted:
    """A stand-in for the run's metrics."""

    written = 0

    def checkpoint_written(self):
        self.written += 1


class Bench:
    """A run's control, storage and keeper, with steps that the test commits."""

    def __init__(self, home, storage=None, tensors=TENSORS, **settings):
        self.home, self.settings = home, settings
        self.session, self.backend = local_session(home, secret_file(home))
        self.control = self.session.control
        self.orchestrator = self.control.actors["orchestrator"].handle
        self.ledger = self.control.actors["ledger"].handle
        self.ledger.open_account("a", OpeningTerms(10.0, 1e-5))
        policy = self.session.policy.digest()
        self.manifest = run_manifest(tensors, run_id=self.session.run_id, policy_digest=policy)
        self.control.orchestrator.begin(run_terms(self.manifest, self.session.policy, self.session.collateral), "s")
        self.storage = storage or PackageStorage.open(str(home / "packages"))
        self.notices, self.metrics, self.clock = [], Counted(), Clock()
        self.keeper = self.start()
        # It tidies up first, and would take what a test leaves there for a dead writer's.
        self.pump(lambda: self.keeper._job is None)

    def start(self):
        """Return a keeper, as of a driver that starts."""
        return Checkpoints(
            CheckpointConfig(**self.settings),
            self.storage,
            self.control,
            self.manifest,
            (),
            self.notices.append,
            self.metrics,
            monotonic=self.clock,
        )

    def snapshot(self, step, **changes):
        return snapshot(self.manifest, step, **self.heads(), **changes)

    def heads(self):
        """Return the newest entries of ledger and evidence log, as a package states them."""
        ledger, log = self.ledger.view().head, self.orchestrator.log_position()
        names = "ledger_sequence", "ledger_hash", "log_length", "log_hash"
        return dict(zip(names, (ledger.sequence, ledger.hash, log.length, log.root), strict=True))

    def commit(self, step):
        digest = snapshot(self.manifest, step).stated.model_digest
        head = self.ledger.view().head
        self.orchestrator.commit(
            (
                StepCommit(
                    step=step - 1,
                    released_digest=digest,
                    attempts=1,
                    ledger_sequence=head.sequence,
                    ledger_hash=head.hash,
                ),
            )
        )

    def offer(self, step, **changes):
        """Commit a step and offer its snapshot."""
        self.commit(step)
        self.keeper.offer(self.snapshot(step, **changes))

    def pump(self, condition):
        """Poll as the coordinator does, until ``condition``."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"it did not come to that; notices: {self.notices}"
            self.keeper.poll()
            time.sleep(0.001)

    def publish(self, step, **changes):
        """Offer a snapshot, and see it published and the retention applied."""
        before = self.metrics.written
        self.offer(step, **changes)
        self.pump(lambda: self.metrics.written > before and self.keeper._job is None)

    @property
    def steps(self):
        """Steps of the packages in the storage."""
        return [int(name[5:11]) for name in self.storage.names()]

    @property
    def logged(self):
        entries = self.orchestrator._run.books.log.entries()
        return [(e.kind, e.content["step"]) for e in entries if e.kind in ("sealed", "published")]

    def stated(self, name):
        with self.storage.reader(name, MANIFEST) as stream:
            return PackageManifest.model_validate_json(stream.read())

    def newest(self):
        return Restorer(self.storage, self.control, self.manifest).newest()

    def close(self):
        for actor in self.control.actors.values():
            actor.handle.close()


@pytest.fixture
def make(tmp_path):
    benches = []

    def made(**arguments):
        benches.append(Bench(tmp_path / f"run{len(benches)}", **arguments))
        return benches[-1]

    yield made
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(make):
    return make()


def code_of(action):
    with pytest.raises((EvidenceError, ConfigError)) as refusal:
        action()
    return refusal.value.code


def test_a_package_restores_the_run_bit_for_bit(bench):
    bench.publish(3)
    restored, original = bench.newest(), bench.snapshot(3)
    assert (restored.finished_steps, restored.package.manifest.model_digest) == (3, original.stated.model_digest)
    assert restored.parameters.tobytes() == original.parameters.tobytes()
    assert restored.state.keys() == original.state.keys()
    for name, array in original.state.items():
        assert (restored.state[name].dtype, restored.state[name].shape) == (array.dtype, array.shape)
        assert restored.state[name].tobytes() == array.tobytes()
    assert bench.logged == [("sealed", 3), ("published", 3)]
    assert bench.notices == []


def test_due_follows_the_frequency(make):
    keeper = make(checkpoint_frequency=4).keeper
    assert [step for step in range(13) if keeper.due(step)] == [4, 8, 12]
    never = make(checkpoint_frequency=0).keeper
    assert not any(never.due(step) for step in range(100))


def test_offering_and_polling_never_wait_for_the_storage(make, tmp_path):
    storage = Stuck(PackageStorage.open(str(tmp_path / "packages")))
    bench = make(storage=storage)
    bench.offer(1)
    bench.pump(lambda: bench.keeper._job is not None and bench.keeper._waiting is None)
    for step in (2, 3, 4, 5):
        bench.offer(step)
        bench.keeper.poll()
    assert bench.steps == []
    storage.go.set()
    bench.pump(lambda: bench.metrics.written == 2)
    assert bench.steps == [1, 5], "waiting snapshots give way to newer ones, the newest does not"


def test_only_the_main_thread_asks_actors(make, monkeypatch):
    asked = set()
    bench = make()
    call = bench.backend.call
    monkeypatch.setattr(bench.backend, "call", lambda *a, **k: asked.add(threading.current_thread()) or call(*a, **k))
    bench.publish(1)
    assert asked == {threading.main_thread()}


def test_a_package_waits_for_its_step_to_be_committed(bench):
    bench.commit(1)
    bench.keeper.offer(bench.snapshot(2))
    bench.pump(lambda: bench.keeper._drafted is not None)
    bench.keeper.poll()
    assert (bench.steps, bench.logged) == ([], [])
    bench.commit(2)
    bench.pump(lambda: bench.metrics.written == 1)
    assert bench.steps == [2]


def test_close_finishes_what_was_offered(bench):
    bench.offer(1)
    bench.offer(2)
    assert bench.keeper.close(DEADLINE_S)
    assert bench.steps[-1] == 2
    assert bench.metrics.written == len(bench.steps)
    assert bench.notices == []


def test_close_says_what_it_could_not_finish(bench):
    bench.keeper.offer(bench.snapshot(7))
    assert not bench.keeper.close(1.0)
    assert bench.notices == ["the checkpoint of step 7 was not published."]
    assert bench.steps == []


def test_close_does_not_turn_in_circles_for_a_step_that_was_not_committed(bench):
    bench.keeper.offer(bench.snapshot(7))
    bench.pump(lambda: bench.keeper._drafted)
    bench.keeper.offer(bench.snapshot(8))
    assert not bench.keeper.close(DEADLINE_S)  # The bench's clock stands still, so a deadline would never pass.
    assert bench.notices == ["the checkpoint of step 7 was not published."]


def test_each_package_names_the_one_before(bench):
    bench.publish(1)
    bench.publish(2)
    first, second = (bench.stated(name) for name in bench.storage.names())
    assert (first.previous, second.previous) == (b"", first.digest())
    again = bench.start()
    assert again._previous == second.digest()


def test_the_newest_packages_stay(make):
    bench = make(num_to_keep=2)
    for step in range(1, 6):
        bench.publish(step)
    assert bench.steps == [4, 5]


@pytest.mark.parametrize(
    ("keep_best", "metric", "values", "kept"),
    [
        ("evaluation_accuracy", "accuracy", [0.5, 0.9, 0.7, 0.6], [2, 4]),
        ("evaluation_loss", "loss", [0.5, 0.1, 0.7, 0.6], [2, 4]),
        ("evaluation_accuracy", "accuracy", [0.5, 0.9, 0.7, 0.9], [4]),
        ("evaluation_accuracy", "loss", [0.5, 0.1, 0.7, 0.6], [4]),
    ],
)
def test_the_newest_and_the_best_are_never_deleted(make, keep_best, metric, values, kept):
    bench = make(num_to_keep=1, keep_best=keep_best)
    for step, value in enumerate(values, 1):
        bench.publish(step, **{f"evaluation_{metric}": value})
        assert step in bench.steps
    assert bench.steps == kept


def test_the_best_survives_a_driver_that_starts_again(make):
    bench = make(num_to_keep=1, keep_best="evaluation_accuracy")
    for step, value in ((1, 0.9), (2, 0.1)):
        bench.publish(step, evaluation_accuracy=value)
    bench.keeper = bench.start()
    bench.publish(3)
    assert bench.steps == [1, 3]


def test_what_is_not_this_runs_is_left_alone(make, tmp_path):
    bench = make(num_to_keep=1)
    site = Site(tmp_path / "site")
    foreign = site.publish(step=1)
    shutil.copytree(site.folder(foreign), bench.home / "packages" / foreign)
    for step in (2, 3):
        bench.publish(step)
    assert bench.steps == [1, 3]


def test_a_keeper_that_starts_removes_what_a_dead_one_left(make):
    bench = make()
    with bench.storage.draft(1).sink("parameters.safetensors.enc") as sink:
        sink.write(b"half")
    bench.keeper = bench.start()
    bench.pump(lambda: bench.keeper._job is None)
    assert list((bench.home / "packages").iterdir()) == []


@contextmanager
def full_disk(at_most):
    """Let no file of this process grow beyond ``at_most`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(make):
    bench = make(tensors=(TensorSpec(name="w", shape=(500_000,)), TensorSpec(name="b", shape=(1,))))
    bench.publish(1)
    with full_disk(2**20):
        bench.offer(2)
        bench.pump(lambda: bench.notices)
        bench.clock.now += RETRY_S
        bench.offer(3)
        bench.pump(lambda: bench.keeper._job is None and bench.keeper._waiting is not None)
        assert bench.newest().finished_steps == 1
    assert len(bench.notices) == 1
    assert "checkpoint of step 2" in bench.notices[0]
    assert "File too large" in bench.notices[0]
    assert bench.steps == [1]
    assert len(list((bench.home / "packages").iterdir())) == 1
    bench.keeper.poll()
    assert bench.keeper._job is None, "the next try comes after a while"
    bench.clock.now += RETRY_S
    bench.pump(lambda: bench.metrics.written == 2)
    assert bench.newest().finished_steps == 3
    assert bench.notices[1:] == ["checkpoints are published again, from step 3."]


@needs_moto
def test_an_s3_that_refuses_costs_a_checkpoint_and_not_the_run(make, bucket_urls):
    url = next(bucket_urls).replace("packages", "unreliable") + "&allow_bucket_creation=true&allow_bucket_deletion=true"
    bucket, _ = fs.FileSystem.from_uri(url)
    bench = make(storage=PackageStorage.open(url))
    bench.offer(1)
    bench.pump(lambda: bench.notices)
    assert "checkpoint of step 1" in bench.notices[0]
    assert bench.newest() is None
    bucket.create_dir("unreliable")
    bench.clock.now += RETRY_S
    bench.pump(lambda: bench.metrics.written == 1 and bench.keeper._job is None)
    bench.publish(2)
    assert bench.newest().finished_steps == 2
    assert bench.steps == [1, 2]


def test_without_a_package_there_is_nothing_to_restore(bench):
    assert bench.newest() is None


def test_an_older_package_presented_as_the_newest_is_refused(bench):
    bench.publish(1)
    bench.publish(2)
    bench.storage.delete("step-000002.tssp")
    assert code_of(bench.newest) == "package_rolled_back"
    bench.storage.delete("step-000001.tssp")
    assert code_of(bench.newest) == "package_rolled_back"


def test_a_package_whose_publishing_was_not_recorded_is_restored(bench, monkeypatch):
    bench.publish(1)
    monkeypatch.setattr(bench.orchestrator, "record_published", lambda *_: None)
    bench.publish(2)
    assert bench.orchestrator.newest_published().step == 1
    assert bench.newest().finished_steps == 2


def test_a_rolled_back_ledger_is_refused(bench, tmp_path):
    bench.publish(1)
    fresh = PrivacyLedger(f"sqlite:///{tmp_path / 'fresh.sqlite'}")
    actors = bench.control.actors
    actors["ledger"] = replace(actors["ledger"], handle=fresh)
    assert code_of(bench.newest) == "ledger_rolled_back"
    fresh.close()


def test_a_rolled_back_evidence_log_is_refused(bench, monkeypatch):
    bench.publish(1)
    monkeypatch.setattr(bench.orchestrator, "log_root_at", lambda length: None)
    assert code_of(bench.newest) == "log_rolled_back"


def test_a_package_of_another_run_or_signer_is_refused(bench, tmp_path):
    bench.publish(1)
    other = run_manifest(run_id="f" * 16)
    assert code_of(lambda: Restorer(bench.storage, bench.control, other).newest()) == "package_other_run"
    site = Site(tmp_path / "site")
    name = site.publish(step=9)
    shutil.copytree(site.folder(name), bench.home / "packages" / name)
    assert code_of(bench.newest) == "package_unknown_signer"


def test_a_package_that_was_not_sealed_to_the_run_is_refused(bench):
    site = Site(bench.home, manifest=bench.manifest)
    assert PackageSigner.load_or_create(bench.home / "signer").public == bench.orchestrator.package_signer()
    bench.commit(1)
    site.publish(step=1, **bench.heads())
    assert code_of(bench.newest) == "not_a_recipient"


def test_parameters_that_are_not_the_signed_ones_are_refused(bench):
    bench.commit(1)
    bench.publish(1, parameters=bench.snapshot(1).parameters + np.float32(1))
    assert code_of(bench.newest) == "package_parameters_differ"


def test_other_recipients_can_open_a_package(make, tmp_path):
    site = Site(tmp_path / "site")
    bench = make()
    bench.keeper._recipients += (RecipientPublic(name="auditor", key=site.recipient.public),)
    bench.publish(1)
    assert [each.name for each in bench.stated("step-000001.tssp").recipients] == ["run", "auditor"]


def test_an_orchestrator_that_starts_again_signs_what_the_lost_one_committed(bench):
    bench.commit(1)
    snapshot, lost = bench.snapshot(1), bench.control.actors["orchestrator"]
    bench.backend.stop(lost)
    bench.keeper.offer(snapshot)
    bench.pump(lambda: bench.metrics.written)
    assert bench.control.actors["orchestrator"] is not lost
    assert bench.newest().finished_steps == 1


def test_an_orchestrator_that_is_lost_for_good_ends_the_run(bench):
    bench.control.max_restarts = 0
    bench.commit(1)
    snapshot = bench.snapshot(1)
    bench.backend.stop(bench.control.actors["orchestrator"])

    def seal() -> None:
        bench.keeper.offer(snapshot)
        bench.pump(lambda: bench.metrics.written)

    with pytest.raises(RunFailedError, match="orchestrator"):
        seal()
