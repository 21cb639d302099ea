"""Review: when the members' evidence has to be looked at again between two steps, because it ages or was revoked."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from attestation.admissions import MemberReview
from coordinator.control import Control
from coordinator.timing import Timer


@dataclass(slots=True)
class Review:
    """Asks the orchestrator only when there may be something new: a step costs no call for it.

    Attributes:
        revocations: how many there are so far; see `attestation.revocations.count_revocations`.
    """

    control: Control
    timer: Timer
    revocations: Callable[[], int]
    _due: float = -math.inf
    _seen: int = 0

    def look(self, *, now: bool = False) -> MemberReview:
        """What the orchestrator says; nothing new if it need not be asked, unless it has to be asked ``now``."""
        revocations = self.revocations()
        if not now and revocations == self._seen and self.timer.now() < self._due:
            return MemberReview((), math.inf)
        review = self.control.orchestrator.review()
        # Counted before it was asked: what was revoked in between is asked about again.
        self._seen = revocations
        # Evidence that is about to be renewed will be new at the next look, which tells when it ages.
        self._due = -math.inf if review.ages else self.timer.now() + review.renew_in_s
        return review
