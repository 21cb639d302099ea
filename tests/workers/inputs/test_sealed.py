"""Sealed data: a slice opens with its key alone, as what was sealed; a run trains on it."""

import json
import pickle
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.data_marks import DataMarks, Likeness, likeness
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.release import key_commitment
from raycloak.attestation.orchestrator.revocations import revoke
from raycloak.attestation.orchestrator.state import state_file
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.attestation.sealed.sealed_data import (
    HEADER_FILE,
    SealedHeader,
    SealedSource,
    SliceKeys,
    Use,
    slice_file,
    slice_key,
)
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.report.words import evaluation_text, sealed_text
from raycloak.coordinator.training import admitted
from raycloak.metrics.errors import (
    BudgetError,
    ConfigError,
    DatasetError,
    EvidenceError,
    ProtocolError,
    RaycloakError,
    RefusedError,
)
from raycloak.workers import train_worker
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.datasets import ArrayDataset, dataset_form, slice_digest, slice_ids
from raycloak.workers.inputs.descriptor import DatasetDescriptor, OpenedDataset
from raycloak.workers.inputs.example_codes import example_marks
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.sealed import SealedDataset, seal_dataset
from raycloak.workers.inputs.units import Units
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Measurement
from raycloak.workers.train_worker import TrainWorker
from raycloak.workers.workload import PlannedWorkload
from tests.protocol import NOW, VIRTUAL_WORKERS, HandRun, config, examples, mechanism, whole_run, worker_setup

KEY, POLICY, COUNT = Secret(b"d" * 32), b"p" * 32, 3
DEMAND = SealedDemand(ledger_key=b"l" * 32, account="patients", least_noise_multiplier=1.5)


@pytest.fixture
def plain() -> ArrayDataset:
    return ArrayDataset(*examples())


@pytest.fixture
def folder(plain, tmp_path):
    seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "sealed", demand=DEMAND)
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


@pytest.mark.parametrize(
    "change",
    [
        {"policy_digest": b"q" * 32},
        {"dataset_id": bytes(16)},
        {"demand": DEMAND.model_copy(update={"ledger_key": b"m" * 32})},
        {"demand": DEMAND.model_copy(update={"account": "nobody"})},
        {"demand": DEMAND.model_copy(update={"least_noise_multiplier": 1e-9})},
    ],
)
def test_a_slice_belongs_to_its_dataset_policy_and_demand(folder, change):
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
    relabelled = relabelled.model_copy(update={"demand": None})  # no header of an evaluation split has one
    (folder / "header.json").write_bytes(relabelled.encode())
    with pytest.raises(DatasetError, match="sealed_changed"):
        SealedDataset(folder, "evaluation").unlock({0: slice_key(KEY, training, 0)})
    with pytest.raises(EvidenceError, match="key_not_committed"):
        SealedDataset(folder, "evaluation").unlock({0: slice_key(KEY, relabelled, 0)})


def test_a_url_is_no_name_of_a_folder_below_the_base(folder, tmp_path):
    below = tmp_path / "s3:" / "bucket"
    below.mkdir(parents=True)
    (below / "sealed").symlink_to(folder)
    for kind in ("sealed", "ray_data", "canaries"):
        with pytest.raises(DatasetError, match=rf"dataset_unreadable.*kind {kind} .*URL"):
            DatasetDescriptor(kind=kind, path="s3://bucket/sealed", function="a:b").open_slices(tmp_path)
    assert len(DatasetDescriptor(kind="sealed", path="s3:/bucket/sealed").open(tmp_path))


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
    relabelled = SealedHeader.load(folder).model_copy(update={"use": "evaluation", "demand": None})
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


def test_training_data_has_a_demand_and_an_evaluation_split_has_none(plain, tmp_path):
    for use, demand in (("training", None), ("evaluation", DEMAND)):
        with pytest.raises(ValueError, match="training data comes with a demand"):
            seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "other", use, demand)
    assert not (tmp_path / "other").exists()


def test_data_sealed_in_a_former_format_is_refused_by_name(folder):
    content = json.loads((folder / "header.json").read_bytes())
    older = {name: value for name, value in content.items() if name != "marks"} | {"format": 3}
    (folder / "header.json").write_text(json.dumps(older, sort_keys=True, separators=(",", ":")))
    with pytest.raises(ConfigError, match=r"former_format: .*header\.json is a SealedHeader of format 3"):
        SealedDataset(folder)
    for other in ({"format": 4}, [], "x"):
        (folder / "header.json").write_text(json.dumps(other))
        with pytest.raises(ConfigError, match="sealed_data"):
            SealedDataset(folder)


def test_the_fingerprint_of_sealed_data_is_that_of_its_header(plain, folder, tmp_path):
    """A second seal of the same examples is another dataset, and known to be of the same people by its sketch."""
    seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "again", demand=DEMAND)
    found = []
    for name in ("sealed", "again"):
        descriptor = DatasetDescriptor(kind="sealed", path=name)
        found.append(data_marks(descriptor, descriptor.open_slices(tmp_path), tmp_path))
    assert [each.fingerprint for each in found] == [
        SealedHeader.load(tmp_path / name).digest() for name in ("sealed", "again")
    ]
    assert found[0].fingerprint != found[1].fingerprint
    assert likeness(*found) is Likeness.MOST_EXAMPLES
    # The same examples in the clear, under the same key.
    assert example_marks(plain, KEY).sketch == found[0].sketch


def test_a_worker_computes_nothing_without_noise_on_sealed_data_whatever_it_is_told(folder):
    """Neither a gradient nor a measurement, and not even if its driver calls the data public."""
    descriptor = DatasetDescriptor(kind="sealed", path=str(folder), public=True)
    setup = worker_setup(config(), folder.parent)
    worker = TrainWorker("worker-0", None, lambda: 0.0)
    worker.prepare(setup.model_copy(update={"dataset": descriptor}))
    clear = mechanism(private=False)
    counts = Measurement(
        mechanism=mechanism(private=False, query="class_counts", sample_rate=1.0), every=0, loss_bound=0.0
    )
    for released in ((clear,), (mechanism(), counts)):
        with pytest.raises(RefusedError, match="not_public: this worker's data is sealed"):
            worker.compute_known_answer(*released)


def test_a_measurement_without_noise_needs_public_data_too(tmp_path):
    worker = TrainWorker("worker-0", None, lambda: 0.0)
    worker.prepare(worker_setup(config(), tmp_path))
    counts = Measurement(
        mechanism=mechanism(private=False, query="class_counts", sample_rate=1.0), every=0, loss_bound=0.0
    )
    with pytest.raises(RefusedError, match="not_public"):
        worker.compute_known_answer(mechanism(), counts)


def sealed_run(home, policy_digest=None, demand=(), fingerprint=None, listed=None, **arguments):
    """Return a run on sealed examples; sealed for its own policy, ledger and account, unless something else is given.

    The account is bound to them, or to the data of another fingerprint.
    """
    vendor = SimulatedVendor.load_or_create(home / "simulator")
    own = simulated_policy(vendor, code_measurement()).model_copy(update={"code": listed}).digest()
    with closing(PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}")) as ledger:
        demanded = DEMAND.model_copy(update={"ledger_key": ledger.public_key, **dict(demand)})
        judged_by, data = policy_digest or own, ArrayDataset(*examples())
        header = seal_dataset(data, VIRTUAL_WORKERS, judged_by, KEY, home / "sealed", demand=demanded)
        ledger.open_account(
            "patients", OpeningTerms(20.0, 1e-5), data=DataMarks(fingerprint=fingerprint or header.digest())
        )
    seal_dataset(ArrayDataset(*split()), VIRTUAL_WORKERS, own, KEY, home / "split", "evaluation")
    (home / "data.key").touch(mode=0o600)
    (home / "data.key").write_text(KEY.reveal().hex())
    dataset = {"kind": "sealed", "path": str(home / "sealed"), "key_file": str(home / "data.key")}
    evaluation = {"dataset": dataset | {"path": str(home / "split"), "public": True}, "every": 2}
    named = {"account": "patients"}
    fields = {"dataset": dataset, "evaluation": evaluation, "ledger": named}
    return whole_run(home, listed=listed, **fields | arguments)


def split():
    """Return examples to evaluate on."""
    features, labels = examples(64)
    return features[40:], labels[40:]


def released(run, kind):
    """Return the virtual workers of each member whose keys of this kind were released to it."""
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
    rows = list(plan_rows(run.train().plan))
    assert ("data", sealed_text(True)) in rows
    assert ("evaluation data", evaluation_text("sealed")) in rows
    assert run.finished.manifest.dataset_fingerprint == SealedHeader.load(tmp_path / "sealed").digest()
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
    assert "release_refused" in log_of(run)
    assert "released" not in log_of(run)


def project(home):
    """Write code of a run's own; return its digest."""
    (home / "data").mkdir()
    (home / "data" / "bundled_code.py").write_text("from torch import nn\n\ndef model():\n    return nn.Linear(6, 3)\n")
    return CodeBundle.read(home / "data").digest


def test_a_run_of_code_that_the_policy_lists_opens_the_seal(tmp_path, own_imports):
    run = sealed_run(tmp_path, listed=(project(tmp_path),), model="bundled_code:model")
    run.train()
    assert released(run, "dataset")


def test_a_run_of_unlisted_code_gets_no_slice_even_for_members_that_state_none(tmp_path, monkeypatch, own_imports):
    """The orchestrator reads the run's contract, as every other guard does; here all others are off."""
    genuine = Attester.present
    monkeypatch.setattr(Attester, "present", lambda self, challenge, *terms: genuine(self, challenge, *terms[:2]))
    monkeypatch.setattr(train_worker, "check_code", lambda *_: None)
    own = simulated_policy(SimulatedVendor.load_or_create(tmp_path / "simulator"), code_measurement())
    policy, code = own.model_copy(update={"code": (b"x" * 32,)}), project(tmp_path)
    run = sealed_run(tmp_path, policy.digest(), listed=(code,), model="bundled_code:model")
    run.change(policy=policy)
    with pytest.raises(RaycloakError, match=f"code_unlisted.*the code {code.hex()} of the run"):
        run.train()
    assert "released" not in log_of(run)
    assert "release_refused" in log_of(run)


def log_of(run):
    """Return the kind of every entry of a run's evidence log, also of one that failed."""
    with closing(sqlite3.connect(state_file(run.home / "orchestrator", run.session.run_id))) as log:
        return [kind for (kind,) in log.execute("SELECT kind FROM log_entries")]


OTHER_TERMS = [
    ({"ledger_key": b"m" * 32}, {}, "the ledger 6d6d"),
    ({"account": "others"}, {}, "the account 'others', and the run pays from 'patients'"),
    ({"least_noise_multiplier": 2.5}, {}, "at least 2.5, and the run has a release with 2"),
    ({}, {"measurements": {"class_counts": {"classes": 3, "noise_multiplier": 1.0}}}, "at least 1.5, and .* with 1"),
]


@pytest.mark.parametrize(("demand", "arguments", "why"), OTHER_TERMS)
@pytest.mark.parametrize("guard", ["driver", "worker", "orchestrator"])
def test_a_run_on_other_terms_than_the_owner_demands_gets_no_slice(
    guard, demand, arguments, why, tmp_path, monkeypatch
):
    """Worker and orchestrator refuse it alone, whatever the driver does; an honest driver registers nothing."""
    if guard != "orchestrator":
        monkeypatch.setattr(SliceKeys, "require_demand", lambda *_: None)
    if guard != "worker":
        monkeypatch.setattr(PlannedWorkload, "check", lambda *_: None)
    if guard != "driver":
        monkeypatch.setattr(admitted, "_require_demanded", lambda *_: None)
    run = sealed_run(tmp_path, demand=demand, **arguments)
    with pytest.raises(RaycloakError, match=f"sealed_demand.*{why}"):
        run.train()
    if guard == "driver":
        assert run.entries == 1
        return
    assert "released" not in log_of(run)
    assert ("release_refused" in log_of(run)) == (guard == "orchestrator")
    assert not run.stage.calls("step")


def test_a_driver_that_shows_the_orchestrator_another_manifest_gets_no_slice(plain, tmp_path):
    """Nor without one: what counts is the manifest whose digest is in every piece of evidence."""
    run = HandRun(tmp_path).manifest
    terms = {"ledger_key": run.ledger_key, "account": run.account}
    header = seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "sealed", demand=DEMAND.model_copy(update=terms))
    keys = SliceKeys(header, KEY)
    keys.require_demand(run.encode(), run.digest())
    weaker = run.model_copy(update={"account": "others"})
    for shown in (b"", weaker.encode()):
        with pytest.raises(EvidenceError, match=r"sealed_demand: .* was not given, or is another one"):
            keys.require_demand(shown, run.digest())
    with pytest.raises(EvidenceError, match="pays from 'others'"):
        keys.require_demand(weaker.encode(), weaker.digest())
    clear = run.computation.mechanism.model_copy(update={"private": False, "noise_multiplier": 9.0})
    without = run.model_copy(update={"computation": run.computation.model_copy(update={"mechanism": clear})})
    with pytest.raises(EvidenceError, match="the run has a release with 0"):
        keys.require_demand(without.encode(), without.digest())


THIN = {
    "share": {"honest_share": 1.1e6},
    "sigma": {},
    "grid": {"gamma_log2": -60},
    "shares of nobody": {"virtual_workers": 8_000_000},
    "no sensitivity": {"max_grad_norm": -1.0},
    "beyond floats": {"sigma": 1e300, "honest_share": 1e300},
    "beyond all floats": {"gamma_log2": 10**400},
}


@pytest.mark.parametrize("thin", THIN)
def test_a_demand_is_held_against_the_noise_that_a_release_has_and_not_what_it_claims(plain, tmp_path, thin):
    """The orchestrator reads numbers that no `Mechanism` could have; a worker cannot even read such a manifest."""
    counts = {"class_counts": {"classes": 3, "noise_multiplier": 5.0}}
    run = HandRun(tmp_path, measurements=counts).manifest
    terms = {"ledger_key": run.ledger_key, "account": run.account, "least_noise_multiplier": 1.0}
    header = seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "sealed", demand=DEMAND.model_copy(update=terms))
    keys = SliceKeys(header, KEY)
    keys.require_demand(run.encode(), run.digest())
    (measured,) = run.computation.measurements
    changes = {"sigma": measured.mechanism.sigma / 1000} | THIN[thin]
    thinned = measured.model_copy(update={"mechanism": measured.mechanism.model_copy(update=changes)})
    computation = run.computation.model_copy(update={"measurements": (thinned,)})
    stated = run.model_copy(update={"computation": computation})
    with pytest.raises(EvidenceError, match=r"sealed_demand: .* and the run has a release with") as refusal:
        keys.require_demand(stated.encode(), stated.digest())
    assert float(refusal.value.message.rpartition("with ")[2].rstrip(".")) < 0.01
    with pytest.raises(ProtocolError, match="mechanism_bounds"):
        parse(Manifest, stated.encode())


def test_an_account_that_is_bound_to_another_seal_pays_nothing_for_this_one(tmp_path):
    run = sealed_run(tmp_path, fingerprint=b"f" * 32)
    with pytest.raises(BudgetError, match=r"dataset_mismatch: .*6666.*is [0-9a-f]{64}"):
        run.train()
    assert "released" not in log_of(run)


CUT = np.array([3, 4, 9, 12, 14, 20, 40])
"""Ends of the rows of seven units, of the 40 examples in a shuffled order."""


@pytest.fixture
def people() -> Units:
    return Units(np.random.default_rng(3).permutation(40), CUT)


@pytest.fixture
def of_people(plain: ArrayDataset, people: Units, tmp_path: Path) -> Path:
    seal_dataset(plain, COUNT, POLICY, KEY, tmp_path / "people", demand=DEMAND, units=("patient_id", people))
    return tmp_path / "people"


def opened_people(folder: Path) -> OpenedDataset:
    described = DatasetDescriptor(kind="sealed", path=folder.name, unit="patient_id", rows_per_unit=2)
    return described.open_slices(folder.parent)


def test_guarantee_a_slice_holds_all_rows_of_its_units(plain: ArrayDataset, people: Units, of_people: Path) -> None:
    data = opened_people(of_people)
    assert data.units is not None
    assert (len(data.units), data.form.num_examples, data.form.population) == (7, 40, 7)
    data.slices.take(keys_of(of_people, 1), {1})
    own = slice_ids(1, COUNT, 7)
    assert data.units.sizes(own).tolist() == people.sizes(own).tolist()
    for unit in own:
        mine, original = data.units.rows_of(np.array([unit])), people.rows_of(np.array([unit]))
        for part, expected in zip(data.examples.batch(mine), plain.batch(original), strict=True):
            assert part.tobytes() == expected.tobytes()
    words = np.random.default_rng(4).integers(0, 2**64, (2, 3), np.uint64)
    (rows, present), (others, there) = (each.chosen(own, 3, words) for each in (data.units, people))
    assert present.tolist() == there.tolist()
    assert data.examples.batch(rows.ravel())[0].tobytes() == plain.batch(others.ravel())[0].tobytes()
    with pytest.raises(DatasetError, match="slice_sealed"):
        data.units.rows_of(np.array([0]))


def test_sealed_units_have_the_digest_of_those_in_the_clear(
    plain: ArrayDataset, people: Units, of_people: Path
) -> None:
    data = opened_people(of_people)
    data.slices.take(keys_of(of_people, 0, 1, 2), {0, 1, 2})
    for v in range(COUNT):
        own = slice_ids(v, COUNT, 7)
        assert slice_digest(data.examples, own, data.units) == slice_digest(plain, own, people)


def test_keys_of_sealed_units_open_nothing_under_another_name_of_theirs(of_people: Path) -> None:
    header = SealedHeader.load(of_people)
    keys = {slice_key(KEY, header.model_copy(update={"unit": unit}), 0).reveal() for unit in ("patient_id", "x", None)}
    assert len(keys) == 3


def test_another_unit_than_the_one_that_was_sealed_is_refused(of_people: Path, folder: Path) -> None:
    for path, unit in ((of_people, None), (of_people, "clinic"), (folder, "patient_id")):
        with pytest.raises(ConfigError, match="sealed_data"):
            DatasetDescriptor(kind="sealed", path=path.name, unit=unit).open_slices(path.parent)


def test_a_header_with_another_unit_opens_no_slice(of_people: Path) -> None:
    header = SealedHeader.load(of_people)
    for change in ({"unit": "clinic"}, {"unit": None}):
        other = header.model_copy(update=change)
        assert slice_key(KEY, other, 0).reveal() != slice_key(KEY, header, 0).reveal()


def test_slices_that_do_not_add_up_to_the_rows_of_the_header_are_refused(of_people: Path) -> None:
    header = SealedHeader.load(of_people)
    assert isinstance(header.form["num_examples"], int)
    form = {**header.form, "num_examples": header.form["num_examples"] + 1}
    (of_people / HEADER_FILE).write_bytes(header.model_copy(update={"form": form}).encode())
    with pytest.raises(ConfigError, match="other sizes than its header"):
        SealedDataset(of_people)
