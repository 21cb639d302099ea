"""Scores and guesses: what they see, and that trying several costs confidence."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from raycloak.coordinator.audit.bound import SCORES, SHARES, Observed, epsilon_lower_bound, scores_of, strongest_bound
from tests.coordinator.audit.audit_cases import coins_of
from tests.protocol import mechanism

CANARIES = 800


def claimed(deviation: float = 4.0, sample_rate: float = 0.5):
    """Return a mechanism whose whole noise has this deviation at C = 1."""
    base = mechanism()
    return base.model_copy(
        update={"sigma": deviation / base.gamma / math.sqrt(base.virtual_workers), "sample_rate": sample_rate}
    )


def observed(included, *, steps=4, rate=0.5, deviation=4.0, repeated=False, seed=0):
    """Return an observer's view of a Gaussian mechanism with clipping norm 1."""
    generator = np.random.default_rng(seed)
    drawn = (generator.random((steps, len(included))) < rate) & included
    noise = generator.normal(0, deviation, drawn.shape)
    signs = 1 - 2 * generator.integers(0, 2, drawn.shape)
    return Observed(drawn * signs + (noise[:1] if repeated else noise), signs)


def aligned(sums):
    """Return the same for gradients of one sign."""
    return Observed(sums, np.ones(sums.shape, np.int64))


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
    seen = observed(included, rate=rate, deviation=40.0, repeated=True)
    found = strongest_bound(seen, included, claimed(40.0, rate), delta=1e-12, confidence=1 - 1e-8)
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
