"""Folders of rows that a pipeline wrote: their files, and an index that names the pipeline's code and their content.

``raycloak data build`` writes them where the data may be read; see `raycloak.coordinator.cluster.pipelines`.

Guarantee: a folder is opened only if the code that wrote it is the code beside the configuration, byte for byte, and
its rows are those that were written.

Not guaranteed: that this code wrote the rows. The index is the word of the data's owner, who could write any table.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Message, parse
from raycloak.metrics.errors import DatasetError, ProtocolError
from raycloak.workers.inputs.file_sets import CommittedFile, FileSet
from raycloak.workers.inputs.tables import PARQUET_SUFFIXES
from raycloak.workers.inputs.user_code import unexecuted_digest

# A name that starts with a dash is none of examples, to this reader and to others.
INDEX = "_index.json"
FILE_ROWS = 2**17
_GROUP_ROWS = 2**14
# Longer rows would make a group of gigabytes.
_GROUP_BYTES = 64 * 2**20


class RowFile(Message):
    """One file: its name, its rows, and the digest of its bytes, see `raycloak.workers.inputs.file_sets`."""

    DOMAIN: ClassVar[str] = "raycloak/row-file/v2"

    name: str
    rows: int
    content: bytes


class PipelineIndex(Message):
    """The index of a folder.

    Attributes:
        function: ``module:function`` of the pipeline.
        code: digest of its source, as `raycloak.workers.inputs.user_code.source_digest`.
        files: in the order of the ids of their rows.
    """

    DOMAIN: ClassVar[str] = "raycloak/pipeline-index/v2"

    function: str
    code: bytes
    files: tuple[RowFile, ...]

    @classmethod
    def load(cls, folder: Path) -> "PipelineIndex":
        """Read the index of ``folder``; DatasetError ``dataset_unbuilt`` if it has none."""
        try:
            return parse(cls, (folder / INDEX).read_bytes().strip())
        except (OSError, ProtocolError):
            raise DatasetError(
                "dataset_unbuilt",
                f"{folder} has no index that 'raycloak data build' wrote.",
                "Where the data may be read: raycloak data build CONFIG.",
            ) from None

    @property
    def rows(self) -> int:
        """The number of examples."""
        return sum(each.rows for each in self.files)

    def made_by(self) -> bytes:
        """Return the digest of the pipeline that the manifest has; it tells nothing about the rows."""
        return digest(length_prefixed("raycloak/pipeline/v1", self.function, self.code))

    def require_code(self, function: str, base: Path | str, folder: Path) -> None:
        """Require that the pipeline's code is still what wrote the folder; DatasetError ``pipeline_changed``."""
        code = unexecuted_digest(function, base)
        if (function, code) != (self.function, self.code):
            raise DatasetError(
                "pipeline_changed",
                f"{folder} was written by {self.function} with code {self.code.hex()[:16]}; {function} now has "
                f"{code.hex()[:16]}.",
                "Build it again into a new folder, or put the code back.",
            )

    def require_content(self, content: bytes, folder: Path) -> None:
        """Require the digest of the files that were written; DatasetError ``data_changed``."""
        digests = [each.content for each in self.files]
        expected = digests[0] if len(digests) == 1 else digest(length_prefixed("raycloak/files/v1", *digests))
        if content != expected:
            raise DatasetError("data_changed", f"{folder} is not what its index says.", "Build it again.")


def built_files(folder: Path, index: PipelineIndex) -> FileSet:
    """Return the files of an index, whose digest is asked for."""
    return FileSet(str(folder), Path(), PARQUET_SUFFIXES, hashed=True, names=tuple(each.name for each in index.files))


def write_rows(tables: Iterable[Any], folder: Path, function: str, code: bytes) -> PipelineIndex:
    """Write the rows of pyarrow ``tables`` to files of `FILE_ROWS` rows, in their order, and their index last.

    Args:
        folder: exists, is empty, and only its owner may read it.

    Raises:
        DatasetError: ``dataset_empty``, or ``dataset_array`` if a table has other columns than the first.
        OSError: the folder cannot be written to.
    """
    files: list[RowFile] = []
    for table in _cut(tables):
        name = f"rows-{len(files):05d}.parquet"
        files.append(RowFile(name=name, rows=len(table), content=_write(table, folder / name)))
    if not files:
        raise DatasetError("dataset_empty", f"{function} gives no rows.", "Name a dataset with examples.")
    index = PipelineIndex(function=function, code=code, files=tuple(files))
    (folder / INDEX).write_bytes(index.encode() + b"\n")
    return index


def _cut(tables: Iterable[Any]) -> Iterable[Any]:
    """Yield the rows in tables of `FILE_ROWS`, the last of fewer."""
    import pyarrow as pa

    held: list[Any] = []
    schema = None
    for table in tables:
        schema = schema or table.schema
        if table.schema.names != schema.names or table.schema.types != schema.types:
            raise DatasetError(
                "dataset_array",
                "the pipeline gives rows with different columns.",
                "Let every row have the same columns, of the same types.",
            )
        held.append(table)
        while sum(map(len, held)) >= FILE_ROWS:
            whole = pa.concat_tables(held)
            yield whole.slice(0, FILE_ROWS)
            held = [whole.slice(FILE_ROWS)]
    if sum(map(len, held)):
        yield pa.concat_tables(held)


def _write(table: Any, path: Path) -> bytes:
    """Write one file durably; returns the digest of its bytes."""
    import pyarrow.parquet as pq

    group = max(1, min(_GROUP_ROWS, _GROUP_BYTES * len(table) // max(table.nbytes, 1)))
    # Statistics would repeat the least and largest values of each column in the clear, for no reader.
    pq.write_table(table, path, row_group_size=group, write_statistics=False)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return CommittedFile(file, path.name).digest
