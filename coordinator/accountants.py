"""The accountants an account may be held with, behind one interface: how composed epsilon is computed.

``rdp`` is a Renyi filter: it adds up, and holds for runs that are chosen after others were seen. ``pld`` is tight, and
holds for one plan that was fixed before its first step; a run may only end early. Every value either gives is an upper
bound on the same quantity, so the smaller of two bounds is one too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator import accounting, privacy_loss
from coordinator.releases import Release, Releases
from metrics.collectors import spent_ratio
from workers.mechanism import AccountantName

QUOTE_POINTS = 16
"""Points of a quote: epsilon is stated after every sixteenth of the plan."""


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """What may be spent from an account.

    Attributes:
        epsilon_cap: most that all its charges may come to.
        delta: the accountant's share of the account's.
        orders: Renyi orders that the account was opened with, and keeps.
    """

    epsilon_cap: float
    delta: float
    orders: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Quote:
    """What parts of a fixed plan cost, computed once and then only looked up.

    Attributes:
        counts: per point, how often each mechanism has been released; growing in every component.
        epsilon: per point, an upper bound, never decreasing.
    """

    counts: tuple[tuple[int, ...], ...] = ()
    epsilon: tuple[float, ...] = ()

    def at(self, counts: tuple[int, ...]) -> float:
        """Epsilon at the first point that has at least ``counts`` of everything; infinite if there is none."""
        if not any(counts):
            return 0.0
        for point, value in zip(self.counts, self.epsilon, strict=True):
            if all(had <= allowed for had, allowed in zip(counts, point, strict=True)):
                return value
        return math.inf

    def within(self, cap: float) -> tuple[int, ...]:
        """The counts of the last point that ``cap`` allows; empty if it allows none."""
        fitting = [point for point, value in zip(self.counts, self.epsilon, strict=True) if value <= cap]
        return fitting[-1] if fitting else ()


@dataclass(frozen=True, slots=True)
class Spend:
    """What one run has been charged.

    Attributes:
        rdp: at the account's orders, of all its charges.
        counts: per private mechanism of the run, its charges.
        releases: the same charges as releases, without those that were never made.
        quote: what its registration recorded.
    """

    rdp: NDArray[np.float64]
    counts: tuple[int, ...]
    releases: Releases
    quote: Quote


class Accountant(Protocol):
    """How epsilon of an account is computed, and what of it is recorded when a run is registered.

    Attributes:
        name: in configuration, mechanism and account.
        shareable: whether several runs may spend from one account.
    """

    name: ClassVar[AccountantName]
    shareable: ClassVar[bool]

    def version(self) -> str:
        """Names and versions of the libraries that compute."""
        ...

    def load(self) -> None:
        """Import those libraries, which takes seconds; optional."""
        ...

    def curve(self, points: Sequence[Releases], delta: float) -> tuple[float, ...]:
        """Epsilon of each of several growing compositions at ``delta``, the accountant's share."""
        ...

    def quote(self, plan: Sequence[Release], limits: AccountLimits) -> Quote:
        """What a registration records of a run that plans these releases, one element a mechanism."""
        ...

    def spent(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """Epsilon of all that was charged to an account; infinite for what no run of it planned."""
        ...

    def ratio(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """Share of the account that is spent, linear in the steps of a run; infinity if it admits nothing."""
        ...


class RenyiAccountant:
    """Opacus' RDP at fixed orders, added up: a Renyi filter (Feldman and Zrnic, arXiv 2008.11193)."""

    name: ClassVar[AccountantName] = "rdp"
    shareable: ClassVar[bool] = True

    def version(self) -> str:
        """See :class:`Accountant`."""
        return accounting.accountant_version()

    def load(self) -> None:
        """See :class:`Accountant`."""
        accounting.step_rdp(0.5, 1.0, (2.0,))

    def curve(self, points: Sequence[Releases], delta: float) -> tuple[float, ...]:
        """See :class:`Accountant`."""
        return tuple(accounting.epsilon(accounting.composed_rdp(point), delta) for point in points)

    def quote(self, plan: Sequence[Release], limits: AccountLimits) -> Quote:
        """Nothing: a filter needs no plan."""
        return Quote()

    def spent(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """See :class:`Accountant`."""
        return accounting.epsilon(_total(spends, limits), limits.delta, limits.orders)

    def ratio(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """See :class:`Accountant`."""
        caps = accounting.order_caps(limits.epsilon_cap, limits.delta, limits.orders)
        return spent_ratio(_total(spends, limits).tolist(), caps)


class PrivacyLossAccountant:
    """dp-accounting's privacy loss distributions, for the one plan that an account was opened for."""

    name: ClassVar[AccountantName] = "pld"
    shareable: ClassVar[bool] = False

    def version(self) -> str:
        """See :class:`Accountant`."""
        return f"{privacy_loss.library_version()}, {accounting.accountant_version()}"

    def load(self) -> None:
        """See :class:`Accountant`."""
        privacy_loss.epsilon((Release(0.5, 1.0, 1),), 1e-5)
        RENYI.load()

    def curve(self, points: Sequence[Releases], delta: float) -> tuple[float, ...]:
        """See :class:`Accountant`."""
        return privacy_loss.curve(tuple(points), delta)

    def quote(self, plan: Sequence[Release], limits: AccountLimits) -> Quote:
        """Sixteen parts of what the cap allows of the plan, and sixteen of the rest, should the cap be raised."""
        allowed, whole = largest_part(self, plan, limits.epsilon_cap, limits.delta), most_frequent(plan)
        within = [part_of(plan, share) for share in _sixteenths(0, allowed)]
        beyond = [part_of(plan, share) for share in _sixteenths(allowed, whole)]
        counts = tuple(tuple(release.count for release in point) for point in (*within, *beyond))
        epsilon = (*self.curve(within, limits.delta), *self.curve(beyond, limits.delta))
        return Quote(counts, tuple(accumulate(epsilon, max)))

    def spent(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """The recorded epsilon of the next point of the plan, or Renyi's value where that is smaller.

        Where both are above the cap, the charges themselves are composed, so that none is refused that fits: points
        have every mechanism in proportion, and a run may be ahead with one of them.
        """
        made = [spend for spend in spends if spend.releases]
        renyi = RENYI.spent(spends, limits)
        if len(made) != 1:
            return renyi
        looked_up = min(renyi, made[0].quote.at(made[0].counts))
        if looked_up <= limits.epsilon_cap:
            return looked_up
        return min(looked_up, privacy_loss.epsilon(made[0].releases, limits.delta))

    def ratio(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """See :class:`Accountant`."""
        return max((_share(spend, limits.epsilon_cap) for spend in spends), default=0.0)


RENYI = RenyiAccountant()
_ACCOUNTANTS: dict[AccountantName, Accountant] = {"rdp": RENYI, "pld": PrivacyLossAccountant()}


def accountant_of(name: AccountantName) -> Accountant:
    """The accountant of that name."""
    return _ACCOUNTANTS[name]


def most_frequent(plan: Sequence[Release]) -> int:
    """The count of a plan's most frequent release, which :func:`part_of` divides it by."""
    return max(release.count for release in plan)


def part_of(plan: Sequence[Release], share: int) -> Releases:
    """The part of a plan that has ``share`` of its most frequent release, and of every other in proportion.

    Rounded up, so that releases spread evenly over a run are inside the part at every moment.
    """
    most = most_frequent(plan)
    return tuple(replace(release, count=-(-release.count * share // most)) for release in plan)


def largest_part(accountant: Accountant, plan: Sequence[Release], cap: float, delta: float) -> int:
    """The largest share, see :func:`part_of`, whose epsilon does not exceed ``cap``; the whole plan's at most."""
    low, high = 0, most_frequent(plan)
    middle = high
    while low < high:
        if accountant.curve([part_of(plan, middle)], delta)[0] <= cap:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


def _total(spends: Sequence[Spend], limits: AccountLimits) -> NDArray[np.float64]:
    return sum((spend.rdp for spend in spends), np.zeros(len(limits.orders)))


def _sixteenths(start: int, end: int) -> list[int]:
    """The ends of sixteen parts of the whole numbers above ``start`` up to ``end``; fewer if there are fewer."""
    points = range(1, QUOTE_POINTS + 1)
    return sorted({start - -(end - start) * point // QUOTE_POINTS for point in points} - {start})


def _share(spend: Spend, cap: float) -> float:
    """Largest share that a run has used of any of the counts that ``cap`` allows it."""
    admitted = spend.quote.within(cap) or (0,) * len(spend.counts)
    shares = (had / most if most else math.inf for had, most in zip(spend.counts, admitted, strict=True) if had)
    return max(shares, default=0.0)
