"""The coefficients of correlated noise."""

import math
from dataclasses import astuple
from fractions import Fraction

import numpy as np
import pytest

from raycloak.coordinator.planning.factorisation import (
    COEFFICIENT_UNIT,
    MOST_STEPS,
    Factorisation,
    NoiseWorkload,
    amplification_of,
    factorise,
    norm_of,
    squared_error,
)
from raycloak.metrics.errors import ConfigError

ONE = COEFFICIENT_UNIT
DECAYING = tuple(1 - t / 12 for t in range(12))
LONG = NoiseWorkload(0.9, (1.0,) * 400, 10**6)
SUMS = NoiseWorkload(0.0, (1.0,) * 120, 10**6)


def steps_of(workload: NoiseWorkload) -> np.ndarray:
    """Return the workload as the optimizer's own loop makes it: one column for each release."""
    velocity = iterate = np.zeros(len(workload.rates))
    rows = []
    for release, rate in zip(np.eye(len(workload.rates)), workload.rates, strict=True):
        velocity = workload.momentum * velocity + release
        iterate = iterate + rate * velocity
        rows.append(iterate)
    return np.array(rows)


def dense(workload: NoiseWorkload, coefficients: tuple[int, ...]) -> np.ndarray:
    steps, epoch = len(workload.rates), workload.epoch_steps
    matrix = np.zeros((steps, steps))
    for t in range(steps):
        for s in range(max(0, t - len(coefficients) + 1), t + 1):
            matrix[t, s] = coefficients[t - s] / ONE if t // epoch == s // epoch else 0.0
    return matrix


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rates", [(1.0,) * 7, DECAYING, tuple(1e-4 * rate for rate in DECAYING)])
@pytest.mark.parametrize(("epoch", "bands"), [(1, 1), (3, 2), (3, 3), (4, 2), (5, 5), (12, 3), (100, 1), (100, 7)])
def test_the_error_is_that_of_the_dense_matrices(momentum, rates, epoch, bands):
    workload = NoiseWorkload(momentum, rates, epoch)
    found = factorise(workload, bands)
    inverse = np.linalg.inv(dense(workload, found.coefficients or (ONE,)))
    noise = np.linalg.norm(steps_of(workload) @ inverse) / math.sqrt(len(rates))
    norm = math.sqrt(sum((each / ONE) ** 2 for each in found.coefficients or (ONE,)))
    assert found.error == pytest.approx(norm * noise, rel=1e-10)
    assert found.norm == pytest.approx(norm, rel=1e-15)
    assert found.amplification == pytest.approx(np.abs(inverse).sum(axis=1).max(), rel=1e-12)


@pytest.mark.parametrize(("steps", "epoch", "bands"), [(1, 100, 2), (12, 3, 4), (7, 100, 8), (401, 1000, 401)])
def test_bands_that_a_run_or_an_epoch_has_no_room_for_are_refused(steps, epoch, bands):
    with pytest.raises(ConfigError, match=f"{bands} bands does not fit {bands - 1} steps") as refused:
        factorise(NoiseWorkload(0.9, (1.0,) * steps, epoch), bands)
    assert refused.value.code == "bands_too_many"


@pytest.mark.parametrize(("momentum", "epoch"), [(0.0, 12), (0.9, 12), (0.9, 5)])
def test_the_gradient_is_that_of_finite_differences(momentum, epoch):
    kernel = NoiseWorkload(momentum, DECAYING, epoch).kernel()
    coefficients = np.array([1.0, 0.7, 0.2, 0.4, 0.1])
    _, gradient = squared_error(kernel, coefficients)
    for k in range(1, 5):
        shift = 1e-5 * np.eye(5)[k]
        above, below = (squared_error(kernel, coefficients + each)[0] for each in (shift, -shift))
        assert gradient[k - 1] == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_no_step_away_from_the_coefficients_lowers_the_error():
    kernel = SUMS.kernel()
    found = factorise(SUMS, 6)
    exact = np.array(found.coefficients) / ONE
    assert math.sqrt(squared_error(kernel, exact)[0]) == found.error
    for k in range(1, 6):
        for sign in (-1, 1):
            assert squared_error(kernel, exact + sign * 0.005 * np.eye(6)[k])[0] > found.error**2


@pytest.mark.parametrize(
    ("bands", "norm", "total"), [(4, 1.93, 3.9), (8, 2.60, 7.4), (16, 3.35, 13.3), (32, 3.98, 22.0)]
)
def test_coefficients_of_a_run_with_momentum_have_the_measured_norms(bands, norm, total):
    found = factorise(LONG, bands)
    assert found.norm == pytest.approx(norm, abs=0.01)
    assert sum(found.coefficients) / ONE == pytest.approx(total, abs=0.1)
    assert len(found.coefficients) == bands
    assert found.coefficients[0] == ONE
    assert all(0 <= each <= ONE for each in found.coefficients)


def test_one_band_is_independent_noise():
    assert astuple(factorise(SUMS, 1)) == ((), pytest.approx(math.sqrt(121 / 2)), 1.0, 1.0)


@pytest.mark.parametrize("epoch", [40, 10**6])
def test_the_error_falls_with_the_bands(epoch):
    errors = [factorise(NoiseWorkload(0.0, SUMS.rates, epoch), bands).error for bands in (1, 2, 4, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.4 * errors[0]


def test_the_error_is_below_that_of_the_square_root():
    roots = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, 16))])
    assert factorise(LONG, 16).error < 0.9 * math.sqrt(squared_error(LONG.kernel(), roots)[0])


def test_the_unit_of_the_rates_changes_no_coefficient_but_by_rounding():
    small = factorise(NoiseWorkload(0.9, (2.0**-20,) * 120, 10**6), 8)
    found = factorise(NoiseWorkload(0.9, SUMS.rates, 10**6), 8)
    assert small.coefficients == found.coefficients
    assert small.error == found.error * 2.0**-20


def test_a_long_run_chooses_by_its_first_steps():
    rates = (1.0,) * MOST_STEPS
    first, longer = (factorise(NoiseWorkload(0.5, each, 10**6), 4) for each in (rates, rates + (0.25,) * 50))
    assert (longer.coefficients, longer.error) == (first.coefficients, first.error)
    assert longer.amplification >= first.amplification


@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [((ONE, ONE), 400), ((ONE, 0, ONE), 400), ((ONE, ONE * 9995 // 10_000), 2), ((ONE, 0, 0, 2 * ONE), 10**9)],
)
def test_coefficients_whose_inverse_amplifies_are_refused(coefficients, steps):
    with pytest.raises(ConfigError) as refused:
        amplification_of(coefficients, steps)
    assert refused.value.code == "noise_amplified"


def test_the_amplification_of_a_geometric_inverse_is_its_sum():
    half = (ONE, ONE // 2)
    assert amplification_of(half, 3) == 1.75
    assert amplification_of(half, 10**9) == pytest.approx(2.0, rel=1e-12)
    assert amplification_of((ONE, 0), 2) == 1.0
    slow = (ONE, ONE * 9989 // 10_000)
    assert amplification_of(slow, 10**9) == pytest.approx(1 / (1 - slow[1] / ONE), rel=1e-6)


def test_the_norm_is_never_below_the_true_one():
    for low in range(1, 2000, 7):
        coefficients = (ONE, low, ONE - 3 * low % ONE)
        squared = Fraction(sum(each * each for each in coefficients), ONE**2)
        assert squared <= Fraction(norm_of(coefficients)) ** 2 <= squared * (1 + Fraction(1, 2**51))
    assert norm_of((3 * ONE, 4 * ONE)) == 5.0


def test_a_workload_always_has_the_same_coefficients():
    first, second = (factorise(NoiseWorkload(0.9, DECAYING, 6), 4) for _ in range(2))
    assert first == second
    assert isinstance(first, Factorisation)
