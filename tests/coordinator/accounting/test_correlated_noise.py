"""Correlated noise against enumerations and adaptive adversaries: `docs/proofs/013-correlated-noise.md`."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT, counted_noise, mixed_norm, sensitivity_of
from raycloak.coordinator.accounting import pld
from raycloak.coordinator.accounting.releases import Release, cut_at, release_of
from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.planning.factorisation import NoiseWorkload, factorise
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.inputs.datasets import slice_ids
from raycloak.workers.terms.manifest import Computation
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.ring import RingDemand, RingSpec, encode_into, mix_into, ring_dtype
from tests.coordinator.accounting.leg_laws import (
    composed,
    hockey_sticks,
    leg_pair,
    mixed,
    moves,
    paired,
    run_law,
)
from tests.coordinator.ledger.ledger_cases import mechanism
from tests.layout import ROOT

ONE = COEFFICIENT_UNIT
MIXES = [(ONE, ONE), (ONE, 3 * ONE // 2), (ONE, ONE // 2, ONE // 4), (ONE, 4 * ONE, 1), (ONE, 0, ONE - 1)]
SCALES = [Fraction(4, 4), Fraction(5, 4), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(5)]
"""Exponentials of the epsilons at which exact laws are compared."""
CURVE = (0.0, 0.3, 0.8, 1.5, 2.5)
COIN = Fraction(1, 3)


def leg_bound(coefficients: tuple[int, ...], clip: Fraction, dimension: int = 1) -> Fraction:
    """Return the square of the code's bound of a leg, on a grid of 1, as a mechanism is held to it."""
    demand = RingDemand(float(clip), 1.0, dimension, 1, 1.0, 1.0, coefficients)
    return demand.needed_variance(0) - 4


# Sensitivity.


@pytest.mark.parametrize("coefficients", MIXES)
@pytest.mark.parametrize("clip", [1, 3])
def test_no_leg_of_one_coordinate_moves_by_more_than_the_bound(coefficients: tuple[int, ...], clip: int):
    """Each mix takes its worst context and its worst difference, so a sum that is recomputed wrongly is covered too."""
    by_delta = [[max(map(abs, each)) for each in moves(coefficients, delta)] for delta in range(clip + 2)]
    worst = sum(max(of_place) ** 2 for of_place in zip(*by_delta, strict=True))
    assert worst <= leg_bound(coefficients, Fraction(clip))
    assert math.sqrt(worst) <= sensitivity_of(float(clip), 1.0, 1, coefficients)


def test_rounding_a_mix_moves_it_by_more_than_its_coefficients_do():
    """So the term of the second rounding cannot be left out."""
    coefficients, delta = (ONE, ONE // 2, ONE // 4), 1
    found = sum(max(map(abs, each)) ** 2 for each in moves(coefficients, delta))
    assert found > mixed_norm(coefficients) ** 2 * delta**2


@pytest.mark.parametrize("bits", [32, 64])
def test_encoded_and_mixed_neighbours_differ_by_at_most_the_sensitivity(bits: int):
    """Real sums next to ties in every coordinate, where both roundings add the most."""
    generator, dimension, clip = np.random.default_rng(13), 64, 2.0
    for coefficients in MIXES:
        bound = sensitivity_of(clip, 1.0, dimension, coefficients)
        spec, dtype = RingSpec(bits, 0, 2.0**20), ring_dtype(bits)
        largest = 0.0
        for _ in range(40):
            ties = generator.integers(-50, 50, dimension) + 0.5
            move = generator.standard_normal(dimension)
            move *= clip * generator.random() / np.linalg.norm(move)
            pair = []
            for each in (ties - move / 2, ties + move / 2):
                words = np.empty(dimension, dtype)
                encode_into(each, spec, words)
                pair.append(words)
            total = 0
            for place in range(len(coefficients)):
                others = list(generator.integers(-50, 50, (len(coefficients), dimension)).astype(dtype))
                outs = [np.empty(dtype=dtype, shape=dimension) for _ in pair]
                for own, out in zip(pair, outs, strict=True):
                    mix_into([*others[:place], own, *others[place + 1 :]], coefficients, out)
                difference = (outs[1] - outs[0]).view(f"<i{bits // 8}").astype(np.int64)
                total += int(difference @ difference)
            largest = max(largest, math.sqrt(total))
        assert largest <= bound
        assert largest > clip * float(mixed_norm(coefficients))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_mix_is_the_exact_sum_rounded_once_half_to_even(bits: int):
    """Against rational arithmetic; a coefficient of half a unit makes every other case a tie."""
    generator, cases = np.random.default_rng(7), 200
    for coefficients in [*MIXES, (ONE, ONE // 2), (ONE, *generator.integers(0, 4 * ONE, 63).tolist())]:
        for lacking in (0, 1):
            count = len(coefficients) - lacking
            # As the ring holds them: 2^62 over the sum of the coefficients, and what 32 bits keep of a mix.
            largest = min((1 << 62) // sum(coefficients), (1 << (bits - 1)) * ONE // sum(coefficients)) - 1
            sums = generator.integers(-largest, largest, (count, cases), endpoint=True)
            sums[:, : cases // 2] = generator.integers(-9, 9, (count, cases // 2))
            words = sums.astype(f"<i{bits // 8}").view(ring_dtype(bits))
            out = np.empty(cases, ring_dtype(bits))
            mix_into(list(words), coefficients, out)
            exact = [
                round(sum(Fraction(int(s) * k, ONE) for s, k in zip(column, coefficients, strict=False)))
                for column in sums.T
            ]
            assert out.view(f"<i{bits // 8}").tolist() == exact


# Exact laws of small runs.


@pytest.mark.parametrize("coefficients", MIXES[:4])
@pytest.mark.parametrize("epoch_steps", [2, 5, 99])
def test_no_small_run_tells_more_than_one_leg_for_each_round(coefficients: tuple[int, ...], epoch_steps: int):
    """Every output of runs of one to two rounds, whichever step they end with; sums of others are hidden, and mixed."""
    shifts = [max(map(abs, each)) for each in moves(coefficients, 1)]
    leg, bands = leg_pair(shifts, COIN), len(coefficients)
    for steps in range(1, 2 * bands + (bands == 2)):
        with_it, without = (run_law(steps, epoch_steps, coefficients, COIN, own) for own in (1, 0))
        assert sum(with_it.values()) == sum(without.values()) == 1
        claimed = hockey_sticks(composed(leg, -(-steps // bands)), SCALES)
        found = hockey_sticks(paired(with_it, without), SCALES)
        assert all(told <= bound for told, bound in zip(found, claimed, strict=True))


def test_a_second_round_is_not_free():
    """The enumeration can fail: a run of two rounds tells more than one leg."""
    coefficients = (ONE, ONE)
    one = hockey_sticks(leg_pair((1, 1), COIN), SCALES)
    pair = paired(*(run_law(4, 99, coefficients, COIN, own) for own in (1, 0)))
    assert any(found > bound for found, bound in zip(hockey_sticks(pair, SCALES), one, strict=True))


def test_a_past_that_is_drawn_anew_in_each_mix_costs_more_than_a_leg():
    """The reason that the input of a step fixes all earlier draws."""
    leg = hockey_sticks(leg_pair((1, 1), COIN), SCALES)
    redrawn = hockey_sticks(composed(leg_pair((1,), COIN), 2), SCALES)
    assert redrawn[0] > leg[0]


def test_the_input_of_a_step_names_all_steps_before():
    """Equal models after different pasts have different inputs, and so other draws and other noise."""

    def chain(models: list[bytes]) -> bytes:
        before = b""
        for each in models:
            before = step_input(each, (), before)
        return before

    models = [bytes([step]) * 32 for step in range(4)]
    other = b"o" * 32
    pasts = [[other if step == place else each for step, each in enumerate(models)] for place in range(4)]
    assert len({chain(past) for past in [models, models[1:], *pasts]}) == 6


# Displacements of a fixed total budget.


def _sup(lr: Any, constant: float, move: Any) -> Any:
    """Return E[(lr exp(mZ - m²/2) + constant)₊] of a standard normal Z, the best of all tests after a last output."""
    lr, move = np.broadcast_arrays(np.asarray(lr, float), np.maximum(np.asarray(move, float), 1e-9))
    if constant >= 0 and np.all(lr >= 0):
        return lr + constant
    with np.errstate(divide="ignore"):
        at = (np.log(np.abs(constant / lr)) + move**2 / 2) / move
    above = lr * ndtr(move - at) + constant * ndtr(-at)
    below = lr * ndtr(at - move) + constant * ndtr(at)
    return np.maximum(above if constant < 0 else below, 0)


def _tests(q: float, epsilon: float) -> list[tuple[float, float]]:
    """Return (factor of the likelihood ratio, constant) of both directions of a sampled leg at ``epsilon``."""
    scale = math.exp(epsilon)
    return [(q, 1 - q - scale), (-scale * q, 1 - scale * (1 - q))]


_Y = np.linspace(-9, 9, 9001)
_WEIGHTS = np.exp(-(_Y**2) / 2) * (_Y[1] - _Y[0]) / math.sqrt(2 * math.pi)


def _best_of_two(budget: float, factor: float, constant: float) -> float:
    """Return the best that any rule gets that chooses the second displacement by the first output."""
    best = 0.0
    for first in np.linspace(0, budget, 9):
        lr = factor * np.exp(first * _Y - first**2 / 2)
        seconds = np.linspace(0, math.sqrt(max(budget**2 - first**2, 0)), 9)
        best = max(best, float(_WEIGHTS @ np.max([_sup(lr, constant, each) for each in seconds], axis=0)))
    return best


@pytest.mark.parametrize("q", [1.0, 0.3])
def test_the_best_adaptive_displacements_meet_the_bound_and_do_not_pass_it(q: float):
    """By dynamic programming; a budget that is 5 % larger passes it."""
    for epsilon in CURVE:
        for factor, constant in _tests(q, epsilon):
            claimed = float(_sup(factor, constant, 1.2))
            assert claimed - 2e-7 < _best_of_two(1.2, factor, constant) < claimed + 2e-7
            if claimed > 1e-3:
                assert _best_of_two(1.2 * 1.05, factor, constant) > claimed + 1e-4


def test_a_budget_that_holds_on_average_alone_is_no_budget():
    """The bound must hold on every path: a rule that saves on half of them, and spends it on the others, passes it."""
    first, budget = 0.5, 1.0
    rest = budget**2 - first**2
    second = np.where(_Y > 0, math.sqrt(2 * rest), 0.0)
    assert _WEIGHTS @ (first**2 + second**2) == pytest.approx(budget**2, rel=1e-2)
    factor, constant = _tests(1.0, 1.5)[0]
    lr = factor * np.exp(first * _Y - first**2 / 2)
    assert _WEIGHTS @ _sup(lr, constant, second) > float(_sup(factor, constant, budget)) + 0.01


@pytest.mark.parametrize("seed", range(4))
def test_random_rules_over_three_outputs_do_not_pass_the_bound(seed: int):
    """Signs, sizes and unspent budgets follow from all outputs so far."""
    generator, budget, grid = np.random.default_rng(seed), 1.3, _Y[::25]
    weights = np.exp(-(grid**2) / 2) * (grid[1] - grid[0]) / math.sqrt(2 * math.pi)
    one, two = np.meshgrid(grid, grid, indexing="ij")
    for q, epsilon in itertools.product((1.0, 0.25), CURVE):
        waves = generator.normal(size=(3, 3))
        first = budget * generator.random()
        second = np.sqrt(budget**2 - first**2) * np.sin(waves[0, 0] * one + waves[0, 1])
        third = np.sqrt(np.maximum(budget**2 - first**2 - second**2, 0)) * np.abs(
            np.cos(waves[1, 0] * one + waves[1, 1] * two + waves[1, 2])
        )
        ratio = np.exp(first * one - first**2 / 2 + second * two - second**2 / 2)
        for factor, constant in _tests(q, epsilon):
            found = weights @ _sup(factor * ratio, constant, third) @ weights
            assert found <= float(_sup(factor, constant, budget)) + 5e-6


@pytest.mark.parametrize("seed", range(4))
def test_adaptive_legs_of_a_cut_draw_are_below_the_collinear_pair(seed: int):
    """A unit that stays displaces another: both moved laws are adaptive, at distances 2 and 4 of the bound."""
    generator, z, p, grid = np.random.default_rng(seed), 1.3, 0.4, np.arange(-12.0, 12.0, 1 / 16)
    one, two = np.meshgrid(grid, grid, indexing="ij")
    width = (1 / 16) / (z * math.sqrt(2 * math.pi))

    def law(first: float, second: np.ndarray) -> np.ndarray:
        return np.exp(-((one - first) ** 2 + (two - second[:, None]) ** 2) / (2 * z * z)) * width**2

    def line(centre: float) -> np.ndarray:
        return np.exp(-((grid - centre) ** 2) / (2 * z * z)) * width

    claims = {centres: [(1 - p) * line(0) + p * line(each) for each in centres] for centres in ((2, -2), (1, 0))}
    passed = False
    for _ in range(4):
        angles = np.sin(generator.normal() * grid + generator.normal(size=(2, 1)))
        firsts = np.array([2.0, -2.0]) * generator.uniform(0.3, 1, 2)
        seconds = np.sqrt(4 - firsts**2)[:, None] * angles
        moved = [law(first, second) for first, second in zip(firsts, seconds, strict=True)]
        ends = [(1 - p) * law(0.0, np.zeros_like(grid)) + p * each for each in moved]
        for epsilon, (a, b) in itertools.product(CURVE, ((0, 1), (1, 0))):
            found = np.maximum(ends[a] - math.exp(epsilon) * ends[b], 0).sum()
            claimed, plain = (np.maximum(one - math.exp(epsilon) * two, 0).sum() for one, two in claims.values())
            assert found <= claimed + 1e-4
            passed |= bool(found > plain + 1e-2)
    # The charge of a draw without a cut would be too small.
    assert passed


@pytest.mark.parametrize("coefficients", [(ONE, ONE), (ONE, 3 * ONE // 2)])
def test_a_leg_under_discrete_gaussians_is_below_the_sampled_gaussian(coefficients: tuple[int, ...]):
    """Sampling, both roundings, mixing with hidden sums, and noise of integers; sums follow the outputs before."""
    q, s, clip, reach = 0.35, 4.0, 3.0, 70
    words, contexts = np.arange(-reach, reach + 1), range(-3, 4)
    # Noise of variance s² + 4 pays for a Gaussian of s: proof 001.
    noise = np.exp(-(np.arange(-4 * reach, 4 * reach + 1) ** 2) / (2 * (s * s + 4)))
    noise /= noise.sum()
    # The largest encoded difference that a contribution of 3 has: just below one tie, and just above another.
    delta, base = 4, 1
    sums = np.array([[other, base + own] for other in contexts for own in (0, delta)]).T
    outputs = mixed(sums, coefficients).reshape(len(contexts), 2)
    # For each first output the context that moves the second most, and the next one for a hidden coin.
    chosen = int(np.argmax(outputs[:, 1] - outputs[:, 0]))
    hidden = np.array([[chosen, (chosen + 1) % len(contexts)] if y % 2 else [chosen, chosen] for y in words])

    def law(own: int) -> np.ndarray:
        first = noise[words - base - own * delta + 4 * reach]
        second = np.mean([noise[words - outputs[each, own][:, None] + 4 * reach] for each in hidden.T], axis=0)
        return first[:, None] * second

    without, moved = law(0), law(1)
    with_it = (1 - q) * without + q * moved
    bound = sensitivity_of(clip, 1.0, 1, coefficients) / s
    unmixed = sensitivity_of(clip, 1.0, 1, ()) / s
    passed = False
    for epsilon in CURVE:
        for (factor, constant), (a, b) in zip(
            _tests(q, epsilon), ((with_it, without), (without, with_it)), strict=True
        ):
            found = np.maximum(a - math.exp(epsilon) * b, 0).sum()
            assert found <= float(_sup(factor, constant, bound)) + 1e-9
            passed |= bool(found > float(_sup(factor, constant, unmixed)) + 1e-3)
    # A charge that forgets the mix would be too small.
    assert passed


# Rounds, parts and what a mechanism claims.


@pytest.mark.parametrize("bands", [1, 2, 3, 5, 16])
def test_n_consecutive_steps_hold_one_participation_for_each_round_begun(bands: int):
    coefficients = (ONE,) * bands if bands > 1 else ()
    claimed = correlated(coefficients=coefficients)
    for steps in range(1, 4 * bands + 2):
        taken = [len(range(part, steps, bands)) for part in range(bands)]
        assert claimed.participations(steps) == max(taken) == math.ceil(steps / bands)


@pytest.mark.parametrize(("bands", "epoch_steps"), [(2, 3), (3, 5), (4, 2), (4, 4), (5, 1), (3, 100)])
def test_no_two_legs_of_one_unit_overlap_and_no_sum_outlives_its_epoch(bands: int, epoch_steps: int):
    computation: Any = SimpleNamespace(mechanism=SimpleNamespace(bands=bands), epoch_steps=epoch_steps)
    for part in range(bands):
        ends = -1
        for step in range(part, 40, bands):
            leg = [t for t in range(step, 40) if t - step <= Computation.reach(computation, t)]
            assert leg == list(range(step, leg[-1] + 1))
            assert len(leg) <= bands
            assert {t // epoch_steps for t in leg} == {step // epoch_steps}
            assert step > ends
            ends = leg[-1]


def test_the_sizes_of_a_cut_are_those_of_the_parts_that_are_drawn_from():
    for bands, virtual_workers, num_examples in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 8), range(56, 80)):
        slices = [slice_ids(v, virtual_workers, num_examples) for v in range(virtual_workers)]
        parts = [ids[step % bands :: bands] for ids in slices for step in range(bands)]
        sizes = tuple(sorted({len(part) for part in parts}))
        cut = cut_at(num_examples, virtual_workers, 1, bands)
        assert cut is None if sizes[-1] <= 1 else cut is not None and cut.slice_sizes == sizes
        assert cut_at(num_examples, virtual_workers, sizes[-1], bands) is None
        # Each unit is in one part of one slice.
        assert sorted(itertools.chain.from_iterable(parts)) == list(range(num_examples))


def correlated(coefficients: tuple[int, ...] = (ONE, ONE // 2, ONE // 4), **changes: Any) -> Mechanism:
    """Return a mechanism whose noise just pays for what it claims."""
    demand = RingDemand(1.0, 2.0, 1000, 8, 2.6, 1.0, coefficients)
    return mechanism(**{"coefficients": coefficients, "sigma": demand.sigma(-20), "clamp": 2.0} | changes)


@pytest.mark.parametrize("coefficients", [*MIXES[:3], (ONE, 0), (ONE,) * 16])
def test_the_counted_noise_of_a_mechanism_is_what_it_claims_of_the_whole_leg(coefficients: tuple[int, ...]):
    one = correlated(coefficients)
    assert counted_noise(one, 8.0) == pytest.approx(one.noise_multiplier, rel=1e-12)
    assert one.sensitivity > float(mixed_norm(coefficients)) * one.max_grad_norm
    rounds = -(-one.steps // len(coefficients))
    assert release_of(one, one.steps) == Release(1.0, one.noise_multiplier, rounds)


def test_noise_that_was_calibrated_without_the_mix_is_no_mechanism():
    """It would pay for one release of the leg, and not for all that the sum is mixed into."""
    alone = RingDemand(1.0, 2.0, 1000, 8, 2.6, 1.0).sigma(-20)
    with pytest.raises(ProtocolError, match="does not pay") as refused:
        correlated(sigma=alone)
    assert refused.value.code == "mechanism_bounds"
    paying = correlated().sigma
    with pytest.raises(ProtocolError, match="does not pay"):
        correlated(sigma=math.nextafter(paying, 0.0))


# The table of the proof.


def _table() -> list[list[float]]:
    text = (ROOT / "docs/proofs/013-correlated-noise.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[float(cell) for cell in row] for row in rows if row[0].strip().isdigit()]


@pytest.mark.parametrize("row", range(5))
def test_the_table_of_the_proof_is_what_the_code_computes(row: int):
    bands, sample_rate, rounds, noise, norm, error = _table()[row]
    units, batch, steps, delta = 60_000, 256, 234, accountant_delta(1e-5)
    assert sample_rate == pytest.approx(batch * bands / units, abs=5e-5)
    assert rounds == -(-steps // int(bands))
    workload = NoiseWorkload(0.9, (1.0,) * steps, steps)

    def solved(b: int) -> float:
        def over(z: float) -> float:
            return pld.epsilon((Release(batch * b / units, z, -(-steps // b)),), delta) - 3.0

        return float(brentq(over, 0.3, 5.0, xtol=1e-4))

    found = factorise(workload, int(bands))
    z = solved(int(bands))
    assert noise == pytest.approx(z, abs=1e-3)
    assert norm == pytest.approx(found.norm, abs=1e-3)
    assert error == pytest.approx(z * found.error / (solved(1) * factorise(workload, 1).error), abs=1e-3)
