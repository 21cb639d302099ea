"""Sealed data: a slice opens with its key alone, as what was sealed; a run trains on it."""

import pickle
import sqlite3
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.keys.release import key_commitment
from raycloak.attestation.orchestrator.revocations import revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.sealed.sealed_data import SealedHeader, SealedSource, SliceKeys, Use, slice_file, slice_key
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.cli.tables import evaluation_text, plan_rows, sealed_text
from raycloak.metrics.errors import ConfigError, DatasetError, EvidenceError, RaycloakError
from raycloak.workers.inputs.datasets import ArrayDataset, dataset_form, slice_ids
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.sealed import SealedDataset, seal_dataset
from tests.protocol import NOW, VIRTUAL_WORKERS, examples, whole_run

KEY, POLICY, COUNT = Secret(b"d" * 32), b"p" * 32, 3


@pytest.fixture
def plain() -> ArrayDataset:
    return ArrayDataset(*examples())


@pytest.fixture
def folder(plain, tmp_path):
    seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "sealed")
    return tmp_path / "sealed"


def keys_of(folder, *slices):
    header = SealedHeader.load(folder)
    return {v: slice_key(KEY, header, v) for v in slices}


def test_only_the_slices_whose_keys_were_given_open(plain, folder):
    sealed = DatasetDescriptor(kind="sealed", path="sealed").open(folder.parent)
    assert dataset_form(sealed) == dataset_form(plain)
    sealed.unlock(keys_of(folder, 0, 2))
    for v in (0, 2):
        ids = slice_ids(v, COUNT, len(plain))[::-1]
        for mine, original in zip(sealed.batch(ids), plain.batch(ids), strict=True):
            assert (mine.dtype, mine.tobytes()) == (original.dtype, original.tobytes())
    for ids in ([1], [0, 1], [2, 3, 4]):
        with pytest.raises(DatasetError, match="slice_sealed"):
            sealed.batch(np.asarray(ids))
    sealed.lock_all_but({2})
    assert sealed.batch(np.array([2]))[0].tobytes() == plain.batch(np.array([2]))[0].tobytes()
    with pytest.raises(DatasetError, match="slice_sealed"):
        sealed.batch(np.array([0]))


def test_no_example_is_in_the_files(plain, folder):
    features, _ = plain.batch(np.arange(len(plain)))
    stored = b"".join(path.read_bytes() for path in folder.iterdir())
    assert all(row.tobytes() not in stored for row in features)


def test_another_key_and_any_change_of_a_slice_are_refused(folder):
    with pytest.raises(EvidenceError, match="key_not_committed"):
        SealedDataset(folder).unlock({0: keys_of(folder, 1)[1]})
    first, second = slice_file(folder, 0), slice_file(folder, 1)
    honest, other = first.read_bytes(), second.read_bytes()
    for changed in (other, honest[:-1], honest + b"0", bytes([honest[0] ^ 1]) + honest[1:]):
        first.write_bytes(changed)
        with pytest.raises(DatasetError, match="sealed_changed"):
            SealedDataset(folder).unlock(keys_of(folder, 0))


@pytest.mark.parametrize("change", [{"policy_digest": b"q" * 32}, {"dataset_id": bytes(16)}])
def test_a_slice_belongs_to_its_dataset_and_policy(folder, change):
    keys, header = keys_of(folder, 0), SealedHeader.load(folder)
    changed = header.model_copy(update=change)
    assert slice_key(KEY, changed, 0).reveal() != keys[0].reveal()
    (folder / "header.json").write_bytes(changed.encode())
    with pytest.raises(DatasetError, match="sealed_changed"):
        SealedDataset(folder).unlock(keys)


def test_a_key_of_a_training_slice_opens_no_evaluation_slice_and_the_other_way(plain, folder, tmp_path):
    """Sealed with one key of the owner, for the same policy, from the same examples."""
    seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "split", "evaluation")
    training, evaluation = (SealedHeader.load(each) for each in (folder, tmp_path / "split"))
    assert (training.use, evaluation.use) == ("training", "evaluation")
    with pytest.raises(EvidenceError, match="key_not_committed"):
        SealedDataset(folder).unlock(keys_of(tmp_path / "split", 0))
    with pytest.raises(EvidenceError, match="key_not_committed"):
        SealedDataset(tmp_path / "split", "evaluation").unlock(keys_of(folder, 0))
    # The same header but for its use, so that only use tells the keys apart: relabelling a dataset opens nothing.
    relabelled = training.model_copy(update={"use": "evaluation"})
    assert relabelled.context(0) != training.context(0)
    assert slice_key(KEY, relabelled, 0).reveal() != slice_key(KEY, training, 0).reveal()
    # And by a purpose of its own, so that no other use of the key derives one of an evaluation slice.
    as_training = derive(KEY, Purpose.SEALED_SLICE, relabelled.context(0))
    assert slice_key(KEY, relabelled, 0).reveal() != as_training.reveal()
    (folder / "header.json").write_bytes(relabelled.encode())
    with pytest.raises(DatasetError, match="sealed_changed"):
        SealedDataset(folder, "evaluation").unlock({0: slice_key(KEY, training, 0)})
    with pytest.raises(EvidenceError, match="key_not_committed"):
        SealedDataset(folder, "evaluation").unlock({0: slice_key(KEY, relabelled, 0)})


def test_a_dataset_is_opened_for_the_use_that_it_was_sealed_for_alone(plain, folder, tmp_path):
    key_file = tmp_path / "data.key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY.reveal().hex())
    seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "split", "evaluation")
    uses: list[Use] = ["training", "evaluation"]
    for use, other, path in zip(uses, uses[::-1], (folder, tmp_path / "split"), strict=True):
        terms = SealedSource(SealedHeader.load(path), str(key_file))
        SealedDataset(path, use)
        SliceKeys.open(terms, use)
        for refused in (partial(SealedDataset, path), partial(SliceKeys.open, terms)):
            with pytest.raises(ConfigError, match=f"sealed for {use}"):
                refused(other)
    relabelled = SealedHeader.load(folder).model_copy(update={"use": "evaluation"})
    with pytest.raises(ConfigError, match="dataset_key"):
        SliceKeys.open(SealedSource(relabelled, str(key_file)), "evaluation")


def test_the_orchestrator_takes_no_other_dataset_key(folder, tmp_path):
    key_file = tmp_path / "data.key"
    key_file.touch(mode=0o600)
    for content, accepted in ((KEY.reveal(), True), (bytes(32), False), (b"", False)):
        key_file.write_text(content.hex())
        terms = SealedSource(SealedHeader.load(folder), str(key_file))
        if accepted:
            assert key_commitment(SliceKeys.open(terms, "training").of(1)) == terms.header.key_commitments[1]
        else:
            with pytest.raises(ConfigError, match="dataset_key"):
                SliceKeys.open(terms, "training")


def sealed_run(home, policy_digest=None, **arguments):
    """A run on sealed examples; sealed for its own policy unless another is given."""
    vendor = SimulatedVendor.load_or_create(home / "simulator")
    own = simulated_policy(vendor, code_measurement()).digest()
    seal_dataset(ArrayDataset(*examples()), VIRTUAL_WORKERS, policy_digest or own, KEY, home / "sealed")
    seal_dataset(ArrayDataset(*split()), VIRTUAL_WORKERS, own, KEY, home / "split", "evaluation")
    (home / "data.key").touch(mode=0o600)
    (home / "data.key").write_text(KEY.reveal().hex())
    dataset = {"kind": "sealed", "path": str(home / "sealed"), "key_file": str(home / "data.key")}
    evaluation = {"dataset": dataset | {"path": str(home / "split"), "public": True}, "every": 2}
    return whole_run(home, dataset=dataset, evaluation=evaluation, **arguments)


def split():
    """Examples to evaluate on."""
    features, labels = examples(64)
    return features[40:], labels[40:]


def released(run, kind):
    """Virtual workers of each member whose keys of this kind were released to it."""
    found = {}
    for entry, body in run.evidence:
        if entry == "released" and body["kind"] == kind:
            found.setdefault(body["member_id"], set()).update(body["virtual_workers"])
    return found


def test_a_run_trains_on_sealed_data_and_its_driver_opens_none(tmp_path):
    """Nor of the split that it is evaluated on.

    A worker is revoked after the first step: its slices move, with their keys, and it gets none any more.
    """
    opened = {}

    def watch(worker, name):
        opened[name] = worker

    def take_back(call):
        if (call.method, call.index) == ("open_step", 1):
            state = state_file(tmp_path / "orchestrator", run.session.run_id)
            revoke(state, "member", "worker-1", reason="stolen", now=NOW)

    run = sealed_run(tmp_path, tamper=watch, disturb=take_back)
    (tmp_path / "data" / "examples.npz").unlink()
    rows = plan_rows(run.train().plan)
    assert ("data", sealed_text(True)) in rows
    assert ("evaluation data", evaluation_text("sealed")) in rows
    assert run.left == [("worker-1", "revoked")]
    given = released(run, "dataset")
    assert given == released(run, "virtual_worker") == released(run, "evaluation")
    assert len(given["worker-1"]) < VIRTUAL_WORKERS
    assert set().union(*(given[name] for name in given if name != "worker-1")) == set(range(VIRTUAL_WORKERS))
    kinds = [entry for entry, _ in run.evidence]
    later = [body["member_id"] for entry, body in run.evidence[kinds.index("revoked") :] if entry == "released"]
    assert later
    assert "worker-1" not in later
    for name, worker in opened.items():
        assert set(worker._stage.planned.workload.dataset._open) == given[name]
        assert set(worker._stage.planned.workload.split.dataset._open) == given[name]
    features = np.concatenate([examples()[0], split()[0]])
    talks = [talk for talk in run.stage.log if talk[0].member_id.startswith(("worker", "aggregator"))]
    sent = [pickle.dumps((call.arguments, [each.value for each in references])) for call, references in talks]
    assert sent
    assert not any(row.tobytes() in message for row in features for message in sent)


def test_data_sealed_for_another_policy_is_not_released(tmp_path):
    run = sealed_run(tmp_path, POLICY)
    with pytest.raises(RaycloakError, match="release_denied"):
        run.train()
    with closing(sqlite3.connect(state_file(tmp_path / "orchestrator", run.session.run_id))) as log:
        kinds = [kind for (kind,) in log.execute("SELECT kind FROM log_entries")]
    assert "release_refused" in kinds
    assert "released" not in kinds
