"""Remembers the newest head of an evidence log that somebody was shown, so that he is not shown another log later."""

from collections.abc import Sequence

from attestation.log_entries import LogHead, check_extends
from metrics.errors import EvidenceError


class LogWatch:
    """What one reader of one log has seen of it.

    Guarantee: every head that was accepted extends all that were accepted before (RFC 9162 section 2.1.4). A log
    that was put back, rewritten or forked after this reader saw it is refused once it is shown to him.
    Not guaranteed: that others are shown the same log; they would have to compare their heads.
    """

    def __init__(self) -> None:
        self._head: LogHead | None = None

    @property
    def length(self) -> int:
        """Entries under the newest head; 0 before there is one. A proof that a newer head extends it starts there."""
        return self._head.length if self._head else 0

    def accept(self, head: LogHead, extends: Sequence[bytes]) -> None:
        """Take ``head``, whose signatures were checked, for the newest.

        Args:
            extends: proof from :attr:`length` to ``head.length``; empty where the two are equal, or for a first head.

        Raises:
            EvidenceError: ``log_forked``; nothing is taken then.
        """
        old = self._head
        if old is not None:
            self._require_extends(old, head, extends)
        self._head = head

    def _require_extends(self, old: LogHead, head: LogHead, extends: Sequence[bytes]) -> None:
        try:
            check_extends(old, head, extends)
        except EvidenceError:
            raise forked(f"its head over {head.length} entries does not extend the one over {old.length}") from None


def forked(message: str) -> EvidenceError:
    """The refusal of a log that is not the one that was seen before, ``log_forked``."""
    return EvidenceError(
        "log_forked",
        f"this is not the evidence log that was seen before: {message}.",
        "It was put back or rewritten since; compare it with heads kept elsewhere, such as sealed packages.",
    )
