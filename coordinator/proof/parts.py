"""The parts of a run's record, by name: read from a bundle or from the places where the site keeps them.

A part is never trusted: its reader bounds it, and checks it against something signed.
"""

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

from raycloak.coordinator.proof.claims import Broken

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

_PIECE = 2**20


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
        if part.size > most:
            raise Broken(name, f"it has {part.size} bytes, where {most} are the most")
        with part.open() as source:
            return source.read(part.size)

    def lines(self, name: str) -> list[bytes]:
        """Return the lines of a part, each of which must end in a line feed."""
        content = self.read(name)
        if not content.endswith(b"\n"):
            raise Broken(name, "its last line is cut off")
        return content[:-1].split(b"\n")

    def line(self, name: str) -> bytes:
        """Return the one line of a part."""
        lines = self.lines(name)
        if len(lines) != 1:
            raise Broken(name, f"it has {len(lines)} lines, not one")
        return lines[0]

    def packages(self) -> list[str]:
        """Return the names of the sealed packages, in order."""
        return sorted({name.split("/")[1] for name in self.by_name if name.startswith(PACKAGE)})
