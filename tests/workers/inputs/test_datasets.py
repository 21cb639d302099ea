"""Datasets open from descriptors, give examples by id, and refuse what cannot be trained on."""

import hashlib
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs.datasets import ArrayDataset, Dataset, SteadyDataset, dataset_form, slice_digest, slice_ids
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.in_memory import export_in_memory
from raycloak.workers.inputs.units import Units

IMAGES = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
LABELS = np.array([2, 0, 1], dtype=np.uint8)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def npz(folder: Path, **arrays: np.ndarray) -> DatasetDescriptor:
    np.savez(folder / "data.npz", **arrays)
    return DatasetDescriptor(kind="npz", path="data.npz")


def code_of(descriptor: DatasetDescriptor, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        descriptor.open(folder)
    return caught.value.code


def test_digits_are_split_into_disjoint_parts_of_the_real_images() -> None:
    train, public = (DatasetDescriptor(kind="digits", split=split).open(".") for split in ("train", "public"))
    assert (len(train), len(public)) == (1437, 360)
    features = np.concatenate([each.batch(np.arange(len(each)))[0] for each in (train, public)])
    labels = np.concatenate([each.batch(np.arange(len(each)))[1] for each in (train, public)])
    real, classes = load_digits(return_X_y=True)
    assert features.dtype == np.float32
    assert labels.dtype == np.int64
    together = np.column_stack([features * 16, labels])
    expected = np.column_stack([real, classes])
    assert sorted(map(tuple, together)) == sorted(map(tuple, expected))
    assert not np.array_equal(together, expected)


def test_the_digits_never_change() -> None:
    digest = slice_digest(DatasetDescriptor(kind="digits").open("."), np.arange(1437))
    assert digest.hex() == "5c8d0d9b81766c895f8fff63edba930a2a89aea62b7a318ca0d63b6d633aaec1"


def test_npz_examples_come_by_id_scaled_by_the_public_constant(tmp_path: Path) -> None:
    descriptor = npz(tmp_path, images=IMAGES, labels=LABELS).model_copy(update={"scale": 2.0})
    features, labels = descriptor.open(tmp_path).batch(ids(2, 0, 2))
    assert features.tolist() == (IMAGES[[2, 0, 2]] / 2).tolist()
    assert features.dtype == np.float32
    assert labels.tolist() == [1, 2, 1]


def test_integer_features_without_a_scale_stay_integers(tmp_path: Path) -> None:
    descriptor = npz(tmp_path, tokens=IMAGES, labels=LABELS).model_copy(update={"features": ("tokens",)})
    form = dataset_form(descriptor.open(tmp_path))
    assert (form.num_examples, form.feature_shape, form.feature_dtype) == (3, (2, 2), "int64")
    assert (form.label_shape, form.label_dtype) == ((), "int64")


def test_parquet_columns_are_scalars_or_lists_of_one_length(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a": pa.array([1.5, 2.5, 3.5]),
            "b": pa.array([1, 2, 3], pa.int32()),
            "pixels": pa.array([[0, 1], [2, 3], [4, 5]], pa.list_(pa.uint8())),
            "fixed": pa.array([[0, 1], [2, 3], [4, 5]], pa.list_(pa.float64(), 2)),
            "ragged": pa.array([[0], [2, 3], [4, 5]], pa.list_(pa.uint8())),
            "gaps": pa.array([1, None, 3]),
            "text": pa.array(["x", "y", "z"]),
            "y": pa.array([0.5, 1.0, 2.0]),
        }
    )
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=2)

    def described(*features: str) -> DatasetDescriptor:
        return DatasetDescriptor(kind="parquet", path="data.parquet", features=features, labels="y")

    features, labels = described("a", "b").open(tmp_path).batch(ids(2, 1))
    assert features.tolist() == [[3.5, 3.0], [2.5, 2.0]]
    assert (labels.dtype, labels.tolist()) == (np.float32, [2.0, 1.0])
    for name in ("pixels", "fixed"):
        assert described(name).open(tmp_path).batch(ids(1))[0].tolist() == [[2, 3]]
    assert code_of(described("ragged"), tmp_path) == "dataset_array"
    assert code_of(described("gaps"), tmp_path) == "dataset_array"
    assert code_of(described("none"), tmp_path) == "dataset_array"
    assert code_of(described("text"), tmp_path) == "dataset_dtype"


def test_a_parquet_file_that_is_empty_or_none_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"images": pa.array([], pa.int8()), "labels": pa.array([], pa.int8())}), tmp_path / "empty")
    (tmp_path / "text").write_text("not parquet")
    for path, code in (
        ("empty", "dataset_empty"),
        ("text", "dataset_unreadable"),
        ("none", "dataset_unreadable"),
    ):
        assert code_of(DatasetDescriptor(kind="parquet", path=path), tmp_path) == code


@pytest.mark.parametrize(
    ("arrays", "code"),
    [
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "dataset_empty"),
        ({"images": IMAGES, "labels": LABELS[:2]}, "dataset_lengths"),
        ({"images": IMAGES}, "dataset_array"),
        ({"labels": LABELS}, "dataset_array"),
        ({"images": np.array([None, {}], dtype=object), "labels": LABELS[:2]}, "dataset_dtype"),
        ({"images": IMAGES, "labels": np.array(["a", "b", "c"])}, "dataset_dtype"),
        ({"images": IMAGES.astype(np.complex64), "labels": LABELS}, "dataset_dtype"),
        ({"images": IMAGES, "labels": LABELS[0]}, "dataset_array"),
    ],
)
def test_arrays_that_cannot_be_examples_are_refused(arrays: dict[str, np.ndarray], code: str, tmp_path: Path) -> None:
    assert code_of(npz(tmp_path, **arrays), tmp_path) == code


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert code_of(DatasetDescriptor(kind="npz", path="none.npz"), tmp_path) == "dataset_unreadable"
    (tmp_path / "text.npz").write_text("hello")
    assert code_of(DatasetDescriptor(kind="npz", path="text.npz"), tmp_path) in ("dataset_unreadable", "dataset_dtype")


@pytest.mark.parametrize("content", [b"", b"a: 1\n", b"PK\x03\x04 torn", "one array", "torn"])
def test_a_file_that_is_no_npz_archive_is_refused_by_name(content: bytes | str, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    if content == "one array":
        with path.open("wb") as file:
            np.save(file, IMAGES)
    elif content == "torn":
        np.savez_compressed(path, images=IMAGES, labels=LABELS)
        whole = bytearray(path.read_bytes())
        whole[60:75] = bytes(15)
        path.write_bytes(whole)
    else:
        assert isinstance(content, bytes)
        path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"dataset_unreadable: .*data\.npz .*numpy\.savez"):
        DatasetDescriptor(kind="npz", path="data.npz").open(tmp_path)


def test_a_users_function_gives_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import numpy as np\n"
        "class Rows:\n"
        "    def __len__(self): return 4\n"
        "    def batch(self, ids): return np.ones((len(ids), 2), np.float32), np.zeros(len(ids), np.int64)\n"
        "class Empty(Rows):\n"
        "    def __len__(self): return 0\n"
        "class Wrong(Rows):\n"
        "    def batch(self, ids): return np.ones((len(ids), 2)), np.zeros(len(ids), np.int64)\n"
        "def nothing(): return 3\n"
    )

    def described(function: str) -> DatasetDescriptor:
        return DatasetDescriptor(kind="module", function=f"data:{function}")

    assert len(described("Rows").open(tmp_path)) == 4
    assert code_of(described("Empty"), tmp_path) == "dataset_empty"
    assert code_of(described("Wrong"), tmp_path) == "dataset_dtype"
    assert code_of(described("nothing"), tmp_path) == "dataset_array"
    assert code_of(described("missing"), tmp_path) == "module_function"


def test_the_identity_does_not_change_with_the_location_and_changes_with_the_content() -> None:
    here = DatasetDescriptor(kind="npz", path="a.npz")
    assert here.identity_digest() == here.model_copy(update={"path": "/b.npz"}).identity_digest()
    changes = {"kind": "parquet", "features": ("x",), "labels": "y", "scale": 2.0, "public": True, "split": "public"}
    others = {here.model_copy(update={name: value}).identity_digest() for name, value in changes.items()}
    assert len(others | {here.identity_digest()}) == len(changes) + 1


def test_an_overflow_while_converting_says_nothing() -> None:
    features, _ = ArrayDataset(np.array([[1e300]]), np.zeros(1, np.int64), 1e-3).batch(ids(0))
    assert np.isinf(features).all()


def test_an_in_memory_dataset_becomes_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_text("an older file")
    path.chmod(0o644)
    inputs, targets = torch.arange(6.0).reshape(3, 2), torch.tensor([1, 0, 2])
    descriptor = export_in_memory(TensorDataset(inputs, targets), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    features, labels = descriptor.open("/").batch(ids(2, 0))
    assert features.tolist() == [[4, 5], [0, 1]]
    assert labels.tolist() == [2, 1]
    pairs = export_in_memory([(np.uint8(3), 1.5), (np.uint8(4), 2.5)], path).open("/").batch(ids(1))
    assert [part.tolist() for part in pairs] == [[4], [2.5]]


@pytest.mark.parametrize(
    ("dataset", "code"),
    [
        ([], "dataset_empty"),
        (iter([(1, 2)]), "dataset_array"),
        ([(1, 2, 3)], "dataset_array"),
        ([5], "dataset_array"),
        ([(np.zeros(2), 0), (np.zeros(3), 0)], "dataset_array"),
        ([("text", 0)], "dataset_dtype"),
    ],
)
def test_an_in_memory_dataset_of_another_kind_is_refused(dataset: object, code: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        export_in_memory(dataset, tmp_path / "data.npz")
    assert caught.value.code == code
    assert not list(tmp_path.glob("data*"))


@pytest.mark.parametrize(("count", "virtual_workers"), [(8, 8), (17, 3), (1437, 8), (5, 1)])
def test_slices_partition_the_examples(count: int, virtual_workers: int) -> None:
    slices = [slice_ids(v, virtual_workers, count) for v in range(virtual_workers)]
    assert sorted(np.concatenate(slices).tolist()) == list(range(count))
    for v, part in enumerate(slices):
        assert part.dtype == np.int64
        assert len(part)
        assert (part % virtual_workers == v).all()
        assert (np.diff(part) > 0).all()


def test_fewer_examples_than_virtual_workers_are_refused() -> None:
    with pytest.raises(DatasetError) as caught:
        slice_ids(0, 8, 7)
    assert caught.value.code == "dataset_small"


class _Recording:
    """A dataset that notes how many ids each batch asked for."""

    def __init__(self, inner: Dataset) -> None:
        self.inner = inner
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.inner)

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(len(ids))
        return self.inner.batch(ids)


def test_slice_digest_changes_with_any_byte_dtype_shape_or_order_and_not_with_storage() -> None:
    features = np.arange(5000 * 3, dtype=np.float32).reshape(5000, 3)
    labels = np.arange(5000)
    chosen = np.arange(0, 5000, 2)

    def digest(x: np.ndarray, y: np.ndarray, which: np.ndarray = chosen, scale: float = 1.0) -> bytes:
        return slice_digest(ArrayDataset(x, y, scale), which)

    reference = digest(features, labels)
    stored_otherwise = digest(features.astype(np.float64) * 4, labels.astype(np.int16), scale=4.0)
    assert stored_otherwise == reference
    flipped = features.copy()
    flipped.view(np.uint32)[4998, 2] ^= 1
    unseen = features.copy()
    unseen[4999] = 0
    assert digest(unseen, labels) == reference
    others = {
        digest(flipped, labels),
        digest(features, labels + (np.arange(5000) == 4998)),
        digest(features, labels, chosen[::-1]),
        digest(features, labels, chosen[:-1]),
        digest(features.reshape(5000, 3, 1), labels),
        digest(features, labels.astype(np.float32)),
        digest(features.astype(np.int64), labels),
    }
    assert len(others | {reference}) == 8


def test_slice_digest_streams() -> None:
    recording = _Recording(ArrayDataset(np.zeros((5000, 1)), np.zeros(5000)))
    slice_digest(recording, np.arange(5000))
    assert max(recording.asked) <= 1024
    assert sum(recording.asked) == 5000


def test_the_digits_come_from_a_hash_order_and_not_from_a_generator() -> None:
    first = min(
        range(1797), key=lambda i: hashlib.sha256(_prefixed(b"raycloak/digits/v1", i.to_bytes(8, "big"))).digest()
    )
    real, classes = load_digits(return_X_y=True)
    features, labels = DatasetDescriptor(kind="digits").open(".").batch(ids(0))
    assert (features[0] * 16).tolist() == real[first].tolist()
    assert labels[0] == classes[first]


def _prefixed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


class Rewritten:
    """A dataset of two examples whose content a test changes."""

    def __init__(self) -> None:
        self.features = np.zeros((2, 3), np.float32)
        self.labels: np.ndarray = np.zeros(2, np.int64)

    def __len__(self) -> int:
        return 2

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # All of them is a view of its own array, as a slice of a mapped file is.
        return (self.features if ids.tolist() == [0, 1] else self.features[ids]), self.labels[ids]


def test_every_read_of_a_steady_dataset_returns_the_first_ones_bytes_or_is_refused() -> None:
    source = Rewritten()
    steady = SteadyDataset(source)
    steady.batch(ids(1))
    features, _ = steady.batch(ids(0, 1))
    source.features[0, 2] = 1
    assert not features.any()
    steady.batch(ids(1, 1))
    for changed in (ids(0), ids(0, 1), ids(1, 0, 1)):
        with pytest.raises(DatasetError, match="data_changed"):
            steady.batch(changed)
    source.features[0, 2] = 0
    steady.batch(ids(0, 1))
    for labels in (source.labels.astype(np.float64), source.labels + 1):  # the same bytes of another type, and others
        source.labels = labels
        with pytest.raises(DatasetError, match="data_changed"):
            steady.batch(ids(1))


def test_one_read_of_a_steady_dataset_gives_no_example_in_two_versions() -> None:
    class Counting(Rewritten):
        def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.arange(len(ids), dtype=np.float32), self.labels[ids]

    with pytest.raises(DatasetError, match="data_changed"):
        SteadyDataset(Counting()).batch(ids(1, 1))


def test_the_digest_of_a_slice_changes_with_the_rows_of_a_unit_alone() -> None:
    dataset = ArrayDataset(np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6))
    cut = Units(np.arange(6), np.array([2, 3, 6]))
    every = np.arange(3)
    assert slice_digest(dataset, every, cut) == slice_digest(dataset, every, Units(np.arange(6), np.array([2, 3, 6])))
    found = {
        slice_digest(dataset, np.arange(6)),
        slice_digest(dataset, every, cut),
        slice_digest(dataset, every[:2], cut),
        slice_digest(dataset, every, Units(np.arange(6), np.array([1, 3, 6]))),
        slice_digest(dataset, every, Units(np.array([1, 0, 2, 3, 4, 5]), np.array([2, 3, 6]))),
        slice_digest(dataset, np.arange(6), Units(np.arange(6), np.arange(1, 7))),
    }
    assert len(found) == 6
