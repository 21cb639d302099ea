"""The review of the members' evidence between two steps: it may have aged, or been revoked."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from raycloak.attestation.orchestrator.admissions import MemberReview
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.membership.timing import Timer


@dataclass(slots=True)
class Review:
    """Asks the orchestrator only when there may be something new: a step costs no call for it.

    Attributes:
        revocations: counts them; see `raycloak.attestation.orchestrator.revocations.count_revocations`.
    """

    control: Control
    timer: Timer
    revocations: Callable[[], int]
    _due: float = -math.inf
    _seen: int = 0

    def look(self, *, now: bool = False) -> MemberReview:
        """Return the orchestrator's review; an empty one if nothing can be new.

        Args:
            now: ask the orchestrator in any case.
        """
        revocations = self.revocations()
        if not now and revocations == self._seen and self.timer.now() < self._due:
            return MemberReview((), None)
        review = self.control.orchestrator.review()
        # Counted before asking: a revocation in between makes the next look ask again.
        self._seen = revocations
        # Evidence that is about to be renewed will be new at the next look, which tells when it ages.
        wait_s = math.inf if review.renew_in_s is None else review.renew_in_s
        self._due = -math.inf if review.ages else self.timer.now() + wait_s
        return review
