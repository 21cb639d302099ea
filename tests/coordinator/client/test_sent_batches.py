"""A client's side of sent data: what it refuses to encrypt, and what it encrypts."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.sealed.sent_batch import SentBatch
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.client.sent_batches import (
    DataKeys,
    DataTerms,
    SentExamples,
    SentRun,
)
from raycloak.coordinator.config import home
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.metrics.errors import ConfigError, EvidenceError
from raycloak.metrics.service_errors import ServiceValidationError
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.sent_rows import SentForm, row_bytes
from raycloak.workers.terms.manifest import Manifest
from tests.owner import Owner, key_service
from tests.protocol import VIRTUAL_WORKERS, whole_run

SENT: dict[str, Any] = {
    "kind": "sent",
    "shape": [6],
    "classes": 3,
    "max_participations": 2,
    "max_examples_per_step": 20,
}
DATASET = DatasetConfig(**SENT)
TEXT = DatasetConfig(**SENT | {"shape": [4], "vocabulary": 10})
TOKENS = DatasetConfig(**SENT | {"shape": [4], "vocabulary": 10, "classes": None, "label_kind": "token"})
NUMBERS = DatasetConfig(**SENT | {"shape": [2, 3], "classes": None, "label_kind": "number"})


def policy() -> Policy:
    return simulated_policy(SimulatedVendor.load_or_create(home.simulator_folder()), code_measurement())


@pytest.fixture
def owner(tmp_path) -> Iterator[Owner]:
    with key_service(tmp_path) as owner:
        yield owner


@pytest.fixture
def manifest(owner) -> Manifest:
    """The manifest of an admitted run on the owner's data."""
    private = {"noise_multiplier": 2.0, "epsilon_cap": 20.0}
    given = {"dataset": SENT, "key_service": owner.section(), "dp_config": private, "expected_batch_size": 12}
    run = whole_run(home.home(), **given)
    try:
        return run.coordinator.admitted().manifest
    finally:
        run.events.close()
        for actor in run.session.control.actors.values():
            actor.handle.close()


def terms(manifest: Manifest, **changes: Any) -> DataTerms:
    return replace(DataTerms(manifest.account, manifest.ledger_key, 2.0, 2), **changes)


def keys(owner: Owner, of: DataTerms, **changes: Any) -> DataKeys:
    files = {"secret": owner.file.parent, "contract": owner.file, "policy": policy()} | changes
    return DataKeys(files["secret"], files["contract"], files["policy"], of)


def with_mechanism(manifest: Manifest, **changes: Any) -> Manifest:
    computation = manifest.computation
    mechanism = computation.mechanism.model_copy(update=changes)
    return manifest.model_copy(update={"computation": computation.model_copy(update={"mechanism": mechanism})})


def test_an_owner_accepts_its_own_terms_alone(owner, manifest, tmp_path):
    """Each term that a run could state otherwise is refused by its name, before anything is encrypted."""
    secret = tmp_path / "own.hex"
    own = keys(owner, terms(manifest), secret=secret)
    assert own.accept(manifest.encode(), DATASET).manifest == manifest
    # As it travels: any JSON of the same content.
    assert own.accept(json.dumps(json.loads(manifest.encode()), indent=1), DATASET).manifest == manifest
    wrong = {
        "charges the account": manifest.model_copy(update={"account": "another"}),
        "another ledger": manifest.model_copy(update={"ledger_key": b"x" * 32}),
        "no participations": with_mechanism(manifest, max_participations=None),
        "in 3 steps": with_mechanism(manifest, max_participations=3),
        "noise multiplier of 1.9": with_mechanism(manifest, noise_multiplier=1.9),
        "no participations, so": with_mechanism(manifest, private=False, max_participations=None),
        "takes 21 examples": with_mechanism(manifest, num_examples=21),
    }
    for what, other in wrong.items():
        with pytest.raises(EvidenceError, match="data_terms") as refusal:
            own.accept(other.encode(), DATASET)
        assert what in refusal.value.message
    for thin in (
        {"honest_share": 1.1e6},
        {"honest_share": math.nextafter(1.0, 2.0)},
        {"gamma_log2": -60},
        {"virtual_workers": 0},
        {"max_grad_norm": -1.0},
    ):
        less = {"sigma": manifest.computation.mechanism.sigma / 1000} | thin
        with pytest.raises(EvidenceError, match="data_terms: the run states what no proof covers: a mechanism of"):
            own.accept(with_mechanism(manifest, **less).encode(), DATASET)
    for other in (
        manifest.model_copy(update={"key_service": None}),
        manifest.model_copy(update={"policy_digest": b"x" * 32}),
        with_mechanism(manifest, virtual_workers=VIRTUAL_WORKERS + 1),
        manifest.model_copy(update={"key_commitments": manifest.key_commitments * 2}),
    ):
        with pytest.raises(EvidenceError, match="key_service_mismatch"):
            own.accept(other.encode(), DATASET)
    for text in (b"", b"{}", b"[1", '{"a":1}'):
        with pytest.raises(EvidenceError, match="run_manifest"):
            own.accept(text, DATASET)


def test_an_owner_has_keys_for_its_own_service_and_policy_alone(owner, manifest, tmp_path):
    (tmp_path / "other.hex").write_text("ef" * 32)
    of = terms(manifest)
    with pytest.raises(EvidenceError, match="owner_contract"):
        keys(owner, of, secret=tmp_path / "other.hex")
    stricter = policy().model_copy(update={"evidence_lifetime_s": 7})
    with pytest.raises(EvidenceError, match="owner_policy"):
        keys(owner, of, secret=tmp_path / "own.hex", policy=stricter)
    for files, code in (
        ({"secret": tmp_path / "none"}, "run_secret"),
        ({"secret": tmp_path / "own.hex", "contract": tmp_path / "other.hex"}, "key_service"),
        ({"secret": tmp_path / "own.hex", "contract": tmp_path / "none"}, "key_service"),
        ({"secret": tmp_path / "own.hex", "policy": tmp_path / "none"}, "policy"),
    ):
        with pytest.raises(ConfigError) as refusal:
            keys(owner, of, **files)
        assert refusal.value.code == code


@pytest.mark.parametrize(
    "changes",
    [
        {"least_noise_multiplier": 0.0},
        {"least_noise_multiplier": float("nan")},
        {"most_participations": 0},
        {"account": ""},
        {"ledger_key": b""},
    ],
)
def test_terms_without_a_bound_are_none(changes):
    with pytest.raises(ConfigError, match="data_terms"):
        replace(DataTerms("a", b"l" * 32, 1.0, 1), **changes)


def batch(dataset: DatasetConfig = DATASET, count: int = 5, **changes: Any) -> dict[str, Any]:
    shape = (count, *(dataset.shape or ()))
    given: dict[str, Any] = {"example_ids": [f"id {i}" for i in range(count)]}
    if dataset.vocabulary is None:
        given["features"] = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    else:
        given["features"] = np.arange(int(np.prod(shape))).reshape(shape) % dataset.vocabulary
    if dataset.label_kind == "number":
        given["labels"] = np.arange(count) / 2
    else:
        given["labels"] = (np.arange(count) % 3) if dataset.label_kind == "class" else given["features"]
    return {name: value for name, value in (given | changes).items() if value is not None}


F = np.float32
WRONG: list[tuple[DatasetConfig, dict[str, Any], str]] = [
    (DATASET, {"example_ids": None}, "example_ids"),
    (DATASET, {"example_ids": []}, "example_ids"),
    (DATASET, {"example_ids": "abcde"}, "example_ids"),
    (DATASET, {"example_ids": ["a", "b", "c", "d"]}, "features"),
    (DATASET, {"example_ids": ["a", "b", "c", "d", "a"]}, "example_ids"),
    (DATASET, {"example_ids": [1, 2, 3, 4, "4"]}, "example_ids"),
    (DATASET, {"example_ids": ["a", "b", "c", "d", ""]}, "example_ids"),
    (DATASET, {"example_ids": ["a", "b", "c", "d", None]}, "example_ids"),
    (DATASET, {"features": None}, "features"),
    (DATASET, {"features": np.zeros((5, 7), F)}, "features"),
    (DATASET, {"features": np.zeros((4, 6), F)}, "features"),
    (DATASET, {"features": [[1.0], [2.0, 3.0]]}, "features"),
    (DATASET, {"features": np.full((5, 6), np.nan)}, "features"),
    (DATASET, {"features": np.full((5, 6), 1e300)}, "features"),
    (DATASET, {"features": np.full((5, 6), "x")}, "features"),
    (DATASET, {"features": np.zeros((5, 6), complex)}, "features"),
    (DATASET, {"labels": None}, "labels"),
    (DATASET, {"labels": np.array([0, 1, 2, 3, 0])}, "labels"),
    (DATASET, {"labels": np.array([0, 1, 2, -1, 0])}, "labels"),
    (DATASET, {"labels": np.array([0, 1, 2, -100, 0])}, "labels"),
    (DATASET, {"labels": np.zeros(5)}, "labels"),
    (DATASET, {"labels": np.zeros((5, 1), int)}, "labels"),
    (DATASET, {"weights": np.ones(5)}, "weights"),
    (DATASET, {"attention_mask": np.ones((5, 6), int)}, "attention_mask"),
    (TEXT, {"features": np.full((5, 4), 10)}, "features"),
    (TEXT, {"features": np.full((5, 4), -2)}, "features"),
    (TEXT, {"features": np.zeros((5, 4))}, "features"),
    (TEXT, {"input_ids": np.zeros((5, 4), int)}, "input_ids"),
    (TEXT, {"features": None, "input_ids": np.full((5, 4), 11)}, "input_ids"),
    (TEXT, {"attention_mask": np.ones((5, 3), int)}, "attention_mask"),
    (TOKENS, {"labels": np.full((5, 4), 10)}, "labels"),
    (TOKENS, {"labels": np.zeros(5, int)}, "labels"),
    (NUMBERS, {"labels": np.full(5, np.inf)}, "labels"),
]


@pytest.mark.parametrize(("dataset", "changes", "name"), WRONG)
def test_a_wrong_batch_is_refused_by_its_field(dataset, changes, name):
    with pytest.raises(ServiceValidationError) as refusal:
        SentExamples(dataset).encode(batch(dataset, **changes))
    assert refusal.value.field == f"batch.{name}"


def test_a_batch_is_a_mapping():
    with pytest.raises(ServiceValidationError) as refusal:
        SentExamples(DATASET).encode([1, 2])  # type: ignore[arg-type]
    assert refusal.value.field == "batch"


@pytest.mark.parametrize("dataset", [DATASET, TEXT, TOKENS, NUMBERS])
def test_a_worker_reads_what_the_client_wrote(dataset):
    form = DatasetForm(
        num_examples=20,
        feature_shape=tuple(dataset.shape),
        feature_dtype="float32" if dataset.vocabulary is None else "int64",
        label_shape=tuple(dataset.shape) if dataset.label_kind == "token" else (),
        label_dtype="float32" if dataset.label_kind == "number" else "int64",
    )
    examples, sent = SentExamples(dataset), batch(dataset)
    assert examples.row_bytes == row_bytes(form)
    _, rows = examples.encode(sent)
    reader = SentForm(form, dataset.vocabulary, dataset.classes)
    for i, row in enumerate(rows):
        features, label = reader.decode(row)
        assert features.dtype == form.feature_dtype
        np.testing.assert_array_equal(features, sent["features"][i])
        np.testing.assert_array_equal(label, np.asarray(sent["labels"])[i].astype(form.label_dtype))
        assert reader.in_range(features, label)


def test_tokenized_text_and_tensors_are_taken_as_they_come():
    """A masked token is the padding that a Hugging Face model knows here; see `workers/inputs/text_data.py`."""
    ids = torch.arange(20).reshape(5, 4) % 10
    mask = (torch.arange(4) < 3).long().expand(5, 4)
    given = {"example_ids": np.arange(5), "input_ids": ids, "attention_mask": mask, "labels": torch.zeros(5).long()}
    _, rows = SentExamples(TEXT).encode(given)
    form = DatasetForm(num_examples=20, feature_shape=(4,), feature_dtype="int64", label_shape=(), label_dtype="int64")
    features, label = SentForm(form, 10, 3, padded=True).decode(rows[1])
    assert features.tolist() == [4, 5, 6, -1]
    assert SentForm(form, 10, 3, padded=True).in_range(features, label)
    assert not SentForm(form, 10, 3).in_range(features, label)


def test_a_sealed_batch_is_bound_to_its_step_and_counts_ids_without_telling_them(owner, manifest, tmp_path):
    run = keys(owner, terms(manifest), secret=tmp_path / "own.hex").accept(manifest.encode(), DATASET)
    one = run.seal_batch(batch(), client_id="c", step=1, number=2, first=4)
    head = SentBatch.read(one.content).head
    assert (head.run_id, head.manifest_digest, head.client_id) == (manifest.run_id, manifest.digest(), "c")
    assert (head.step, head.epoch, head.number, head.first, head.examples) == (1, 0, 2, 4, 5)
    assert one.example_hashes == head.hashes == b"".join(run.hash_of(f"id {i}") for i in range(5))
    # The same id has the same hash in every step, and another one in another run.
    later = run.seal_batch(batch(), client_id="c", step=2)
    assert later.example_hashes == one.example_hashes
    assert later.sha256 != one.sha256
    other = replace(run, manifest=manifest.model_copy(update={"run_id": "another"}))
    assert other.hash_of("id 0") != run.hash_of("id 0")
    assert run.hash_of(7) == run.hash_of("7")
    assert len(run.hash_of(7)) == 16
    assert "id 0" not in repr(one)
    assert "Secret" not in repr(run)


@pytest.mark.parametrize(
    ("place", "name"),
    [({"step": 3}, "step"), ({"step": -1}, "step"), ({"step": 0, "first": 16}, "batch.example_ids")],
)
def test_a_batch_beyond_the_plan_is_refused(owner, manifest, tmp_path, place, name):
    run: SentRun = keys(owner, terms(manifest), secret=tmp_path / "own.hex").accept(manifest.encode(), DATASET)
    with pytest.raises(ServiceValidationError) as refusal:
        run.seal_batch(batch(), client_id="c", **place)
    assert refusal.value.field == name
