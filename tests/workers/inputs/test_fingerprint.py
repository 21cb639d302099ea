"""The marks of a dataset are of its examples, its key and its places: not of their order, their format or a run."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

from raycloak.attestation.core.data_marks import DataMarks, Likeness, likeness
from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs import example_codes
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.descriptor import AuditedExamples, DatasetDescriptor
from raycloak.workers.inputs.example_codes import example_marks
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.in_memory import export_in_memory

KEY = "0f" * 32
SECRET = Secret(bytes.fromhex(KEY))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a dataset of two features and its key."""
    rng = np.random.default_rng(3)
    features, others = rng.integers(0, 255, (2, 500, 4), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=features, others=others, labels=rng.integers(0, 3, 500))
    write_key(tmp_path / "data.key", KEY)
    return tmp_path


def write_key(path: Path, text: str, mode: int = 0o600) -> None:
    path.touch(mode=mode)
    path.write_text(text + "\n")


def marks(base: Path, **fields: Any) -> DataMarks:
    descriptor = DatasetDescriptor(**{"kind": "npz", "path": "data.npz", "fingerprint_key": "data.key"} | fields)
    return data_marks(descriptor, descriptor.open_slices(base), base)


def arrays(features: Any, labels: Any) -> DataMarks:
    return example_marks(ArrayDataset(np.asarray(features), np.asarray(labels)), SECRET)


def examples(count: int = 500, width: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.normal(size=(count, width)).astype(np.float32), rng.integers(0, 3, count)


# --- the examples


def test_guarantee_another_order_has_the_same_fingerprint(tmp_path: Path):
    """As a `random_split` without a seed gives the same people."""
    features, labels = (torch.from_numpy(part) for part in examples(100))
    write_key(tmp_path / "data.key", KEY)
    seen = set()
    for number in range(3):
        everybody, _ = random_split(TensorDataset(features, labels), [100, 0])
        given = export_in_memory(everybody, tmp_path / f"{number}.npz")
        given = given.model_copy(update={"fingerprint_key": "data.key"})
        found = data_marks(given, given.open_slices(tmp_path), tmp_path)
        seen.add((found.key, found.fingerprint, found.sketch))
    assert len(seen) == 1


def test_guarantee_one_row_more_or_less_and_most_of_the_people_are_recognised():
    features, labels = examples()
    first = arrays(features, labels)
    for rows in (slice(1, None), slice(None, 499), slice(None, 300), np.r_[:500, :100]):
        other = arrays(features[rows], labels[rows])
        assert other.fingerprint != first.fingerprint
        assert likeness(other, first) is Likeness.MOST_EXAMPLES
    halves = arrays(features[:250], labels[:250]), arrays(features[250:], labels[250:])
    assert likeness(*halves) is None


def test_a_row_that_is_there_twice_counts_twice():
    features, labels = examples(3)
    doubled = [0, 0, 1, 1, 2]
    seen = {
        arrays(features[rows], labels[rows]).fingerprint for rows in ([0, 1, 2], doubled, [0, 0, 1, 2, 2], [2, 1, 0])
    }
    assert len(seen) == 3


def test_another_label_is_another_dataset_of_the_same_people():
    features, labels = examples()
    first, other = arrays(features, labels), arrays(features, 2 - labels)
    assert first.fingerprint != other.fingerprint
    assert first.sketch == other.sketch


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "int16", "uint8"])
def test_guarantee_numbers_are_what_counts_and_not_their_format(dtype: str):
    numbers = np.arange(60).reshape(20, 3) % 200
    assert arrays(numbers.astype(dtype), np.arange(20) % 2) == arrays(numbers.astype(np.float32), np.arange(20) % 2)


def test_zeros_are_one_and_so_are_unknown_values():
    first, second = np.zeros((2, 5), np.float32), -np.zeros((2, 5), np.float32)
    first[0, 0] = np.nan
    second.view(np.uint32)[0, 0] = 0xFFC00001
    assert arrays(first, [0, 1]) == arrays(second, [0, 1])


def test_large_ids_are_told_apart():
    """A float32 has no place for their last digits, and one large id changes the code of no other example."""
    ids = np.arange(40).reshape(20, 2).astype(np.int64)
    large = ids.copy()
    large[3, 1] = 2**24 + 1
    near = large.copy()
    near[3, 1] = 2**24
    seen = [arrays(each, np.arange(20)) for each in (ids, large, near)]
    assert len({each.fingerprint for each in seen}) == 3
    assert likeness(seen[0], seen[1]) is Likeness.MOST_EXAMPLES
    assert arrays(near, np.arange(20)) == arrays(near.astype(np.float64), np.arange(20))


@pytest.mark.parametrize("width", [1, 3, 4, 5, 17])
def test_every_number_counts_and_chunks_change_nothing(width: int, monkeypatch: pytest.MonkeyPatch):
    features, labels = examples(90, width)
    first = arrays(features, labels)
    for name, value in (("_ROWS", 7), ("_CODED_BYTES", 64)):
        monkeypatch.setattr(example_codes, name, value)
        assert arrays(features, labels) == first
    seen = {first.fingerprint}
    for place in range(width):
        changed = features.copy()
        changed[40, place] += 1
        seen.add(arrays(changed, labels).fingerprint)
    assert len(seen) == 1 + width


def test_codes_of_two_shapes_have_nothing_in_common():
    narrow, wide = (arrays(np.zeros((70, width), np.float32), np.zeros(70)) for width in (2, 3))
    assert likeness(narrow, wide) is None


def test_the_sketch_has_the_least_codes_of_a_keyed_function():
    """Drawn anew for each key: of 1,000 examples, the largest of 64 least codes is near 64/1000 of all.

    Fails for an honest function with probability 1e-9: it is beta(64, 937), whose standard deviation is 0.0078.
    """
    features, labels = examples(1000)
    for key in (SECRET, Secret(b"o" * 32)):
        found = example_marks(ArrayDataset(features, labels), key)
        assert len(found.sketch) == 64 * 8
        assert abs(int.from_bytes(found.sketch[-8:], "big") / 2**64 - 0.064) < 0.048


# --- the key and the place


def test_guarantee_a_moved_file_is_known_whatever_a_run_reads_of_it(base: Path):
    first = marks(base)
    (base / "elsewhere").mkdir()
    shutil.copy(base / "data.npz", base / "elsewhere" / "other.npz")
    moved = marks(base, path="elsewhere/other.npz")
    assert (moved.fingerprint, moved.sketch) == (first.fingerprint, first.sketch)
    assert moved.places != first.places
    for reading in ({"scale": 255.0}, {"features": ("others",)}):
        assert likeness(marks(base, path="elsewhere/other.npz", **reading), first) is Likeness.PLACE
    assert marks(base, fingerprint_key=str(base / "data.key")) == first


def test_any_changed_number_and_any_other_key_give_another_fingerprint(base: Path):
    first = marks(base)
    with np.load(base / "data.npz") as archive:
        content = dict(archive)
    content["images"][7, 2] ^= 1
    np.savez(base / "data.npz", **content)
    changed = marks(base)
    write_key(base / "other.key", "0e" + KEY[2:])
    other = marks(base, fingerprint_key="other.key")
    assert len({first.fingerprint, changed.fingerprint, other.fingerprint}) == 3
    assert first.key == changed.key != other.key
    assert likeness(first, changed) is Likeness.MOST_EXAMPLES
    assert likeness(changed, other) is Likeness.PLACE


def test_examples_of_a_function_are_read_one_and_all(base: Path):
    (base / "readings.py").write_text(
        "import numpy as np\n"
        "class Readings:\n"
        "    def __init__(self, last): self.last = last\n"
        "    def __len__(self): return 30\n"
        "    def batch(self, ids):\n"
        "        features = np.stack([ids, np.where(ids == 29, self.last, ids)], axis=1).astype(np.float32)\n"
        "        return features, (ids % 2).astype(np.int64)\n"
        "def one(): return Readings(0)\n"
        "def other(): return Readings(1)\n"
    )
    fields = {"kind": "module", "path": None}
    one, again, other = (marks(base, function=f"readings:{name}", **fields) for name in ("one", "one", "other"))
    assert one == again
    assert one.fingerprint != other.fingerprint


def test_guarantee_an_audit_has_the_marks_of_the_data_that_it_adds_canaries_to(base: Path):
    """Whatever coins it draws, and without a key as well."""
    key = base / "data.key"
    for fingerprint_key in ("data.key", None):
        inner = DatasetDescriptor(kind="npz", path="data.npz", fingerprint_key=fingerprint_key)
        own = marks(base, fingerprint_key=fingerprint_key)
        (base / "audit").mkdir(exist_ok=True)
        for coins in ((True, False), (False, True, True)):
            audited = AuditedExamples(base=str(base), dataset=inner, included=coins)
            (base / "audit" / "audited.json").write_bytes(audited.encode())
            named = str(key) if fingerprint_key else None
            outer = DatasetDescriptor(kind="canaries", path="audited.json", fingerprint_key=named)
            opened = outer.open_slices(base / "audit")
            assert len(opened.examples) == 500 + len(coins)
            assert data_marks(outer, opened, base / "audit") == own


def test_without_a_key_there_are_places_alone(base: Path):
    found = marks(base, fingerprint_key=None)
    assert (found.key, found.fingerprint, found.sketch) == (b"", b"", b"")
    assert likeness(found, marks(base)) is Likeness.PLACE


@pytest.mark.parametrize(
    ("text", "mode", "what"), [("ff", 0o600, "64 hex"), ("zz" * 32, 0o600, "64 hex"), (KEY, 0o644, "mode 0644")]
)
def test_a_key_that_is_none_or_that_others_can_read_is_refused(base: Path, text: str, mode: int, what: str):
    write_key(base / "bad.key", text)
    (base / "bad.key").chmod(mode)
    with pytest.raises(ConfigError, match=f"fingerprint_key: .*{what}"):
        marks(base, fingerprint_key="bad.key")


def test_a_missing_key_or_file_is_named(base: Path):
    with pytest.raises(ConfigError, match="fingerprint_key: cannot read"):
        marks(base, fingerprint_key="none.key")
    (base / "data.npz").unlink()
    with pytest.raises(DatasetError, match="dataset_unreadable"):
        marks(base)


def test_where_the_key_lies_is_no_part_of_what_the_data_is():
    here = DatasetDescriptor(kind="npz", path="a.npz")
    assert here.identity_digest() == here.model_copy(update={"fingerprint_key": "k"}).identity_digest()
