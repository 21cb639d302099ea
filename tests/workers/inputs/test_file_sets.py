"""The digest of a set of files is over the bytes that are read, wherever they lie; other bytes are refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloak.attestation.core.data_marks import DataMarks, Likeness, likeness
from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs import file_sets
from raycloak.workers.inputs.datasets import Taken
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.file_sets import CommittedFile, FileSet
from raycloak.workers.inputs.files import npz_rows
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.tables import csv_rows, parquet_rows
from tests.workers.inputs.content import content_digest

READERS = {"parquet": parquet_rows, "csv": csv_rows, "npz": npz_rows}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for part in range(3):
        write(tmp_path / "data" / f"part-{part}.parquet", part)
    (tmp_path / "data.key").touch(mode=0o600)
    (tmp_path / "data.key").write_text("0f" * 32)
    return tmp_path


def write(path: Path, part: int, rows: int = 30) -> None:
    path.parent.mkdir(exist_ok=True)
    rng = np.random.default_rng(part)
    columns = {**{f"f{index}": rng.normal(size=rows) for index in range(4)}, "labels": rng.integers(0, 3, rows)}
    if path.suffix == ".csv":
        lines = zip(*(column.tolist() for column in columns.values()), strict=True)
        path.write_text("\n".join([",".join(columns), *(",".join(map(str, line)) for line in lines)]))
    elif path.suffix == ".npz":
        np.savez(path, **columns)
    else:
        pq.write_table(pa.table(columns), path)


def marks(base: Path, path: str, **fields: Any) -> DataMarks:
    given = {"kind": "parquet", "features": (), "fingerprint_key": "data.key", **fields}
    descriptor = DatasetDescriptor(path=path, **given)
    return data_marks(descriptor, descriptor.open_slices(base), base)


def test_a_file_a_folder_and_a_pattern_of_the_same_files_have_one_fingerprint(base: Path):
    folder, pattern = marks(base, "data"), marks(base, "data/part-*.parquet")
    assert folder.fingerprint == pattern.fingerprint
    (base / "data").rename(base / "elsewhere")
    assert marks(base, "elsewhere").fingerprint == folder.fingerprint
    one, same = marks(base, "elsewhere/part-[1].parquet"), marks(base, "elsewhere/part-1.parquet")
    assert one.fingerprint == same.fingerprint
    # Other columns are other examples, but the files have the same bytes.
    assert likeness(marks(base, "elsewhere", features=("f0..f2",)), folder) is Likeness.PLACE


def test_another_order_of_files_has_the_same_fingerprint_and_one_more_file_is_recognised(base: Path):
    first = marks(base, "data")
    (base / "data" / "part-0.parquet").rename(base / "data" / "part-9.parquet")
    assert marks(base, "data").fingerprint == first.fingerprint
    seen = {first.fingerprint}
    for part in (4, 5):
        write(base / "data" / "part-4.parquet", part)
        seen.add(marks(base, "data").fingerprint)
        assert likeness(marks(base, "data"), first) is Likeness.MOST_EXAMPLES
    assert len(seen) == 3


@pytest.mark.parametrize("suffix", ["parquet", "csv", "npz"])
def test_a_file_that_is_rewritten_between_its_digest_and_its_reading_is_refused(suffix: str, tmp_path: Path):
    path = tmp_path / f"data.{suffix}"
    for other, code in ((1, None), (2, "data_changed")):
        write(path, 1)
        stated = content_digest(path.read_bytes())
        files = FileSet(path.name, tmp_path, (f".{suffix}",), hashed=True)
        opened = files.opened

        def after_rewriting(opened: Any = opened, other: int = other) -> Any:
            for found in opened():
                write(path, other)
                yield found

        files.opened = after_rewriting  # type: ignore[method-assign]
        asked = DatasetDescriptor(kind=suffix, features=("f0",))
        rows = READERS[suffix](files, asked, Taken())
        if code is None:
            assert sum(len(features) for features, _ in rows) == 30
            assert files.digest() == stated
        else:
            with pytest.raises(DatasetError) as caught:
                list(rows)
            assert caught.value.code == code


def test_a_committed_file_reads_as_any_other(monkeypatch):
    monkeypatch.setattr(file_sets, "_BLOCK", 16)
    content = bytes(range(100))
    committed = CommittedFile(io.BytesIO(content), "file")
    assert committed.digest == content_digest(content)
    with io.BufferedReader(committed, 8) as reader:
        assert reader.read() == content
        assert (reader.seek(-3, io.SEEK_END), reader.read(9), reader.read(1)) == (97, content[97:], b"")
        for start, count in ((15, 2), (0, 33), (96, 4)):
            reader.seek(start)
            assert reader.read(count) == content[start : start + count]


def test_a_committed_file_refuses_a_changed_block_and_gives_the_others(monkeypatch):
    monkeypatch.setattr(file_sets, "_BLOCK", 16)
    source = io.BytesIO(bytes(100))
    committed = CommittedFile(source, "file")
    source.getbuffer()[40] = 1
    assert committed.read(16) == bytes(16)
    committed.seek(35)
    with pytest.raises(DatasetError, match="data_changed"):
        committed.read(1)
    source.truncate(20)
    committed.seek(16)
    with pytest.raises(DatasetError, match="data_changed"):
        committed.read(16)


@pytest.mark.parametrize("path", ["none.parquet", "none", "data/none-*.parquet", "data.key"])
def test_a_path_that_names_no_table_is_refused(base: Path, path: str):
    with pytest.raises(DatasetError, match="dataset_unreadable"):
        DatasetDescriptor(kind="parquet", path=path, features=()).open(base)


def test_an_empty_folder_is_refused(base: Path):
    (base / "empty").mkdir()
    (base / "empty" / "notes.txt").touch()
    with pytest.raises(DatasetError, match=r"dataset_unreadable: .*empty names no file that ends in \.parquet"):
        DatasetDescriptor(kind="parquet", path="empty", features=()).open(base)
