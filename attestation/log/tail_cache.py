"""A cache of the length and the newest subtrees of an evidence log, while no other process can change them."""

from collections.abc import Sequence
from typing import Final

from raycloak.attestation.files.sqlite import Transactions
from raycloak.attestation.log.entries import LogHead

_KEPT: Final = 4096  # all are dropped at once when so many are in memory


class RecentLog:
    """The values that the newest transaction has read and appended, for as long as they hold.

    A length holds until the next transaction, before which another process may have appended. A subtree holds for
    ever, unless its append is undone.

    Args:
        transactions: every transaction of the log's connection; None remembers nothing.
    """

    def __init__(self, transactions: Transactions | None) -> None:
        self._transactions = transactions
        self._read: tuple[int, int] | None = None
        self._length: int | None = None
        self._head: LogHead | None = None
        self._subtrees: dict[tuple[int, int], bytes] = {}

    @property
    def length(self) -> int | None:
        """The number of entries; None if it has to be read."""
        self._forget()
        return self._length

    @property
    def head(self) -> LogHead | None:
        """The head over all entries; None if none was computed since the last of them."""
        self._forget()
        return self._head

    def subtree(self, level: int, index: int) -> bytes | None:
        """Return a complete subtree, if it was appended here."""
        self._forget()
        return self._subtrees.get((level, index))

    def found(self, length: int) -> None:
        """Remember a length that was read."""
        if self._transactions is not None:
            self._length, self._head = length, None

    def note(self, head: LogHead) -> None:
        """Remember a head over all current entries."""
        if self._transactions is not None:
            self._head = head

    def appended(self, length: int, subtrees: Sequence[bytes]) -> None:
        """Remember an entry behind ``length`` others, and the subtrees that end in it."""
        if self._transactions is not None:
            self.found(length + 1)
            if len(self._subtrees) >= _KEPT:
                self._subtrees.clear()
            self._subtrees.update(((level, length >> level), subtree) for level, subtree in enumerate(subtrees))

    def _forget(self) -> None:
        if self._transactions is None:
            return
        now = self._transactions.begun, self._transactions.undone
        if now != self._read:
            # Only an undone append makes a subtree wrong; the next transaction does not.
            if self._read is None or self._read[1] != now[1]:
                self._subtrees.clear()
            self._read, self._length, self._head = now, None, None
