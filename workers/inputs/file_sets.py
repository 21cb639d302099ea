"""File sets: the files that one path names, in one public order, and a digest over the very bytes that are read.

Hides where files lie and how a path names them. It may name one file, all files below a folder, a pattern such as
``train-*.parquet``, or the same on S3. A reader gets one open file after another.

Guarantee: the digest of a set is over the bytes that its readers get. A file is hashed block by block before it is
read, and a block that has changed when it is read is refused (``data_changed``).

Memory: 32 bytes for each MiB of the open file, and a few blocks.
"""

import gzip
import hashlib
import io
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.secret_urls import secret_in
from raycloak.metrics.errors import DatasetError
from raycloak.metrics.file_errors import file_errors
from raycloak.workers.inputs.places import Places, file_places, remote_places

# A seek costs one block; 32 bytes of memory keep one.
_BLOCK = 2**20
_PATTERN = re.compile(r"[*?\[]")
PACKED_BY_GZIP = "packed by gzip"
ZIP = "a zip archive, as workbooks of Excel and .npz files are"
# The first bytes of a file that no reader takes as it is.
_MARKS = {
    b"\x1f\x8b": PACKED_BY_GZIP,
    b"PK\x03\x04": ZIP,
    b"\xd0\xcf\x11\xe0": "an Excel workbook",
    # Its number follows the level, so that no text begins so.
    **{b"BZh%d1AY&SY" % level: "packed by bzip2" for level in range(1, 10)},
    b"\xfd7zXZ\x00": "packed by xz",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"7z\xbc\xaf\x27\x1c": "packed by 7-Zip",
}


class FileSet:
    """The files of one dataset.

    Args:
        path: file, folder or pattern, relative to ``base`` or absolute, or ``s3://bucket/prefix``. An S3 path may carry
            pyarrow's options as its query.
        suffixes: of the files that count below a folder. One file that is named may have any.
        hashed: whether :meth:`digest` is asked for.
        names: the files below the folder, in the order of their rows; found there if empty.

    Attributes:
        text: the path, for messages.
        names: of the files, relative to their folder, in the order of the examples: ascending if they were found.
        left_out: of the other files below the folder, ascending; none if one file or a pattern is named.
        empty: names of the folders in it that have no file at all, ascending.

    Raises:
        DatasetError: ``dataset_unreadable`` if the path names no file; ``url_secret`` if it has a key, which the error
            does not repeat.
    """

    def __init__(
        self, path: str, base: Path, suffixes: tuple[str, ...], hashed: bool, names: tuple[str, ...] = ()
    ) -> None:
        self._hashed = hashed
        self._digests: list[bytes] = []
        self._place = _ObjectStore(path) if "://" in path else _Disk(base / path)
        self.text = self._place.text
        # Files that are given by name leave out nothing that a reader of the folder would miss.
        if not names:
            self._place.find(suffixes)
        self.names = names or self._place.names
        self.left_out, self.empty = self._place.left_out, self._place.empty
        if not self.names:
            others = f"; {left_out_text(self.left_out)}" if self.left_out else ""
            raise DatasetError(
                "dataset_unreadable",
                f"{self.text} names no file that ends in {' or '.join(suffixes)}{others}.",
                "Check the path.",
            )

    def opened(self) -> Iterator[tuple[str, BinaryIO]]:
        """Open the files one after the other; yields what a message calls each, and the file.

        Raises:
            DatasetError: ``dataset_unreadable``; ``data_changed`` from a reader's read.
        """
        self._digests = []
        for name in self.names:
            with self._place.open(name) as file:
                where = self._place.where(name)
                if not self._hashed:
                    yield where, file
                    continue
                committed = CommittedFile(file, where)
                self._digests.append(committed.digest)
                with closing(io.BufferedReader(committed, _BLOCK)) as reader:
                    yield where, reader

    def places(self) -> Places:
        """Return the places of the files."""
        return self._place.places(self.names)

    def digest(self) -> bytes:
        """Return the digest of the one file, or one over all in their order; empty unless the set is hashed.

        The files' names are no part of it, and their place is not either. Ask after :meth:`opened` has ended.
        """
        if not self._hashed:
            return b""
        assert len(self._digests) == len(self.names), "every file was read"
        if len(self._digests) == 1:
            return self._digests[0]
        return digest(length_prefixed("raycloak/files/v1", *self._digests))


def named_places(path: str, base: Path) -> list[Path]:
    """Return the files that a pattern names; of any other path the place itself, for comparing what two name.

    A path of S3 becomes a place of that name below ``base``, without the query.
    """
    if "://" in path:
        return [base / path.partition("?")[0]]
    place = written(base / path)
    if place.exists() or not _PATTERN.search(path):
        return [place]
    return sorted(_matching(place)[1])


def written(path: Path) -> Path:
    """Return ``path`` as the file system has its names: an umlaut may be written as one letter or as two.

    A name that is there as it is given stays, and so does one that is not there in either form.
    """
    if path.exists() or not path.name:
        return path
    folder, name = written(path.parent), unicodedata.normalize("NFC", path.name)
    try:
        same = (each for each in folder.iterdir() if unicodedata.normalize("NFC", each.name) == name)
        return next(same, folder / path.name)
    except OSError:
        return path


def left_out_text(names: Sequence[str]) -> str:
    """Return a phrase about files that are left out: how many, and of which endings."""
    hidden = sum(not _shown(name) for name in names)
    endings = Counter(PurePosixPath(name).suffix.lower() or "without an ending" for name in names if _shown(name))
    said = [f"{count} {ending}" for ending, count in sorted(endings.items())]
    said += [f"{hidden} whose name starts with . or _"] if hidden else []
    files = "file is" if len(names) == 1 else "files are"
    return f"{len(names)} {files} left out: {', '.join(said)}"


def unzipped(file: BinaryIO, where: str) -> BinaryIO:
    """Return what a file holds that gzip has packed, and any other file as it is; seekable, from its start.

    Raises:
        DatasetError: ``dataset_unreadable`` for a file that something else has packed, or an Excel workbook.
    """
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if require_unpacked(file, where, PACKED_BY_GZIP) else file


def require_unpacked(file: BinaryIO, where: str, but: str = "") -> bool:
    """Refuse a file that something has packed, and go back to its start; DatasetError ``dataset_unreadable``.

    Args:
        but: the one way in which it may be packed, `PACKED_BY_GZIP` or `ZIP`.

    Returns:
        whether it is packed so.
    """
    start = file.read(max(map(len, _MARKS)))
    file.seek(0)
    packed = next((words for mark, words in _MARKS.items() if start.startswith(mark)), "")
    if packed not in ("", but):
        raise DatasetError(
            "dataset_unreadable",
            f"{where} is {packed}.",
            "Unpack it, save a workbook as CSV, or read .npz files with dataset.kind npz.",
        )
    return packed != ""


class CommittedFile(io.RawIOBase):
    """A file whose reads return the bytes that it was hashed with, or are refused.

    Args:
        file: seekable; it stays the caller's.
        name: for messages.

    Attributes:
        digest: of its content: SHA-256 over those of its blocks of 1 MiB, so that each is hashed once.

    Raises:
        DatasetError: ``dataset_unreadable``; ``data_changed`` from a later read.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._blocks: list[bytes] = []
        self._size = self._position = 0
        self._held: tuple[int, bytes] = (-1, b"")
        with file_errors("dataset_unreadable", "read", name, DatasetError):
            while block := _exactly(file, _BLOCK):
                self._blocks.append(hashlib.sha256(block).digest())
                self._size += len(block)
        self.digest = digest(length_prefixed("raycloak/file-blocks/v1", *self._blocks))

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, as any file does."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` with the bytes of one block at most; see :class:`io.RawIOBase`."""
        view = memoryview(buffer).cast("B")
        if self._position >= self._size:
            return 0
        block, start = divmod(self._position, _BLOCK)
        piece = self._block(block)[start : start + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _block(self, index: int) -> bytes:
        if self._held[0] != index:
            self._file.seek(index * _BLOCK)
            content = _exactly(self._file, min(_BLOCK, self._size - index * _BLOCK))
            if hashlib.sha256(content).digest() != self._blocks[index]:
                raise DatasetError(
                    "data_changed", f"{self._name} changed while it was read.", "Change no file under a run."
                )
            self._held = (index, content)
        return self._held[1]


def _exactly(file: BinaryIO, count: int) -> bytes:
    """Return the next ``count`` bytes, fewer only at the end: a raw read may return fewer before it."""
    pieces = []
    while count > 0 and (piece := file.read(count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _shown(name: str) -> bool:
    """Return whether a file below a folder is one of examples: tools leave others, which start with a dot or a dash."""
    return not any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)


def _matching(path: Path) -> tuple[Path, list[Path]]:
    """Return the folder that a pattern starts in, and the files that it matches, in no order."""
    folder = Path(*itertools.takewhile(lambda part: not _PATTERN.search(part), path.parts))
    return folder, [each for each in folder.glob(str(path.relative_to(folder))) if each.is_file()]


class _Place:
    """The place of a set of files, and which of them count.

    Attributes:
        names, left_out, empty: as of :class:`FileSet`, once they were found.
    """

    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    def take(self, names: Iterable[str], suffixes: tuple[str, ...]) -> None:
        """Take the files below a folder that count, and name the others."""
        every = sorted(names)
        self.names = tuple(name for name in every if _shown(name) and name.lower().endswith(suffixes))
        self.left_out = tuple(name for name in every if not (_shown(name) and name.lower().endswith(suffixes)))


class _Disk(_Place):
    """Files of a local disk."""

    def __init__(self, path: Path) -> None:
        self._path, self.text = written(path), str(path)
        self._folder = self._path

    def find(self, suffixes: tuple[str, ...]) -> None:
        with file_errors("dataset_unreadable", "read", self._path, DatasetError):
            if self._path.is_dir():
                names = [each.relative_to(self._path).as_posix() for each in self._path.rglob("*") if each.is_file()]
                self.take(names, suffixes)
                folders = {each.name for each in self._path.iterdir() if each.is_dir()}
                self.empty = tuple(sorted(folders - {PurePosixPath(name).parts[0] for name in names}))
            elif not self._path.exists() and _PATTERN.search(str(self._path)):
                self._folder, found = _matching(self._path)
                self.names = tuple(sorted(each.relative_to(self._folder).as_posix() for each in found))
            else:
                # A name that is not there is said so, and not taken for a file by those who never open it.
                self._path.stat()
                self._folder = self._path.parent
                self.names = (self._path.name,)

    def where(self, name: str) -> str:
        return str(self._folder / name)

    def places(self, names: tuple[str, ...]) -> Places:
        return file_places(self._folder / name for name in names)

    def open(self, name: str) -> BinaryIO:
        with file_errors("dataset_unreadable", "read", self._folder / name, DatasetError):
            return (self._folder / name).open("rb")


class _ObjectStore(_Place):
    """Files of S3, or of anything else that pyarrow has a file system for."""

    def __init__(self, uri: str) -> None:
        from pyarrow import ArrowException, fs

        if (found := secret_in(uri)) is not None:
            raise DatasetError("url_secret", "the dataset's URL holds a secret.", f"{found[0].upper()}{found[1:]}.")
        plain, _, query = uri.partition("?")
        self.text, self._pattern = plain, ""
        start = _PATTERN.search(plain)
        if start:
            folder, _, _ = plain[: start.start()].rpartition("/")
            self._pattern = plain[len(folder) + 1 :]
            plain = folder
        try:
            self._filesystem, root = fs.FileSystem.from_uri(f"{plain}?{query}" if query else plain)
        except (OSError, ArrowException, ValueError) as error:
            raise self._unusable(error) from None
        self._root = root.rstrip("/")

    def _unusable(self, error: Exception) -> DatasetError:
        return DatasetError(
            "dataset_unreadable",
            f"cannot use {self.text} ({type(error).__name__}).",
            "Check bucket, region and credentials.",
        )

    def find(self, suffixes: tuple[str, ...]) -> None:
        from pyarrow import ArrowException, fs

        try:
            if not self._pattern and self._filesystem.get_file_info(self._root).is_file:
                self._root, _, name = self._root.rpartition("/")
                self.names = (name,)
                return
            below = self._filesystem.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        except (OSError, ArrowException) as error:
            raise self._unusable(error) from None
        names = (each.path.removeprefix(self._root + "/") for each in below if each.is_file)
        if self._pattern:
            self.names = tuple(sorted(name for name in names if PurePosixPath(name).match(self._pattern)))
        else:
            self.take(names, suffixes)

    def where(self, name: str) -> str:
        return f"s3://{self._root}/{name}"

    def places(self, names: tuple[str, ...]) -> Places:
        from pyarrow import fs

        if isinstance(self._filesystem, fs.LocalFileSystem):
            return file_places(Path(self._root, name) for name in names)
        return remote_places(self.text.partition("://")[0], (f"{self._root}/{name}" for name in names))

    def open(self, name: str) -> Any:
        from pyarrow import ArrowException

        try:
            return self._filesystem.open_input_file(f"{self._root}/{name}")
        except (OSError, ArrowException) as error:
            raise self._unusable(error) from None
