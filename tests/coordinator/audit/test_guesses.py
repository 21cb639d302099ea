"""Scores and guesses: what they see, and that trying several costs confidence."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.linalg import solve_triangular
from scipy.stats import multivariate_normal, norm

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.coordinator.audit.bound import SCORES, SHARES, Observed, epsilon_lower_bound, scores_of, strongest_bound
from tests.coordinator.audit.audit_cases import coins_of
from tests.protocol import mechanism

CANARIES = 800


def claimed(deviation: float = 4.0, sample_rate: float = 0.5, **fields):
    """Return a mechanism whose whole noise has this deviation at C = 1."""
    base = mechanism().model_copy(update=fields)
    sigma = deviation / base.gamma / math.sqrt(base.virtual_workers)
    return base.model_copy(update={"sigma": sigma, "sample_rate": sample_rate})


def observed(included, *, steps=4, rate=0.5, deviation=4.0, repeated=False, seed=0):
    """Return an observer's view of a Gaussian mechanism with clipping norm 1."""
    generator = np.random.default_rng(seed)
    drawn = (generator.random((steps, len(included))) < rate) & included
    noise = generator.normal(0, deviation, drawn.shape)
    signs = 1 - 2 * generator.integers(0, 2, drawn.shape)
    return seen(drawn * signs + (noise[:1] if repeated else noise), signs)


def seen(sums, signs):
    return Observed(sums, signs, np.ones(sums.shape))


def aligned(sums):
    """Return the same for gradients of one sign."""
    return seen(sums, np.ones(sums.shape, np.int64))


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_the_likelihood_score_is_the_log_likelihood_ratio(rate):
    sums = np.random.default_rng(1).normal(0.5, 2.0, (3, 20))
    out = norm.pdf(sums, 0, 2.0)
    ratio = np.log(((1 - rate) * out + rate * norm.pdf(sums, 1, 2.0)) / out).sum(0)
    assert scores_of("likelihood", aligned(sums), claimed(2.0, rate)) == pytest.approx(ratio, rel=1e-6)


def test_a_sum_that_is_far_too_large_overflows_nothing():
    sums = np.full((2, 3), 1e6)
    assert np.isfinite(scores_of("likelihood", aligned(sums), claimed())).all()


def test_coins_without_trace_show_nothing():
    included = coins_of(1, CANARIES)
    nothing = strongest_bound(observed(included & False), included, claimed(), delta=1e-9, confidence=0.95)
    assert nothing.epsilon < 0.2
    assert nothing.ceiling > 1


@pytest.mark.parametrize("rate", [0.2, 0.5, 1.0])
def test_repeated_noise_is_seen_by_differences_alone(rate):
    """At rate 1 too: the signs differ, though the draws do not."""
    included = coins_of(2, CANARIES)
    repeated = observed(included, rate=rate, deviation=40.0, repeated=True)
    found = strongest_bound(repeated, included, claimed(40.0, rate), delta=1e-12, confidence=1 - 1e-8)
    assert found.score == "difference"
    assert found.epsilon > 1


def test_one_step_alone_has_no_differences_and_is_audited_all_the_same():
    included = coins_of(3, CANARIES)
    sums = observed(included, steps=1, rate=1.0, deviation=0.01)
    found = strongest_bound(sums, included, claimed(0.01, 1.0), delta=1e-12, confidence=0.95)
    assert (found.score, found.correct) == ("likelihood", found.guesses)


def test_the_confidence_is_shared_by_all_that_is_tried():
    """With every guess right the bound is that of one attempt at a tenth of the significance."""
    included = coins_of(4, CANARIES)
    sums = np.tile(np.where(included, 100.0, -100.0), (2, 1))
    found = strongest_bound(aligned(sums), included, claimed(), delta=0.0, confidence=0.95)
    alone = epsilon_lower_bound(
        canaries=CANARIES,
        guesses=found.guesses,
        correct=found.guesses,
        delta=0.0,
        significance=0.05 / (len(SCORES) * len(SHARES)),
    )
    assert found.epsilon == found.ceiling == pytest.approx(alone, abs=1e-5)
    assert found.guesses == max(int(CANARIES * a) + int(CANARIES * b) for a, b in SHARES)


# --- correlated noise

WEIGHTS, EPOCH, STEPS, SLICES = np.array([1, 0.75, 0.5]), 4, 7, 2
COEFFICIENTS = tuple(int(each * COEFFICIENT_UNIT) for each in WEIGHTS)


def encoder(steps=STEPS, epoch=EPOCH):
    """Return C: lower triangular, of three bands, anew in each key epoch."""
    numbers = np.arange(steps)
    lags = np.subtract.outer(numbers, numbers)
    inside = (lags >= 0) & (lags < len(WEIGHTS)) & (numbers[:, None] // epoch == numbers // epoch)
    return np.where(inside, WEIGHTS[np.clip(lags, 0, len(WEIGHTS) - 1)], 0)


def of_bands(count, deviation=2.0, rate=0.3, examples=9):
    """Return a mechanism of three bands over these examples and so many canaries."""
    sizes = {"num_examples": examples + count, "virtual_workers": SLICES}
    return claimed(deviation, rate, coefficients=COEFFICIENTS, **sizes)


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_the_score_of_released_sums_is_their_likelihood_ratio_over_all_draws(rate):
    """Brute force knows nothing of rounds and filters: the sums, their covariance, and each way to draw a canary."""
    generator = np.random.default_rng(1)
    released, signs = generator.normal(0, 2, (STEPS, 8)), 1 - 2 * generator.integers(0, 2, (STEPS, 8))
    root = 2.0 * np.linalg.inv(encoder())
    chance = multivariate_normal(np.zeros(STEPS), root @ root.T)
    expected = []
    for canary in range(8):
        part = (9 + canary) // SLICES % len(WEIGHTS)
        ratio = 0.0
        for ways in product([False, True], repeat=len(range(part, STEPS, len(WEIGHTS)))):
            moved = np.zeros(STEPS)
            moved[part :: len(WEIGHTS)] = ways
            way = math.prod(rate if drawn else 1 - rate for drawn in ways)
            ratio += way * math.exp(
                chance.logpdf(released[:, canary] - moved * signs[:, canary]) - chance.logpdf(released[:, canary])
            )
        expected.append(math.log(ratio))
    view = Observed.of(released, signs, of_bands(8, rate=rate), EPOCH)
    assert scores_of("likelihood", view, of_bands(8, rate=rate)) == pytest.approx(expected, rel=1e-6)


def test_without_bands_each_step_is_a_round_as_it_was_released():
    released, signs = np.random.default_rng(2).normal(0, 2, (5, 6)), np.ones((5, 6), np.int64)
    view = Observed.of(released, signs, claimed(), epoch_steps=3)
    assert view.sums.tobytes() == released.tobytes()
    assert np.array_equal(view.signs, signs)
    assert (view.signals == 1).all()


def test_noise_that_repeats_is_seen_though_the_last_rounds_are_cut():
    """Key epochs of seven steps end within a round, and so does the run of sixteen."""
    included, steps = coins_of(5, CANARIES), 16
    generator = np.random.default_rng(5)
    parts = (9 + np.arange(CANARIES)) // SLICES % len(WEIGHTS)
    mine = np.arange(steps)[:, None] % len(WEIGHTS) == parts
    signs = 1 - 2 * generator.integers(0, 2, mine.shape)
    noise = np.repeat(generator.normal(0, 40.0, (1, CANARIES)), steps, axis=0)
    released = mine * included * signs + solve_triangular(encoder(steps, 7), noise, lower=True)
    claim = of_bands(CANARIES, 40.0, 1.0)
    found = strongest_bound(Observed.of(released, signs, claim, 7), included, claim, delta=1e-12, confidence=1 - 1e-8)
    assert found.score == "difference"
    assert found.epsilon > 1
