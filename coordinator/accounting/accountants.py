"""The accountants that an account may be held with: they compute composed epsilon, by methods of the same names.

``rdp`` is a Renyi filter: it adds up, and holds for runs that are chosen after others were seen. It is held at one
order, which the account's first private run fixes. ``pld`` is tight, and holds for one plan that was fixed before its
first step; a run may only end early. For such a plan every value is an upper bound on the same quantity, so the smaller
of two bounds is one too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from raycloak.coordinator.accounting import pld, renyi
from raycloak.coordinator.accounting.outward import weighted_sum_up
from raycloak.coordinator.accounting.releases import Release, Releases, merged
from raycloak.metrics.proof_bounds import require_bound
from raycloak.version import VERSION
from raycloak.workers.terms.mechanism import AccountantName

QUOTE_POINTS = 16
"""Points of a quote: epsilon is stated after every sixteenth of the plan."""


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """The limits of what may be spent from an account.

    Attributes:
        epsilon_cap: most that all its charges may come to.
        delta: the accountant's share of the account's.
        orders: Renyi orders in use. A filter that has several shares its delta among them.
    """

    epsilon_cap: float
    delta: float
    orders: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Quote:
    """The costs of parts of a fixed plan, computed once and then only looked up.

    Attributes:
        counts: per point, how often each mechanism has been released; growing in every component.
        epsilon: per point, an upper bound, never decreasing.
    """

    counts: tuple[tuple[int, ...], ...] = ()
    epsilon: tuple[float, ...] = ()

    def at(self, counts: tuple[int, ...]) -> float:
        """Return epsilon at the first point with at least ``counts`` of everything; infinite if there is none."""
        if not any(counts):
            return 0.0
        for point, value in zip(self.counts, self.epsilon, strict=True):
            if all(had <= allowed for had, allowed in zip(counts, point, strict=True)):
                return value
        return math.inf

    def within(self, cap: float) -> tuple[int, ...]:
        """Return the counts of the last point that ``cap`` allows; empty if it allows none."""
        fitting = [point for point, value in zip(self.counts, self.epsilon, strict=True) if value <= cap]
        return fitting[-1] if fitting else ()


@dataclass(frozen=True, slots=True)
class Spend:
    """The charges of one run.

    Attributes:
        rdp: at the account's orders in use, of all its charges.
        counts: per private mechanism of the run, its charges.
        releases: the same charges as releases, without those that were never made.
        quote: what its registration recorded.
    """

    rdp: tuple[float, ...]
    counts: tuple[int, ...]
    releases: Releases
    quote: Quote


class RenyiAccountant:
    """The sum of Opacus' RDP at one fixed order: a Renyi filter (Feldman and Zrnic, arXiv 2008.11193).

    Attributes:
        shareable: whether several runs may spend from one account.
    """

    shareable: ClassVar[bool] = True

    def version(self) -> str:
        """Return names and versions of the libraries that compute."""
        return f"opacus {version('opacus')}"

    def load(self) -> None:
        """Import those libraries, which takes seconds; optional."""
        renyi.step_rdp(0.5, 1.0, (2.0,))

    def curve(
        self, points: Sequence[Releases], delta: float, orders: tuple[float, ...] | None = None
    ) -> tuple[float, ...]:
        """Return epsilon of each of several growing compositions at ``delta``, the accountant's share.

        Args:
            orders: those in use by the account that pays. None for one plan that is fixed in advance and alone, which
                may take the best of all.
        """
        if orders is None:
            return tuple(renyi.epsilon(renyi.composed_rdp(point), delta) for point in points)
        return tuple(renyi.filter_epsilon(renyi.composed_rdp(point, orders), delta, orders) for point in points)

    def fixed_orders(self, plan: Sequence[Release], limits: AccountLimits) -> tuple[float, ...]:
        """Return those of an account's orders that its first private run puts to use, given what that run plans.

        It is the one order at which the whole plan takes the least share of the cap.
        """
        rdp = renyi.composed_rdp(plan, limits.orders)
        return (renyi.least_share_order(rdp, limits.epsilon_cap, limits.delta, limits.orders),)

    def needs_whole_plan(self, plan: Sequence[Release]) -> bool:
        """Return False: a filter holds for releases that are chosen one by one."""
        return False

    def quote(self, plan: Sequence[Release], limits: AccountLimits) -> Quote:
        """Return what a registration records of a run that plans these releases: nothing, a filter needs no plan."""
        return Quote()

    def spent(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """Return epsilon of all charges to an account, from the summed RDP of its runs."""
        return renyi.filter_epsilon(_total(spends, limits), limits.delta, limits.orders)

    def ratio(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """Return the spent share of the account, linear in the steps of a run; infinite if it admits nothing.

        It is the share at the order in use; of several, at the one that admits most.
        """
        # Here, because an auditor's machine has no libraries of metrics.
        from raycloak.metrics.collectors import spent_ratio

        caps = renyi.filter_caps(limits.epsilon_cap, limits.delta, limits.orders)
        return spent_ratio(_total(spends, limits).tolist(), caps)


class PrivacyLossAccountant:
    """Privacy loss distributions, for the one plan that an account was opened for."""

    shareable: ClassVar[bool] = False

    def version(self) -> str:
        """Return the versions of raycloak, its numerical libraries and Opacus."""
        return f"raycloak {VERSION}, numpy {version('numpy')}, scipy {version('scipy')}, {RENYI.version()}"

    def load(self) -> None:
        """Import the numerical libraries and Opacus."""
        pld.epsilon((Release(0.5, 1.0, 1),), 1e-5)
        RENYI.load()

    def curve(
        self, points: Sequence[Releases], delta: float, orders: tuple[float, ...] | None = None
    ) -> tuple[float, ...]:
        """Compose the privacy loss distributions."""
        return pld.curve(tuple(points), delta)

    def fixed_orders(self, plan: Sequence[Release], limits: AccountLimits) -> tuple[float, ...]:
        """Return all orders: an account with one plan may state the smallest epsilon over them."""
        return limits.orders

    def needs_whole_plan(self, plan: Sequence[Release]) -> bool:
        """Return whether the plan has mechanisms to choose from; Gaussians alone cost the same in any order.

        A cap must then hold all of it: under a smaller one, somebody could choose what to leave out. See
        docs/proofs/005-what-a-run-may-claim.md, theorem 3.
        """
        return len(merged(plan)) > 1

    def quote(self, plan: Sequence[Release], limits: AccountLimits) -> Quote:
        """Quote sixteen parts of the plan within the cap, and sixteen of the rest, in case the cap is raised.

        A plan has one element per mechanism.
        """
        allowed, whole = largest_part(self, plan, limits.epsilon_cap, limits.delta), most_frequent(plan)
        within = [part_of(plan, share) for share in _sixteenths(0, allowed)]
        beyond = [part_of(plan, share) for share in _sixteenths(allowed, whole)]
        counts = tuple(tuple(release.count for release in point) for point in (*within, *beyond))
        epsilon = (*self.curve(within, limits.delta), *self.curve(beyond, limits.delta))
        return Quote(counts, tuple(accumulate(epsilon, max)))

    def spent(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """Return the recorded epsilon of the next point of the plan, or Renyi's value where that is smaller.

        Where both are above the cap, the charges themselves are composed, so that none is refused that fits: points
        have every mechanism in proportion, and a run may be ahead with one of them.
        """
        made = [spend for spend in spends if spend.releases]
        if len(made) != 1:
            return math.inf if made else 0.0
        # One plan, fixed before its first release, may take the best of all orders.
        by_renyi = renyi.epsilon(_total(made, limits), limits.delta, limits.orders)
        looked_up = min(by_renyi, made[0].quote.at(made[0].counts))
        if looked_up <= limits.epsilon_cap:
            return looked_up
        return min(looked_up, pld.epsilon(made[0].releases, limits.delta))

    def ratio(self, spends: Sequence[Spend], limits: AccountLimits) -> float:
        """Return the largest share that any run has used of any of the counts that the cap allows it."""
        shares = [0.0]
        for spend in spends:
            admitted = spend.quote.within(limits.epsilon_cap) or (0,) * len(spend.counts)
            used = zip(spend.counts, admitted, strict=True)
            shares += [had / most if most else math.inf for had, most in used if had]
        return max(shares)


RENYI = RenyiAccountant()
Accountant = RenyiAccountant | PrivacyLossAccountant
_ACCOUNTANTS: dict[AccountantName, Accountant] = {"rdp": RENYI, "pld": PrivacyLossAccountant()}


def accountant_of(name: AccountantName) -> Accountant:
    """Return the accountant of that name."""
    return _ACCOUNTANTS[name]


def most_frequent(plan: Sequence[Release]) -> int:
    """Return the count of a plan's most frequent release, by which :func:`part_of` divides it."""
    return max(release.count for release in plan)


def part_of(plan: Sequence[Release], share: int) -> Releases:
    """Return the part of a plan with ``share`` of its most frequent release, and the others in proportion.

    Rounded up, so that releases spread evenly over a run are inside the part at every moment.
    """
    most = most_frequent(plan)
    return tuple(replace(release, count=-(-release.count * share // most)) for release in plan)


def largest_part(accountant: Accountant, plan: Sequence[Release], cap: float, delta: float) -> int:
    """Return the largest share, as in :func:`part_of`, whose epsilon does not exceed ``cap``."""
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
    # A run without private releases has no RDP, and may have been registered before the orders in use were known.
    made = [np.asarray(spend.rdp) for spend in spends if spend.releases]
    require_bound(all(len(rdp) == len(limits.orders) for rdp in made), "runs of an account are charged at its orders")
    return weighted_sum_up([(1, rdp) for rdp in made], len(limits.orders))


def _sixteenths(start: int, end: int) -> list[int]:
    """Return the ends of sixteen parts of the whole numbers above ``start`` up to ``end``; fewer if there are fewer."""
    points = range(1, QUOTE_POINTS + 1)
    return sorted({start - -(end - start) * point // QUOTE_POINTS for point in points} - {start})
