"""The mask graph: which pairs of workers mask with each other, and how many neighbours each needs in a large roster.

By default every worker masks with every other. A run that says how many colluding workers it must withstand may have a
sparse graph instead. Its workers stand on a circle in random order, and each masks with the ``reach`` nearest on either
side. `docs/proofs/008-sparse-mask-graph.md` has the proof.
"""

import hmac
from fractions import Fraction
from functools import lru_cache
from itertools import count
from math import comb, prod
from typing import Final, get_args

from raycloak.attestation.core.canonical import DIGEST_BYTES
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.roster import MaskCircle, Member, Query, Roster
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound

MAX_ATTEMPTS_PER_STEP: Final = 4096
"""A step that is tried so often never ends. Each attempt may draw one circle, so the number is in the bound below."""

LARGEST_COMPLETE: Final = 32
"""Up to so many workers, all pairs mask: a circle would hardly save anything."""

SPLIT_PROBABILITY: Final = 2.0**-40
"""The most by which the honest workers may split over a whole run. Delta pays for it."""


def split_bound(workers: int, colluding: int, reach: int) -> Fraction:
    """Return a bound on the probability that one circle splits its honest workers into groups that share no mask.

    Guarantee: at least that probability, for any ``colluding`` workers that were fixed before the circle was drawn. It
    counts groups of every size, not only single workers.
    """
    require_bound(0 <= colluding <= workers, "colluding workers are some of the workers")
    require_bound(0 < 2 * reach < workers, "a worker's neighbours on a circle are different ones")
    # Two runs of `reach` colluding workers at given places: both exact, where the power of their share is an estimate.
    taken = Fraction(prod(colluding - i for i in range(2 * reach)), prod(workers - i for i in range(2 * reach)))
    return comb(workers, 2) * taken if colluding >= 2 * reach else Fraction(0)


def most_circles(releases: int) -> int:
    """Return how many circles a run may draw at most: one for each attempt of as many steps of each of its queries."""
    return MAX_ATTEMPTS_PER_STEP * len(get_args(Query)) * releases


@lru_cache(maxsize=64)  # The orchestrator and each worker ask for the same one at every roster.
def least_reach(workers: int, colluding: int, releases: int) -> int | None:
    """Return the smallest reach at which honest workers split in no attempt of a run, except with chance 2^-40.

    Guarantee: ``most_circles(releases) * split_bound(...) <= 2^-40``. In whole numbers, so that all workers find the
    same one.

    Returns:
        None if all pairs must mask: in a small roster, or where a circle would join all but one anyway.
    """
    if workers <= LARGEST_COMPLETE:
        return None
    circles = most_circles(releases)
    for reach in count(1):
        if 2 * reach >= workers - 1:
            return None
        if circles * split_bound(workers, colluding, reach) <= Fraction(SPLIT_PROBABILITY):
            return reach
    raise AssertionError("a reach of half the circle ends the search")


def draw_circle(seed: bytes, workers: int, colluding: int, releases: int) -> MaskCircle | None:
    """Return the circle of a roster, or None if all pairs must mask.

    Args:
        seed: 32 bytes that nobody could foresee when the members were fixed.
        releases: of the whole run, over all its mechanisms.
    """
    reach = least_reach(workers, colluding, releases)
    return None if reach is None else MaskCircle(seed=seed, reach=reach, colluding_workers=colluding)


def check_circle(roster: Roster, releases: int, agreed: int | None) -> None:
    """Require the masks of a verified roster to withstand what was agreed.

    Guarantee: returns only if all pairs mask, or if the circle is large enough. That is: it states at least the agreed
    number of colluding workers, its reach is at least :func:`least_reach` for that, and two honest workers remain.

    Args:
        agreed: the manifest's number of colluding workers; None if all pairs must mask.

    Raises:
        ProtocolError: ``mask_graph``.
    """
    circle, workers = roster.circle, len(roster.workers)
    if circle is None:
        return
    if agreed is None or circle.colluding_workers < agreed:
        stated = "no" if agreed is None else str(agreed)
        raise ProtocolError("mask_graph", f"{stated} colluding workers were agreed, not {circle.colluding_workers}")
    if len(circle.seed) != DIGEST_BYTES or not 0 < circle.colluding_workers <= workers - 2:
        raise ProtocolError("mask_graph", f"a circle of {workers} workers states {circle.colluding_workers} colluding")
    least = least_reach(workers, circle.colluding_workers, releases)
    if least is None or circle.reach < least:
        raise ProtocolError("mask_graph", f"each of {workers} workers masks with {circle.reach} on either side only")


@lru_cache(maxsize=4)  # A circle stays for many steps, and a worker asks for its order twice in each.
def _order(seed: bytes, run_id: str, manifest_digest: bytes, ids: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ids in their order on the circle of ``seed``."""
    key = derive(Secret(seed), Purpose.MASK_CIRCLE, run_id, manifest_digest).reveal()
    # A keyed place for each id. Two equal ones are less likely than 2^-200, and then the ids decide.
    return tuple(sorted(ids, key=lambda each: (hmac.digest(key, each.encode(), "sha256"), each)))


class MaskGraph:
    """The pairs of workers of one roster that mask with each other."""

    def __init__(self, roster: Roster) -> None:
        """Place the workers of a roster whose circle was checked."""
        workers, circle = list(roster.workers), roster.circle
        self._step, self._reach = roster.step, len(workers) if circle is None else circle.reach
        if circle is not None:
            of = {each.member_id: each for each in workers}
            workers = [of[each] for each in _order(circle.seed, roster.run_id, roster.manifest_digest, tuple(of))]
        self._circle = workers
        self._place = {each.member_id: place for place, each in enumerate(workers)}

    def neighbours(self, member_id: str) -> tuple[Member, ...]:
        """Return the workers that mask with ``member_id``, by id.

        Guarantee: of two workers, either both are among the neighbours of the other or neither is.

        Raises:
            ProtocolError: ``roster_member`` if it is no worker of the roster.
        """
        place, size = self._place.get(member_id), len(self._circle)
        if place is None:
            raise ProtocolError("roster_member", f"{member_id} is not a worker in the roster of step {self._step}")
        if 2 * self._reach >= size - 1:
            near = [each for each in self._circle if each.member_id != member_id]
        else:
            steps = (*range(-self._reach, 0), *range(1, self._reach + 1))
            near = [self._circle[(place + step) % size] for step in steps]
        return tuple(sorted(near, key=lambda each: each.member_id))
