"""Text as examples: token ids [N, T] of one public length, with -1 for padding.

The tokenizer is public, and its digest is in the manifest: another tokenizer would make other examples of the same
text. Every text is cut or padded to T tokens, whatever its length.
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.columns import found_columns
from raycloak.workers.inputs.datasets import Arrays, Taken
from raycloak.workers.inputs.file_sets import FileSet, unzipped
from raycloak.workers.inputs.hub_files import library, public_folder, quiet
from raycloak.workers.inputs.tables import class_numbers, column_place, label_columns, note_units, unbroken
from raycloak.workers.inputs.unit_names import require_unit_column
from raycloak.workers.inputs.void import IGNORED, PADDING, named_by_check, which

if TYPE_CHECKING:
    from raycloak.workers.inputs.descriptor import DatasetDescriptor

TEXT_SUFFIXES = (".tsv", ".tsv.gz", ".parquet")

# Texts that are tokenised at once: bounds the memory beside the ids.
_CHUNK = 4096
# Of other programs; each name is of a form that a line of text would be taken from in silence.
_OTHERS = {".csv": "a CSV file", ".json": "JSON", ".jsonl": "JSON lines", ".xlsx": "a workbook"}
_CLASS = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A public tokenizer.

    Attributes:
        vocabulary: number of its token ids, added ones included.
        content: SHA-256 of all that decides which ids it gives, and of the library's version.
    """

    inner: Any
    vocabulary: int
    content: bytes

    @classmethod
    def load(cls, hf: str, base: Path | str) -> "Tokenizer":
        """Read a tokenizer from a folder or from the hub's cache.

        Raises:
            ConfigError: ``tokenizer`` if there is none or it has no fast form; ``hf_missing`` or ``not_cached``.
        """
        folder = public_folder(hf, base)
        with quiet():
            try:
                inner = library("transformers").AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # noqa: BLE001 - it parses files in many ways
                raise _no_tokenizer(hf, f"it cannot be loaded ({type(error).__name__})") from None
        if not inner.is_fast:
            raise _no_tokenizer(hf, "it is written in Python, and has no form in the library tokenizers")
        # Before its first use: padding and truncation are settings in the same text.
        content = digest(
            length_prefixed("raycloak/tokenizer/v1", version("tokenizers"), inner.backend_tokenizer.to_str())
        )
        return cls(inner, len(inner), content)

    def rows(self, texts: Sequence[str], length: int) -> NDArray[np.int32]:
        """Return ids [n, length], with the tokenizer's special tokens; longer texts are cut."""
        rows = np.full((len(texts), length), PADDING, np.int32)
        for start in range(0, len(texts), _CHUNK):
            found = self.inner(
                list(texts[start : start + _CHUNK]),
                truncation=True,
                max_length=length,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
            for row, ids in enumerate(found["input_ids"], start):
                rows[row, : len(ids)] = ids
        return rows

    def lengths(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of ids of each text, special tokens included, before it is cut."""
        found: list[int] = []
        for start in range(0, len(texts), _CHUNK):
            rows = self.inner(list(texts[start : start + _CHUNK]), truncation=False, return_attention_mask=False)
            found += [len(ids) for ids in rows["input_ids"]]
        return np.array(found, np.int64)

    def blocks(self, text: str, length: int) -> NDArray[np.int32]:
        """Return the ids of one text without special tokens, cut to blocks [n, length]; the last one is padded."""
        (ids,) = self.inner([text], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        blocks = np.full(-(-len(ids) // length) * length, PADDING, np.int32)
        blocks[: len(ids)] = ids
        return blocks.reshape(-1, length)


def text_rows(files: FileSet, asked: "DatasetDescriptor", taken: Taken, tokenizer: Tokenizer) -> Iterator[Arrays]:
    """Yield ids [n, T] and labels [n] or [n, k] of :func:`read_texts`, in chunks; errors as there."""
    assert asked.max_length is not None, "text comes with a length"
    for where, file in files.opened():
        texts, labels = read_texts(file, where, asked, taken)
        yield tokenizer.rows(texts, asked.max_length), labels


def block_rows(files: FileSet, asked: "DatasetDescriptor", taken: Taken, tokenizer: Tokenizer) -> Iterator[Arrays]:
    """Yield the ids of each text file in blocks [n, T], and themselves as labels, -100 at padding.

    A file is a document: its blocks are one unit, if ``taken`` asks for units.

    Raises:
        DatasetError: ``dataset_unreadable``.
    """
    assert asked.max_length is not None, "text comes with a length"
    for where, file in files.opened():
        ids = tokenizer.blocks(_text(file, where), asked.max_length)
        if taken.units is not None:
            taken.units.add([where] * len(ids))
        yield ids, np.where(ids == PADDING, IGNORED, ids)


def text_example(item: Mapping[str, Any], name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ids, with -1 where the attention mask is 0, and labels, of an example as Hugging Face writes it.

    Args:
        name: for error messages.

    Raises:
        DatasetError: ``dataset_array`` without ``input_ids`` and ``labels``, or with token types other than 0.
    """
    labels = item.get("labels", item.get("label"))
    if "input_ids" not in item or labels is None:
        raise DatasetError(
            "dataset_array",
            f"{name} has no input_ids or no labels.",
            "Let each be a pair (features, label), or a mapping with input_ids, attention_mask and labels.",
        )
    ids = np.asarray(item["input_ids"])
    mask = np.asarray(item.get("attention_mask", np.ones_like(ids)))
    if np.any(np.asarray(item.get("token_type_ids", 0))):
        raise DatasetError(
            "dataset_array",
            f"{name} has token types other than 0, which have no place in its features.",
            "Join a pair of texts into one, with the tokenizer's separator. Or, for a model of your own that takes "
            "them by name, let each example be a pair of inputs by name and a label.",
        )
    return np.where(mask != 0, ids, PADDING), np.asarray(labels)


def read_texts(file: BinaryIO, where: str, asked: "DatasetDescriptor", taken: Taken) -> tuple[list[str], NDArray[Any]]:
    """Return the texts and labels of a ``.parquet`` table; or of a ``.tsv`` file of text, tab, class number, which gzip
    may have packed.

    Args:
        taken: gets the units of the rows.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_array``, ``dataset_label`` or ``dataset_unit``.
    """
    path = PurePath(where)
    if path.suffix == ".parquet":
        return _parquet(file, where, asked, taken)
    if asked.unit is not None:
        raise DatasetError(
            "dataset_unit",
            f"a line of {where} is text and label, and has no column for dataset.unit.",
            "Give a .parquet table.",
        )
    other = _OTHERS.get(PurePath(path.name.removesuffix(".gz")).suffix.lower())
    if other is not None:
        raise DatasetError(
            "dataset_array",
            f"{where} is {other}; text is read from lines of text, a tab and a class number (.tsv), or from .parquet.",
            "Convert it, for example with pandas: DataFrame.to_parquet.",
        )
    labels = len(asked.label_names)
    if labels > 1:
        raise DatasetError(
            "dataset_array", f"a line of {where} has one label, and {labels} are named.", "Give a .parquet table."
        )
    return _tsv(file, where, asked.class_names)


def _tsv(file: BinaryIO, where: str, classes: tuple[str, ...]) -> tuple[list[str], NDArray[np.int64]]:
    import pyarrow as pa

    texts, labels, wrong = [], [], []
    for number, line in enumerate(_text(file, where).removesuffix("\n").split("\n"), 1):
        text, _, label = line.removesuffix("\r").rpartition("\t")
        if text and (classes or _CLASS.fullmatch(label)):
            texts.append(text)
            labels.append(label)
        else:
            wrong.append(number)
    if wrong:
        raise DatasetError(
            "dataset_array",
            f"a line of {where} is not text, a tab and a class{'' if classes else ' number'}{which(wrong, 'line')}.",
            f"Write one example a line, without a header.{named_by_check()}",
        )
    if classes:
        return texts, class_numbers(pa.array(labels, pa.string()), classes, where)
    return texts, np.asarray([int(label) for label in labels], np.int64)


def _parquet(file: BinaryIO, where: str, asked: "DatasetDescriptor", taken: Taken) -> tuple[list[str], NDArray[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with unbroken(file, where, "not a parquet file"):
        parquet = pq.ParquetFile(file)
        named = (asked.features[0], *asked.label_names)
        present = parquet.schema_arrow.names
        text, *labels = found_columns(named, present, where)
        units = [] if asked.unit is None else [require_unit_column(asked.unit, present, where)]
        table = parquet.read(columns=list(dict.fromkeys((text, *labels, *units))))
    column = table.column(text)
    if column.null_count or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        missing = np.flatnonzero(np.asarray(column.is_null())) + 1
        raise DatasetError(
            "dataset_array",
            f"{where}, column '{text}' is not all text{which(missing.tolist()) if len(missing) else ''}.",
            "Set dataset.features to a column of text.",
        )
    for name in units:
        note_units(taken, name, {name: table.column(name)}, where)
    given = [(table.column(name).combine_chunks(), column_place(where, name)) for name in labels]
    return column.to_pylist(), label_columns(given, asked.class_names)


def _text(file: BinaryIO, where: str) -> str:
    try:
        text = unzipped(file, where).read().decode("utf-8")
    except OSError as error:
        raise file_error("dataset_unreadable", "read", where, error, DatasetError) from None
    except (EOFError, zlib.error):
        raise DatasetError("dataset_unreadable", f"{where} is damaged.", "Write it again.") from None
    except UnicodeDecodeError as error:
        place = which([error.start + 1], "byte")
        raise DatasetError("dataset_unreadable", f"{where} is not text in UTF-8{place}.", "Convert it.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _no_tokenizer(hf: str, why: str) -> ConfigError:
    return ConfigError(
        "tokenizer",
        f"'{hf}' has no tokenizer that can be used: {why}.",
        "Set dataset.tokenizer to a folder with a tokenizer.json, or a hub name.",
    )
