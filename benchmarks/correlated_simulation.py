"""Correlated and independent noise in plain float64, beside which `benchmarks.correlated` sets whole runs.

It simulates a linear model: cyclic Poisson draws, clipping, mixing, Gaussian noise, the solve, the update rule and
averaged weights. It has no ring, no masks, no keys, no Ray, and only one key epoch. It promises no privacy.

Its one link with the product is the mechanism of a plan, whose noise, coefficients and rates it takes.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.workers.terms.mechanism import Mechanism

STABILITY = 0.01
"""What normalised clipping adds to a gradient's norm, as `raycloak.workers.gradients.clipping` does."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Examples:
    """Features [N, k], with the constant 1 as the last where the model has a bias, and classes [N] from 0."""

    features: Vector
    labels: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule at a constant rate, as in the configuration of a run: ``sgd`` or ``adam``."""

    name: str
    learning_rate: float
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def steps(self, start: Vector) -> Generator[tuple[Vector, Vector], Vector, None]:
        """Yield the weights and their average after each step; send the released gradient of the next to get them."""
        weights, averaged = start, start
        first, second = np.zeros_like(start), np.zeros_like(start)
        for step in count():
            gradient = yield weights, averaged
            if self.name == "sgd":
                first = self.momentum * first + gradient
                weights = weights - self.learning_rate * first
            else:
                first = self.beta1 * first + (1 - self.beta1) * gradient
                second = self.beta2 * second + (1 - self.beta2) * gradient**2
                deviation = np.sqrt(second / (1 - self.beta2 ** (step + 1))) + self.eps
                weights = weights - self.learning_rate * first / (1 - self.beta1 ** (step + 1)) / deviation
            averaged = averaged + (weights - averaged) * 9 / (10 + step)


class Solver:
    """Mixes the sums of steps, adds noise and solves: x_t = (sum_j c_j s_(t-j) + z_t) / B - sum_(j>=1) c_j x_(t-j)."""

    def __init__(self, mechanism: Mechanism, noise: np.random.Generator | None) -> None:
        units = mechanism.coefficients or (COEFFICIENT_UNIT,)
        self.coefficients = np.array(units) / COEFFICIENT_UNIT
        norm = float(np.linalg.norm(self.coefficients))
        self._deviation = mechanism.noise_multiplier * mechanism.max_grad_norm * norm
        self._divisor, self._noise = mechanism.expected_batch_size, noise
        self._sums: deque[Vector] = deque(maxlen=len(units))
        self._released: deque[Vector] = deque(maxlen=len(units) - 1)

    def mixed(self, clipped_sum: Vector) -> Vector:
        """Return y_t: what the workers of a run release together, over the batch."""
        self._sums.appendleft(clipped_sum)
        total = sum(c * each for c, each in zip(self.coefficients, self._sums, strict=False))
        if self._noise is not None:
            total = total + self._deviation * self._noise.standard_normal(clipped_sum.shape)
        return total / self._divisor

    def solved(self, mixed: Vector) -> Vector:
        """Return x_t: what the update rule of a run is given."""
        found = mixed - sum(c * each for c, each in zip(self.coefficients[1:], self._released, strict=False))
        self._released.appendleft(found)
        return found


def part_of(mechanism: Mechanism, step: int) -> NDArray[np.int64]:
    """Return the examples that ``step`` draws from: of each slice every b-th one."""
    ids = np.arange(mechanism.num_examples)
    return ids[ids // mechanism.virtual_workers % mechanism.bands == step % mechanism.bands]


def clipped_sum(weights: Vector, examples: Examples, mechanism: Mechanism) -> Vector:
    """Return the sum of clipped gradients of the cross entropy, [classes, k]. Each gradient is an outer product."""
    logits = examples.features @ weights.T
    error = np.exp(logits - logits.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(error)), examples.labels] -= 1
    norms = np.linalg.norm(error, axis=1) * np.linalg.norm(examples.features, axis=1)
    clip = mechanism.max_grad_norm
    if mechanism.clipping == "normalised":
        scales = clip / (norms + STABILITY)
    else:
        scales = np.minimum(1.0, clip / np.maximum(norms, 1e-300))
    found: Vector = (error * scales[:, None]).T @ examples.features
    return found


def trained(mechanism: Mechanism, rule: Rule, examples: Examples, seed: int, *, noisy: bool = True) -> Vector:
    """Return the averaged weights of a run of ``mechanism.steps``, from zero; without noise if not ``noisy``."""
    draws, noise = (np.random.default_rng([seed, purpose]) for purpose in range(2))
    solver = Solver(mechanism, noise if noisy else None)
    weights = averaged = np.zeros((int(examples.labels.max()) + 1, examples.features.shape[1]))
    rule_steps = rule.steps(weights)
    next(rule_steps)
    parts = [part_of(mechanism, step) for step in range(mechanism.bands)]
    for step in range(mechanism.steps):
        part = parts[step % mechanism.bands]
        drawn = part[draws.random(len(part)) < mechanism.sample_rate]
        batch = Examples(examples.features[drawn], examples.labels[drawn])
        weights, averaged = rule_steps.send(solver.solved(solver.mixed(clipped_sum(weights, batch, mechanism))))
    return averaged


def accuracy(weights: Vector, examples: Examples) -> float:
    """Return the share of examples whose largest logit is their class's."""
    return float(((examples.features @ weights.T).argmax(axis=1) == examples.labels).mean())
