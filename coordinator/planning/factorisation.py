"""The coefficients of correlated noise: banded matrix factorisation of a run's optimizer (arXiv 2306.08153).

A run of T steps releases ``x_t + (C^-1 z)_t``, where z is independent noise. C is lower triangular and starts anew at
each key epoch of E steps: ``C[t, s] = c_(t-s)`` if ``0 <= t - s < b`` and ``t // E == s // E``, else 0, with c_0 = 1.
So errors of consecutive steps cancel in the iterates. An example that takes part once is seen by a column of C.

The workload A maps releases to iterates. SGD of momentum m and rates lr has ``A[t, s] = sum_(u=s..t) lr_u m^(u-s)``.
The squared error of the iterates is ``||c||^2 ||A C^-1||_F^2 / T``, for noise whose deviation is the norm of a column.

The sum needs no matrix product. In an epoch C^-1 is Toeplitz too, with the first column g. So
``||A C^-1||_F^2 = g' K g``, where ``K[i, j]`` is the sum of ``H[i + k, j + k]`` over k, and H adds up the Gram matrices
of the columns of A that belong to each epoch.

Guarantee: the error and the norm are of the rounded coefficients, and noise of the past fades. Assumes nothing of
privacy: any coefficients are private at noise that is calibrated to their norm. The search depends on the numerical
libraries in its last bits, so coefficients are chosen once for a run.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT, LARGEST_COEFFICIENT
from raycloak.metrics.errors import ConfigError

MOST_STEPS: Final = 400
"""Steps of a run by which coefficients are chosen. A longer run takes those that are best for its first ones, because
time grows with the cube. Over 1,600 steps that costs up to 4 % of the error: 32 bands, no momentum."""

LARGEST_DECAY: Final = 0.999
"""Most that noise of the past may keep of itself in a step, by the largest pole of 1 / (c_0 + c_1 x + ...).

Optima have at most 0.98 with momentum 0.9 and 0.995 with 0.999. At 1 the released noise grows with the steps."""

_SUMMED: Final = 2**14
"""Steps whose coefficients in C^-1 are added up: beyond them ``LARGEST_DECAY`` leaves less than a millionth."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NoiseWorkload:
    """The optimizer of a run, as far as it decides how noise adds up in the weights.

    Attributes:
        momentum: of SGD, in [0, 1).
        rates: the learning rate of each of the T steps, in any unit; none negative, and one of the first
            ``MOST_STEPS`` positive.
        epoch_steps: E, the steps of a key epoch; may exceed T.
    """

    momentum: float
    rates: tuple[float, ...]
    epoch_steps: int

    @property
    def most_bands(self) -> int:
        """The most bands that an epoch has room for, among the steps that are looked at."""
        return min(len(self.rates), self.epoch_steps, MOST_STEPS)

    def kernel(self) -> Vector:
        """Return K / T over the first ``MOST_STEPS`` steps: symmetric, one row for each step of an epoch."""
        rates = np.array(self.rates[:MOST_STEPS])
        steps, rows = len(rates), self.most_bands
        lags = np.subtract.outer(np.arange(steps), np.arange(steps))
        velocities = np.where(lags >= 0, self.momentum ** np.maximum(lags, 0), 0.0)
        workload = np.cumsum(rates[:, None] * velocities, axis=0)
        sums = np.zeros((rows, rows))
        for start in range(0, steps, rows):
            columns = workload[:, start : start + rows]
            # The last epoch may be shorter.
            sums[: columns.shape[1], : columns.shape[1]] += columns.T @ columns
        for row in reversed(range(rows - 1)):
            sums[row, :-1] += sums[row + 1, 1:]
        return sums / steps


@dataclass(frozen=True, slots=True)
class Factorisation:
    """The coefficients of a run's correlated noise, and the price and gain of it.

    Attributes:
        coefficients: c in units of 1 / ``COEFFICIENT_UNIT``, the first exactly 1; empty for independent noise.
        error: root mean square of the noise of an iterate, in the unit of the rates, for noise of deviation ``norm``.
            The mean is over the first ``MOST_STEPS`` steps.
        norm: Euclidean norm of c, rounded up: the factor of the sensitivity.
        amplification: largest l1 norm of a row of C^-1, which bounds how far errors of single releases add up.
    """

    coefficients: tuple[int, ...]
    error: float
    norm: float
    amplification: float


def factorise(workload: NoiseWorkload, bands: int) -> Factorisation:
    """Return the coefficients of least error, none below 0.

    Args:
        bands: b, at least 1; 1 is independent noise.

    Raises:
        ConfigError: ``bands_too_many`` for more than ``workload.most_bands``; ``noise_amplified`` as
            `amplification_of` does.
    """
    if bands > workload.most_bands:
        raise ConfigError(
            "bands_too_many",
            f"noise of {bands} bands does not fit {workload.most_bands} steps.",
            f"Take at most {workload.most_bands} bands: as many as the run or a key epoch has steps, or {MOST_STEPS}.",
        )
    kernel = workload.kernel()
    if bands == 1:
        return Factorisation((), math.sqrt(kernel[0, 0]), 1.0, 1.0)
    chosen = np.rint(_least(kernel, bands) * COEFFICIENT_UNIT)
    coefficients = tuple(int(each) for each in chosen)
    squared, _ = squared_error(kernel, chosen / COEFFICIENT_UNIT)
    return Factorisation(
        coefficients,
        math.sqrt(squared),
        norm_of(coefficients),
        amplification_of(coefficients, min(workload.epoch_steps, len(workload.rates))),
    )


def error_of(workload: NoiseWorkload, coefficients: tuple[int, ...]) -> float:
    """Return the error of given coefficients, as of a `Factorisation`; at most ``workload.most_bands`` of them."""
    squared, _ = squared_error(workload.kernel(), np.array(coefficients) / COEFFICIENT_UNIT)
    return math.sqrt(squared)


def squared_error(kernel: Vector, coefficients: Vector) -> tuple[float, Vector]:
    """Return the squared error of the iterates, and its gradient by each coefficient but the first.

    Args:
        kernel: as `NoiseWorkload.kernel` returns it, of shape (n, n).
        coefficients: c, of shape (b,) with c_0 = 1 and b <= n.
    """
    steps, bands = len(kernel), len(coefficients)
    inverse = _solved(coefficients, np.eye(1, steps)[0])
    weighted = kernel @ inverse
    # The derivative of g by c_k is -C^-1 g, shifted by k. C' is C with both axes reversed.
    adjoint = _solved(coefficients, weighted[::-1])[::-1]
    by_coefficient = np.array([-2 * (adjoint[k:] @ inverse[:-k]) for k in range(1, bands)])
    noise, norm = float(inverse @ weighted), float(coefficients @ coefficients)
    return norm * noise, 2 * noise * coefficients[1:] + norm * by_coefficient


def norm_of(coefficients: tuple[int, ...]) -> float:
    """Return the Euclidean norm of coefficients in units of 1 / ``COEFFICIENT_UNIT``, rounded up."""
    squared = sum(each * each for each in coefficients)
    root = math.sqrt(squared)
    # Noise is calibrated to the norm, so none below the true one will do.
    if Fraction(root) ** 2 < squared:
        root = math.nextafter(root, math.inf)
    return root / COEFFICIENT_UNIT


def amplification_of(coefficients: tuple[int, ...], steps: int) -> float:
    """Return the largest l1 norm of a row of C^-1 in an epoch of ``steps`` steps, to a part in a million.

    Args:
        coefficients: in units of 1 / ``COEFFICIENT_UNIT``, the first exactly 1; at least two, and at most ``steps``.

    Raises:
        ConfigError: ``noise_amplified`` if it grows with the steps, or nearly so: past noise fades by less than
            ``LARGEST_DECAY`` a step.
    """
    exact = np.array(coefficients) / COEFFICIENT_UNIT
    # These roots are the inverses of the zeros of c_0 + c_1 x + ..., all of which must lie outside the unit circle.
    if np.abs(np.roots(exact)).max(initial=0.0) > LARGEST_DECAY:
        raise ConfigError(
            "noise_amplified",
            f"the inverse of {len(coefficients)} bands of noise adds up the noise of past steps without bound.",
            "Take fewer bands, or less momentum.",
        )
    return float(np.abs(_solved(exact, np.eye(1, min(steps, _SUMMED))[0])).sum())


def _least(kernel: Vector, bands: int) -> Vector:
    """Return the real coefficients of least error. The search starts at (1 - x)^(-1/2), the square root of sums."""
    from scipy.optimize import minimize

    # Rates have any unit, and the search ends at a gradient of a fixed size: so the error is over that of b = 1.
    independent = kernel[0, 0]

    def relative(free: Vector) -> tuple[float, Vector]:
        squared, gradient = squared_error(kernel, np.concatenate(([1.0], free)))
        return squared / independent, gradient / independent

    lags = np.arange(1, bands)
    found = minimize(
        relative,
        np.cumprod((2 * lags - 1) / (2 * lags)),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, LARGEST_COEFFICIENT / COEFFICIENT_UNIT)] * (bands - 1),
    )
    return np.concatenate(([1.0], found.x))


def _solved(coefficients: Vector, right: Vector) -> Vector:
    """Return ``C^-1 right`` within one epoch; as many steps as ``right`` has, not fewer than bands."""
    from scipy.linalg import solve_banded

    diagonals = np.broadcast_to(coefficients[:, None], (len(coefficients), len(right)))
    solution: Vector = solve_banded((len(coefficients) - 1, 0), diagonals, right, check_finite=False)
    return solution
