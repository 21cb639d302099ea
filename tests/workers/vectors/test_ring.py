"""The guarantees of `workers/vectors/ring.py`, each proved in `docs/proofs/002-ring-and-sensitivity.md`."""

import math
import re
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError
from raycloak.workers.vectors.noise import decompose
from raycloak.workers.vectors.ring import (
    CACHE_BLOCK_BYTES,
    RingDemand,
    RingFit,
    RingSpec,
    decode,
    encode_into,
    fit_ring,
    ring_dtype,
)

RINGS = (32, 64)
FLOATS = (np.float32, np.float64)
BASE = {
    "max_grad_norm": 1.0,
    "clamp": 4.0,
    "dimension": 26_010,
    "virtual_workers": 8,
    "noise_multiplier": 1.1,
    "honest_share": 0.75,
}


def fit(**changes) -> RingFit:
    demand = {name: changes.pop(name, value) for name, value in BASE.items()}
    return fit_ring(RingDemand(**demand), **changes)


def encoded(values: np.ndarray, spec: RingSpec) -> np.ndarray:
    out = np.empty(len(values), ring_dtype(spec.bits))
    encode_into(values, spec, out)
    return out


def centred(words: np.ndarray) -> list[int]:
    return words.view(np.int32 if words.itemsize == 4 else np.int64).tolist()


def exact_words(values: np.ndarray, spec: RingSpec) -> list[int]:
    """Clamp, scale and round half to even in rational arithmetic."""
    clamp, gamma = Fraction(spec.clamp), Fraction(2) ** spec.gamma_log2
    return [round(max(-clamp, min(clamp, Fraction(x))) / gamma) for x in values.tolist()]


# --- encode and decode


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("float_type", FLOATS)
def test_words_are_the_exact_rounding_of_the_real_numbers(bits, float_type):
    spec = fit(bits=bits)
    gamma = math.ldexp(1.0, spec.gamma_log2)
    random = np.random.default_rng(1)
    ties = (np.arange(-300, 300) + 0.5) * gamma
    scales = 2.0 ** random.integers(-80, 10, 600)
    values = np.concatenate(
        [
            ties,
            np.nextafter(ties, np.inf),
            np.nextafter(ties, -np.inf),
            random.standard_normal(600) * scales,
            [0.0, -0.0, spec.clamp, -spec.clamp, 1e30, -1e30, 3e38, 1e-45, np.nextafter(spec.clamp, 0)],
        ]
    ).astype(float_type)
    assert centred(encoded(values, spec)) == exact_words(values, spec)


@pytest.mark.parametrize("gamma_log2", [-100, 100])
def test_words_are_exact_at_the_ends_of_the_float32_range(gamma_log2):
    clamp = math.ldexp(2.0**23 + 1, gamma_log2)
    values = np.array([clamp, -clamp, 1.5, 2.5, 1e-38, -1e-45, 3e38], np.float32)
    values[2:4] = np.ldexp(values[2:4], gamma_log2)
    spec = RingSpec(32, gamma_log2, clamp)
    assert centred(encoded(values, spec)) == exact_words(values, spec)


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("float_type", FLOATS)
def test_block_boundaries_do_not_show(bits, float_type):
    spec = fit(bits=bits)
    size = 2 * CACHE_BLOCK_BYTES // np.dtype(float_type).itemsize + 17
    values = np.random.default_rng(2).standard_normal(size).astype(float_type)
    whole = encoded(values, spec)
    pieces = [encoded(values[a : a + 1001], spec) for a in range(0, size, 1001)]
    assert np.array_equal(whole, np.concatenate(pieces))


def test_float32_and_float64_of_the_same_numbers_encode_alike():
    values = (np.random.default_rng(3).standard_normal(5000) * 3).astype(np.float32)
    for bits in RINGS:
        spec = fit(bits=bits)
        assert np.array_equal(encoded(values, spec), encoded(values.astype(np.float64), spec))


def test_encoding_is_within_half_a_step_of_what_is_decoded():
    for bits in RINGS:
        spec = fit(bits=bits)
        values = np.random.default_rng(4).uniform(-spec.clamp, spec.clamp, 10_000)
        error = np.abs(decode(encoded(values, spec), spec.gamma_log2) - values)
        assert error.max() <= math.ldexp(0.5, spec.gamma_log2) + np.spacing(spec.clamp)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("float_type", FLOATS)
def test_a_non_finite_sum_is_refused_without_data(poison, float_type):
    size = CACHE_BLOCK_BYTES // np.dtype(float_type).itemsize + 5
    spec = fit()
    for position in (0, size - 6, size - 1):
        values = np.ones(size, float_type)
        values[position] = poison
        with pytest.raises(ProtocolError) as refusal:
            encoded(values, spec)
        assert refusal.value.code == "encode_non_finite"
        assert not re.search(r"\d|nan|inf\b", refusal.value.message)


@pytest.mark.parametrize(("bits", "float_type"), [(32, np.float32), (64, np.float64)])
def test_encoding_in_place_gives_the_same_words(bits, float_type):
    values = np.random.default_rng(8).normal(size=100_001).astype(float_type)
    spec = RingSpec(bits, -10, 2.0)
    apart = np.empty(len(values), ring_dtype(bits))
    encode_into(values, spec, apart)
    encode_into(values, spec, values.view(ring_dtype(bits)))
    assert values.tobytes() == apart.tobytes()


def test_encoding_in_place_into_narrower_words_is_refused():
    values = np.zeros(10)
    with pytest.raises(RefusedError, match="proof_bound: no word is written"):
        encode_into(values, RingSpec(32, -10, 2.0), values.view(ring_dtype(32))[:10])


def test_encoding_has_no_full_size_temporary():
    values = np.ones(4_000_000, np.float32)
    out = np.empty(len(values), np.uint32)
    spec = fit()
    tracemalloc.start()
    encode_into(values, spec, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * CACHE_BLOCK_BYTES


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("virtual_workers", [1, 2, 8, 61])
def test_all_maximum_vectors_of_all_virtual_workers_decode_exactly(bits, virtual_workers):
    found = fit(bits=bits, virtual_workers=virtual_workers)
    for sign in (1.0, -1.0):
        one = encoded(np.full(100, sign * 1e9), found)
        total = np.zeros_like(one)
        for _ in range(virtual_workers):
            np.add(total, one, out=total)
        assert decode(total, found.gamma_log2).tolist() == [sign * virtual_workers * found.clamp] * 100


# --- sensitivity


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the l2 distance of two encodings in centred ring units."""
    signed = np.int32 if a.itemsize == 4 else np.int64
    return math.sqrt(sum(int(x) ** 2 for x in np.subtract(a, b).view(signed).tolist()))


@given(
    seed=st.integers(0, 2**32 - 1),
    dimension=st.integers(1, 300),
    spread=st.floats(-30, 30),
    bits=st.sampled_from(RINGS),
    float_type=st.sampled_from(FLOATS),
)
def test_encoded_difference_is_at_most_distance_over_gamma_plus_root_d(seed, dimension, spread, bits, float_type):
    spec = fit(bits=bits, dimension=dimension)
    random = np.random.default_rng(seed)
    a = (random.standard_normal(dimension) * 2).astype(float_type)
    b = (a + random.standard_normal(dimension) * math.ldexp(2.0**spread, spec.gamma_log2)).astype(float_type)
    real = math.sqrt(sum((Fraction(x) - Fraction(y)) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)))
    bound = math.ldexp(real, -spec.gamma_log2) + math.sqrt(dimension)
    assert distance(encoded(a, spec), encoded(b, spec)) <= bound * (1 + 1e-12)


@pytest.mark.parametrize("bits", RINGS)
def test_neighbours_around_every_tie_reach_the_root_d_of_the_bound(bits):
    spec = fit(bits=bits)
    gamma = math.ldexp(1.0, spec.gamma_log2)
    ties = (2 * np.arange(10_000) + 0.5) * gamma
    below, above = encoded(ties, spec), encoded(np.nextafter(ties, np.inf), spec)
    assert distance(below, above) == 100.0


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("offset", [0.0, 0.25, 0.499999, 0.5])
def test_encoded_change_of_an_adversarial_example_is_at_most_the_sensitivity(bits, offset):
    """The example has norm C, and moves as many coordinates as it can across a rounding boundary."""
    dimension = 40_000
    found = fit(bits=bits, dimension=dimension, clamp=2048.0)
    gamma = math.ldexp(1.0, found.gamma_log2)
    others = (np.random.default_rng(5).integers(-1000, 1000, dimension) + 0.5 - offset) * gamma
    sensitivity = 1.0 + gamma * math.sqrt(dimension)
    for support in (1, 100, dimension):
        example = np.zeros(dimension)
        example[:support] = 1.0 / math.sqrt(support)
        if support < dimension:
            example[support:] = gamma * 1e-3
        example *= (1 - 1e-12) / np.linalg.norm(example)
        change = distance(encoded(others, found), encoded(others + example, found))
        assert change * gamma <= sensitivity
        assert change * gamma >= 0.9


# --- fit


def load(found: RingFit, virtual_workers: int) -> Fraction:
    """Return v·clamp/γ + V/2 + 16·σ·√V of the capacity rule, exact but for the square root."""
    units = Fraction(found.clamp) / Fraction(2) ** found.gamma_log2
    tail = 16 * Fraction(found.sigma) * Fraction(math.sqrt(virtual_workers))
    return virtual_workers * units + Fraction(virtual_workers, 2) + tail


@given(
    virtual_workers=st.integers(1, 512),
    clamp=st.floats(1e-3, 1e5),
    norm=st.floats(1e-2, 10),
    dimension=st.integers(1, 10**9),
    noise=st.floats(0.3, 50),
    share=st.floats(0.1, 1),
    bits=st.sampled_from(("auto", *RINGS)),
    most=st.sampled_from((None, 0.0, 1e-4, 1e-2, 1.0)),
)
def test_a_fit_keeps_capacity_and_pays_for_the_rounded_sensitivity(
    virtual_workers, clamp, norm, dimension, noise, share, bits, most
):
    demand = RingDemand(norm, clamp, dimension, virtual_workers, noise, share)
    try:
        affordable = None if most is None else lambda inflation: inflation <= most
        found = fit_ring(demand, bits=bits, affordable=affordable)
    except ConfigError:
        assert bits == 32
        return
    assert load(found, virtual_workers) < 2 ** (found.bits - 1)
    assert 16 <= found.sigma <= 2**40
    gamma = math.ldexp(1.0, found.gamma_log2)
    root = Fraction(math.isqrt(dimension << 200), 1 << 100)
    exact = (Fraction(noise) * (Fraction(norm) / Fraction(gamma) + root)) ** 2 + 4
    assert virtual_workers * Fraction(share) * Fraction(found.sigma) ** 2 >= exact
    assert virtual_workers * Fraction(share) * Fraction(found.sigma * (1 - 1e-12)) ** 2 < exact
    assert found.inflation == pytest.approx(gamma * math.sqrt(dimension) / norm)
    assert clamp * (1 - 2.0**-22) - gamma < found.clamp <= clamp
    assert demand.is_paid_by(found.sigma, found.gamma_log2)
    assert not demand.is_paid_by(found.sigma * (1 - 1e-12), found.gamma_log2)
    assert found.holds(virtual_workers, found.sigma)


def test_the_clamp_is_a_float32_on_the_grid():
    for clamp in (4.0, math.pi, 0.1, 1e4 / 3):
        for bits in RINGS:
            found = fit(clamp=clamp, bits=bits)
            assert float(np.float32(found.clamp)) == found.clamp
            assert (Fraction(found.clamp) / Fraction(2) ** found.gamma_log2).denominator == 1


def test_the_grid_is_the_finest_that_fits():
    narrow = fit(bits=32)
    finer = RingFit(32, narrow.gamma_log2 - 1, narrow.clamp, narrow.sigma * 2, 0.0)
    assert load(finer, BASE["virtual_workers"]) >= 2**31
    wide = fit(bits=64)
    assert 2**39 < wide.sigma <= 2**40


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("most", [1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_noise_takes_the_fewest_draws_at_an_affordable_inflation_and_the_finest_grid_for_them(bits, most):
    def draws(found: RingFit) -> int:
        return decompose(found.sigma).draws

    def at(gamma_log2: int) -> RingFit:
        """Return the fit of this grid step: the clamp leaves no room for a finer one."""
        return fit(bits=64, clamp=math.ldexp(2.0**59.9, gamma_log2))

    finest, found = fit(bits=bits), fit(bits=bits, affordable=lambda inflation: inflation <= most)
    assert found.bits == bits
    assert at(found.gamma_log2).sigma == found.sigma
    if found != finest:
        assert found.inflation <= most
        assert draws(at(found.gamma_log2 - 1)) > draws(found)
    # The next number of draws would cost too much.
    coarser = next((each for g in range(found.gamma_log2, -8) if draws(each := at(g)) < draws(found)), None)
    assert coarser is None or coarser.inflation > most


def test_affordable_rounding_has_no_say_in_the_width():
    for dimension in (10**6, 10**8):
        for clamp in (1.0, 1000.0):
            wanted = {"dimension": dimension, "clamp": clamp}
            assert fit(**wanted, affordable=lambda inflation: True).bits == fit(**wanted).bits


@pytest.mark.parametrize("dimension", [10**6, 10**7, 10**8, 10**9])
def test_a_billion_parameters_keep_32_bits_whatever_the_grid_may_cost(dimension):
    wanted = {"dimension": dimension, "virtual_workers": 8, "clamp": 168.0, "least_clamp": 42.0}
    for most in (0.0, 1e-4, 1e-3, 1.0):
        assert fit(**wanted, affordable=lambda inflation, most=most: inflation <= most).bits == 32


def test_capacity_is_met_at_v_and_the_ring_widened_or_refused_beyond():
    small, widths = fit(clamp=100.0, virtual_workers=64), set()
    for virtual_workers in (64, 128, 4096, 1 << 17):
        found = fit(clamp=100.0, virtual_workers=virtual_workers)
        widths.add(found.bits)
        assert load(found, virtual_workers) < 2 ** (found.bits - 1)
    assert widths == {32, 64}
    assert load(small, 65) < 2**31 <= load(small, 2 * 64 + 1)
    with pytest.raises(ConfigError) as refusal:
        fit(clamp=100.0, virtual_workers=1 << 20, bits=32)
    assert refusal.value.code in ("ring_capacity", "ring_sigma")
    assert "1048576 virtual workers" in str(refusal.value)


def test_auto_takes_32_bits_exactly_while_the_inflation_is_below_one_percent():
    for dimension in (1000, 10**6, 11 * 10**6, 10**8):
        for clamp in (1.0, 100.0, 1000.0):
            narrow = fit(dimension=dimension, clamp=clamp, bits=32)
            chosen = fit(dimension=dimension, clamp=clamp)
            assert chosen.bits == (32 if narrow.inflation < 0.01 else 64)
            assert chosen.inflation < 0.01


def test_a_run_without_noise_has_no_sigma():
    for bits in RINGS:
        found = fit(noise_multiplier=0.0, bits=bits)
        assert found.sigma == 0.0
        assert 2 ** (bits - 2) <= load(found, BASE["virtual_workers"]) < 2 ** (bits - 1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"clamp": 1e9, "bits": 32, "dimension": 3}, "ring_sigma"),
        ({"clamp": 1e30, "dimension": 3}, "ring_sigma"),
        ({"clamp": 1e30, "dimension": 10**6}, "ring_capacity"),
        ({"noise_multiplier": 1e8, "bits": 32}, "ring_capacity"),
        ({"noise_multiplier": 1e12}, "ring_capacity"),
        ({"clamp": 1e-38}, "ring_capacity"),
        ({"max_grad_norm": 1e300, "clamp": 1e300}, "ring_capacity"),
        ({"max_grad_norm": 1e-300}, "ring_capacity"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(changes, code):
    with pytest.raises(ConfigError) as refusal:
        fit(**changes)
    assert (refusal.value.code, refusal.value.exit_code) == (code, 2)
    demand = {**BASE, **changes}
    for name in ("virtual_workers", "max_grad_norm", "clamp", "noise_multiplier", "honest_share"):
        assert f"{demand[name]:g}" in str(refusal.value)
    assert f"dimension {demand['dimension']}" in str(refusal.value)
    assert refusal.value.remedy


@pytest.mark.parametrize(("clamp", "remedy"), [(1e-38, "Raise ring.clamp"), (1e30, "Lower the clamp")])
def test_the_remedy_for_a_clamp_says_which_way(clamp, remedy):
    with pytest.raises(ConfigError, match=f"ring_capacity: .* {remedy}"):
        fit(clamp=clamp, dimension=10**6)


def parity_bias(sigma: float) -> float:
    """|P[even] − P[odd]| of the discrete Gaussian over Z with this parameter."""
    reach = range(-math.ceil(40 * sigma), math.ceil(40 * sigma) + 1)
    weights = [math.exp(-(k**2) / (2 * sigma**2)) for k in reach]
    return abs(math.fsum(w * (-1) ** k for k, w in zip(reach, weights, strict=True))) / math.fsum(weights)


def test_parity_tells_no_neighbours_apart_under_the_least_noise_a_ring_admits():
    """Neighbours may differ in the parity of every word; at the refused sigma below 1 it would show, at 16 not."""
    assert parity_bias(0.5) > 0.1
    assert parity_bias(16.0) < 1e-15
    with pytest.raises(ConfigError, match="ring_sigma"):
        fit(clamp=1e9, bits=32, dimension=3)


@pytest.mark.parametrize("dimension", [10**6, 10**7, 10**8, 10**9])
def test_auto_halves_the_clamp_no_further_than_it_may_to_stay_at_32_bits(dimension):
    wanted = {"dimension": dimension, "virtual_workers": 8, "clamp": 168.0}
    whole = fit(**wanted)
    fitted = fit(**wanted, least_clamp=42.0)
    assert fitted.bits == 32
    assert fitted.inflation < 0.01
    # Halved only where the whole one needs 64 bits, and no more often than needed.
    halvings = round(math.log2(168 / fitted.clamp))
    assert 0 <= halvings <= 2
    assert (halvings == 0) == (whole.bits == 32)
    if halvings:
        assert fit(**wanted | {"clamp": 168.0 / 2 ** (halvings - 1)}).bits == 64


def test_a_clamp_that_may_not_be_halved_enough_widens_the_ring():
    wanted = {"dimension": 10**9, "virtual_workers": 64, "clamp": 168.0}
    assert fit(**wanted, least_clamp=42.0) == fit(**wanted)
    assert fit(**wanted).bits == 64
