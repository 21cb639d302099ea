"""Five computations of one epsilon, and the refusal of a plan on which they do not agree.

The five are raycloak's PLD, dp-accounting's PLD and RDP, and Opacus' RDP and PRV. The two RDPs share the conversion to
epsilon, so their agreement shows only that the divergences agree. The two PLDs share the mathematics of a grid and no
code; they are compared on one grid. PRV discretises differently, and bounds the true value from both sides.

Where epsilon pays for cut batches, both PLDs compose the cut mechanism by the analysis of docs/proofs/007. Both RDPs
use a bound of our own that shares nothing with it. PRV knows no cut. It is compared with PLD on the same plan without
one, which PLD with the cut must not be below.

dp-accounting's PLD and PRV have rounding errors that do not shrink with delta. Where those would matter, they are left
out, and it is said.
"""

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from raycloak.coordinator.accounting import pld, renyi
from raycloak.coordinator.accounting.accountants import accountant_of
from raycloak.coordinator.accounting.opacus_modules import opacus_module
from raycloak.coordinator.accounting.releases import Release, Releases, merged, uncut
from raycloak.coordinator.quick_imports import quickly
from raycloak.metrics.errors import ConfigError, RefusedError

# Only for types: an auditor's machine has no torch, which a plan imports.
if TYPE_CHECKING:
    from raycloak.coordinator.config.run import RunConfig
    from raycloak.coordinator.planning.plan import Plan

RDP_TOLERANCE = 1e-3
"""Relative difference allowed between the two RDPs at integer orders. At fractional ones dp-accounting's series does
not converge for larger sampling rates; it then leaves the order out, and its epsilon is larger."""

PRV_ERROR_SHARE = 0.005
"""The error that PRV is asked for, as a share of epsilon, where its grid is then small enough."""

PRV_GRID = 2**19
LARGEST_PRV_GRID = 2**22
"""Points of PRV's grid: the number that an error is chosen for, and the limit, beyond which PRV is not computed."""

LARGEST_PRV_LOSS = 700.0
"""PRV takes the exponential of every loss on its grid; a float64 holds that of 709."""

_INTEGER_ORDERS = tuple(order for order in renyi.ORDERS if order.is_integer())

_ALMOST_ONE = 1 - 2.0**-53
"""Stands for sampling rate 1, at which PRV's formulas divide by zero; it changes delta by less than steps * 2^-53."""

LIBRARY_ROUNDING = 2.0**-45
"""Delta, a release, above which rounding in the transforms of dp-accounting's PLD and of PRV is known to be harmless.

Measured: with delta that large, neither is off by more than a thousandth of epsilon. With a hundredth of it, the lower
bound of PRV is above the true value.
"""

LARGEST_PLD_GRID = 2**16
"""Most points of one release's law in dp-accounting's PLD, which takes 10 microseconds a point."""

SAME_GRID_TOLERANCE = 5e-3
"""Relative difference allowed between the two PLDs on one grid."""


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """The answers of five accountants for the same releases at the same delta.

    Attributes:
        epsilon: by accountant; ``opacus_prv`` is its estimate.
        integer_orders: RDP of Opacus and of dp-accounting where only integer orders are used.
        prv_bounds: the bounds that PRV claims for the true value without cuts; None if it was not computed.
        tight_uncut: epsilon by PLD without cuts; 0 if it was not computed.
        same_grid: epsilon by raycloak's and by dp-accounting's PLD on one grid; None if either was not computed.
        not_computed: reason, by accountant that is missing in ``epsilon``.
    """

    epsilon: dict[str, float]
    integer_orders: tuple[float, float]
    prv_bounds: tuple[float, float] | None = None
    tight_uncut: float = 0.0
    same_grid: tuple[float, float] | None = None
    not_computed: dict[str, str] = field(default_factory=dict)

    def disagreement(self) -> str | None:
        """Return a sentence that names two accountants that contradict each other; None if none do."""
        opacus, google = self.integer_orders
        if not math.isclose(opacus, google, rel_tol=RDP_TOLERANCE, abs_tol=1e-9):
            return f"RDP at integer orders gives {opacus:.6g} in opacus and {google:.6g} in dp-accounting"
        tight = self.epsilon.get("raycloak_pld", 0.0)
        lower, upper = self.prv_bounds or (0.0, math.inf)
        least = max(tight * (1 - pld.STATED_ERROR), lower)
        for name in ("opacus_rdp", "dp_accounting_rdp"):
            if self.epsilon[name] < least:
                return f"{name} gives {self.epsilon[name]:.6g}, below the {least:.6g} that PLD or PRV shows"
        if upper < self.tight_uncut * (1 - pld.STATED_ERROR) or 0 < self.tight_uncut < lower:
            return f"PRV gives {lower:.6g} to {upper:.6g} and PLD {self.tight_uncut:.6g}"
        if tight < self.tight_uncut * (1 - pld.STATED_ERROR):
            return f"PLD gives {tight:.6g} with cut batches, below the {self.tight_uncut:.6g} that it gives without"
        ours, theirs = self.same_grid or (0.0, 0.0)
        if not math.isclose(ours, theirs, rel_tol=SAME_GRID_TOLERANCE, abs_tol=1e-9):
            return f"PLD on one grid gives {ours:.6g} in raycloak and {theirs:.6g} in dp-accounting"
        return None

    def require_agreement(self) -> None:
        """Refuse a plan on which accountants contradict each other; RefusedError ``accountants_disagree``."""
        problem = self.disagreement()
        if problem is not None:
            raise RefusedError(
                "accountants_disagree",
                f"the accountants contradict each other on this plan: {problem}.",
                "Rely on neither; change the sampling rate or the noise, and report it.",
            )


def load_accountants(config: "RunConfig") -> None:
    """Import the libraries that plan a run of ``config`` and check the plan, which takes seconds; optional."""
    if config.dp_config.enabled:
        accountant_of("pld").load()
        _dp_accounting_pld((Release(0.5, 1.0, 1),), 1e-5, 0.125, 0)
        _prv_library()


def checked(plan: "Plan") -> "Plan":
    """Return ``plan`` with the epsilon of each accountant; unchanged where nothing is private.

    Raises:
        RefusedError: ``accountants_disagree``.
    """
    if not plan.releases:
        return plan
    found = cross_check(plan.releases, renyi.accountant_delta(plan.delta))
    found.require_agreement()
    return replace(plan, epsilon_by_accountant=found.epsilon, accountants_not_computed=found.not_computed)


@lru_cache(maxsize=64)
def cross_check(releases: Releases, delta: float) -> CrossCheck:
    """Return the epsilon of ``releases`` by all five, at ``delta``, the accountant's share. Takes up to 5 s at
    first."""
    four = without_prv(releases, delta)
    found, missing = dict(four.epsilon), dict(four.not_computed)
    without = merged(uncut(releases))
    prv, bounds = _opacus_prv(without, delta, _opacus_rdp(without, delta, renyi.ORDERS)), None
    if isinstance(prv, str):
        missing["opacus_prv"] = prv
    else:
        lower, estimate, upper = prv
        bounds = lower, upper
        if any(release.cut for release in releases):
            missing["opacus_prv"] = f"it knows no cut batches; {estimate:.4g} without"
        else:
            found["opacus_prv"] = estimate
    return replace(four, epsilon=dict(sorted(found.items())), prv_bounds=bounds, not_computed=missing)


@lru_cache(maxsize=64)
def without_prv(releases: Releases, delta: float) -> CrossCheck:
    """Return the answers of :func:`cross_check` but PRV's, whose library imports torch."""
    missing, tight_uncut, same_grid = {}, 0.0, None
    found = {
        "opacus_rdp": _opacus_rdp(releases, delta, renyi.ORDERS),
        "dp_accounting_rdp": dp_accounting_rdp(releases, delta, renyi.ORDERS),
    }
    integers = (
        _opacus_rdp(releases, delta, _INTEGER_ORDERS),
        dp_accounting_rdp(releases, delta, _INTEGER_ORDERS),
    )
    try:
        found["raycloak_pld"] = pld.epsilon(releases, delta)
        tight_uncut = pld.epsilon(uncut(releases), delta)
    except ConfigError as refusal:
        missing["raycloak_pld"] = missing["dp_accounting_pld"] = refusal.message
    else:
        pair = _on_one_grid(merged(releases), delta)
        if isinstance(pair, str):
            missing["dp_accounting_pld"] = pair
        else:
            same_grid = pair
            found["dp_accounting_pld"] = pair[1]
    return CrossCheck(dict(sorted(found.items())), integers, None, tight_uncut, same_grid, missing)


def _on_one_grid(releases: Releases, delta: float) -> tuple[float, float] | str:
    """Return epsilon by raycloak's and by dp-accounting's PLD on one grid, or why there is none."""
    if (problem := _too_small(releases, delta)) is not None:
        return problem
    interval = pld.settled_interval(releases, delta)
    if not interval:
        from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

        return pld.epsilon(releases, delta), float(get_epsilon_gaussian(releases[0].noise_multiplier, delta))
    coarsest = max(_largest_loss(release) for release in releases) / LARGEST_PLD_GRID
    interval = max(interval, 2.0 ** math.ceil(math.log2(coarsest)))
    slices = max(len(release.cut.slice_sizes) if release.cut else 1 for release in releases)
    theirs = max(_dp_accounting_pld(releases, delta, interval, size) for size in range(slices))
    return pld.on_grid(releases, delta, interval), theirs


def _too_small(releases: Releases, delta: float) -> str | None:
    """Return that rounding errors would matter to libraries whose transforms are not tilted; None if they would not."""
    count = sum(release.count for release in releases)
    if count * LIBRARY_ROUNDING <= delta:
        return None
    return f"at delta {delta:.3g} its rounding errors of {count} releases would matter"


def _largest_loss(release: Release) -> float:
    """Estimate the largest privacy loss on dp-accounting's grid, which ends after ten deviations of the noise."""
    moved = 2 if release.cut else 1
    exponent = moved * (10 + moved / release.noise_multiplier) / release.noise_multiplier
    return 2 * float(np.logaddexp(0.0, math.log(release.sample_rate) + exponent))


def _dp_accounting_pld(releases: Releases, delta: float, interval: float, size: int) -> float:
    """Return epsilon by dp-accounting's PLD for an example of a slice of the smaller (0) or the larger (1) size."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, interval)
    for release in releases:
        event, cut = _event(release), release.cut
        if cut is not None:
            slice_size = cut.slice_sizes[min(size, len(cut.slice_sizes) - 1)]
            cuts, _ = replace(cut, slice_sizes=(slice_size,)).chances(release.sample_rate)[0]
            # Its quotients underflow for less.
            if cuts > 2.0**-200:
                event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
                    slice_size, release.sample_rate, cut.capacity, release.noise_multiplier
                )
        accountant.compose(event, release.count)
    return float(accountant.get_epsilon(delta))


def _opacus_rdp(releases: Releases, delta: float, orders: tuple[float, ...]) -> float:
    opacus_rdp = opacus_module("opacus.accountants.analysis.rdp")
    with _quiet():
        rdp = renyi.composed_rdp(releases, orders)
        found, _ = opacus_rdp.get_privacy_spent(orders=list(orders), rdp=rdp, delta=delta)
    return max(0.0, float(found))


def dp_accounting_rdp(releases: Releases, delta: float, orders: tuple[float, ...]) -> float:
    """Return epsilon by dp-accounting's Renyi accountant, at the best of ``orders``."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    with _quiet():
        if not any(release.cut for release in releases):
            for release in releases:
                accountant.compose(_event(release), release.count)
            return float(accountant.get_epsilon(delta))
        from dp_accounting.rdp import rdp_privacy_accountant

        total = np.zeros(len(orders))
        for release in releases:
            one = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_SPECIAL).compose(_event(release))
            rdp = np.asarray(one._rdp)
            total += release.count * (rdp if release.cut is None else renyi.cut_rdp(rdp, release, release.cut, orders))
        return float(rdp_privacy_accountant.compute_epsilon(orders, total, delta)[0])


def _event(release: Release) -> Any:
    """Return dp-accounting's event of one output, without its cut."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(release.noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(release.sample_rate, gaussian)


def _opacus_prv(releases: Releases, delta: float, expected: float) -> tuple[float, float, float] | str:
    """Return PRV's lower bound, estimate and upper bound, or why there is none."""
    if (problem := _too_small(releases, delta)) is not None:
        return problem
    prv, delta_error = _prv_library(), delta / 1000
    with _quiet():
        length, error, points = _prv_grid(releases, delta_error, expected)
        if length > LARGEST_PRV_LOSS:
            return f"losses up to {length:.3g} overflow its float64"
        if points > LARGEST_PRV_GRID:
            return f"its grid would need {points:.2g} points"
        try:
            domain = prv.Domain.create_aligned(-length, length, 2 * length / points)
            variables = [
                prv.PoissonSubsampledGaussianPRV(min(each.sample_rate, _ALMOST_ONE), each.noise_multiplier)
                for each in releases
            ]
            truncated = [prv.TruncatedPrivacyRandomVariable(each, domain.t_min, domain.t_max) for each in variables]
            discrete = prv.compose_heterogeneous(
                dprvs=[prv.discretize(each, domain) for each in truncated],
                num_self_compositions=[each.count for each in releases],
            )
            lower, estimate, upper = discrete.compute_epsilon(delta, delta_error, error)
        except (RuntimeError, ValueError) as error_found:
            return " ".join(str(error_found).split())
    return max(0.0, float(lower)), max(0.0, float(estimate)), float(upper)


def _prv_library() -> Any:
    with quickly():
        return opacus_module("opacus.accountants.analysis.prv")


def _prv_grid(releases: Releases, delta_error: float, expected: float) -> tuple[float, float, float]:
    """Return the largest loss on PRV's grid, an error to ask for, and how many points the grid then has.

    The loss follows remark 5.6 of Gopi et al. (arXiv 2106.02848), as Opacus' ``compute_safe_domain_size`` does. It is
    taken from known divergences: computing them takes a second, and Opacus does it four times.
    """
    total = sum(each.count for each in releases)
    single = [replace(each, count=1) for each in releases]
    bounds = [renyi.epsilon(renyi.composed_rdp(releases), delta_error / 4)]
    bounds += [renyi.epsilon(renyi.composed_rdp([each]), delta_error / (8 * total)) for each in single]
    length = max(*bounds, 1.0) + 3
    points_at_one = 2 * length * math.sqrt(total * math.log(12 / delta_error) / 2)
    error = min(max(PRV_ERROR_SHARE * expected, points_at_one / PRV_GRID), 1.0)
    return length, error, points_at_one / error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' remarks on orders: their values are compared here, not trusted."""
    logger: Any = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
