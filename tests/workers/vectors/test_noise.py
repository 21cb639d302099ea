"""The noise sampler: exact laws of its tables and composition, and where its bytes come from."""

import hashlib
import math
from bisect import bisect_right
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.metrics.errors import ConfigError, RefusedError
from raycloak.workers.terms.mechanism import MAX_DIMENSION
from raycloak.workers.vectors import noise
from raycloak.workers.vectors.noise import (
    BLOCK,
    MAX_SIGMA,
    MIN_SMOOTHING_VARIANCE,
    SAMPLER_DISTANCE,
    BaseTable,
    NoiseSampler,
    base_table,
    cumulative_bounds,
    decompose,
    gaussian_weights,
)
from raycloak.workers.vectors.streams import KeyStream
from tests.noise import draws

KEY = Secret(bytes(range(32)))
LARGE_SIGMA = 2.0**20 + 12_345.678
SIGMAS = [16.0, 319.9, 320.0, math.nextafter(320.0, 400.0), 47_000.3, LARGE_SIGMA, 2.0**33 / 3, 2.0**40]


def key_of(number: int) -> Secret:
    return Secret(hashlib.sha256(b"noise" + number.to_bytes(2, "big")).digest())


# Exact laws.


def ideal_law(variance: Fraction, last: int, digits: int = 70) -> list[Decimal]:
    """Return exp(-x^2 / (2 variance)) / its sum over the integers, for x = -last .. last."""
    with localcontext() as context:
        context.prec = digits
        halved = -Decimal(variance.denominator) / Decimal(2 * variance.numerator)
        # Beyond 2 * last the weights are below 2^-500.
        weights = [(halved * x * x).exp() for x in range(2 * last + 1)]
        total = 2 * sum(weights) - 1
        return [weights[abs(x)] / total for x in range(-last, last + 1)]


def table_law(table: BaseTable, last: int) -> list[int]:
    """Return probabilities of -last .. last in units of 2^-128, from the words that `resolve` compares with."""
    inner = [(int(high) << 64) | low for high, low in zip(table._high, table._low, strict=True)]
    upper = dict(enumerate([*inner, 2**128], start=table._lowest))
    ends = [0, *(upper.get(x, 2**128 if x > 0 else 0) for x in range(-last, last + 1))]
    return [after - before for before, after in pairwise(ends)]


def total_variation(law: list[int], unit_bits: int, ideal: list[Decimal]) -> Decimal:
    """Compute it exactly to 60 digits; mass of ``ideal`` outside the listed outcomes counts as difference."""
    with localcontext() as context:
        context.prec = 70
        unit = Decimal(2) ** -unit_bits
        differences = sum(abs(p * unit - q) for p, q in zip(law, ideal, strict=True))
        return (differences + (1 - sum(ideal))) / 2


@pytest.mark.parametrize("sigma", [16.0, 319.9, LARGE_SIGMA])
def test_table_is_within_its_share_of_the_distance(sigma: float) -> None:
    """The proof's bound for one base draw is (B + 1/2) 2^-128 for rounding and 2^-134 for the tail."""
    variance = decompose(sigma).base_variance
    last = math.ceil(14 * math.sqrt(variance))
    law = table_law(base_table(variance), last)
    assert sum(law) == 2**128
    distance = total_variation(law, 128, ideal_law(variance, last))
    assert distance <= (len(gaussian_weights(variance)) - 0.5) * 2.0**-128 + 2.0**-134
    assert distance <= 2.0**-115.9


def convolve(inner: list[int], outer: list[int], multiplier: int) -> list[int]:
    """Return the exact law of X + multiplier * Y for symmetric supports; probabilities are integers."""
    last_x, last_y = len(inner) // 2, len(outer) // 2
    result = np.zeros(2 * (last_x + multiplier * last_y) + 1, dtype=object)
    column = np.array(inner, dtype=object)
    for i, p in enumerate(outer):
        result[i * multiplier : i * multiplier + len(inner)] += column * p
    return result.tolist()


def test_composed_draw_is_within_the_sampler_distance() -> None:
    """The whole law of a draw of two base draws, computed exactly from the table, against the ideal one."""
    sigma = 400.0
    parts = decompose(sigma)
    assert parts.draws == 2
    last = math.ceil(14 * parts.base_sigma)
    law = table_law(base_table(parts.base_variance), last)
    composed = convolve(law, law, parts.multiplier)
    distance = total_variation(composed, 256, ideal_law(Fraction(sigma) ** 2, len(composed) // 2))
    assert distance <= 2 * 2.0**-115.9 + 2.0**-127
    assert distance <= SAMPLER_DISTANCE


@pytest.mark.parametrize(("smoothing", "low", "high"), [(Fraction(9, 2), -131, -127.1), (Fraction(2), -61, -55.9)])
def test_convolution_lemma(smoothing: Fraction, low: float, high: float) -> None:
    """X + 3 Y of ideal draws differs from an ideal draw by eps / (1 - eps) at most, eps = 2 exp(-2 pi^2 t^2)."""
    variance = smoothing * 10
    last = math.ceil(16 * math.sqrt(variance))
    scale = 2**400
    with localcontext() as context:
        context.prec = 160
        law = [int(p * scale) for p in ideal_law(variance, last, 140)]
        composed = convolve(law, law, 3)
        ideal = ideal_law(variance * 10, len(composed) // 2, 140)
        distance = sum(abs(Decimal(p) / scale / scale - q) for p, q in zip(composed, ideal, strict=True)) / 2
    assert low <= math.log2(distance) <= high


@pytest.mark.parametrize("rounding", [1 / 8, 1 / 4, 1 / 2])
def test_randomised_rounding_of_a_gaussian_is_the_discrete_gaussian(rounding: float) -> None:
    """TV is at most eps / (1 - eps), eps = 2 exp(-2 pi^2 r^2), at values of r^2 where doubles see a difference.

    The integral over y is a sum over a fine grid, whose own error is below 1e-14.
    """
    variance, step = 9.0, 1 / 64
    y = np.arange(-60, 60, step)
    z = np.arange(-80, 81)
    kernel = np.exp(-((z[None, :] - y[:, None]) ** 2) / (2 * rounding))
    kernel /= kernel.sum(axis=1, keepdims=True)
    rounded = step * np.exp(-(y**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance) @ kernel
    ideal = np.exp(-(z**2) / (2 * (variance + rounding)))
    distance = np.abs(rounded - ideal / ideal.sum()).sum() / 2
    epsilon = 2 * math.exp(-2 * math.pi**2 * rounding)
    assert 1e-10 < distance <= epsilon / (1 - epsilon)


def test_weights_are_exact_to_2_to_minus_220() -> None:
    variance = decompose(LARGE_SIGMA).base_variance
    weights = gaussian_weights(variance)
    with localcontext() as context:
        context.prec = 90
        halved = -Decimal(variance.denominator) / Decimal(2 * variance.numerator)
        errors = [abs(weight - (halved * x * x).exp() * 2**256) for x, weight in enumerate(weights)]
    assert max(errors) <= 2**36
    assert weights[-2] >> 126
    assert not weights[-1] >> 126


def test_cumulative_bounds_round_to_nearest_and_end_at_one() -> None:
    assert cumulative_bounds([1, 1, 1]) == [(2**128 + 1) // 3, (2**129 + 1) // 3, 2**128]
    bounds = cumulative_bounds(gaussian_weights(Fraction(300)))
    assert bounds[-1] == 2**128
    assert bounds == sorted(bounds)


def test_index_agrees_with_resolve_at_both_ends_of_every_bin() -> None:
    """Outcomes rise with the residue, so agreement at both ends is agreement everywhere."""
    table = base_table(decompose(LARGE_SIGMA).base_variance)
    words = np.arange(1 << 16).astype(np.uint16)
    first = table.resolve(words, np.zeros((1 << 16, 2), np.uint64))
    last = table.resolve(words, np.full((1 << 16, 2), 2**64 - 1, np.uint64))
    certain = table.index != np.iinfo(np.int16).min
    assert np.array_equal(certain, first == last)
    assert np.array_equal(table.index[certain], first[certain])
    assert 0.9 < np.mean(certain) < 1


def test_resolve_reaches_the_far_tails() -> None:
    """The smallest and the largest uniform give outcomes near 13 deviations; 64 bits alone would stop at 9.1."""
    table = base_table(Fraction(200**2))
    ends = table.resolve(np.array([0, 65535], np.uint16), np.array([[0, 0], [2**64 - 1] * 2], np.uint64))
    assert ends[0] <= -13 * 200
    assert ends[1] >= 13 * 200


def test_ties_on_the_upper_words_are_decided_by_the_lower_ones() -> None:
    """Bounds that share their upper 64 bits with each other and with the uniforms; against Python integers."""
    high = 0x1234_5678_9ABC_DEF0
    bounds = [5, high << 64 | 10, high << 64 | 11, high << 64 | 11, high << 64 | 2**63, (high + 1) << 64, 2**128]
    table = BaseTable(-3, bounds)
    uniforms = [bound + offset for bound in bounds for offset in (-2, -1, 0, 1, 2) if 0 <= bound + offset < 2**128]
    uniforms += [high << 64, high << 64 | 2**64 - 1, 0, 2**128 - 1]
    words = np.array([u >> 112 for u in uniforms], np.uint16)
    # The lower 16 bits of the first residue word must not matter.
    residues = np.array([[(u >> 48) & (2**64 - 2**16) | 0xABCD, u & (2**64 - 1)] for u in uniforms], np.uint64)
    expected = [-3 + bisect_right(bounds, u) for u in uniforms]
    assert table.resolve(words, residues).tolist() == expected


# Decomposition.


@pytest.mark.parametrize("sigma", [*SIGMAS, *np.exp2(np.linspace(4, 40, 100)).tolist()])
def test_decomposition_hits_sigma_exactly_and_smooths_enough(sigma: float) -> None:
    parts = decompose(sigma)
    powers = [parts.multiplier ** (2 * i) for i in range(parts.draws)]
    assert parts.base_variance * sum(powers) == Fraction(sigma) ** 2
    assert parts.draws <= 6
    assert 16**2 <= parts.base_variance <= 320**2
    for steps in range(1, parts.draws):
        inner = parts.base_variance * sum(powers[:steps])
        conditional = parts.base_variance * inner / (parts.base_variance + parts.multiplier**2 * inner)
        assert conditional >= MIN_SMOOTHING_VARIANCE


@pytest.mark.parametrize(
    ("sigma", "draws", "multiplier"),
    [
        (16.0, 1, 1),
        (320.0, 1, 1),
        (math.nextafter(320.0, 400.0), 2, 12),
        (LARGE_SIGMA, 3, 79),
        (2.0**40, 6, 89),
    ],
)
def test_decomposition_never_changes(sigma: float, draws: int, multiplier: int) -> None:
    parts = decompose(sigma)
    assert (parts.draws, parts.multiplier) == (draws, multiplier)


def test_the_factor_is_the_largest_admissible() -> None:
    """Two draws with factor 20 need sigma^2 >= 9/2 (1 + 20^2)^2."""
    least = math.sqrt(4.5) * 401
    assert Fraction(math.nextafter(least, 0)) ** 2 < Fraction(9, 2) * 401**2 < Fraction(math.nextafter(least, 1e9)) ** 2
    assert decompose(math.nextafter(least, 0)).multiplier == 19
    assert decompose(math.nextafter(least, 1e9)).multiplier == 20


def test_proved_distance_adds_up() -> None:
    """Six base draws, five convolution steps; V = 1 and the rounding argument fit below SAMPLER_DISTANCE too."""
    smoothing_error = 2 * math.exp(-2 * math.pi**2 * float(MIN_SMOOTHING_VARIANCE)) * 1.001
    assert 2 * math.exp(-8 * math.pi**2) * 1.001 <= noise.ROUNDING_DISTANCE
    distance = 6 * 2.0**-115.9 + 5 * smoothing_error
    assert distance + noise.ROUNDING_DISTANCE <= SAMPLER_DISTANCE


@pytest.mark.parametrize(
    "sigma", [0.0, -20.0, math.nextafter(16.0, 0), math.nextafter(2.0**40, math.inf), math.nan, math.inf]
)
def test_sigma_outside_the_range_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="noise_sigma") as refusal:
        NoiseSampler(sigma, 32)
    assert refusal.value.exit_code == 2


# Where the bytes come from.


def reference_draws(sigma: float, key: Secret, blocks: int) -> list[int]:
    """Follow the documented stream layout in plain Python, with the table recomputed from exponentials of 70 digits."""
    parts = decompose(sigma)
    last = math.ceil(14 * parts.base_sigma)
    with localcontext() as context:
        context.prec = 70
        bounds, running = [], Decimal(0)
        for p in ideal_law(parts.base_variance, last):
            running += p
            bounds.append(int((running * 2**128).to_integral_value()))
    index = KeyStream(derive(key, Purpose.NOISE_INDEX)).bytes(blocks * parts.draws * BLOCK * 2)
    words = [index[i] | index[i + 1] << 8 for i in range(0, len(index), 2)]
    drawn = []
    for block in range(blocks):
        residue = KeyStream(derive(key, Purpose.NOISE_RESIDUE), nonce=block)
        base = []
        for word in words[block * parts.draws * BLOCK : (block + 1) * parts.draws * BLOCK]:
            first = bisect_right(bounds, word << 112)
            if first != bisect_right(bounds, (word << 112) + 2**112 - 1):
                upper = int.from_bytes(residue.bytes(8), "little") >> 16
                lower = int.from_bytes(residue.bytes(8), "little")
                first = bisect_right(bounds, word << 112 | upper << 64 | lower)
            base.append(first - last)
        for i in range(BLOCK):
            drawn.append(sum(parts.multiplier**j * base[j * BLOCK + i] for j in range(parts.draws)))
    return drawn


@pytest.mark.parametrize("sigma", [16.0, LARGE_SIGMA, 2.0**40])
def test_draws_follow_the_documented_layout(sigma: float) -> None:
    assert draws(sigma, KEY, 0, 2 * BLOCK).tolist() == reference_draws(sigma, KEY, 2)


GOLDEN = {
    16.0: (
        [0, 6, -20, -4, 1, 10],
        "8dc234a9d5585ded7ccb2c1de68e41d00c79e9d76d504ed958cfd47154dd5bd6",
    ),
    2.0**20: (
        [-291831, -160861, -834131, 165463, -927605, 1254308],
        "11903123e592da8c3dd171aae2d72029ebd08cf5fc6c66190260d2cda2e9da05",
    ),
    2.0**40: (
        [1558230608025, -352689177055, 168199434211, 90442829414, 77635442632, -119978214927],
        "d09975d22e6fe334daeb857da13eb0a2e7725d3b5af328babddb16801c5c01be",
    ),
}


@pytest.mark.parametrize("sigma", GOLDEN)
def test_draws_of_a_fixed_key_never_change(sigma: float) -> None:
    first, digest = GOLDEN[sigma]
    drawn = draws(sigma, KEY, 0, 20_000)
    assert drawn[:6].tolist() == first
    assert hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest() == digest


@pytest.mark.parametrize("sigma", [16.0, LARGE_SIGMA, 2.0**33 / 3])
def test_draw_i_depends_on_i_alone(sigma: float) -> None:
    whole = draws(sigma, KEY, 0, 4 * BLOCK + 17)
    cuts = [0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3000, 4 * BLOCK, whole.size]
    for start, stop in pairwise(cuts):
        assert np.array_equal(draws(sigma, KEY, start, stop - start), whole[start:stop])
    assert np.array_equal(draws(sigma, KEY, 3 * BLOCK + 9, BLOCK), whole[3 * BLOCK + 9 : 4 * BLOCK + 9])
    assert draws(sigma, KEY, 77, 0).size == 0


@pytest.mark.parametrize("sigma", SIGMAS)
def test_rings_agree_and_add_modulo_their_size(sigma: float) -> None:
    count, start = BLOCK + 1000, 123
    vector = np.frombuffer(KeyStream(key_of(1)).bytes(8 * count), np.uint64).copy()
    narrow = vector.astype(np.uint32)
    exact = [int(x) + int(n) for x, n in zip(vector, draws(sigma, KEY, start, count), strict=True)]
    NoiseSampler(sigma, 64).add_to(vector, KEY, start=start)
    NoiseSampler(sigma, 32).add_to(narrow, KEY, start=start)
    assert vector.tolist() == [x % 2**64 for x in exact]
    assert narrow.tolist() == [x % 2**32 for x in exact]


def test_extreme_vectors_wrap() -> None:
    sampler = NoiseSampler(50.0, 32)
    drawn = draws(50.0, KEY, 0, 1000)
    for extreme in (0, 2**31 - 1, 2**31, 2**32 - 1):
        vector = np.full(1000, extreme, np.uint32)
        sampler.add_to(vector, KEY)
        assert np.array_equal(vector, ((drawn + extreme) % 2**32).astype(np.uint32))


def test_strided_and_empty_vectors_are_served() -> None:
    sampler = NoiseSampler(LARGE_SIGMA, 32)
    wide = np.zeros((500, 2), np.uint32)
    sampler.add_to(wide[:, 1], KEY)
    assert not wide[:, 0].any()
    assert np.array_equal(wide[:, 1].view(np.int32), draws(LARGE_SIGMA, KEY, 0, 500))
    sampler.add_to(np.zeros(0, np.uint32), KEY)


def test_a_range_beyond_the_stream_is_refused_and_changes_nothing() -> None:
    sampler = NoiseSampler(LARGE_SIGMA, 32)
    vector = np.zeros(3 * BLOCK, np.uint32)
    end = 2**37 // 3
    with pytest.raises(RefusedError, match="keystream_exhausted"):
        sampler.add_to(vector, KEY, start=end - 2 * BLOCK)
    assert not vector.any()
    sampler.add_to(vector, KEY, start=end - 4 * BLOCK)
    assert vector.any()


@pytest.mark.parametrize("sigma", [LARGE_SIGMA, MAX_SIGMA])
def test_the_last_coordinates_of_the_largest_model_have_draws_of_their_own(sigma: float) -> None:
    around = draws(sigma, KEY, 2**31 - 5, 10)
    assert np.array_equal(around[5:], draws(sigma, KEY, 2**31, 5))
    last = draws(sigma, KEY, MAX_DIMENSION - 3, 3)
    assert len({*around.tolist(), *last.tolist()}) > 10


def test_a_decomposition_names_its_parts() -> None:
    parts = decompose(2.0**20)
    assert (parts.draws, parts.multiplier) == (3, 79)
    assert str(parts) == "sigma 1.04858e+06 = 3 draws of sigma 168.00, factor 79"
