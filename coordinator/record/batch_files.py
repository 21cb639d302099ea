"""The batches that a client has sent, as a run's directory keeps them: still encrypted, for a resume or a replay.

    batches.jsonl          one line for each set of batches that a step was to be charged with
    batches/SHA256.batch   the bytes of one batch

Nobody signs the lines. What they say counts only where it gives the digest that the ledger charged a step for.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from pydantic import Field

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.messages import Message, parse
from raycloak.attestation.files.whole import sync, write_whole
from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError
from raycloak.metrics.file_errors import file_error

INDEX: Final = "batches.jsonl"
FOLDER: Final = "batches"

Digests = tuple[bytes, ...]
"""The SHA-256 of each batch of a step, in their order."""


class SentSet(Message):
    """A line of the index: a step, and the batches that it was to be charged with.

    Attributes:
        batches: SHA-256 of each, in their order.
    """

    DOMAIN: ClassVar[str] = "raycloak/sent-set/v1"

    step: int = Field(ge=0)
    batches: tuple[bytes, ...] = Field(min_length=1)


def sent_sets(lines: Sequence[bytes]) -> dict[int, tuple[Digests, ...]]:
    """Return the sets of each step that an index names; ProtocolError ``malformed`` if a line is none."""
    found = defaultdict[int, list[Digests]](list)
    for line in lines:
        each = parse(SentSet, line)
        found[each.step].append(each.batches)
    return {step: tuple(sets) for step, sets in found.items()}


class BatchFiles:
    """The batches of one run.

    Args:
        folder: the run's directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sets(self, step: int) -> tuple[Digests, ...]:
        """Return the sets of batches that a step was to be charged with, oldest first; one for an honest course.

        Raises:
            ConfigError: ``not_a_run`` if the index cannot be read.
        """
        path = self._folder / INDEX
        try:
            # A crash may have cut the last line, whose step was not charged then.
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
            return sent_sets(lines).get(step, ())
        except (OSError, ProtocolError):
            raise ConfigError("not_a_run", f"{path} cannot be read.", "Restore it as the run wrote it.") from None

    def keep(self, step: int, files: Sequence[Path]) -> Digests:
        """Keep the batches in ``files``, and return their digests; all is on disk when this returns.

        Args:
            files: removed by their owner when it likes, but never written to again: they may become the kept ones.

        Raises:
            RefusedError: ``batch_missing`` if one cannot be read.
            ConfigError: ``run_file`` if the directory cannot be written.
        """
        contents = [_read(path, path.name) for path in files]
        digests = tuple(digest(each) for each in contents)
        try:
            (self._folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
            for source, name, content in zip(files, digests, contents, strict=True):
                _place(source, self._path(name), content, name)
            sync(self._folder / FOLDER)
            if digests not in self.sets(step):
                self._add(SentSet(step=step, batches=digests))
                sync(self._folder)
        except OSError as error:
            raise file_error("run_file", "write", self._folder / FOLDER, error) from None
        return digests

    def read(self, step: int, digests: Digests) -> tuple[bytes, ...]:
        """Return the bytes of a step's batches.

        Raises:
            RefusedError: ``batch_missing`` or ``batch_altered``.
        """
        found = tuple(_read(self._path(name), f"batch {number} of step {step}") for number, name in enumerate(digests))
        for number, (content, name) in enumerate(zip(found, digests, strict=True)):
            if digest(content) != name:
                raise RefusedError(
                    "batch_altered",
                    f"batch {number} of step {step} is not what the client sent.",
                    f"Restore {FOLDER}/{name.hex()}.batch in the run's directory from a backup.",
                )
        return found

    def _path(self, name: bytes) -> Path:
        return self._folder / FOLDER / f"{name.hex()}.batch"

    def _add(self, line: SentSet) -> None:
        path = self._folder / INDEX
        whole = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "r+b") as file:
            file.truncate(whole)
            file.seek(whole)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _place(source: Path, path: Path, content: bytes, name: bytes) -> None:
    """Put the bytes of a batch at ``path``, as a second name of ``source`` where the file system allows it."""
    # Placed once: a resume is given the same files again.
    if path.exists():
        if digest(path.read_bytes()) != name:
            write_whole(path, content)
        return
    try:
        # A sender's batches may be as large as a data set, and a service keeps them too.
        os.link(source, path)
    except OSError:
        write_whole(path, content)
    else:
        # Its owner need not have done so.
        sync(path)


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RefusedError(
            "batch_missing",
            f"{name} cannot be read: {error.strerror}.",
            "Bring the file back; without what was sent for a step, nobody can compute it again.",
        ) from None
