"""A witness: storage apart from the ledger that is told every head, so that a ledger put back is noticed.

It keeps signed heads, each of which follows the one before. A head may only replace the newest one, which the ledger
has checked against its own chain. So two ledgers that diverged cannot both continue under one witness.

It is a folder with one file of JSON lines per ledger, appended to and synced. Or it is an http(s) URL that answers GET
and conditional PUT (RFC 9110: ETag, If-Match, If-None-Match).

Whoever knows the URL can write there. So it stands in a file of mode 0600, and only the file is named in
configurations, arguments and messages.
"""

import fcntl
import http.client
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.files.private import read_private
from raycloak.attestation.files.whole import sync
from raycloak.coordinator.ledger.entries import Head, LedgerHead, LedgerKeys, head_line, read_head_line, rolled_back
from raycloak.coordinator.ledger.location import StoragePlace
from raycloak.metrics.errors import BudgetError, ConfigError, ProtocolError
from raycloak.metrics.file_errors import file_error

TIMEOUT_S = 5.0
"""Bounds the wait for one answer of a URL, and for another process to release a folder's file."""

# Another instance may put a head between our look and our put; then both are repeated.
_TRIES = 20
_TAIL_BYTES = 8192  # several times a line with a head
_SIGNED = "this ledger signed, unless it was put back to before a rotation of its key"


@dataclass(frozen=True, slots=True)
class KeptHead:
    """The state of a witness: its newest head, None without one, and the token that names this state."""

    head: LedgerHead | None
    token: str


@dataclass(frozen=True, slots=True)
class WitnessState:
    """The state of a witness, as a ledger instance last found it.

    Attributes:
        answers: False if it was unavailable when it was last asked.
        entries: entries of the ledger that the newest head covers which it is known to hold.
    """

    answers: bool
    entries: int


_MAKE_FILE = "(umask 077; echo https://HOST/PATH > FILE)"


def open_witness(location: str, keys: LedgerKeys) -> "Witness":
    """Open the witness of the ledger with these keys, of which the first names its heads there.

    Args:
        location: absolute folder; or absolute file of mode 0600 with one http(s) URL.

    Raises:
        ConfigError: ``witness`` if it is neither, which does not repeat a URL.
    """
    path = Path(location)
    if "://" in location or not path.is_absolute():
        shown = "A URL" if "://" in location else f"'{location}'"
        raise ConfigError(
            "witness",
            f"{shown} names neither an absolute folder nor an absolute file.",
            f"Give a folder on other storage than the ledger's, or a file that holds a URL: {_MAKE_FILE}.",
        )
    if not path.is_file():
        return FolderWitness(path, keys)
    try:
        text = read_private(path, "witness").strip()
    except OSError as error:
        raise file_error("witness", "read", path, error) from None
    # Anything else, a library would refuse later with an error that repeats it.
    if re.fullmatch(rb"https?://[!-~]+", text):
        url = urlsplit(text.decode())
        with suppress(ValueError):  # of a port that is none
            if url.hostname and url.username is None and (url.port is None or url.port > 0):
                return UrlWitness(url, keys)
    raise ConfigError(
        "witness", f"{path} holds no http(s) URL, or one with a user, which is never sent.", f"Make it: {_MAKE_FILE}."
    )


class FolderWitness:
    """A witness in a file of an existing folder."""

    def __init__(self, folder: Path, keys: LedgerKeys) -> None:
        self._keys = keys
        self._path = folder / f"{keys.first.hex()[:32]}.heads.jsonl"
        self.place = StoragePlace(path=folder)

    def newest(self) -> KeptHead:
        """Return the last whole line's head, with the file's size as token."""
        with self._failures():
            tail, size = self._tail()
        # A crash cut off a line without a line feed. No ledger was told that it is kept.
        whole = tail.rpartition(b"\n")[0]
        return KeptHead(self._read(whole.rpartition(b"\n")[2]) if whole else None, str(size))

    def heads(self) -> tuple[LedgerHead, ...]:
        """Return the heads of all whole lines."""
        with self._failures():
            self._require_folder()
            lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []
        return tuple(self._read(line) for line in lines)

    def put(self, line: bytes, token: str) -> str | None:
        """Append a head with one write and one fsync, unless the file's size is no longer ``token``."""
        with self._failures(), self._locked() as descriptor:
            tail, size = self._tail()
            # Another instance has put a head since. The caller has to look again.
            if str(size) != token:
                return None
            torn = len(tail) - tail.rfind(b"\n") - 1
            # A crash left half a line, which must not become the beginning of the next.
            if torn:
                os.ftruncate(descriptor, size - torn)
            written = os.write(descriptor, line + b"\n")
            if written != len(line) + 1:
                raise OSError(f"only {written} bytes of a head could be written")
            os.fsync(descriptor)
            return str(size - torn + written)

    def close(self) -> None:
        """Do nothing, because no resource stays open."""

    def _tail(self) -> tuple[bytes, int]:
        """Return the end of the file, and its size; empty if it does not exist yet."""
        if not self._path.exists():
            self._require_folder()
            return b"", 0
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - _TAIL_BYTES))
            return file.read(size - start), size

    @contextmanager
    def _locked(self) -> Iterator[int]:
        is_new = not self._path.exists()
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # The file's name must be as durable as the heads in it.
            if is_new:
                sync(self._path.parent)
            deadline = time.monotonic() + TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)
            yield descriptor
        finally:
            os.close(descriptor)

    def _read(self, line: bytes) -> LedgerHead:
        try:
            return read_head_line(line, self._keys)
        except ProtocolError:
            raise _unavailable(str(self._path), f"a line in it is not a head that {_SIGNED}") from None

    def _require_folder(self) -> None:
        if not self._path.parent.is_dir():
            raise NotADirectoryError(f"there is no folder {self._path.parent}")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unavailable(str(self._path.parent), error.strerror or str(error)) from None


class UrlWitness:
    """A witness behind a URL. The newest head is the content of ``URL/<key in hexadecimal>``."""

    def __init__(self, url: SplitResult, keys: LedgerKeys) -> None:
        self._url = url
        self._keys = keys
        self._path = f"{url.path.rstrip('/')}/{keys.first.hex()}" + (f"?{url.query}" if url.query else "")
        self.place = StoragePlace(host=str(url.hostname))
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        # It connects with the first request, and again after it was closed.
        self._connection = kind(str(url.hostname), url.port, timeout=TIMEOUT_S)

    def newest(self) -> KeptHead:
        """Return the head at the URL, with its ETag as token."""
        status, etag, body = self._ask("GET", None, {})
        if status == 404:
            return KeptHead(None, "")
        if status != 200 or not etag:
            raise self._unavailable(f"GET was answered with {status} and ETag '{etag}'")
        try:
            return KeptHead(read_head_line(body, self._keys), etag)
        except ProtocolError:
            raise self._unavailable(f"its content is not a head that {_SIGNED}") from None

    def heads(self) -> tuple[LedgerHead, ...]:
        """Return the newest head alone, because a URL shows no others."""
        head = self.newest().head
        return (head,) if head else ()

    def put(self, line: bytes, token: str) -> str | None:
        """Replace the head at the URL, on condition that its ETag is still ``token``."""
        condition = {"If-Match": token} if token else {"If-None-Match": "*"}
        status, etag, _ = self._ask("PUT", line, {"Content-Type": "application/json", **condition})
        # Object stores answer 409 where RFC 9110 says 412: another head was put first.
        if status in (409, 412):
            return None
        if status not in (200, 201, 204):
            raise self._unavailable(f"PUT was answered with {status}")
        return etag

    def close(self) -> None:
        """Close the connection, if one is open."""
        self._connection.close()

    def _ask(self, method: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str, bytes]:
        """Send a request; return status, ETag and body of the answer.

        A connection that the other side has closed is opened again, once. If a PUT was done after all, its repetition
        finds it done.
        """
        while True:
            was_open = self._connection.sock is not None
            try:
                self._connection.request(method, self._path, body, headers)
                answer = self._connection.getresponse()
                return answer.status, answer.headers.get("ETag", ""), answer.read(_TAIL_BYTES)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # Only a kept connection may have been closed while it was idle; a new one would fail again.
                if not was_open:
                    raise self._unavailable(str(error) or type(error).__name__) from None

    def _unavailable(self, why: str) -> BudgetError:
        # Without its path, which is a secret.
        return _unavailable(f"the witness at {self._url.scheme}://{self._url.netloc}", why)


Witness = FolderWitness | UrlWitness
"""A place that keeps the heads of one ledger. Every method raises BudgetError ``witness_unavailable``.

``newest`` returns the present state, and ``heads`` all heads that it can still show, oldest first. ``put`` keeps one
more head durably, unless the state is no longer ``token``. It returns the token of the new state, empty if that must be
asked for, and None if nothing was kept. A witness that was closed may be asked again.
"""


class Witnessed:
    """A ledger's connection to its witness. All methods may be called from several threads.

    Args:
        hash_at: hash of the ledger's entry at a position, None beyond its end. It must see committed entries.
        clock: Unix time in whole seconds.
    """

    def __init__(
        self, witness: Witness, key: IdentityKey, hash_at: Callable[[int], bytes | None], clock: Callable[[], int]
    ) -> None:
        self._witness = witness
        self._key = key
        self._hash_at = hash_at
        self._clock = clock
        self._lock = threading.Lock()
        self._held: KeptHead | None = None
        self._state = WitnessState(answers=True, entries=0)

    @property
    def state(self) -> WitnessState:
        """Return what is known, without asking the witness and without waiting for a thread that asks it."""
        return self._state

    def check(self) -> None:
        """Refuse a ledger that lacks the witness's newest head.

        Raises:
            BudgetError: ``ledger_rolled_back`` with both values, or ``witness_unavailable``.
        """
        with self._noted():
            self._known()

    def keep(self, head: Head) -> None:
        """Have the witness keep ``head``, which is committed, unless it has a later one of this chain.

        Guarantee: on return the witness holds, durably, a head of this chain at or behind ``head``.

        Raises:
            BudgetError: as :meth:`check`.
        """
        with self._noted():
            for _ in range(_TRIES):
                held = self._known()
                if head.sequence <= (held.head.sequence if held.head else 0):
                    return
                line = head_line(head, self._key, self._clock())
                # Until the answer is known, the witness may hold either head.
                self._held = None
                token = self._witness.put(line, held.token)
                if token is not None:
                    mine = LedgerKeys.of((), self._key.public)
                    self._held = KeptHead(read_head_line(line, mine), token) if token else None
                    self._state = WitnessState(answers=True, entries=head.sequence)
                    return
            raise _unavailable("the witness", f"its newest head changed {_TRIES} times while keeping a head")

    def close(self) -> None:
        """Release the witness."""
        with self._lock:
            self._witness.close()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Hold the lock while the witness is asked, and note if it does not answer."""
        with self._lock:
            try:
                yield
            except BudgetError as error:
                if error.code == "witness_unavailable":
                    self._state = replace(self._state, answers=False)
                raise

    def _known(self) -> KeptHead:
        """Return the witness's state, after checking that its head is of this chain.

        It is compared every time. A ledger may be put back while it is open, for example by a standby that lacks its
        last entries.
        """
        held = self._held or self._witness.newest()
        if held.head is not None and held.head.sequence:
            found = self._hash_at(held.head.sequence)
            if found != held.head.hash:
                raise rolled_back("the witness", held.head.position, found)
        self._held = held
        self._state = WitnessState(answers=True, entries=held.head.sequence if held.head else 0)
        return held


def _unavailable(where: str, why: str) -> BudgetError:
    return BudgetError(
        "witness_unavailable",
        f"{where} did not keep or show the ledger's head: {why}.",
        "What was charged stays charged and nothing was released for it; once the witness is back, the same charge "
        "gives the same receipt.",
    )
