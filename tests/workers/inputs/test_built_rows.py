"""Folders that a pipeline wrote: what their index binds, and how a worker opens them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.workers.inputs import built_rows
from raycloak.workers.inputs.built_rows import INDEX, PipelineIndex, write_rows
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.user_code import source_digest, unexecuted_digest

FUNCTION = "pipeline:rows"
BUILT = DatasetDescriptor(kind="ray_data", path="built", function=FUNCTION, features=("a", "b"), labels="outcome")


def table(start: int, count: int) -> Any:
    numbers = np.arange(start, start + count)
    return pa.table({"a": numbers.astype(np.float32), "b": numbers + 0.5, "outcome": numbers % 3})


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a pipeline, and 25 rows that it wrote to three files."""
    monkeypatch.setattr(built_rows, "FILE_ROWS", 10)
    (tmp_path / "pipeline.py").write_text("import helper\n\ndef rows():\n    raise RuntimeError('not in a worker')\n")
    (tmp_path / "helper.py").write_text("SCALE = 2\n")
    (tmp_path / "built").mkdir()
    tables = [table(0, 4), table(4, 17), table(21, 4)]
    write_rows(tables, tmp_path / "built", FUNCTION, unexecuted_digest(FUNCTION, tmp_path))
    return tmp_path


def test_rows_have_the_ids_of_their_order_in_all_files(base: Path):
    index = PipelineIndex.load(base / "built")
    assert [(each.name, each.rows) for each in index.files] == [
        ("rows-00000.parquet", 10),
        ("rows-00001.parquet", 10),
        ("rows-00002.parquet", 5),
    ]
    opened = BUILT.open_slices(base)
    assert len(opened.examples) == index.rows == 25
    features, labels = opened.examples.batch(np.array([24, 0, 11]))
    assert features.tolist() == [[24, 24.5], [0, 0.5], [11, 11.5]]
    assert labels.tolist() == [0, 0, 2]
    assert opened.file_digest == b"", "without a key no digest of the rows leaves the worker"


def test_guarantee_the_manifest_has_the_digest_of_the_pipelines_code_and_nothing_of_its_rows(base: Path):
    made_by = BUILT.open_slices(base).tokenizer
    assert len(made_by) == 32
    other = base / "other"
    other.mkdir()
    write_rows([table(100, 3)], other, FUNCTION, unexecuted_digest(FUNCTION, base))
    assert BUILT.model_copy(update={"path": "other"}).open_slices(base).tokenizer == made_by
    (base / "helper.py").write_text("SCALE = 3\n")
    (base / "again").mkdir()
    write_rows([table(100, 3)], base / "again", FUNCTION, unexecuted_digest(FUNCTION, base))
    assert BUILT.model_copy(update={"path": "again"}).open_slices(base).tokenizer != made_by


@pytest.mark.parametrize("name", ["pipeline.py", "helper.py"])
def test_guarantee_a_folder_is_opened_only_beside_the_code_that_wrote_it(base: Path, name: str):
    (base / name).write_text((base / name).read_text() + "# a change\n")
    with pytest.raises(DatasetError, match=r"pipeline_changed: .*pipeline:rows"):
        BUILT.open(base)


def test_another_function_of_the_same_file_is_another_pipeline(base: Path):
    with pytest.raises(DatasetError, match="pipeline_changed"):
        BUILT.model_copy(update={"function": "pipeline:others"}).open(base)


def test_guarantee_a_folder_whose_rows_are_not_those_that_were_written_is_refused(base: Path):
    built = base / "built"
    (built / "rows-00001.parquet").write_bytes((built / "rows-00000.parquet").read_bytes())
    with pytest.raises(DatasetError, match="data_changed"):
        BUILT.open(base)
    (built / "rows-00001.parquet").unlink()
    with pytest.raises(DatasetError, match="dataset_unreadable"):
        BUILT.open(base)


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_a_folder_without_a_readable_index_was_not_built(base: Path, content: bytes | None):
    (base / "built" / INDEX).unlink()
    if content is not None:
        (base / "built" / INDEX).write_bytes(content)
    with pytest.raises(DatasetError, match=r"dataset_unbuilt: .*raycloak data build"):
        BUILT.open(base)


def test_a_pipeline_without_rows_or_with_rows_of_different_columns_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="dataset_empty"):
        write_rows([table(0, 0)], tmp_path, FUNCTION, bytes(32))
    with pytest.raises(DatasetError, match="dataset_array"):
        write_rows([table(0, 1), table(1, 1).drop_columns(["b"])], tmp_path, FUNCTION, bytes(32))
    assert not (tmp_path / INDEX).exists()


def test_the_unexecuted_digest_is_the_source_digest(base: Path):
    (base / "sound.py").write_text("import helper\n\ndef rows():\n    return helper.SCALE\n")
    assert unexecuted_digest("sound:rows", base) == source_digest("sound:rows", base)
    assert unexecuted_digest("json:loads", base) == source_digest("json:loads", base)
    for name in ("nowhere:rows", "nowhere.at.all:rows", "sys:exit", "json"):
        with pytest.raises(ConfigError, match="module_function"):
            unexecuted_digest(name, base)
