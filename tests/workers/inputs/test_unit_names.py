"""The units of every kind of data that can name them, and what is refused: by the column's name, never by a value."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs import rows
from raycloak.workers.inputs.built_rows import PipelineIndex, write_rows
from raycloak.workers.inputs.datasets import slice_digest
from raycloak.workers.inputs.descriptor import AuditedExamples, DatasetDescriptor, OpenedDataset
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.inputs.in_memory import export_in_memory
from raycloak.workers.inputs.unit_names import unit_names
from raycloak.workers.inputs.user_code import unexecuted_digest
from raycloak.workers.inputs.void import for_owner
from raycloak.workers.terms.mechanism import UnitTerms
from tests.tiny_text import write_tokenizer
from tests.workers.inputs.given_dataset import Given

WHOSE = ["mueller", "abe", "mueller", "cruz", "abe", "mueller"]
ROWS = [[0, 2, 5], [1, 4], [3]]
"""Of the units, in the order in which the rows name them."""
LEN = len(WHOSE)


def table(whose: Any = WHOSE, **columns: Any) -> pa.Table:
    return pa.table({"age": range(LEN), "outcome": [0, 1] * 3, "who": whose, **columns})


def opened(base: Path, kind: str, path: str | None, **fields: Any) -> OpenedDataset:
    given = {"features": (), "labels": "outcome", "unit": "who", "rows_per_unit": 2, **fields}
    return DatasetDescriptor(kind=kind, path=path, **given).open_slices(base)


def rows_of(data: OpenedDataset) -> list[list[int]]:
    assert data.units is not None
    return [data.units.rows_of(np.array([unit])).tolist() for unit in range(len(data.units))]


def refusal(base: Path, kind: str, path: str | None, **fields: Any) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        opened(base, kind, path, **fields)
    assert caught.value.code == "dataset_unit"
    return caught.value


def test_a_column_names_the_units_and_is_no_feature(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,who,outcome\n" + "".join(f"{n},{who},0\n" for n, who in enumerate(WHOSE)))
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(table(pa.array(WHOSE).dictionary_encode()), tmp_path / "coded.parquet")
    for kind, path in (("csv", "a.csv"), ("parquet", "a.parquet"), ("parquet", "coded.parquet")):
        data = opened(tmp_path, kind, path)
        assert rows_of(data) == ROWS
        assert (data.features, data.form.feature_shape) == (("age",), ())
        assert (data.form.num_examples, data.form.units, data.form.population) == (LEN, 3, 3)


def test_units_go_on_over_files_whatever_the_type_of_each(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for number, whose in enumerate((pa.array([7, 8, 7, 9, 8, 7]), pa.array([" 7", "8", "x", "7 ", "9", "8"]))):
        pq.write_table(table(whose), tmp_path / "rows" / f"{number}.parquet")
    assert rows_of(opened(tmp_path, "parquet", "rows")) == [[0, 2, 5, 6, 9], [1, 4, 7, 11], [3, 10], [8]]


def test_two_spellings_of_unicode_are_one_unit(tmp_path: Path) -> None:
    pq.write_table(table(["M\u00fcller", "Mu\u0308ller", *"abcd"]), tmp_path / "a.parquet")
    assert rows_of(opened(tmp_path, "parquet", "a.parquet"))[0] == [0, 1]


def test_an_array_of_npz_names_the_units(tmp_path: Path) -> None:
    arrays = {"images": np.zeros((LEN, 2), np.float32), "outcome": np.zeros(LEN, np.int64)}
    for number, whose in enumerate((np.array(WHOSE), np.array([4, 1, 4, 9, 1, 4], np.uint16))):
        np.savez(tmp_path / f"{number}.npz", who=whose, **arrays)
        assert rows_of(opened(tmp_path, "npz", f"{number}.npz", features=("images",))) == ROWS
    np.savez(tmp_path / "short.npz", who=np.array(WHOSE[:-1]), **arrays)
    assert "6 examples" in refusal(tmp_path, "npz", "short.npz", features=("images",)).message
    assert "no 'person'" in refusal(tmp_path, "npz", "0.npz", features=("images",), unit="person").message


def test_tokenised_text_and_text_have_a_column_of_units(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "words")
    text = table(text=["good film"] * LEN, input_ids=[[1, 2]] * LEN)
    pq.write_table(text, tmp_path / "a.parquet")
    tokens = opened(tmp_path, "hf", "a.parquet", max_length=2, vocabulary=9)
    assert (rows_of(tokens), tokens.features) == (ROWS, ("input_ids",))
    given = {"features": ("text",), "tokenizer": "words", "max_length": 4}
    assert rows_of(opened(tmp_path, "text", "a.parquet", **given)) == ROWS
    (tmp_path / "a.tsv").write_text("good film\t1\n")
    assert "no column for dataset.unit" in refusal(tmp_path, "text", "a.tsv", **given).message


def test_a_document_is_the_unit_of_its_blocks(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "words")
    (tmp_path / "texts").mkdir()
    for name, words in (("a", 5), ("b", 2), ("empty", 0)):
        (tmp_path / "texts" / f"{name}.txt").write_text("film " * words)
    given = {"features": (), "tokenizer": "words", "max_length": 2, "unit": "document"}
    assert rows_of(opened(tmp_path, "text_blocks", "texts", **given)) == [[0, 1, 2], [3]]


def test_images_belong_to_the_folder_below_their_class(tmp_path: Path) -> None:
    for name in ("cats/17/a.png", "cats/18/b.png", "dogs/17/c.png"):
        path = tmp_path / "pets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(path)
    given = {"size": (2, 2), "features": (), "unit": "owner"}
    assert rows_of(opened(tmp_path, "imagefolder", "pets", **given)) == [[0, 2], [1]]
    shutil.move(tmp_path / "pets/cats/18/b.png", tmp_path / "pets/cats/b.png")
    assert "folder of their owner" in refusal(tmp_path, "imagefolder", "pets", **given).message


def test_a_function_names_the_unit_of_each_example(tmp_path: Path) -> None:
    (tmp_path / "people.py").write_text(
        "import numpy as np\n"
        "class Rows:\n"
        f"    who = {WHOSE}\n"
        "    def __len__(self): return len(self.who)\n"
        "    def batch(self, ids): return np.zeros((len(ids), 2), np.float32), np.zeros(len(ids), np.int64)\n"
        "class People(Rows):\n"
        "    def unit(self, index): return self.who[index]\n"
        "class Named(People):\n"
        "    def batch(self, ids):\n"
        "        features, labels = super().batch(ids)\n"
        "        return {'x': features}, labels\n"
        "class Broken(Rows):\n"
        "    def unit(self, index): raise ValueError(self.who[index])\n"
        "class Fractions(Rows):\n"
        "    def unit(self, index): return 0.5\n"
    )
    for name in ("People", "Named"):
        assert rows_of(opened(tmp_path, "module", None, function=f"people:{name}")) == ROWS
    for name, what in (("Rows", "no unit(index)"), ("Fractions", "double")):
        assert what in refusal(tmp_path, "module", None, function=f"people:{name}").message
    with pytest.raises(DatasetError, match="ValueError") as caught:
        opened(tmp_path, "module", None, function="people:Broken")
    assert WHOSE[0] not in str(caught.value)


def test_a_pipeline_keeps_the_column_of_units(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("def people(): pass\n")
    (tmp_path / "built").mkdir()
    code = unexecuted_digest("pipeline:people", tmp_path)
    assert isinstance(write_rows([table()], tmp_path / "built", "pipeline:people", code), PipelineIndex)
    assert rows_of(opened(tmp_path, "ray_data", "built", function="pipeline:people")) == ROWS


def test_a_dataset_in_memory_names_units_and_no_name_is_written(tmp_path: Path) -> None:
    given = Given([([float(n)], 0) for n in range(LEN)], unit=WHOSE.__getitem__, rows_per_unit=2)
    described = export_in_memory(given, tmp_path / "examples.npz")
    data = described.open_slices(tmp_path)
    assert (described.unit, described.rows_per_unit, rows_of(data)) == ("unit", 2, ROWS)
    assert b"mueller" not in (tmp_path / "examples.npz").read_bytes()
    assert described.unit_terms == UnitTerms("unit", 2, 1)
    told = {"unit": WHOSE.__getitem__}
    for attributes in (told, {"rows_per_unit": 2}, {"unit": "who", "rows_per_unit": 2}, told | {"rows_per_unit": 257}):
        with pytest.raises(DatasetError, match="dataset_unit"):
            export_in_memory(Given([([0.0], 0)], **attributes), tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("whose", "what"),
    [
        ([*WHOSE[:-1], None], "without a name"),
        ([*WHOSE[:-1], "NaN"], "without a name"),
        ([1.0, 2.0, 1.0, 3.0, 2.0, 1.0], "is double"),
        ([True, False] * 3, "is bool"),
        (pa.array(range(LEN), pa.timestamp("s")), "is timestamp"),
    ],
)
def test_what_is_no_name_is_refused_without_a_value(whose: Any, what: str, tmp_path: Path) -> None:
    pq.write_table(table(whose), tmp_path / "a.parquet")
    error = refusal(tmp_path, "parquet", "a.parquet")
    assert f"a.parquet, column 'who' {'has rows ' if 'name' in what else ''}{what}" in error.message
    assert "mueller" not in str(error)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    assert "has no 'patient_id' for dataset.unit; it has age, outcome, who" in str(
        refusal(tmp_path, "parquet", "a.parquet", unit="patient_id")
    )


def test_the_owner_is_told_which_rows_have_no_unit(tmp_path: Path) -> None:
    pq.write_table(table([*WHOSE[:3], None, "", "x"]), tmp_path / "a.parquet")
    with for_owner():
        assert "(rows 4, 5)" in str(refusal(tmp_path, "parquet", "a.parquet"))
    assert "rows 4" not in str(refusal(tmp_path, "parquet", "a.parquet"))


@pytest.mark.parametrize("values", [["1.0", "2.5", "1.0"], ["1e3", "2", "3"]])
def test_a_text_file_with_units_that_are_floats_is_refused(values: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,who,outcome\n" + "".join(f"1,{value},0\n" for value in values))
    assert "numbers with a point" in refusal(tmp_path, "csv", "a.csv").message
    assert unit_names(pa.array(["1.2", "ward 3"]), "the column", as_text=True) == ["1.2", "ward 3"]


def test_units_of_two_datasets_of_a_process_are_told_apart_by_name(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    pq.write_table(table(["cruz", "new", "mueller", "mueller", "new", "zoe"]), tmp_path / "b.parquet")
    one, other = (opened(tmp_path, "parquet", path).units for path in ("a.parquet", "b.parquet"))
    assert one is not None
    assert other is not None
    assert (one.shared_with(other), other.shared_with(one), one.shared_with(one)) == (2, 2, 3)
    assert one.with_more(1, 2).shared_with(other) is None
    assert "mueller" not in repr(one)


def test_a_canary_is_a_unit_with_as_many_rows_as_a_step_may_have_of_one(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    inner = DatasetDescriptor(
        kind="parquet", path="a.parquet", features=("age",), labels="outcome", unit="who", rows_per_unit=2
    )
    audited = AuditedExamples(base=str(tmp_path), dataset=inner, included=(True, False))
    (tmp_path / "audited.json").write_bytes(audited.encode())
    data = opened(tmp_path, "canaries", "audited.json")
    assert rows_of(data) == [*ROWS, [6, 7], [8, 9]]
    assert data.examples.batch(np.arange(6, 10))[0][:, -1].tolist() == [1, 1, -1, -1]
    assert data.form.population == 5


def test_rows_in_a_scratch_file_have_the_units_of_those_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=2)
    held = opened(tmp_path, "parquet", "a.parquet")
    monkeypatch.setattr(rows, "MEMORY_BYTES", 1)
    written = opened(tmp_path, "parquet", "a.parquet")
    assert isinstance(written.examples, rows.ScratchDataset)
    assert rows_of(written) == rows_of(held) == ROWS
    every = np.arange(3)
    assert slice_digest(written.examples, every, written.units) == slice_digest(held.examples, every, held.units)


def test_an_account_knows_data_by_its_rows_whatever_their_units(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    (tmp_path / "data.key").touch(mode=0o600)
    (tmp_path / "data.key").write_text("0f" * 32)
    found = []
    for unit in ("who", "age", None):
        given = {"features": ("age",), "labels": "outcome", "fingerprint_key": "data.key", "unit": unit}
        described = DatasetDescriptor(kind="parquet", path="a.parquet", **given)
        found.append(data_marks(described, described.open_slices(tmp_path), tmp_path))
    assert found[0] == found[1] == found[2]


def test_data_without_units_has_the_bytes_of_before(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    described = DatasetDescriptor(kind="parquet", path="a.parquet", features=("age",), labels="outcome")
    assert not {b"unit", b"rows_per_unit"} & set(described.encode().split(b'"'))
    data = described.open_slices(tmp_path)
    assert (data.units, data.form.units, data.form.population) == (None, None, LEN)
    assert b"units" not in data.form.encode()
    assert described.identity_digest() != described.model_copy(update={"unit": "who"}).identity_digest()
