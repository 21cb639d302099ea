"""Text as examples: token ids [N, T] of one public length, with -1 for padding.

The tokenizer is public, and its digest is in the manifest: another tokenizer would make other examples of the same
text. Every text is cut or padded to T tokens, whatever its length.
"""

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.datasets import Arrays
from raycloak.workers.inputs.file_sets import require_unpacked, unzipped
from raycloak.workers.inputs.files import parquet_table
from raycloak.workers.inputs.hub_files import library, public_folder, quiet
from raycloak.workers.inputs.tables import class_numbers, label_columns
from raycloak.workers.inputs.void import IGNORED, PADDING, named_by_check, which

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
            for row, ids in enumerate(self._ids(texts[start : start + _CHUNK], length), start):
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

    def _ids(self, texts: Sequence[str], length: int) -> Iterable[list[int]]:
        found: Iterable[list[int]] = self.inner(
            list(texts), truncation=True, max_length=length, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return found


def read_texts(
    file: BinaryIO,
    path: Path,
    text: str,
    labels: tuple[str, ...],
    classes: tuple[str, ...],
    tokenizer: Tokenizer,
    length: int,
) -> Arrays:
    """Return ids [N, length] and labels [N] or [N, k] of a ``.parquet`` table; or of a ``.tsv`` file of text, tab,
    class number, which gzip may have packed.

    Args:
        text, labels: names of the table's columns.
        classes: public list of the classes that labels name; empty for labels that are numbers.

    Raises:
        DatasetError: ``dataset_unreadable``, ``dataset_array``, ``dataset_empty`` or ``dataset_label``.
    """
    texts, numbers = _read(file, path, text, labels, classes)
    if not texts:
        raise DatasetError("dataset_empty", f"{path} has no examples.", "Name a dataset with examples.")
    return tokenizer.rows(texts, length), numbers


def raw_texts(file: BinaryIO, path: Path, text: str, labels: tuple[str, ...], classes: tuple[str, ...]) -> list[str]:
    """Return the texts of a table before they are cut; arguments and errors as :func:`read_texts`."""
    return _read(file, path, text, labels, classes)[0]


def read_blocks(file: BinaryIO, path: Path, tokenizer: Tokenizer, length: int) -> Arrays:
    """Return the ids of a text file in blocks [N, length], and themselves as labels, -100 at padding.

    Raises:
        DatasetError: ``dataset_unreadable`` or ``dataset_empty``.
    """
    ids = tokenizer.blocks(_text(file, path), length)
    if not len(ids):
        raise DatasetError("dataset_empty", f"{path} has no text.", "Name a file with text.")
    return ids, np.where(ids == PADDING, IGNORED, ids)


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


def _read(
    file: BinaryIO, path: Path, text: str, labels: tuple[str, ...], classes: tuple[str, ...]
) -> tuple[list[str], NDArray[Any]]:
    if path.suffix == ".parquet":
        require_unpacked(file, str(path))
        return _parquet(file, path, text, labels, classes)
    other = _OTHERS.get(PurePath(path.name.removesuffix(".gz")).suffix.lower())
    if other is not None:
        raise DatasetError(
            "dataset_array",
            f"{path} is {other}; text is read from lines of text, a tab and a class number (.tsv), or from .parquet.",
            "Convert it, for example with pandas: DataFrame.to_parquet.",
        )
    if len(labels) > 1:
        raise DatasetError(
            "dataset_array", f"a line of {path} has one label, and {len(labels)} are named.", "Give a .parquet table."
        )
    return _tsv(file, path, classes)


def _tsv(file: BinaryIO, path: Path, classes: tuple[str, ...]) -> tuple[list[str], NDArray[np.int64]]:
    import pyarrow as pa

    texts, labels, wrong = [], [], []
    for number, line in enumerate(_text(file, path).removesuffix("\n").split("\n"), 1):
        text, _, label = line.removesuffix("\r").rpartition("\t")
        if text and (classes or _CLASS.fullmatch(label)):
            texts.append(text)
            labels.append(label)
        else:
            wrong.append(number)
    if wrong:
        raise DatasetError(
            "dataset_array",
            f"a line of {path} is not text, a tab and a class{'' if classes else ' number'}{which(wrong, 'line')}.",
            f"Write one example a line, without a header.{named_by_check()}",
        )
    if classes:
        return texts, class_numbers(pa.array(labels, pa.string()), classes, str(path))
    return texts, np.asarray([int(label) for label in labels], np.int64)


def _parquet(
    file: BinaryIO, path: Path, text: str, labels: tuple[str, ...], classes: tuple[str, ...]
) -> tuple[list[str], NDArray[Any]]:
    import pyarrow as pa

    table = parquet_table(file, path, tuple(dict.fromkeys((text, *labels))))
    column = table.column(text)
    if column.null_count or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        missing = np.flatnonzero(np.asarray(column.is_null())) + 1
        raise DatasetError(
            "dataset_array",
            f"{path}, column '{text}' is not all text{which(missing.tolist()) if len(missing) else ''}.",
            "Set dataset.features to a column of text.",
        )
    return column.to_pylist(), label_columns(
        [(table.column(name).combine_chunks(), f"{path}, column '{name}'") for name in labels], classes
    )


def _text(opened: BinaryIO, path: Path) -> str:
    file = unzipped(opened, str(path))
    try:
        # Closing the file is up to who opened it.
        reader = TextIOWrapper(file, encoding="utf-8")
        try:
            return reader.read()
        finally:
            reader.detach()
    except OSError as error:
        raise file_error("dataset_unreadable", "read", path, error, DatasetError) from None
    except (EOFError, zlib.error):
        raise DatasetError("dataset_unreadable", f"{path} is damaged.", "Write it again.") from None
    except UnicodeDecodeError as error:
        place = which([error.start + 1], "byte")
        raise DatasetError("dataset_unreadable", f"{path} is not text in UTF-8{place}.", "Convert it.") from None


def _no_tokenizer(hf: str, why: str) -> ConfigError:
    return ConfigError(
        "tokenizer",
        f"'{hf}' has no tokenizer that can be used: {why}.",
        "Set dataset.tokenizer to a folder with a tokenizer.json, or a hub name.",
    )
