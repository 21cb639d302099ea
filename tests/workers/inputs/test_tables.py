"""CSV and Parquet tables become the same examples however they are cut into files, and name the column that cannot."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs import tables
from raycloak.workers.inputs.datasets import slice_digest
from raycloak.workers.inputs.descriptor import DatasetDescriptor

PATIENTS = "age,weight,smokes,outcome\n40,81.5,1,well\n52,64,0,ill\n33,70.25,0,well\n"
CLASSES = ("well", "ill")


def described(kind: str, path: str, **fields: Any) -> DatasetDescriptor:
    return DatasetDescriptor(**{"kind": kind, "path": path, "features": (), "labels": "outcome", **fields})


def rows_of(folder: Path, kind: str, path: str, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    dataset = described(kind, path, **fields).open(folder)
    return dataset.batch(np.arange(len(dataset)))


def refusal(folder: Path, kind: str, path: str, **fields: Any) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        described(kind, path, **fields).open(folder)
    return caught.value


def test_a_csv_file_gives_all_columns_but_the_label_and_counts_its_classes(tmp_path: Path):
    (tmp_path / "patients.csv").write_text(PATIENTS)
    features, labels = rows_of(tmp_path, "csv", "patients.csv", class_names=CLASSES)
    assert features.tolist() == [[40, 81.5, 1], [52, 64, 0], [33, 70.25, 0]]
    assert (features.dtype, labels.dtype, labels.tolist()) == (np.float32, np.int64, [0, 1, 0])
    features, labels = rows_of(tmp_path, "csv", "patients.csv", features=("weight", "age"), labels="smokes")
    assert features[0].tolist() == [81.5, 40]
    (tmp_path / "spaced.csv").write_text(PATIENTS.replace(",", " , "))
    assert refusal(tmp_path, "csv", "spaced.csv", class_names=CLASSES).code == "dataset_array"  # ' outcome' is a name
    assert (labels.dtype, labels.tolist()) == (np.int64, [1, 0, 0])
    assert rows_of(tmp_path, "csv", "patients.csv", features=("age",), labels="weight")[1].dtype == np.float32


def test_csv_and_parquet_give_the_same_bytes_from_one_file_or_from_a_folder(tmp_path: Path):
    rng = np.random.default_rng(5)
    columns: dict[str, Any] = {f"f{index:02d}": rng.normal(size=40).round(6) for index in range(12)}
    columns["outcome"] = [CLASSES[one] for one in rng.integers(0, 2, 40)]
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "all.parquet", row_group_size=7)
    (tmp_path / "parts" / "more").mkdir(parents=True)
    (tmp_path / "lines").mkdir()
    for part, (start, rows) in enumerate([(0, 9), (9, 30), (39, 1)]):
        piece = table.slice(start, rows)
        pq.write_table(piece, tmp_path / "parts" / f"{'more/' * (part == 2)}part-{part}.parquet")
        order = piece.column_names[:: -1 if part else 1]  # a later file may have another order
        lines = [",".join(order), *(",".join(str(row[name]) for name in order) for row in piece.to_pylist())]
        (tmp_path / "lines" / f"part-{part}.csv").write_text("\r\n".join(lines))
    (tmp_path / "parts" / "_metadata.parquet").write_text("what tools leave")
    (tmp_path / "parts" / "more" / "part-2.parquet").rename(tmp_path / "parts" / "part-2.parquet")
    places = (("parquet", "all.parquet"), ("parquet", "parts"), ("parquet", "parts/part-*.parquet"), ("csv", "lines"))
    digests = {
        slice_digest(described(kind, path, class_names=CLASSES).open(tmp_path), np.arange(40)) for kind, path in places
    }
    assert len(digests) == 1


def test_a_range_names_columns_with_both_its_ends(tmp_path: Path):
    wide = pa.table({**{f"f{index}": [float(index)] for index in range(12)}, "outcome": [1]})
    pq.write_table(wide, tmp_path / "wide.parquet")
    assert rows_of(tmp_path, "parquet", "wide.parquet", features=("f9..f11", "f0"))[0].tolist() == [[9, 10, 11, 0]]
    missing = refusal(tmp_path, "parquet", "wide.parquet", features=("f9..f12",))
    assert "no column 'f12'" in missing.message
    for absent in ("f11..f9", "f0..g1", "f0..f999999999999"):
        assert "no column" in refusal(tmp_path, "parquet", "wide.parquet", features=(absent,)).message
    padded = pa.table({"f09": [1.0], "f10": [2.0], "outcome": [1]})
    pq.write_table(padded, tmp_path / "padded.parquet")
    assert rows_of(tmp_path, "parquet", "padded.parquet", features=("f09..f10",))[0].tolist() == [[1, 2]]


def test_integers_of_several_columns_are_quantities_unless_there_is_a_vocabulary(tmp_path: Path):
    (tmp_path / "counts.csv").write_text("a,b,outcome\n1,2,0\n3,4,1\n")
    pq.write_table(pa.table({"a": [1, 3], "b": [2, 4], "outcome": [0, 1]}), tmp_path / "counts.parquet")
    for kind in ("csv", "parquet"):
        for vocabulary, dtype in ((None, np.float32), (5, np.int64)):
            features, _ = rows_of(tmp_path, kind, f"counts.{kind}", vocabulary=vocabulary)
            assert (features.dtype, features.tolist()) == (dtype, [[1, 2], [3, 4]])


def test_a_table_larger_than_a_chunk_keeps_its_rows_in_order(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tables, "_VALUES", 1000)
    monkeypatch.setattr(tables, "_CSV_BLOCK", 2000)
    count = 2345
    pq.write_table(pa.table({"a": np.arange(count), "outcome": np.zeros(count, int)}), tmp_path / "long.parquet")
    lines = "\n".join(f"{row},0" for row in range(count))
    (tmp_path / "long.csv").write_text(f"a,outcome\n{lines}\n")
    for kind in ("csv", "parquet"):
        assert np.array_equal(rows_of(tmp_path, kind, f"long.{kind}")[0], np.arange(count))


def test_quoted_values_and_tabs_are_read(tmp_path: Path):
    (tmp_path / "quoted.csv").write_text('"a, b",c,outcome\n1,2,"well, or\nso"\n')
    features, labels = rows_of(tmp_path, "csv", "quoted.csv", class_names=("well, or\nso",))
    assert (features.tolist(), labels.tolist()) == ([[1, 2]], [0])
    (tmp_path / "tabs.tsv").write_text("a\tb\toutcome\n1\t 2 \t0\n")
    assert rows_of(tmp_path, "csv", "tabs.tsv")[0].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", "dataset_empty", "no examples"),
        ("a,b,outcome\n", "dataset_empty", "no examples"),
        ("1,2,0\n3,4,1\n", "dataset_array", "starts with numbers"),
        ("a,a,outcome\n1,2,0\n", "dataset_array", "two columns 'a'"),
        ("a;b;outcome\n1,5;2;0\n", "dataset_array", "has values that ';' separates"),
        ("a\tb\toutcome\n1\t2\t0\n", "dataset_array", "has values that a tab separates"),
        ("a,b\n1,2\n", "dataset_array", "no column 'outcome'"),
        ("outcome\n1\n", "dataset_array", "no column but the label"),
        ("a,b,outcome\n1,,0\n", "dataset_array", "'b' has missing values"),
        ("a,b,outcome\n1,NA,0\n", "dataset_array", "'b' has missing values."),
        ("a,b,outcome\n1,,0\n2,<3,0\n", "dataset_array", "'b' has missing values, and others that are no numbers"),
        ("a,b,outcome\n1,secret,0\n2,3,0\n", "dataset_dtype", "'b' holds numbers and something else"),
        ("a,b,outcome\n1,secret,0\n", "dataset_dtype", "'b' is text"),
        ("a,b,outcome\n1,2,secret\n", "dataset_dtype", "'outcome' is text"),
        ("a,b,outcome\n1,True,0\n2,False,1\n", "dataset_dtype", "'b' holds true and false."),
        ("a,b,outcome\n1,2,true\n", "dataset_dtype", "'outcome' holds true and false."),
        ("a,b,outcome\n1,secret\n", "dataset_unreadable", "as many values"),
        ("a,b,outcome\n1,2,0,secret\n", "dataset_unreadable", "as many values"),
    ],
)
def test_a_csv_file_that_is_no_table_of_numbers_is_refused_without_a_value_of_it(
    text: str, code: str, said: str, tmp_path: Path
):
    (tmp_path / "bad.csv").write_text(text)
    error = refusal(tmp_path, "csv", "bad.csv")
    assert (error.code, said in error.message, "secret" in str(error)) == (code, True, False), str(error)


def test_one_error_names_all_columns_that_cannot_be_read_and_dates_as_dates(tmp_path: Path):
    (tmp_path / "bad.csv").write_text(
        "born,city,age,seen,weight,outcome\n"
        "1999-12-31,secret,40,1/2/2024 10:30,,well\n"
        "2000-01-01,other,41,3/4/2024,7,ill\n"
    )
    error = refusal(tmp_path, "csv", "bad.csv", class_names=("well",))
    said = (
        "'born' holds dates",
        "'city' is text",
        "'seen' holds dates",
        "'weight' has missing",
        "'outcome' has a label",
    )
    assert [each for each in (*said, "'age'", "secret") if each in error.message] == list(said)
    assert error.remedy.count("days since") == 1
    days, times = np.array(["1999-12-31"], "M8[D]"), np.array(["1999-12-31"], "M8[s]")
    table = {"born": days, "age": [40], "seen": times, "city": ["secret"], "outcome": ["well"]}
    pq.write_table(pa.table(table), tmp_path / "bad.parquet")
    error = refusal(tmp_path, "parquet", "bad.parquet")
    said = ("'born' holds dates", "'seen' holds dates", "'city' is string", "'outcome' is text")
    assert [each for each in (*said, "'age'") if each in error.message] == list(said)
    pq.write_table(pa.table({"a": [1, None], "b": [None, 2], "outcome": [0, None]}), tmp_path / "gaps.parquet")
    assert refusal(tmp_path, "parquet", "gaps.parquet").message.count("has missing values") == 3


def test_an_error_of_many_columns_names_the_first_and_counts_the_others(tmp_path: Path):
    names = [f"c{index}" for index in range(30)]
    (tmp_path / "bad.csv").write_text(f"{','.join(names)},outcome\n{'x,' * 30}1\n")
    error = refusal(tmp_path, "csv", "bad.csv")
    assert error.message.endswith("column 'c19' is text; and 10 more columns.")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "bad.csv").write_bytes(b"a,outcome\n\xff\xfe,1\n")
    assert refusal(tmp_path, "csv", "bad.csv").code in ("dataset_unreadable", "dataset_dtype")
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe,outcome\n1,1\n")
    assert refusal(tmp_path, "csv", "bad.csv").code == "dataset_unreadable"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_label_outside_the_public_list_is_refused_and_not_told(kind: str, tmp_path: Path):
    (tmp_path / "data.csv").write_text("a,b,outcome\n1,2,well\n3,4,secret\n")
    pq.write_table(pa.table({"a": [1, 3], "b": [2, 4], "outcome": ["well", "secret"]}), tmp_path / "data.parquet")
    error = refusal(tmp_path, kind, f"data.{kind}", class_names=CLASSES)
    assert (error.code, "secret" in str(error)) == ("dataset_label", False)
    (tmp_path / "gap.csv").write_text("a,outcome\n1,well\n2,\n")
    assert "has missing values" in refusal(tmp_path, "csv", "gap.csv", class_names=("well", "ill")).message
    error = refusal(tmp_path, kind, f"data.{kind}")
    assert (error.code, "dataset.classes" in error.remedy) == ("dataset_dtype", True)


@pytest.mark.parametrize(
    ("column", "code", "said"),
    [
        (pa.array(["x", "y"]), "dataset_dtype", "column 'b' is string"),
        (pa.array([1, 2], pa.date32()), "dataset_dtype", "column 'b' holds dates"),
        (pa.array([1, 2]).cast(pa.decimal128(30, 2)), "dataset_dtype", "column 'b' is decimal128"),
        (pa.array([1, None]), "dataset_array", "column 'b' has missing values"),
        (pa.array([[1], [2]]), "dataset_array", "one holds lists"),
        (pa.array([{"x": 1}, {"x": 2}]), "dataset_dtype", "column 'b' is struct"),
    ],
)
def test_a_parquet_column_of_another_type_is_named(column: pa.Array, code: str, said: str, tmp_path: Path):
    pq.write_table(pa.table({"a": [1.0, 2.0], "b": column, "outcome": [0, 1]}), tmp_path / "data.parquet")
    error = refusal(tmp_path, "parquet", "data.parquet")
    assert (error.code, said in error.message) == (code, True), str(error)


def test_files_of_one_table_have_the_same_columns_and_types(tmp_path: Path):
    pq.write_table(pa.table({"a": [1.0], "outcome": [0]}), tmp_path / "one.parquet")
    pq.write_table(pa.table({"a": [1], "outcome": [0]}), tmp_path / "two.parquet")
    error = refusal(tmp_path, "parquet", ".")
    assert (error.code, "column 'a' is int64, and double" in error.message) == ("dataset_dtype", True), str(error)
    pq.write_table(pa.table({"c": [1.0], "outcome": [0]}), tmp_path / "two.parquet")
    assert "two.parquet has no column 'a'" in refusal(tmp_path, "parquet", "*.parquet").message
    pq.write_table(pa.table({"a": [[1.0]], "outcome": [0]}), tmp_path / "one.parquet")
    pq.write_table(pa.table({"a": [[1.0, 2.0]], "outcome": [0]}), tmp_path / "two.parquet")
    assert "different shapes" in refusal(tmp_path, "parquet", ".").message


def test_labels_in_a_dictionary_are_text(tmp_path: Path):
    labels = pa.array(["ill", "well", "ill"]).dictionary_encode()
    pq.write_table(pa.table({"a": [1, 2, 3], "b": [0, 0, 1], "outcome": labels}), tmp_path / "data.parquet")
    assert rows_of(tmp_path, "parquet", "data.parquet", class_names=CLASSES)[1].tolist() == [1, 0, 1]
    pq.write_table(pa.table({"a": [1], "b": [0], "outcome": [3]}), tmp_path / "data.parquet")
    assert refusal(tmp_path, "parquet", "data.parquet", class_names=CLASSES).code == "dataset_dtype"
