"""A table's features are its data: what a tool stored beside them is left out by name, a nameless column refused."""

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.columns import layout
from raycloak.workers.inputs.descriptor import DatasetDescriptor, OpenedDataset

DECOMPOSED, COMPOSED = (unicodedata.normalize(form, "größe") for form in ("NFD", "NFC"))


def opened(folder: Path, kind: str, path: str, **fields: Any) -> OpenedDataset:
    return DatasetDescriptor(**{"kind": kind, "path": path, "features": (), "labels": "outcome", **fields}).open_slices(
        folder
    )


def rows_of(found: OpenedDataset) -> list[Any]:
    features, _ = found.examples.batch(np.arange(len(found.examples)))
    return features.tolist()


def with_pandas_index(folder: Path, index: str) -> None:
    table = pa.table({"age": [4.0, 5.0], "dose": [1.0, 2.0], "outcome": [0, 1], index: [17, 3]})
    metadata = {"pandas": f'{{"index_columns": ["{index}"], "columns": []}}'}
    pq.write_table(table.replace_schema_metadata(metadata), folder / "data.parquet")


@pytest.mark.parametrize("index", ["__index_level_0__", "patient"])
def test_an_index_that_pandas_wrote_is_no_feature_and_is_named(index: str, tmp_path: Path):
    with_pandas_index(tmp_path, index)
    found = opened(tmp_path, "parquet", "data.parquet")
    assert rows_of(found) == [[4, 1], [5, 2]]
    assert found.features == ("age", "dose")
    (said,) = found.left_out
    assert f"column '{index}' is left out" in said
    # The owner may say that it is one.
    asked = opened(tmp_path, "parquet", "data.parquet", features=("age", index))
    assert (rows_of(asked), asked.left_out) == ([[4, 17], [5, 3]], ())


def test_a_range_index_is_no_column_and_strange_metadata_are_no_index(tmp_path: Path):
    table = pa.table({"age": [4.0], "outcome": [0]})
    for text in ('{"index_columns": [{"kind": "range", "name": null}]}', "no json", '["a list"]', '{"columns": []}'):
        pq.write_table(table.replace_schema_metadata({"pandas": text}), tmp_path / "data.parquet")
        assert opened(tmp_path, "parquet", "data.parquet").features == ("age",)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_the_row_numbers_of_a_csv_file_are_no_feature(name: str, tmp_path: Path):
    """DataFrame.to_csv writes the index first and without a name; what reads it back calls it ``Unnamed: 0``."""
    (tmp_path / "data.csv").write_text(f"{name},age,dose,outcome\n0,4,1,0\n1,5,2,1\n")
    found = opened(tmp_path, "csv", "data.csv")
    assert rows_of(found) == [[4, 1], [5, 2]]
    assert found.features == ("age", "dose")
    assert "is left out" in found.left_out[0]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("age,dose,outcome,", "column 4 of 4 has no name: each line ends in a separator"),
        ("age,,dose,outcome", "column 2 of 4 has no name."),
        (" ,age,dose,outcome", "column 1 of 4 has no name."),
    ],
)
def test_any_other_column_without_a_name_is_refused_by_its_place(header: str, said: str, tmp_path: Path):
    (tmp_path / "data.csv").write_text(f"{header}\n1,2,0,1\n")
    with pytest.raises(DatasetError, match=r"data\.csv: column") as caught:
        opened(tmp_path, "csv", "data.csv")
    assert said in caught.value.message
    assert caught.value.code == "dataset_array"


@pytest.mark.parametrize(("asked", "stored"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_is_found_in_whichever_form_of_unicode_it_is_written(
    kind: str, asked: str, stored: str, tmp_path: Path
):
    table = pa.table({stored: [1.0], "age": [2.0], "outcome": [0]})
    if kind == "csv":
        (tmp_path / "data.csv").write_text(f"{stored},age,outcome\n1,2,0\n", encoding="utf-8")
    else:
        pq.write_table(table, tmp_path / "data.parquet")
    found = opened(tmp_path, kind, f"data.{kind}", features=("age", asked))
    assert rows_of(found) == [[2, 1]]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_several_columns_of_labels_make_a_label(kind: str, tmp_path: Path):
    columns = {"age": [4.0, 5.0], "mild": [0, 1], "severe": [1, 1], "y2": [7, 8]}
    lines = zip(*columns.values(), strict=True)
    (tmp_path / "data.csv").write_text("\n".join([",".join(columns), *(",".join(map(str, line)) for line in lines)]))
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    found = opened(tmp_path, kind, f"data.{kind}", labels=("mild", "severe", "y2..y2"))
    features, labels = found.examples.batch(np.arange(2))
    assert (features.tolist(), labels.tolist(), labels.dtype) == ([4, 5], [[0, 1, 7], [1, 1, 8]], np.int64)
    names = ("no", "yes")
    text = pa.table({"age": [4.0, 5.0], "mild": ["no", "yes"], "severe": ["yes", "yes"]})
    pq.write_table(text, tmp_path / "text.parquet")
    worded = opened(tmp_path, "parquet", "text.parquet", labels=("mild", "severe"), class_names=names)
    assert worded.examples.batch(np.arange(2))[1].tolist() == [[0, 1], [1, 1]]


def test_a_later_file_lacks_a_column_by_name(tmp_path: Path):
    asked = DatasetDescriptor(kind="csv", features=(), labels="y")
    found = layout(asked, ["a", "b", "y"], "one.csv")
    assert (found.features, found.labels, found.wanted) == (("a", "b"), ("y",), ["a", "b", "y"])
    with pytest.raises(DatasetError, match=r"two.csv has no column 'b'; it has a, y"):
        found.require(["a", "y"], "two.csv")
