"""The bundle: everything an auditor of one run needs, in one file, and nothing private.

It is a tar archive in one fixed form: an index, the site's signature over it, then the parts in order of their names.
Any tar program opens it. The reader here accepts that form alone, so each byte of the file is either fixed or signed.

Guarantee: two bundles of the same parts, signed once, have the same bytes. A reader holds no more than a part's bound.
"""

import io
import re
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.hybrid_signature import HybridSignature, HybridSigner
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.files.whole import whole_file
from raycloak.attestation.sealed.package_keys import TrustStore
from raycloak.coordinator.proof.claims import Broken
from raycloak.coordinator.proof.parts import OPTIONAL, PACKAGE_FILES, REQUIRED, RecordPart, RecordParts
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error

INDEX: Final = "index.json"
SIGNATURE: Final = "index.sig"

_BLOCK = tarfile.BLOCKSIZE
_PIECE = 2**20
_MOST_PARTS = 2**16
_LARGEST_INDEX = 2**24
_PACKAGE = re.compile(r"packages/step-[0-9]{6,12}(-[0-9]{1,6})?\.tssp/(.+)")


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
        if (part.size, part.sha256()) != (each.size, each.sha256):
            raise Broken(name, "it has other bytes than the site signed")
    return index, signer


def is_part(name: str) -> bool:
    """Return whether a bundle may have a part of that name."""
    package = _PACKAGE.fullmatch(name)
    return name in (*REQUIRED, *OPTIONAL) or (package is not None and package[2] in PACKAGE_FILES)


def _put(sink: BinaryIO, name: str, part: RecordPart) -> None:
    sink.write(_header(name, part.size))
    written = 0
    with part.open() as source:
        # Not beyond the size that the index has: a log may grow while it is copied.
        while piece := source.read(min(_PIECE, part.size - written)):
            sink.write(piece)
            written += len(piece)
    if written != part.size:
        raise Broken(name, "it became shorter while it was read")
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
            if name in found or size > total - start:
                raise Broken(name, "it is there twice, or longer than the file")
            found[name] = RecordPart(size, partial(_slice, path, start, size))
            file.seek(start + size)
            padding = -size % _BLOCK
            if file.read(padding) != bytes(padding):
                raise Broken(name, "it is cut off, or does not end in zeros")
        if file.read(_BLOCK + 1) != bytes(_BLOCK):
            raise Broken(path.name, "it does not end as a bundle does")
    if list(found) != [INDEX, SIGNATURE, *sorted(found.keys() - {INDEX, SIGNATURE})]:
        raise Broken(path.name, "its parts are not in their order")
    return found


def _named(header: bytes, number: int) -> tuple[str, int]:
    """Return name and size of a part; Broken unless its header is the one that :func:`_header` makes."""
    where = f"part {number + 1}"
    if number >= _MOST_PARTS:
        raise Broken(where, "a bundle has fewer parts")
    try:
        info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError, ValueError):
        raise Broken(where, "it has no header of a bundle's part") from None
    if info.name not in (INDEX, SIGNATURE) and not is_part(info.name):
        raise Broken(where, f"{info.name[:100]!r} is no part of a bundle")
    if info.size < 0 or _header(info.name, info.size) != header:
        raise Broken(info.name, "its header is not in the form of a bundle")
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
