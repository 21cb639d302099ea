"""Versions of a row: made by their words alone, and counted as rows of its unit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.attestation.core.keys import Purpose, derive
from raycloak.metrics.errors import ConfigError, ModelError, RefusedError
from raycloak.workers import virtual_worker
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.inputs.augmentation import WORDS, Augmentation, Versions
from raycloak.workers.inputs.datasets import ArrayDataset, DatasetForm, slice_ids
from raycloak.workers.inputs.units import Units
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.virtual_worker import Slice, VirtualWorkerComputer
from tests.drawn import spare_of
from tests.protocol import DATA_ROOT, SilentWords, keys_of, mechanism

SHAPE = (1, 4, 5)
FORM = DatasetForm(num_examples=8, feature_shape=SHAPE, feature_dtype="float32", label_shape=(), label_dtype="int64")
SHIFTS = Augmentation(kind="shift", copies=3, pixels=1, flip=True)
OWN = """
import numpy as np

def scaled(row, generator):
    return row * generator.uniform(0.5, 1.5, row.shape).astype(row.dtype)

def doubled(row, generator):
    return row.astype(np.float64)

def fails_on_twos(row, generator):
    if (row == 2).any():
        raise ValueError("the row has a two")
    return row

seen = []

def remembers(row, generator):
    seen.append(row.sum())
    return row + len(seen)

def writes(row, generator):
    row[:] = 0
    return row
"""


def words_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, (count, WORDS), dtype=np.uint64)


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, *SHAPE)).astype(np.float32)


def shifted(image: np.ndarray, down: int, across: int, mirrored: bool) -> np.ndarray:
    """Return the window of an image in a frame of zeros, by loops."""
    found = np.zeros_like(image)
    _, height, width = image.shape
    for y in range(height):
        for x in range(width):
            if 0 <= y + down < height and 0 <= x + across < width:
                found[:, y, x] = image[:, y + down, x + across]
    return found[..., ::-1] if mirrored else found


def test_a_version_is_a_shift_by_its_words_and_nothing_else():
    """Of 400 versions, each of nine shifts, mirrored or not, is missing with a chance of 18 * (17/18)^400 < 3e-9."""
    rows, words = np.repeat(rows_of(1), 400, 0), words_of(400)
    made = Versions(SHIFTS, FORM, ".").of(rows, words)
    known = {
        shifted(rows[0], down, across, mirrored).tobytes()
        for down in (-1, 0, 1)
        for across in (-1, 0, 1)
        for mirrored in (False, True)
    }
    assert {each.tobytes() for each in made} == known
    assert made.dtype == rows.dtype


def test_which_rows_stand_beside_a_row_changes_none_of_its_versions():
    versions, rows, words = Versions(SHIFTS, FORM, "."), rows_of(8), words_of(8)
    together = versions.of(rows, words)
    alone = [versions.of(rows[i : i + 1], words[i : i + 1])[0] for i in range(8)]
    assert np.array_equal(together, alone)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_a_function_of_the_users_own_makes_versions_by_a_generator_of_the_words(base: Path):
    versions = Versions(Augmentation(kind="own:scaled", copies=2), FORM, base)
    made, again = (versions.of(rows_of(3), words_of(3)) for _ in range(2))
    assert np.array_equal(made, again)
    assert not np.array_equal(made, versions.of(rows_of(3), words_of(3, seed=1)))
    assert len(versions.code) == 32


@pytest.mark.parametrize(
    ("name", "why"),
    [("doubled", "shape and type"), ("remembers", "other values for the same row"), ("writes", "fails on a row")],
)
def test_a_function_that_gives_no_version_is_refused_before_there_is_data(base: Path, name: str, why: str):
    with pytest.raises(ConfigError, match=why) as caught:
        Versions(Augmentation(kind=f"own:{name}", copies=2), FORM, base)
    assert caught.value.code == "augment"


def test_a_failure_on_an_example_says_nothing_of_it(base: Path):
    versions = Versions(Augmentation(kind="own:fails_on_twos", copies=1), FORM, base)
    with pytest.raises(ModelError) as caught:
        versions.of(np.full((1, *SHAPE), 2, np.float32), words_of(1))
    assert caught.value.code == "augment"
    assert "two" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("shape", [(20,), (1, 1, 20), (4, 0)])
def test_shifts_of_rows_that_are_no_images_are_refused(shape: tuple[int, ...]):
    with pytest.raises(ConfigError, match="longer"):
        Versions(SHIFTS, FORM.model_copy(update={"feature_shape": shape}), ".")


# --- in a step


def dataset_of(features: np.ndarray) -> ArrayDataset:
    return ArrayDataset(features, np.arange(len(features)) % 3)


def terms(**changes: object) -> Mechanism:
    fields = {"dimension": 63, "num_examples": 8, "sample_rate": 1.0, "virtual_workers": 2, "clamp": 8.0}
    return mechanism(**fields | {"gamma_log2": -20, "rows_per_unit": 3, "copies": 3} | changes)


def computer_of(chosen: Mechanism, features: np.ndarray, units: Units | None = None) -> VirtualWorkerComputer:
    torch.manual_seed(0)
    module, dataset = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), dataset_of(features)
    engine, versions = GradientEngine(module, cross_entropy, chosen), Versions(SHIFTS, FORM, ".")
    # Neighbours have the same keys, which the digest of a slice enters.
    slices = {0: Slice(slice_ids(0, 2, chosen.num_examples), bytes(32))}
    return VirtualWorkerComputer(chosen, engine, dataset, spare_of(dataset), units, versions, slices, SilentWords())


def vector(chosen: Mechanism, features: np.ndarray, model: bytes = b"p" * 32, units: Units | None = None) -> np.ndarray:
    parameters = np.random.default_rng(3).normal(size=63).astype(np.float32)
    computed = computer_of(chosen, features, units).vector(0, keys_of(b"c" * 32, 0), 0, model, DATA_ROOT, parameters)
    return computed.values.view(np.int32).astype(np.float64) * chosen.gamma


def test_a_step_has_the_same_bytes_again_and_other_versions_under_another_key():
    chosen, rows = terms(), rows_of(8)
    assert np.array_equal(vector(chosen, rows), vector(chosen, rows))
    assert not np.array_equal(vector(chosen, rows), vector(chosen, rows, b"q" * 32))


def test_versions_have_a_key_of_their_own(monkeypatch: pytest.MonkeyPatch):
    derived: list[Purpose] = []
    monkeypatch.setattr(
        virtual_worker,
        "derive",
        lambda secret, purpose, *rest: derived.append(purpose) or derive(secret, purpose, *rest),
    )
    vector(terms(), rows_of(8))
    assert derived == [Purpose.NOISE, Purpose.PLACES, Purpose.SAMPLING, Purpose.VERSIONS, Purpose.VECTOR_TAG]


def test_guarantee_no_example_moves_the_sum_by_more_than_the_sensitivity_whatever_its_versions():
    chosen = terms(max_grad_norm=0.25)
    for scale in (1, 1e4):
        whole = rows_of(8)
        # Virtual worker 0 has the even ones.
        whole[0] *= np.float32(scale)
        without = whole.copy()
        without[0] = np.nan
        moved = float(np.linalg.norm(vector(chosen, whole) - vector(chosen, without)))
        assert 0.2 < moved <= chosen.sensitivity


def test_versions_of_a_person_s_rows_are_rows_of_the_person():
    owners = np.arange(8) % 4
    units = Units(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners)))
    chosen = terms(unit="person", num_examples=4, rows_per_unit=6, max_grad_norm=0.25)
    whole = rows_of(8)
    without = whole.copy()
    without[owners == 0] = np.nan
    moved = float(np.linalg.norm(vector(chosen, whole, units=units) - vector(chosen, without, units=units)))
    assert 0.1 < moved <= chosen.sensitivity


def test_a_row_is_read_once_for_all_of_its_versions(monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    genuine = ArrayDataset.batch
    monkeypatch.setattr(ArrayDataset, "batch", lambda self, ids: read.append(len(ids)) or genuine(self, ids))
    chosen = terms()
    vector(chosen, rows_of(8))
    assert sum(read[-chosen.micro_batches :]) == chosen.micro_batch_size * chosen.micro_batches


def test_a_mechanism_that_counts_other_versions_is_refused():
    with pytest.raises(RefusedError, match="proof_bound"):
        computer_of(terms(copies=1, rows_per_unit=1), rows_of(8))
