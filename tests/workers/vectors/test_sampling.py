"""Poisson sampling: exact inclusion, the binomial law, and the cut at capacity."""

import hashlib

import numpy as np
import pytest
from scipy.stats import binom, chi2

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ConfigError
from raycloak.workers.vectors.sampling import draw_ids, inclusion_threshold, unit_places
from raycloak.workers.vectors.streams import KeyStream

KEY = Secret(bytes(range(32)))


def key_of(number: int) -> Secret:
    return Secret(hashlib.sha256(b"sampling" + bytes([number])).digest())


def slice_of(count: int, virtual_workers: int = 8, owner: int = 3) -> np.ndarray:
    """Return the ids of one virtual worker."""
    return np.arange(count, dtype=np.int64) * virtual_workers + owner


def binomial_interval(count: int, probability: float) -> tuple[float, float]:
    """Return an interval of counts; those outside happen with probability at most 1e-8."""
    return binom.ppf(5e-9, count, probability), binom.isf(5e-9, count, probability)


@pytest.mark.parametrize(
    ("rate", "threshold"),
    [(0.0, 0), (1.0, 2**64), (0.5, 2**63), (2.0**-64, 1), (2.0**-65, 0), (0.1, 0x1999999999999A00)],
)
def test_threshold_is_the_exact_floor(rate: float, threshold: int) -> None:
    assert inclusion_threshold(rate) == threshold


@pytest.mark.parametrize("rate", [-1e-9, 1.0000001, float("nan"), float("inf")])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="sample_rate"):
        draw_ids(KEY, slice_of(3), rate, 3)


@pytest.mark.parametrize("rate", [0.003, 0.25, 0.999])
def test_an_id_is_drawn_iff_its_own_word_is_below_the_threshold(rate: float) -> None:
    ids = slice_of(1000)
    raw = KeyStream(KEY).bytes(8000)
    words = [int.from_bytes(raw[8 * j : 8 * j + 8], "little") for j in range(1000)]
    expected = [int(ids[j]) for j in range(1000) if words[j] < int(rate * 2**64)]
    assert draw_ids(KEY, ids, rate, 1000).tolist() == expected


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.2, 0.5, 0.9])
def test_true_poisson_sampling(rate: float) -> None:
    """The batch size, every residue class of positions, neighbouring pairs and pairs across two steps are binomial.

    Eight two-sided checks for each of five rates, 1e-8 each: false-alarm rate below 4e-7 for all together.
    """
    count = 1_000_000
    ids = slice_of(count)
    first, second = (np.isin(ids, draw_ids(key_of(i), ids, rate, count), assume_unique=True) for i in (1, 2))
    observed = [(first, rate), (first[:-1:2] & first[1::2], rate**2), (first & second, rate**2)]
    observed += [(first[offset::5], rate) for offset in range(5)]
    for included, probability in observed:
        low, high = binomial_interval(included.size, probability)
        assert low <= np.count_nonzero(included) <= high


def test_rate_one_draws_everything_and_rate_zero_nothing() -> None:
    ids = slice_of(5000)
    assert np.array_equal(draw_ids(KEY, ids, 1.0, 5000), ids)
    assert draw_ids(KEY, ids, 0.0, 5000).size == 0


def test_no_ids_and_no_capacity_are_normal() -> None:
    assert draw_ids(KEY, slice_of(0), 0.5, 4).size == 0
    assert draw_ids(KEY, slice_of(50), 1.0, 0).size == 0


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("capacity", [1, 7, 100])
def test_overflow_keeps_the_smallest_draws(rate: float, capacity: int) -> None:
    ids = slice_of(2000)
    raw = np.frombuffer(KeyStream(KEY).bytes(16_000), "<u8")
    smallest = np.sort(np.argsort(raw)[:capacity])
    kept = draw_ids(KEY, ids, rate, capacity)
    assert kept.dtype == np.int64
    assert np.array_equal(kept, ids[smallest])


def test_capacity_that_is_just_reached_cuts_nothing_and_one_less_cuts_one() -> None:
    ids = slice_of(2000)
    drawn = draw_ids(KEY, ids, 0.3, 2000)
    assert np.array_equal(draw_ids(KEY, ids, 0.3, drawn.size), drawn)
    assert draw_ids(KEY, ids, 0.3, drawn.size - 1).size == drawn.size - 1


def test_a_draw_equal_to_the_threshold_is_not_included() -> None:
    """A word with eleven zero bits at the end is q * 2^64 for a float q."""
    ids = slice_of(50_000)
    words = np.frombuffer(KeyStream(KEY).bytes(8 * ids.size), "<u8")
    position = int(np.flatnonzero(words % 2048 == 0)[0])
    rate = int(words[position]) / 2**64
    assert inclusion_threshold(rate) == words[position]
    assert ids[position] not in draw_ids(KEY, ids, rate, ids.size)
    assert ids[position] in draw_ids(KEY, ids, float(np.nextafter(rate, 1)), ids.size)


def test_the_draw_depends_on_position_and_key_alone() -> None:
    ids = slice_of(400)
    renamed = slice_of(400, virtual_workers=3, owner=1)
    drawn = draw_ids(KEY, ids, 0.4, 400)
    assert np.array_equal(np.searchsorted(ids, drawn), np.searchsorted(renamed, draw_ids(KEY, renamed, 0.4, 400)))
    assert not np.array_equal(drawn, draw_ids(key_of(9), ids, 0.4, 400))


def test_draws_of_a_fixed_key_never_change() -> None:
    assert draw_ids(KEY, np.arange(100, dtype=np.int64), 0.1, 100).tolist() == [
        7,
        34,
        47,
        51,
        53,
        56,
        79,
        82,
        89,
        95,
        99,
    ]


@pytest.mark.parametrize(("rows", "batches"), [(8, 3), (4, 1), (1, 5), (64, 7)])
def test_drawn_examples_fill_the_micro_batches_evenly_each_at_a_keyed_place(rows: int, batches: int):
    places = unit_places(Secret(b"p" * 32), rows, batches)
    assert places.dtype == np.int64
    assert sorted(places) == list(range(rows * batches))
    for drawn in range(rows * batches + 1):
        taken = np.bincount(places[:drawn] // rows, minlength=batches)
        assert taken.max() - taken.min() <= 1
    assert np.array_equal(places, unit_places(Secret(b"p" * 32), rows, batches))


def test_places_are_uniform():
    """Chi-square over the row that the first example takes, 64 rows and 6,400 keys; false-alarm rate 1e-6."""
    keys = (Secret(number.to_bytes(32, "big")) for number in range(6400))
    counts = np.bincount([unit_places(key, 64, 1)[0] for key in keys], minlength=64)
    assert ((counts - 100) ** 2 / 100).sum() < chi2.ppf(1 - 1e-6, 63)
