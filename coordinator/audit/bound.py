"""Guess which canaries were in a run, and turn right guesses into a lower bound on epsilon.

A run trains with m canaries, each of them in by a fair secret coin. An observer of the released sums guesses r of the
coins; v guesses are right. If the run is (epsilon, delta) differentially private, v is stochastically dominated by
a Binomial(r, e^epsilon / (1 + e^epsilon)) up to a term in delta (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846,
theorem 5.2). So many right guesses refute every small epsilon.

Two scores, because no single one sees every defect:

* ``likelihood``: log-likelihood ratio of in against out under the mechanism as it is claimed. By Neyman and Pearson
  nothing beats it against a correct run, and too little noise or clipping moves it further.
* ``difference``: sum of squared differences of consecutive sums. Noise that repeats cancels in it, which leaves the
  canary's own draws.

Both are of rounds. A round is the steps in which each unit may be drawn once: one step, or b with correlated noise. The
released sums are then solved ones, ``C^-1 y``, so an observer mixes them again. A canary that was drawn in a step is in
``y`` of that step and of those after it, by one coefficient each. Their noise is independent, so a weighted sum is all
that they tell.

Each is tried with a few fixed ways to guess. All of this is fixed before anything is seen. Significance is shared out
evenly, so the best of the bounds holds with the confidence asked for.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.terms.mechanism import Mechanism

_RESOLUTION = 2.0**-20  # six digits


def p_value(epsilon: float, delta: float, *, canaries: int, guesses: int, correct: int) -> float:
    """Bound the chance of at least ``correct`` right guesses, if the run is (epsilon, delta) private.

    ``beta + 2 m delta max_i P[v - i <= X < v] / i`` with X ~ Binomial(r, e^eps / (1 + e^eps)), beta = P[X >= v].

    Guarantee: not below the paper's value, and non-decreasing in epsilon. With c = 2 m delta / i <= 1, each term
    ``beta + c P[v - i <= X < v] = (1 - c) beta + c P[X >= v - i]`` grows with epsilon. If c > 1 the larger
    ``c P[X >= v - i]`` is taken, which grows too.

    Args:
        canaries: m, coins that were tossed. guesses: r <= m. correct: v <= r.
    """
    from scipy.stats import binom  # importing it takes a second

    require_bound(0 <= correct <= guesses <= canaries, "right guesses are some of the guesses about canaries")
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(correct - 1, guesses, accuracy))
    if correct == 0 or delta == 0:
        return min(1.0, beta)
    below = np.arange(1, correct + 1)
    window = np.cumsum(binom.pmf(correct - below, guesses, accuracy))
    factor = 2 * canaries * delta / below
    return min(1.0, float((beta * np.maximum(factor, 1) + factor * window).max()))


def epsilon_lower_bound(*, canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """Return the largest epsilon, to six digits and rounded down, that so many right guesses refute; 0 if none.

    Guarantee: if the run is (epsilon, delta) private, the result exceeds epsilon with a chance of at most
    ``significance``, because :func:`p_value` does not decrease.

    Args:
        significance: one minus the confidence, in (0, 1).
    """

    def refuted(epsilon: float) -> bool:
        value = p_value(epsilon, delta, canaries=canaries, guesses=guesses, correct=correct)
        return value < significance

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > _RESOLUTION:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


SHARES = ((0.0625, 0.0), (0.125, 0.0), (0.25, 0.0), (0.125, 0.125), (0.25, 0.25))
"""Shares of the canaries guessed as in and as out: the highest and the lowest scores."""

SCORES = ("likelihood", "difference")


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on epsilon, and its basis.

    Attributes:
        epsilon: the bound.
        score: one of `SCORES`.
        guesses, correct: r and v.
        ceiling: the largest possible bound of this audit, had every guess been right.
    """

    epsilon: float
    score: str
    guesses: int
    correct: int
    ceiling: float


@dataclass(frozen=True, slots=True)
class Observed:
    """An adversary's view of the canaries, [rounds, m] each.

    Attributes:
        sums: each round's sum along each canary's axis, under the noise of one release; 0 where a canary has no step
            left in the last round.
        signs: +1 or -1, the direction of the canary's gradient on it, known from the model before its step.
        signals: the length of a drawn canary in ``sums``, in units of C: 1 without correlated noise, and 0 where a
            canary has no step left.
    """

    sums: NDArray[np.float64]
    signs: NDArray[np.int64]
    signals: NDArray[np.float64]

    @classmethod
    def of(
        cls, released: NDArray[np.float64], signs: NDArray[np.int64], mechanism: Mechanism, epoch_steps: int
    ) -> "Observed":
        """Gather the steps of each round: a matched filter for the one step that may draw the canary.

        A canary that step t draws is in the mix of step t + j by c_j, up to the last band, the last step or the end of
        the key epoch. ``sum_j c_j y_(t+j) / |c|`` over these has the signal ``|c| C``, and the noise of one of them.

        Args:
            released: [steps, m], the released sums along each canary's axis. Canaries are the last units.
            signs: [steps, m].
            epoch_steps: E, the steps of a key epoch, after which a mix starts anew.
        """
        (steps, count), bands = released.shape, mechanism.bands
        weights = np.array(mechanism.coefficients or (COEFFICIENT_UNIT,)) / COEFFICIENT_UNIT
        numbers = np.arange(steps)
        # Steps before and after each, in its key epoch and its run.
        before = numbers % epoch_steps
        after = np.minimum(epoch_steps - 1 - before, steps - 1 - numbers)
        mixed, filtered, squares = np.zeros_like(released), np.zeros_like(released), np.zeros(steps)
        for lag, weight in enumerate(weights):
            reached = numbers[before >= lag]
            mixed[reached] += weight * released[reached - lag]
        for lag, weight in enumerate(weights):
            reaching = numbers[after >= lag]
            filtered[reaching] += weight * mixed[reaching + lag]
            squares[reaching] += weight**2
        lengths = np.sqrt(squares)
        filtered /= lengths[:, None]
        units = mechanism.num_examples - count + np.arange(count)
        parts = units // mechanism.virtual_workers % bands
        own = np.arange(0, steps, bands)[:, None] + parts
        there, own = own < steps, np.minimum(own, steps - 1)
        return cls(
            np.where(there, np.take_along_axis(filtered, own, 0), 0.0),
            np.take_along_axis(signs, own, 0),
            np.where(there, lengths[own], 0.0),
        )


def strongest_bound(
    observed: Observed,
    included: NDArray[np.bool_],
    mechanism: Mechanism,
    *,
    delta: float,
    confidence: float,
) -> Bound:
    """Return the best lower bound of all scores and ways to guess.

    Assumes that ``included`` are fair coins, independent of everything else.

    Guarantee: if the run is (epsilon, delta) private, the result exceeds epsilon with a chance of at most
    ``1 - confidence``: a union bound over all attempts.

    Args:
        included: [m], the coins.
    """
    count = len(included)
    significance = (1 - confidence) / (len(SCORES) * len(SHARES))

    def bound(guesses: int, correct: int) -> float:
        return epsilon_lower_bound(
            canaries=count, guesses=guesses, correct=correct, delta=delta, significance=significance
        )

    tried = []
    for score in SCORES:
        # Most certainly included first. Equal scores keep the order of canaries, which is independent of the coins.
        order = np.argsort(-scores_of(score, observed, mechanism), kind="stable")
        for share_in, share_out in SHARES:
            first, last = int(count * share_in), int(count * share_out)
            correct = int(included[order[:first]].sum() + (~included[order[count - last :]]).sum())
            tried.append((bound(first + last, correct), score, first + last, correct))
    ceiling = max(bound(guesses, guesses) for _, _, guesses, _ in tried)
    return Bound(*max(tried, key=lambda each: each[0]), ceiling)


def scores_of(score: str, observed: Observed, mechanism: Mechanism) -> NDArray[np.float64]:
    """Score each canary, [m]; higher means more likely included."""
    total: NDArray[np.float64]
    if score == "difference":
        # Filters of unlike length weigh the same noise unlike, so it would not cancel.
        alike = np.diff(observed.signals, axis=0) == 0
        total = np.square(np.where(alike, np.diff(observed.sums, axis=0), 0.0)).sum(0)
        return total
    signal = mechanism.max_grad_norm * observed.signals
    deviation = mechanism.sigma * mechanism.gamma * math.sqrt(mechanism.virtual_workers)
    rate = mechanism.sample_rate
    exponent = (observed.sums * observed.signs * signal - signal**2 / 2) / deviation**2
    ratio = exponent if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)
    total = ratio.sum(0)
    return total
