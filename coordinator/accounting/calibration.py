"""The cost of mechanisms under an accountant, and the noise that a target needs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from raycloak.coordinator.accounting import renyi
from raycloak.coordinator.accounting.accountants import accountant_of
from raycloak.coordinator.accounting.releases import Release, Releases, cut_of, release_of
from raycloak.coordinator.accounting.renyi import (
    SMALLEST_NOISE_MULTIPLIER,
    WHOLE_ORDERS,
    accountant_delta,
    effective_noise_multiplier,
    slack_reserve,
    total_slack,
)
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.mechanism import AccountantName, Mechanism

LARGEST_NOISE_MULTIPLIER = 2.0**14
"""Where the search ends: a target that needs more noise leaves nothing to learn."""

GENEROUS = 1.5
"""Stated epsilon over that at a cap which just fits, above which a cap is generous: its order suits the cap, and not
what is released."""

ROUNDING_SHARE = 1e-3
"""The share of epsilon that rounding to a coarser grid may take where noise is drawn faster for it."""

# Share of the target to aim at, and share at which the search stops: the pld accountant jumps by up to 0.2 %, so a
# search for 1 itself would overshoot it. Four trials are usual; the limit only ends a search that cannot settle.
_AIM, _CLOSE, _MOST_TRIALS = 0.9988, 0.997, 16

# Epsilon falls at least as fast as the noise grows, so a raise by what is missing is enough; less would not settle.
_LEAST_RAISE = 1.0005


def epsilon_of(
    sample_rate: float, noise_multiplier: float, steps: int, delta: float, accountant: AccountantName = "rdp"
) -> float:
    """Return epsilon of ``steps`` steps at an account's ``delta``, after the slack reserve is taken off."""
    return composed_epsilon((Release(sample_rate, noise_multiplier, steps),), delta, accountant)


def composed_epsilon(
    releases: Releases, delta: float, accountant: AccountantName = "rdp", orders: tuple[float, ...] | None = None
) -> float:
    """Return epsilon of ``releases`` at an account's ``delta``, after the slack reserve is taken off.

    Args:
        orders: those in use by the account that pays. None for one plan that is fixed in advance and alone.
    """
    return composed_curve([releases], delta, accountant, orders)[0]


def composed_curve(
    points: Sequence[Releases],
    delta: float,
    accountant: AccountantName = "rdp",
    orders: tuple[float, ...] | None = None,
) -> tuple[float, ...]:
    """Return the same for several growing compositions; the last is the most exact."""
    return accountant_of(accountant).curve(points, accountant_delta(delta), orders)


def fitting_cap(releases: Releases, stated: float, delta: float) -> float | None:
    """Return the cap at which a new ``rdp`` account states least for ``releases``; None unless its own is generous.

    It just holds them, rounded up to four digits. So the order that it fixes is the best one for them.

    Args:
        releases: all that one plan releases.
        stated: epsilon that the account states for them, at the order that its cap fixes.
        delta: of the account.
    """
    least = composed_epsilon(releases, delta, "rdp")
    return _round_up(least, 3) if stated > GENEROUS * least else None


def epsilon_against(
    mechanism: Mechanism,
    missing_virtual_workers: float,
    delta: float,
    steps: int,
    beside: Sequence[tuple[Mechanism, int]] = (),
) -> float:
    """Return epsilon of ``steps`` steps for an adversary who knows the noise of ``missing_virtual_workers``.

    Infinite if no unknown noise is left, or if the slack at that epsilon does not fit its share of ``delta``. Where the
    chance of a cut does not fit it, at an epsilon above the cap, the accountant is charged for the cut instead.

    Args:
        beside: what else was released: measurements, and how often each.
    """
    made = [(each, count) for each, count in ((mechanism, steps), *beside) if each.private and count]
    if not made:
        return 0.0
    noises = [effective_noise_multiplier(each, missing_virtual_workers) for each, _ in made]
    if min(noises) < SMALLEST_NOISE_MULTIPLIER:
        return math.inf
    releases = tuple(
        replace(release_of(each, count), noise_multiplier=z) for (each, count), z in zip(made, noises, strict=True)
    )
    spent = composed_epsilon(releases, delta, mechanism.accountant)
    slack = total_slack((each for each, _ in made), spent)
    if slack.total <= slack_reserve(delta):
        return spent
    cuts = (None if each.sample_rate == 1 else cut_of(each) for each, _ in made)
    charged = tuple(replace(release, cut=cut) for release, cut in zip(releases, cuts, strict=True))
    spent = composed_epsilon(charged, delta, mechanism.accountant)
    slack = replace(total_slack((each for each, _ in made), spent), batch_overflow=0.0)
    return spent if slack.total <= slack_reserve(delta) else math.inf


def rounding_cost(release: Release, inflation: float, delta: float) -> float:
    """Return the share of epsilon that rounding to a grid takes from ``release``, at an account's ``delta``.

    Its noise is in units of the sensitivity that rounding leaves. Over the sensitivity without rounding, the same noise
    is larger by ``inflation``, and the share is what epsilon would be lower by. It is found by Renyi differential
    privacy, whatever accountant pays: values of ``pld`` jump by more than the shares asked for.
    """
    exact = replace(release, noise_multiplier=release.noise_multiplier * (1 + inflation))
    rounded = _near_epsilon((release,), delta)
    return 1 - _near_epsilon((exact,), delta) / rounded if rounded else 0.0


def affordable_rounding(release: Release, delta: float) -> Callable[[float], bool]:
    """Return the test that `raycloak.workers.vectors.ring.fit_ring` asks: does it cost below ``ROUNDING_SHARE``?"""
    return lambda inflation: rounding_cost(release, inflation, delta) < ROUNDING_SHARE


def solve_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: AccountantName = "rdp",
    others: Releases = (),
    orders: tuple[float, ...] | None = None,
) -> float:
    """Return the smallest noise multiplier that keeps ``steps`` steps within the target, to five digits, rounded up.

    Guarantee: with ``others``, ``steps`` releases at the result cost at most the target. They cost at least 99.7 % of
    it (99.9 % under ``rdp``), unless the result is the floor ``SMALLEST_NOISE_MULTIPLIER``.

    Args:
        delta: of the account, before the slack reserve is taken off.
        others: what else the plan releases, with noise of its own.
        orders: as in :func:`composed_epsilon`. Without them the plan fits a new account of this cap, whose order it
            fixes.

    Raises:
        ConfigError: ``epsilon_unreachable`` if no noise is enough.
    """

    def share(noise: float) -> float:
        releases = (*others, Release(sample_rate, noise, steps))
        return composed_epsilon(releases, delta, accountant, orders) / target_epsilon

    def near_share(noise: float) -> float:
        return _near_epsilon((*others, Release(sample_rate, noise, steps)), delta) / target_epsilon

    # A tighter accountant refines the result, so its search only has to begin near it: few orders will do.
    enough = _smallest(share if accountant == "rdp" else near_share) or LARGEST_NOISE_MULTIPLIER
    if share(enough) > 1:
        raise ConfigError(
            "epsilon_unreachable",
            f"no noise multiplier up to {LARGEST_NOISE_MULTIPLIER:g} keeps {steps} steps at sampling rate "
            f"{sample_rate:.4g} within epsilon {target_epsilon:g} at delta {delta:g}.",
            "Ask for a larger epsilon or fewer steps.",
        )
    return _tightened(share, enough)


def _near_epsilon(releases: Releases, delta: float) -> float:
    """Return epsilon by Renyi differential privacy at whole orders alone, which takes a millisecond."""
    rdp = renyi.composed_rdp(releases, WHOLE_ORDERS)
    return renyi.epsilon(rdp, accountant_delta(delta), WHOLE_ORDERS)


def noise_with_cut(
    target_epsilon: float, delta: float, training: Release, accountant: AccountantName, others: Releases = ()
) -> float:
    """Return a noise multiplier, at least that of ``training``, that keeps it with its cut within the target.

    ``training`` is within the target without its cut, which costs little: a little more noise pays for it.
    """
    noise = training.noise_multiplier
    while True:
        releases = (*others, replace(training, noise_multiplier=noise))
        cost = composed_epsilon(releases, delta, accountant) / target_epsilon
        if cost <= 1:
            return noise
        noise = _round_up(noise * max(cost, _LEAST_RAISE))


def _smallest(share: Callable[[float], float]) -> float | None:
    """Return the smallest noise, rounded up, whose ``share`` is at most 1; None if there is none.

    Assumes that ``share`` is continuous and decreasing.
    """
    from scipy.optimize import brentq

    low, high = SMALLEST_NOISE_MULTIPLIER, 1.0
    while share(high) > 1:
        low, high = high, high * 4
        if high > LARGEST_NOISE_MULTIPLIER:
            return None
    if share(low) <= 1:
        return SMALLEST_NOISE_MULTIPLIER

    def log_share(log: float) -> float:
        # A large delta may leave no epsilon at all.
        return math.log(max(share(math.exp(log)), 1e-300))

    noise = _round_up(math.exp(brentq(log_share, math.log(low), math.log(high), xtol=1e-6)))
    while share(noise) > 1:
        noise = _round_up(noise * (1 + 1e-5))
    return noise


def _tightened(share: Callable[[float], float], enough: float) -> float:
    """Return a smaller noise than ``enough`` with a share just below 1, by interpolating logarithms.

    Takes about four values of ``share``, which may be costly and jump by up to 0.2 %.
    """
    low, best, at_best = SMALLEST_NOISE_MULTIPLIER, enough, share(enough)
    slope = -1.5
    for _ in range(_MOST_TRIALS):
        if at_best >= _CLOSE or best <= SMALLEST_NOISE_MULTIPLIER:
            break
        guess = best * (_AIM / at_best) ** (1 / slope) if at_best > 0 else 0.0
        noise = _round_up(max(guess, math.sqrt(low * best) if guess <= low else low))
        if noise >= best:
            break
        value = share(noise)
        if value > 0 < at_best:
            slope = min(math.log(value / at_best) / math.log(noise / best), -0.1)
        if value <= 1:
            best, at_best = noise, value
        else:
            low = noise
    return best


def _round_up(value: float, digits: int = 5) -> float:
    """Return ``value`` rounded up to so many decimal digits after the leading one."""
    decimals = digits - math.floor(math.log10(value))
    return math.ceil(value * 10.0**decimals) / 10.0**decimals
