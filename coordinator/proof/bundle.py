"""The parts of a run's record, and the bundle: everything an auditor of one run needs, in one file, nothing private.

Parts are read from a bundle or from the places where the site keeps them. A part is never trusted: its reader bounds
it, and checks it against something signed.

A bundle is a tar archive in one fixed form: an index, the signature over it, then the parts in order of their names.
Any tar program opens it. The reader here accepts that form alone, so each byte of the file is either fixed or signed.

Guarantee: two bundles of the same parts, signed once, have the same bytes. A reader holds no more than a part's bound.
"""

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal, Self

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.hybrid_signature import HybridSignature, HybridSigner
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.files.whole import whole_file
from raycloak.attestation.sealed.package_keys import TrustStore
from raycloak.coordinator.proof.claims import Broken, require
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error

MANIFEST: Final = "manifest.json"
LOG: Final = "evidence.jsonl"
DOCUMENTS: Final = "documents.jsonl"
LEDGER: Final = "ledger.jsonl"
PARAMETERS: Final = "parameters.safetensors"
MEASUREMENTS: Final = "measurements.json"
METRICS: Final = "metrics.jsonl"
VERDICT: Final = "verdict.json"
BATCHES: Final = "batches.jsonl"
PACKAGE: Final = "packages/"
PACKAGE_FILES: Final = ("manifest.json", "manifest.sig")

REQUIRED: Final = (MANIFEST, LOG, DOCUMENTS, LEDGER)
OPTIONAL: Final = (PARAMETERS, MEASUREMENTS, METRICS, VERDICT, BATCHES)

LARGEST_TEXT: Final = 2**30
"""Bytes of a part that is read as a whole; 10,000 steps of a run take a hundredth of it."""

INDEX: Final = "index.json"
SIGNATURE: Final = "index.sig"

_BLOCK = tarfile.BLOCKSIZE
_PIECE = 2**20
_MOST_PARTS = 2**16
_LARGEST_INDEX = 2**24
_PACKAGE = re.compile(r"packages/step-[0-9]{6,12}(-[0-9]{1,6})?\.tssp/(.+)")


@dataclass(frozen=True, slots=True)
class RecordPart:
    """One part: its size in bytes, and how to open it."""

    size: int
    open: Callable[[], BinaryIO]

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return a part that is in memory."""
        return cls(len(content), lambda: io.BytesIO(content))

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return a part that is a file; OSError if there is none."""
        return cls(path.stat().st_size, lambda: path.open("rb"))

    def sha256(self) -> bytes:
        """Return the digest of the content, read in pieces."""
        found = hashlib.sha256()
        with self.open() as source:
            while piece := source.read(_PIECE):
                found.update(piece)
        return found.digest()


@dataclass(frozen=True, slots=True)
class RecordParts:
    """All parts of one run's record."""

    by_name: Mapping[str, RecordPart]

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def read(self, name: str, most: int = LARGEST_TEXT) -> bytes:
        """Return a part's content; Broken if it is missing, or has more than ``most`` bytes."""
        part = self.by_name.get(name)
        if part is None:
            raise Broken(name, "it is missing")
        require(part.size <= most, name, f"it has {part.size} bytes, where {most} are the most")
        with part.open() as source:
            return source.read(part.size)

    def lines(self, name: str) -> list[bytes]:
        """Return the lines of a part, each of which must end in a line feed."""
        content = self.read(name)
        require(content.endswith(b"\n"), name, "its last line is cut off")
        return content[:-1].split(b"\n")

    def line(self, name: str) -> bytes:
        """Return the one line of a part."""
        lines = self.lines(name)
        require(len(lines) == 1, name, f"it has {len(lines)} lines, not one")
        return lines[0]

    def packages(self) -> list[str]:
        """Return the names of the sealed packages, in order."""
        return sorted({name.split("/")[1] for name in self.by_name if name.startswith(PACKAGE)})


class IndexedPart(Message):
    """The name, size and SHA-256 of one part."""

    DOMAIN: ClassVar[str] = "raycloak/bundle/part/v1"

    name: str
    size: int
    sha256: bytes


class BundleIndex(Message):
    """The statement that the site signs: which parts the bundle of a run has.

    Attributes:
        made_at: unix seconds, by the site's clock.
        parts: in order of their names.
    """

    DOMAIN: ClassVar[str] = "raycloak/bundle/index/v1"

    format: Literal["raycloak bundle 1"] = "raycloak bundle 1"
    run_id: str
    made_at: int
    parts: tuple[IndexedPart, ...]


def write_bundle(path: Path, run_id: str, parts: RecordParts, signer: HybridSigner, made_at: int) -> BundleIndex:
    """Write a bundle; the file appears as a whole.

    Raises:
        ConfigError: ``bundle_exists``, or ``bundle_file`` if it cannot be written.
    """
    if path.exists():
        raise ConfigError("bundle_exists", f"{path} already exists.", "Choose another name, or remove it.")
    try:
        with whole_file(path) as file:
            return put_bundle(file, run_id, parts, signer, made_at)
    except OSError as error:
        raise file_error("bundle_file", "write", path, error) from None


def put_bundle(sink: BinaryIO, run_id: str, parts: RecordParts, signer: HybridSigner, made_at: int) -> BundleIndex:
    """Write a bundle's bytes to ``sink``."""
    named = sorted(parts.by_name.items())
    index = BundleIndex(
        run_id=run_id,
        made_at=made_at,
        parts=tuple(IndexedPart(name=name, size=part.size, sha256=part.sha256()) for name, part in named),
    )
    body = index.encode()
    signature = signer.sign(length_prefixed(BundleIndex.DOMAIN, body)).encode()
    for name, part in [(INDEX, RecordPart.of(body)), (SIGNATURE, RecordPart.of(signature)), *named]:
        _put(sink, name, part)
    sink.write(bytes(2 * _BLOCK))
    return index


def read_bundle(path: Path) -> RecordParts:
    """Return the parts of a bundle, none of which is checked yet but for its name and its place in the file.

    Raises:
        Broken: if the file has another form than :func:`write_bundle` gives it.
        ConfigError: ``bundle_file`` if it cannot be read.
    """
    try:
        return RecordParts(_places(path))
    except OSError as error:
        raise file_error("bundle_file", "read", path, error) from None


def check_index(parts: RecordParts, trust: TrustStore) -> tuple[BundleIndex, str]:
    """Check a bundle's parts against its signed index; return it with the name of its signer.

    Raises:
        Broken: if a part is missing, extra or changed.
        EvidenceError: as `TrustStore.verify`.
        ProtocolError: ``malformed``.
    """
    body = parts.read(INDEX, _LARGEST_INDEX)
    signature = parse(HybridSignature, parts.read(SIGNATURE, _LARGEST_INDEX))
    signer = trust.verify(length_prefixed(BundleIndex.DOMAIN, body), signature)
    index = parse(BundleIndex, body)
    stated = {each.name: each for each in index.parts}
    found = parts.by_name.keys() - {INDEX, SIGNATURE}
    for name in sorted(stated.keys() ^ found):
        raise Broken(name, "it is missing" if name in stated else "the signed index does not name it")
    for name, each in stated.items():
        part = parts.by_name[name]
        same = (part.size, part.sha256()) == (each.size, each.sha256)
        require(same, name, "it has other bytes than the site signed")
    return index, signer


def _put(sink: BinaryIO, name: str, part: RecordPart) -> None:
    sink.write(_header(name, part.size))
    written = 0
    with part.open() as source:
        # Not beyond the size that the index has: a log may grow while it is copied.
        while piece := source.read(min(_PIECE, part.size - written)):
            sink.write(piece)
            written += len(piece)
    require(written == part.size, name, "it became shorter while it was read")
    sink.write(bytes(-written % _BLOCK))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info.tobuf(tarfile.GNU_FORMAT)


def _places(path: Path) -> Mapping[str, RecordPart]:
    found: dict[str, RecordPart] = {}
    total = path.stat().st_size
    with path.open("rb") as file:
        while (header := file.read(_BLOCK)) != bytes(_BLOCK):
            name, size = _named(header, len(found))
            start = file.tell()
            fits = name not in found and size <= total - start
            require(fits, name, "it is there twice, or longer than the file")
            found[name] = RecordPart(size, partial(_slice, path, start, size))
            file.seek(start + size)
            padding = -size % _BLOCK
            require(file.read(padding) == bytes(padding), name, "it is cut off, or does not end in zeros")
        require(file.read(_BLOCK + 1) == bytes(_BLOCK), path.name, "it does not end as a bundle does")
    in_order = [INDEX, SIGNATURE, *sorted(found.keys() - {INDEX, SIGNATURE})]
    require(list(found) == in_order, path.name, "its parts are not in their order")
    return found


def _named(header: bytes, number: int) -> tuple[str, int]:
    """Return name and size of a part; Broken unless its header is the one that :func:`_header` makes."""
    where = f"part {number + 1}"
    require(number < _MOST_PARTS, where, "a bundle has fewer parts")
    try:
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError, ValueError):
        raise Broken(where, "it has no header of a bundle's part") from None
    package = _PACKAGE.fullmatch(info.name)
    is_part = info.name in (INDEX, SIGNATURE, *REQUIRED, *OPTIONAL) or (package and package[2] in PACKAGE_FILES)
    require(bool(is_part), where, f"{info.name[:100]!r} is no part of a bundle")
    is_ours = info.size >= 0 and _header(info.name, info.size) == header
    require(is_ours, info.name, "its header is not in the form of a bundle")
    return info.name, info.size


class _Slice(io.RawIOBase):
    """A stretch of a file, to read from its begin to its end."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = path.open("rb")
        self._file.seek(start)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(min(len(buffer), self._left))
        buffer[: len(piece)] = piece
        self._left -= len(piece)
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()


def _slice(path: Path, start: int, size: int) -> BinaryIO:
    return io.BufferedReader(_Slice(path, start, size))
