"""Guarantee: no dataset gives an example that would get no gradient, unless its owner says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs import rows
from raycloak.workers.inputs.datasets import SteadyDataset
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.void import Limits, Voids, for_owner, named_by_check, which

NAN = float("nan")


def described(kind: str, path: str, **fields: Any) -> DatasetDescriptor:
    return DatasetDescriptor(**{"kind": kind, "path": path, "features": (), "labels": "y", **fields})


def refusal(descriptor: DatasetDescriptor, folder: Path) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        descriptor.open(folder)
    assert caught.value.code == "dataset_void"
    assert "allow_void" in caught.value.remedy
    return caught.value


@pytest.mark.parametrize("spelling", ["nan", "NaN", "NAN", "-nan", "inf", "-Infinity", "1e39"])
def test_a_number_that_is_none_in_a_csv_file_is_refused_by_its_column(spelling: str, tmp_path: Path):
    (tmp_path / "data.csv").write_text(f"age,bmi,y\n1,2,0\n3,{spelling},1\n")
    error = refusal(described("csv", "data.csv"), tmp_path)
    assert "NaN or infinite as float32 in bmi" in error.message
    assert spelling not in str(error).replace("NaN or infinite", "")
    allowed = described("csv", "data.csv", allow_void=True).open(tmp_path)
    features, _ = allowed.batch(np.arange(2))
    assert np.isfinite(features).tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("spelling", ["", "NA", "null", "None", "nan"])
def test_all_spellings_of_a_missing_value_are_refused_and_are_nan_where_they_are_allowed(spelling: str, tmp_path: Path):
    (tmp_path / "data.csv").write_text(f"age,bmi,y\n1,2,0\n3,{spelling},1\n")
    with pytest.raises(DatasetError, match="bmi"):
        described("csv", "data.csv").open(tmp_path)
    features, labels = described("csv", "data.csv", allow_void=True).open(tmp_path).batch(np.arange(2))
    assert (np.isnan(features).tolist(), labels.tolist()) == ([[False, False], [False, True]], [0, 1])
    # A row without a label is not an example.
    (tmp_path / "data.csv").write_text(f"age,bmi,y\n1,2,0\n3,4,{spelling}\n")
    with pytest.raises(DatasetError):
        described("csv", "data.csv", class_names=("0", "1"), allow_void=True).open(tmp_path)


def test_a_null_in_a_parquet_table_is_as_void_as_a_nan(tmp_path: Path):
    for bad in (None, NAN):
        table = pa.table({"age": pa.array([1.0, bad]), "bmi": [1.0, 2.0], "y": [0, 1]})
        pq.write_table(table, tmp_path / "data.parquet")
        with pytest.raises(DatasetError, match="age"):
            described("parquet", "data.parquet").open(tmp_path)
        features, _ = described("parquet", "data.parquet", allow_void=True).open(tmp_path).batch(np.arange(2))
        assert np.isnan(features).tolist() == [[False, False], [True, False]]


def npz(folder: Path, features: Any, labels: Any, **fields: Any) -> DatasetDescriptor:
    np.savez(folder / "data.npz", x=features, y=labels)
    return described("npz", "data.npz", features=("x",), **fields)


def test_a_void_example_of_an_archive_is_refused_whatever_makes_it_void(tmp_path: Path):
    good = np.ones((5, 2)), np.arange(5) % 2
    npz(tmp_path, *good, classes=2).open(tmp_path)
    assert "NaN or infinite" in refusal(npz(tmp_path, [[1.0, np.inf]], [0]), tmp_path).message
    # Float32 has no such number.
    assert "NaN or infinite" in refusal(npz(tmp_path, [[1.0, 1e300]], [0]), tmp_path).message
    assert "NaN or infinite" in refusal(npz(tmp_path, np.ones((2, 2)), [0.5, NAN]), tmp_path).message
    assert "a label outside 0 .. 1" in refusal(npz(tmp_path, np.ones((2, 2)), [0, 2], classes=2), tmp_path).message
    assert "a label outside 0 .. 1" in refusal(npz(tmp_path, np.ones((2, 2)), [0, -100], classes=2), tmp_path).message
    ids = np.array([[1, 2], [3, 4]])
    assert "an id outside its vocabulary" in refusal(npz(tmp_path, ids, [0, 1], vocabulary=4), tmp_path).message
    npz(tmp_path, ids, [0, 1], vocabulary=5).open(tmp_path)
    # Padding is no id, and the label of a pixel may be left out.
    npz(tmp_path, np.array([[1, -1]]), np.full((1, 2, 2), -100), vocabulary=4, classes=2).open(tmp_path)


def test_tokenised_text_beyond_its_vocabulary_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"input_ids": [[1, 2], [3, 9]], "y": [0, 1]}), tmp_path / "text.parquet")
    of_text = {"max_length": 4, "vocabulary": 9}
    assert "an id outside" in refusal(described("hf", "text.parquet", **of_text), tmp_path).message
    described("hf", "text.parquet", **{**of_text, "vocabulary": 10}).open(tmp_path)


def test_rows_beyond_memory_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "MEMORY_BYTES", 64)
    lines = [f"{row},2,0" for row in range(100)]
    (tmp_path / "data.csv").write_text("\n".join(["age,bmi,y", *lines, "nan,2,0"]))
    assert "in age" in refusal(described("csv", "data.csv"), tmp_path).message


class Given:
    """A dataset of the user's own."""

    def __len__(self) -> int:
        return 4

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        features = np.array([[1.0], [2.0], [NAN], [3.0]], np.float32)
        return features[ids], np.zeros(len(ids), np.int64)


def test_an_example_of_the_users_own_dataset_is_refused_when_it_is_first_read():
    def accept(features: np.ndarray, labels: np.ndarray) -> None:
        if Voids.of(features, labels, Limits()).not_finite.any():
            raise DatasetError("dataset_void", "void")

    dataset = SteadyDataset(Given(), accept)
    dataset.batch(np.array([0, 1, 3]))
    for read in (dataset.read_rest, lambda: dataset.batch(np.array([1, 2]))):
        with pytest.raises(DatasetError):
            read()
    SteadyDataset(Given()).read_rest()


def test_where_a_fault_lies_is_said_to_the_owner_alone():
    numbers = iter(range(3, 100))
    assert which(numbers) == ""
    assert next(numbers) == 3, "nobody looks for them in a run"
    with for_owner():
        assert which([7]) == " (row 7)"
        assert which([7, 9], "line") == " (lines 7, 9)"
        assert which(range(1, 13)) == " (rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and more)"
        assert named_by_check() == ""
    assert (which([7]), "data check" in named_by_check()) == ("", True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("age,y\n1,0\n,0\n3,1\nNA,0\n", "(rows 2, 4)"),
        ("age,y\n1,0\nsecret,0\n3,1\n", "(row 2)"),
        ("age,y\n1,0\n2,3,4\n3,1\n", "(line 3)"),
        ("age,y\n1,no\n2,other\n", "(rows 1, 2)"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_to_the_owner(text: str, said: str, tmp_path: Path):
    (tmp_path / "data.csv").write_text(text)
    fields = {"class_names": ("yes",)} if "no" in text else {}
    with pytest.raises(DatasetError) as hidden:
        described("csv", "data.csv", **fields).open(tmp_path)
    assert "(" not in hidden.value.message
    with for_owner(), pytest.raises(DatasetError) as shown:
        described("csv", "data.csv", **fields).open(tmp_path)
    assert said in shown.value.message
    assert "secret" not in shown.value.message


def test_a_row_of_a_parquet_table_is_named_to_the_owner(tmp_path: Path):
    lists = pa.array([[1.0], [2.0, 3.0], [None]], pa.list_(pa.float64()))
    for column, said in ((pa.array([1.0, None, None]), "(rows 2, 3)"), (lists, "(row 3)"), (lists[:2], "(row 2)")):
        pq.write_table(pa.table({"x": column, "y": [0] * len(column)}), tmp_path / "data.parquet")
        with for_owner(), pytest.raises(DatasetError) as shown:
            described("parquet", "data.parquet").open(tmp_path)
        assert said in shown.value.message
