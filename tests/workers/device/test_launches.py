"""`workers/device/launches.py`: what the launches need no device for."""

import math

import numpy as np
import pytest

from raycloak.workers.vectors.noise import BLOCK, NoiseSampler

launches = pytest.importorskip(
    "raycloak.workers.device.launches", reason="needs triton (the extra gpu)", exc_type=ImportError
)


def test_guarantee_a_block_has_more_open_words_than_room_with_a_probability_below_two_to_the_minus_128():
    """Chernoff: a sum of independent draws of mean m exceeds a with probability at most exp(a - m - a ln(a / m))."""
    for exponent in np.linspace(4, 40, 37):
        sampler = NoiseSampler(2.0**exponent, 32)
        words = sampler.decomposition.draws * BLOCK
        mean = words * float((sampler._table.index == launches.OPEN.value).mean())
        room = launches.room_for(mean, words)
        assert room == words or (room * math.log(room / mean) - room + mean) / math.log(2) > 128, exponent
        assert room < words / 2, "a list takes less memory than the words"


def test_the_constants_of_sha_256_are_those_of_the_standard():
    """FIPS 180-4, 4.2.2 and 5.3.3: the first and the last of each."""
    found = launches._SHA256.tolist()
    assert [found[0], found[63], found[64], found[71]] == [0x428A2F98, 0xC67178F2, 0x6A09E667, 0x5BE0CD19]
    assert len(found) == 72
