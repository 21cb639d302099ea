"""A reader's memory of the newest head it saw of an evidence log, so that it cannot be shown another log later."""

from collections.abc import Sequence

from raycloak.attestation.log.entries import LogHead, check_extends
from raycloak.metrics.errors import EvidenceError


class LogWatch:
    """One reader's memory of one log.

    Guarantee: every accepted head extends all heads accepted before it (RFC 9162 section 2.1.4). A log that was put
    back, rewritten or forked after this reader saw it is refused once the reader is shown it.
    Not guaranteed: that others are shown the same log. They would have to compare their heads.
    """

    def __init__(self) -> None:
        self._head: LogHead | None = None

    @property
    def length(self) -> int:
        """Entries under the newest head; 0 before there is one. The proof for a newer head starts there."""
        return self._head.length if self._head else 0

    def accept(self, head: LogHead, extends: Sequence[bytes]) -> None:
        """Accept ``head`` as the newest. Its signatures must already be verified.

        Args:
            extends: proof from :attr:`length` to ``head.length``; empty where the two are equal, or for a first head.

        Raises:
            EvidenceError: ``log_forked``; the memory stays unchanged then.
        """
        old = self._head
        if old is not None:
            try:
                check_extends(old, head, extends)
            except EvidenceError:
                raise forked(f"its head over {head.length} entries does not extend the one over {old.length}") from None
        # Only now: a refused head must not replace the known one.
        self._head = head


def forked(message: str) -> EvidenceError:
    """Build the refusal, ``log_forked``, of a log that is not the one seen before."""
    return EvidenceError(
        "log_forked",
        f"this is not the evidence log that was seen before: {message}.",
        "It was put back or rewritten since; compare it with heads kept elsewhere, such as sealed packages.",
    )
