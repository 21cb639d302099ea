"""Statistics of the noise sampler's draws, at ten million draws where it matters."""

import hashlib
import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import chi2, poisson

from raycloak.attestation.core.keys import Secret
from raycloak.workers.vectors.noise import BLOCK, MIN_SIGMA, NoiseSampler, decompose
from tests.noise import draws

LARGE_SIGMA = 2.0**20 + 12_345.678
MANY = 10_000_000


def key_of(number: int) -> Secret:
    return Secret(hashlib.sha256(b"noise" + number.to_bytes(2, "big")).digest())


@cache
def many_draws(sigma: float) -> np.ndarray:
    drawn = draws(sigma, key_of(0), 0, MANY)
    drawn.flags.writeable = False
    return drawn


@pytest.fixture(scope="module", autouse=True)
def _drop_cached_draws() -> Iterator[None]:
    yield
    many_draws.cache_clear()


def small_law(sigma: float) -> np.ndarray:
    """Return probabilities of -400 .. 400."""
    law = np.exp(-(np.arange(-400.0, 401.0) ** 2) / (2 * sigma**2))
    return law / law.sum()


@pytest.mark.parametrize("sigma", [16.0, LARGE_SIGMA])
def test_kolmogorov_smirnov_at_ten_million_draws(sigma: float) -> None:
    """Massart's bound for n = 1e7 at a false-alarm rate of 1e-6, for the discrete law at the integers.

    At x + 1/2 the Gaussian's distribution function is the discrete law's to 1e-13 for the large sigma.
    """
    ordered = np.sort(many_draws(sigma))
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    values = ordered[firsts]
    after = np.append(firsts[1:], MANY) / MANY
    law = np.cumsum(small_law(sigma))[values + 400] if sigma == MIN_SIGMA else ndtr((values + 0.5) / sigma)
    assert np.abs(after - law).max() <= math.sqrt(math.log(2e6) / (2 * MANY))


@pytest.mark.parametrize("sigma", [16.0, LARGE_SIGMA])
@pytest.mark.parametrize("deviations", [3.0, 4.0, 5.0, 5.5])
def test_tails_at_ten_million_draws(sigma: float, deviations: float) -> None:
    """Counts beyond a threshold on each side are binomial; 16 checks of 5e-8: false-alarm rate below 1e-6."""
    edge = math.ceil(deviations * sigma)
    beyond = small_law(sigma)[400 + edge :].sum() if sigma == MIN_SIGMA else ndtr(-(edge - 0.5) / sigma)
    drawn = many_draws(sigma)
    for count in (np.count_nonzero(drawn >= edge), np.count_nonzero(drawn <= -edge)):
        assert poisson.ppf(2.5e-8, MANY * beyond) <= count <= poisson.isf(2.5e-8, MANY * beyond)


@pytest.mark.parametrize("sigma", [16.0, LARGE_SIGMA])
def test_mean_variance_and_fourth_moment(sigma: float) -> None:
    """Six checks at 5.3 standard errors of a Gaussian sample: false-alarm rate below 1e-6."""
    scaled = many_draws(sigma) / sigma
    root = math.sqrt(MANY)
    assert abs(scaled.mean()) <= 5.3 / root
    assert abs(np.mean(scaled**2) - 1) <= 5.3 * math.sqrt(2) / root
    assert abs(np.mean(scaled**4) - 3) <= 5.3 * math.sqrt(96) / root


def chi_square_alarm(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether Pearson's statistic exceeds its 1 - 1e-7 quantile."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic > chi2.isf(1e-7, observed.size - 1)


def test_probabilities_of_the_smallest_sigma() -> None:
    """Chi-square of 1e7 draws on the exact law at sigma = 16, tails pooled; false-alarm rate 1e-7."""
    edge = 72
    law = small_law(16.0)
    expected = MANY * np.array(
        [law[: 400 - edge + 1].sum(), *law[400 - edge + 1 : 400 + edge], law[400 + edge :].sum()]
    )
    observed = np.bincount(np.clip(many_draws(16.0), -edge, edge) + edge, minlength=2 * edge + 1)
    assert not chi_square_alarm(observed, expected)


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_low_bits_are_uniform(bits: int) -> None:
    """Parity and the low byte of 1e7 large draws; three chi-squares of 1e-7: false-alarm rate 3e-7."""
    observed = np.bincount(many_draws(LARGE_SIGMA) & (2**bits - 1), minlength=2**bits)
    assert not chi_square_alarm(observed, np.full(2**bits, MANY / 2**bits))


def test_residues_modulo_the_factor_are_uniform() -> None:
    """Modulo k only X_0 is seen, so a short inner draw would show; false-alarm rate 1e-7."""
    multiplier = decompose(LARGE_SIGMA).multiplier
    observed = np.bincount(many_draws(LARGE_SIGMA) % multiplier, minlength=multiplier)
    assert not chi_square_alarm(observed, np.full(multiplier, MANY / multiplier))


def test_sum_of_sixteen_shares() -> None:
    """Variance (5.3 standard errors) and Massart's bound for the sum of V = 16 shares; false-alarm rate below 1e-6."""
    count, shares, sigma = 1_000_000, 16, 5000.5
    sampler = NoiseSampler(sigma, 32)
    total = np.zeros(count, np.uint32)
    for share in range(shares):
        sampler.add_to(total, key_of(100 + share))
    scaled = np.sort(total.view(np.int32)) / (sigma * math.sqrt(shares))
    assert abs(np.mean(scaled**2) - 1) <= 5.3 * math.sqrt(2 / count)
    ranks = np.arange(count)
    law = ndtr(scaled)
    gap = max(np.abs(law - ranks / count).max(), np.abs(law - (ranks + 1) / count).max())
    # The steps of the law, 1 / (sigma sqrt(2 pi V)), are added for the half-integer shift.
    assert gap <= math.sqrt(math.log(2e7) / (2 * count)) + 0.2 / (sigma * math.sqrt(shares))


def test_streams_are_independent() -> None:
    """Correlations of 1e6 pairs: keys, neighbours, blocks, and digits that would share words.

    Seven correlations below 5.5 standard errors: false-alarm rate below 3e-7.
    """
    count = 1_000_000
    drawn = many_draws(LARGE_SIGMA)[: 2 * count] / LARGE_SIGMA
    other = draws(LARGE_SIGMA, key_of(7), 0, count) / LARGE_SIGMA
    pairs = [(drawn[:count], other), (drawn[:count] ** 2 - 1, other**2 - 1)]
    pairs += [(drawn[:count], drawn[lag : count + lag]) for lag in (1, 2, 3, BLOCK, 3 * BLOCK)]
    for left, right in pairs:
        spread = left.std() * right.std()
        assert abs(np.mean(left * right)) / spread <= 5.5 / math.sqrt(count)
