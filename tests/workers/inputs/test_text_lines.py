"""Files of text: the one bad line is named to its owner, a packed file is read, and another form is refused by name."""

import bz2
import gzip
import io
import lzma
import unicodedata
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycloak.metrics.errors import DatasetError
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.void import for_owner
from tests.tiny_text import write_tokenizer


@pytest.fixture
def base(tmp_path):
    write_tokenizer(tmp_path / "words")
    return tmp_path


def described(path, **fields):
    given = {"kind": "text", "path": path, "features": ("text",), "tokenizer": "words", "max_length": 6}
    return DatasetDescriptor.model_validate({**given, **fields})


def refusal(base, path, **fields):
    with pytest.raises(DatasetError) as caught:
        described(path, **fields).open(base)
    return caught.value


def test_a_line_that_is_no_example_is_named_to_the_owner_alone(base):
    lines = [f"a text\t{number % 2}" for number in range(300)]
    lines[150], lines[200] = "no tab", "a text\tpositive"
    (base / "train.tsv").write_text("\n".join(lines))
    hidden = refusal(base, "train.tsv")
    assert hidden.message == f"a line of {base / 'train.tsv'} is not text, a tab and a class number."
    assert "data check" in hidden.remedy
    with for_owner():
        assert refusal(base, "train.tsv").message.endswith("a tab and a class number (lines 151, 201).")
        (base / "train.tsv").write_bytes(b"a text\t1\nan \xff\t0\n")
        assert "not text in UTF-8 (byte 13)" in refusal(base, "train.tsv").message


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_texts_of_a_folder_are_those_of_its_files_in_order(base, scheme):
    parts = [b"a text\t1\r\nanother\t0\n", b"a last one\t2\n"]
    (base / "parts").mkdir()
    for name, part in zip("ab", parts, strict=True):
        (base / "parts" / f"{name}.tsv").write_bytes(part)
    (base / "parts" / "notes.txt").write_text("none")
    (base / "all.tsv").write_bytes(b"".join(parts))
    path = f"{scheme}{base}/parts" if scheme else "parts"
    opened = described(path).open_slices(base)
    ours, theirs = (each.batch(np.arange(3)) for each in (opened.examples, described("all.tsv").open(base)))
    assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert opened.left_out == (f"{scheme}{base}/parts: 1 file is left out: 1 .txt",)


def test_text_that_gzip_has_packed_is_read(base):
    (base / "train.tsv").write_text("a text\t1\nanother\t0\n")
    (base / "train.tsv.gz").write_bytes(gzip.compress((base / "train.tsv").read_bytes()))
    ours, theirs = (described(path).open(base).batch(np.arange(2)) for path in ("train.tsv", "train.tsv.gz"))
    assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    (base / "train.tsv.gz").write_bytes(gzip.compress(b"a text\t1\n")[:-9])
    assert "is damaged" in refusal(base, "train.tsv.gz").message


@pytest.mark.parametrize(
    ("name", "said"), [("train.jsonl", "JSON lines"), ("train.jsonl.gz", "JSON lines"), ("train.csv", "a CSV file")]
)
def test_a_file_of_another_form_is_refused_by_its_name(name, said, base):
    (base / name).write_bytes(gzip.compress(b"{}") if name.endswith(".gz") else b"text,label\n")
    error = refusal(base, name)
    assert (said in error.message, "to_parquet" in error.remedy) == (True, True)


def test_several_columns_of_a_table_of_text_make_a_label(base):
    pq.write_table(pa.table({"text": ["a text", "one"], "rude": [0, 1], "spam": [1, 1]}), base / "train.parquet")
    _, labels = described("train.parquet", labels=("rude", "spam")).open(base).batch(np.arange(2))
    assert labels.tolist() == [[0, 1], [1, 1]]
    (base / "train.tsv").write_text("a text\t1\n")
    assert "has one label, and 2 are named" in refusal(base, "train.tsv", labels=("rude", "spam")).message


def test_labels_of_text_may_be_the_names_of_a_public_list(base):
    names = {"class_names": ("neg", "Müll"), "classes": 2}
    decomposed = unicodedata.normalize("NFD", "Müll")
    (base / "train.tsv").write_text(f"a text\tMüll\none\tneg\nmore\t{decomposed}\n", encoding="utf-8")
    table = {"text": ["a text", "one", "more"], "input_ids": [[1], [2], [3]], "label": ["Müll", "neg", decomposed]}
    pq.write_table(pa.table(table), base / "train.parquet")
    tokens = {"kind": "hf", "features": (), "tokenizer": None, "vocabulary": 9}
    for path, fields in (("train.tsv", {}), ("train.parquet", {}), ("train.parquet", tokens)):
        _, labels = described(path, labels="label", **names, **fields).open(base).batch(np.arange(3))
        assert (labels.tolist(), labels.dtype) == ([1, 0, 1], np.int64)
    (base / "train.tsv").write_text("sentence\tlabel\na text\tneg\n")
    with for_owner():
        error = refusal(base, "train.tsv", **names)
        assert (error.code, "not in dataset.classes (row 1)" in error.message) == ("dataset_label", True)
        (base / "train.tsv").write_text("a text\tneg\nno tab\n")
        assert refusal(base, "train.tsv", **names).message.endswith("is not text, a tab and a class (line 2).")


def test_a_packed_file_of_a_kind_that_is_read_in_pieces_is_refused_by_name(base):
    pq.write_table(pa.table({"x": [1.0], "y": [0]}), base / "plain.parquet")
    packed = gzip.compress((base / "plain.parquet").read_bytes())
    for kind, path, fields in (
        ("parquet", "data.parquet", {}),
        ("npz", "data.npz", {}),
        ("hf", "tokens.parquet", {"max_length": 4, "vocabulary": 9}),
    ):
        (base / path).write_bytes(packed)
        given = {"kind": kind, "path": path, "features": ("x",), "labels": "y", **fields}
        with pytest.raises(DatasetError, match="is packed by gzip") as caught:
            DatasetDescriptor.model_validate(given).open(base)
        assert caught.value.remedy.startswith("Unpack it")


def as_zip(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("train", content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("pack", "said"),
    [
        (as_zip, "is a zip archive, as workbooks of Excel and .npz files are"),
        (bz2.compress, "is packed by bzip2"),
        (lzma.compress, "is packed by xz"),
        (lambda content: pa.compress(content, "zstd", asbytes=True), "is packed by zstd"),
        (lambda content: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + content, "is an Excel workbook"),
    ],
)
def test_what_a_file_is_packed_by_is_said_and_none_of_its_bytes(base, pack, said):
    (base / "train.tsv").write_bytes(pack(b"a text\t1\n"))
    assert said in refusal(base, "train.tsv").message
    (base / "data.csv").write_bytes(pack(b"x,y\n1,0\n"))
    pq.write_table(pa.table({"x": [1.0], "y": [0]}), base / "plain.parquet")
    (base / "data.parquet").write_bytes(pack((base / "plain.parquet").read_bytes()))
    for kind, path in (("csv", "data.csv"), ("parquet", "data.parquet")):
        with pytest.raises(DatasetError, match=said) as caught:
            DatasetDescriptor(kind=kind, path=path, features=("x",), labels="y").open(base)
        assert caught.value.message.endswith(f"{path} {said}.")
