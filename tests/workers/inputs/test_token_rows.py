"""Tokenised text gives the same ids from a folder of `datasets` and from Parquet, cut and padded to one length."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.datasets import dataset_form
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.in_memory import export_in_memory
from tests.tiny_text import write_tokenizer

ROWS = {
    "input_ids": [[2, 5, 3], [2, 7, 8, 9, 3], [2, 3, 0, 0], [11]],
    "attention_mask": [[1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0], [1]],
    "labels": [1, 0, 1, 1],
}
IDS = [[2, 5, 3, -1], [2, 7, 8, 9], [2, 3, -1, -1], [11, -1, -1, -1]]


def saved(folder: Path, rows: dict[str, Any], parts: int = 2, **state: Any) -> Path:
    """Write what ``Dataset.save_to_disk`` writes: Arrow streams, and the order of their files."""
    folder.mkdir(parents=True)
    table = pa.table(rows)
    names = [f"data-{part:05d}-of-{parts:05d}.arrow" for part in range(parts)]
    size = -(-len(table) // parts)
    for part, name in enumerate(names):
        piece = table.slice(part * size, size)
        with ipc.new_stream(folder / name, piece.schema) as writer:
            writer.write_table(piece, max_chunksize=3)
    (folder / "dataset_info.json").write_text("{}")
    listed = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}
    (folder / "state.json").write_text(json.dumps({**listed, **state}))
    return folder


def described(path: str, **fields: Any) -> DatasetDescriptor:
    given = {"kind": "hf", "path": path, "features": (), "max_length": 4, "vocabulary": 16}
    return DatasetDescriptor(**{**given, **fields})


def rows_of(base: Path, path: str, **fields: Any) -> list[Any]:
    dataset = described(path, **fields).open(base)
    return [part.tolist() for part in dataset.batch(np.arange(len(dataset)))]


def refusal(base: Path, rows: dict[str, Any], **fields: Any) -> str:
    pq.write_table(pa.table(rows), base / "bad.parquet")
    with pytest.raises(DatasetError) as caught:
        described("bad.parquet", **fields).open(base)
    return str(caught.value)


def test_a_folder_of_datasets_and_parquet_give_ids_of_one_length(tmp_path: Path):
    saved(tmp_path / "saved", ROWS)
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet", row_group_size=3)
    for path in ("saved", "rows.parquet"):
        assert rows_of(tmp_path, path) == [IDS, ROWS["labels"]]
    form = dataset_form(described("saved").open(tmp_path))
    assert (form.feature_shape, form.feature_dtype, form.label_shape) == ((4,), "int64", ())
    assert rows_of(tmp_path, "saved", max_length=2)[0] == [row[:2] for row in IDS]


def test_they_are_what_the_same_rows_are_that_are_given_in_memory(tmp_path: Path):
    rows = {name: [ROWS[name][0], ROWS[name][3] * (3 if name != "labels" else 1)] for name in ("input_ids", "labels")}
    saved(tmp_path / "saved", rows, parts=1)
    given = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    exported = export_in_memory(given, tmp_path / "given.npz").open("/")
    ids, labels = exported.batch(np.arange(2))
    assert rows_of(tmp_path, "saved", max_length=3) == [ids.tolist(), labels.tolist()]


def test_labels_of_tokens_end_with_their_row(tmp_path: Path):
    rows = {**ROWS, "labels": [[-100, 4, -100], [0, 1, 2, 3, 4], [5, 6, 7, 7], [9]]}
    saved(tmp_path / "saved", rows)
    labels = rows_of(tmp_path, "saved")[1]
    assert labels == [[-100, 4, -100, -100], [0, 1, 2, 3], [5, 6, 7, 7], [9, -100, -100, -100]]
    labels = rows_of(tmp_path, "saved", labels="input_ids")[1]
    assert labels == [[2, 5, 3, -100], [2, 7, 8, 9], [2, 3, -100, -100], [11, -100, -100, -100]]


def test_the_files_come_in_the_order_that_the_folder_states(tmp_path: Path):
    folder = saved(tmp_path / "saved", ROWS)
    names = [{"filename": f"data-0000{part}-of-00002.arrow"} for part in (1, 0)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    assert rows_of(tmp_path, "saved")[1] == [1, 1, 1, 0]


def test_a_tokenizer_gives_the_number_of_ids_and_its_digest(tmp_path: Path):
    write_tokenizer(tmp_path / "words")
    saved(tmp_path / "saved", ROWS)
    opened = described("saved", tokenizer="words", vocabulary=None).open_slices(tmp_path)
    assert (opened.vocabulary, len(opened.tokenizer)) == (16, 32)
    assert described("saved").open_slices(tmp_path).vocabulary == 16


def test_the_fingerprint_is_of_the_rows_and_not_of_their_place(tmp_path: Path):
    (tmp_path / "data.key").touch(mode=0o600)
    (tmp_path / "data.key").write_text("0f" * 32)

    def fingerprint(path: str) -> bytes:
        descriptor = described(path, fingerprint_key="data.key")
        return data_marks(descriptor, descriptor.open_slices(tmp_path), tmp_path).fingerprint

    first = fingerprint(saved(tmp_path / "one", ROWS).name)
    assert fingerprint(saved(tmp_path / "two", ROWS).name) == first
    assert fingerprint(saved(tmp_path / "three", {**ROWS, "labels": [1, 0, 1, 0]}).name) != first


def test_rows_that_are_no_examples_are_refused_by_column(tmp_path: Path):
    assert "no column 'labels'" in refusal(tmp_path, {"input_ids": ROWS["input_ids"]})
    assert "no column 'input_ids'" in refusal(tmp_path, {"text": ["a"], "labels": [1]})
    assert "dataset_dtype" in refusal(tmp_path, {**ROWS, "input_ids": [[1.0]] * 4})
    assert "dataset_dtype" in refusal(tmp_path, {**ROWS, "input_ids": ["secret"] * 4})
    assert "missing values" in refusal(tmp_path, {**ROWS, "input_ids": [[1, None], *ROWS["input_ids"][1:]]})
    assert "missing values" in refusal(tmp_path, {**ROWS, "labels": [1, None, 0, 0]})
    assert "'attention_mask' has rows of other lengths" in refusal(tmp_path, {**ROWS, "attention_mask": [[1]] * 4})
    assert "token types" in refusal(tmp_path, {**ROWS, "token_type_ids": [[0, 1]] * 4})
    assert "dataset_empty" in refusal(tmp_path, {name: pa.array([], pa.list_(pa.int64())) for name in ROWS})


def test_folders_that_are_not_one_table_are_refused(tmp_path: Path):
    saved(tmp_path / "many" / "train", ROWS)
    (tmp_path / "many" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DatasetError, match=r"dataset_array: .*several splits.*many/train"):
        described("many").open(tmp_path)
    saved(tmp_path / "selected", ROWS, _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(DatasetError, match="flatten_indices"):
        described("selected").open(tmp_path)
    (saved(tmp_path / "torn", ROWS) / "state.json").write_text("{")
    with pytest.raises(DatasetError, match="no folder that datasets wrote"):
        described("torn").open(tmp_path)
    damaged = saved(tmp_path / "damaged", ROWS) / "data-00001-of-00002.arrow"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(DatasetError, match="dataset_unreadable"):
        described("damaged").open(tmp_path)
    (tmp_path / "damaged" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DatasetError, match="dataset_unreadable: cannot read"):
        described("damaged").open(tmp_path)
