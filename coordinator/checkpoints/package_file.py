"""A package as one file: a tar of its folder, for a reader who gets it over one connection.

    step-000050.tssp/manifest.json, .../manifest.run.json, .../manifest.sig, ...     by name, then two empty blocks

Guarantee: the same package gives the same bytes, whatever storage it is in. Only exactly such a tar is read: each
header must be the one that is written here, so links, devices, paths that lead elsewhere and extensions are refused.
"""

import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from raycloak.attestation.sealed.package_manifest import PackageRefusal, refuse
from raycloak.coordinator.checkpoints.storage import PackageSource, is_name

PIECE_BYTES: Final = 2**18
"""The most bytes of one piece; far below what a gRPC message may have."""

_BLOCK: Final = tarfile.BLOCKSIZE
_END: Final = bytes(2 * _BLOCK)
_FILE: Final = re.compile(r"[a-z]+(\.[a-z]+)+")
# A package has five; a reader lists no more than these before a signature is verified.
_MOST_FILES: Final = 16


def file_bytes(source: PackageSource, name: str) -> int:
    """Return the size of a package as one file."""
    return sum(_BLOCK + size + _padding(size) for size in _sizes(source, name).values()) + len(_END)


def file_pieces(source: PackageSource, name: str) -> Iterator[bytes]:
    """Yield a package as one file, in pieces of at most ``PIECE_BYTES`` bytes; only one of them is in memory.

    Raises:
        EvidenceError: ``package_malformed`` if it is no package of files. ``package_file_changed`` if one of them
            changes meanwhile.
        STORAGE_ERRORS of `raycloak.coordinator.checkpoints.storage`.
    """
    for file, size in sorted(_sizes(source, name).items()):
        yield _header(f"{name}/{file}", size)
        left = size
        with source.reader(name, file) as stream:
            while left and (piece := bytes(stream.read(min(left, PIECE_BYTES)))):
                left -= len(piece)
                yield piece
        if left:
            refuse(PackageRefusal.FILE_CHANGED, f"{file} has {left} bytes less than it had.")
        if padding := _padding(size):
            yield bytes(padding)
    yield _END


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A package in one file, as a source of its files; see `raycloak.coordinator.checkpoints.storage.PackageSource`.

    Attributes:
        name: of the package's folder in the file.
        places: where each of its files begins, and its size, in bytes.
    """

    path: Path
    name: str
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def open(cls, path: Path) -> "PackageFile":
        """Read the headers of ``path``, and nothing else.

        Raises:
            EvidenceError: ``package_malformed`` unless it is exactly as :func:`file_pieces` writes one.
            OSError: if it cannot be read.
        """
        places: dict[str, tuple[int, int]] = {}
        name = ""
        with path.open("rb") as tar:
            whole = os.fstat(tar.fileno()).st_size
            while (block := tar.read(_BLOCK)) != _END[:_BLOCK]:
                member, size = _member(block)
                folder, _, file = member.partition("/")
                # In order, so that no name is there twice.
                follows = not places or (folder == name and file > next(reversed(places)))
                if not (is_name(folder) and _FILE.fullmatch(file) and follows and len(places) < _MOST_FILES):
                    _malformed(f"it has the file {member!r} where a package has none")
                name, places[file] = folder, (tar.tell(), size)
                if tar.tell() + size > whole:
                    _malformed(f"{file} is not whole")
                tar.seek(size, os.SEEK_CUR)
                if tar.read(_padding(size)) != bytes(_padding(size)):
                    _malformed(f"{file} is not whole")
            if not places or tar.read(len(_END)) != _END[_BLOCK:]:
                _malformed("it does not end as a package does")
        return cls(path, name, places)

    def files(self, name: str) -> Mapping[str, int]:
        """Return the size of every file of the package."""
        return {file: size for file, (_, size) in self.places.items()} if name == self.name else {}

    @contextmanager
    def reader(self, name: str, file: str) -> Iterator["_PartStream"]:
        """Open a binary stream over one of its files."""
        start, size = self.places[file]
        with self.path.open("rb") as tar:
            tar.seek(start)
            yield _PartStream(tar, size)


class _PartStream:
    """A binary stream over the next ``size`` bytes of another one."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int = -1) -> bytes:
        """Read at most ``size`` bytes; all that is left if it is negative."""
        wanted = self._left if size < 0 else min(size, self._left)
        piece = self._stream.read(wanted)
        self._left -= len(piece)
        return piece


def _sizes(source: PackageSource, name: str) -> Mapping[str, int]:
    files = source.files(name)
    if not is_name(name) or not files or min(files.values()) < 0 or not all(map(_FILE.fullmatch, files)):
        _malformed(f"{name} is not a package of files")
    return files


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o644, 0
    # Of the formats that tar programs read, the one whose sizes have no bound and need no second header.
    return member.tobuf(tarfile.GNU_FORMAT)


def _member(block: bytes) -> tuple[str, int]:
    """Return name and size in a header that :func:`_header` made."""
    try:
        member = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        is_own = member.size >= 0 and _header(member.name, member.size) == block
    except (tarfile.HeaderError, UnicodeError, ValueError, OverflowError):
        is_own = False
    if not is_own:
        _malformed("it has a header that no package has")
    return member.name, member.size


def _padding(size: int) -> int:
    return -size % _BLOCK


def _malformed(why: str) -> NoReturn:
    refuse(PackageRefusal.MALFORMED, f"{why}.")
