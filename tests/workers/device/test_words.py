"""`workers/device/words.py`: words in the host's memory are those of `workers/vectors`, and a GPU needs Triton."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ConfigError
from raycloak.workers.device import compiler
from raycloak.workers.device.words import CpuWords, PiecedWords, kernel_digest, ring_of, words_on
from raycloak.workers.vectors.masks import masked_sum
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.ring import encode_into, mix_into, ring_dtype
from raycloak.workers.vectors.streams import BLOCK_BYTES, KeyStream
from raycloak.workers.vectors.threads import WordThreads
from raycloak.workers.vectors.vector_tag import TensorLeaves
from tests.mixed import mixed_mechanism
from tests.protocol import mechanism

KEY, OTHER, D = Secret(bytes(range(32))), Secret(bytes(range(1, 33))), 300_000
SUM = np.random.default_rng(0).normal(size=D)


@pytest.mark.parametrize("bits", [32, 64])
def test_words_of_a_cpu_are_those_of_the_vectors_room(bits):
    chosen = mechanism(ring_bits=bits)
    expected = np.empty(D, ring_dtype(bits))
    encode_into(SUM, ring_of(chosen), expected)
    NoiseSampler(chosen.sigma, bits).add_to(expected, KEY)
    words, total = CpuWords(WordThreads(2)), torch.tensor(SUM)
    vector = words.encoded([total], chosen, KEY)
    assert np.array_equal(vector, expected)
    assert np.may_share_memory(vector, total.numpy()) == (bits == 64), "in the sum's memory where the words fit it"
    cut = [100, 200_000, D - 200_100]
    assert words.leaves(vector, cut) == [TensorLeaves.of(part) for part in np.split(vector, np.cumsum(cut)[:-1])]
    masked = words.masked(vector, VectorRange(index=1, offset=7, length=1000), [(KEY, -1)])
    assert np.array_equal(vector, expected), "a later attempt masks it again"
    right = np.empty(1000, ring_dtype(bits))
    masked_sum([expected[7:1007]], [(KEY, -1)], right)
    assert np.array_equal(masked, right)
    words.add(vector, expected)
    assert np.array_equal(vector, expected + expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_guarantee_however_a_vector_is_cut_its_words_digests_and_masked_ranges_are_the_same_bytes(bits):
    """Pieces begin within a block of noise and of a mask, and ranges within a piece, at its end, or over several."""
    chosen, whole, sizes = mechanism(ring_bits=bits), CpuWords(), [1, 30_001, 8192, 7, 180_000, D - 218_201]
    right = whole.encoded([torch.tensor(SUM)], chosen, KEY)
    whole.add(right, whole.encoded([torch.tensor(SUM[::-1].copy())], chosen, OTHER))
    for cut in ([1], [2, 5], [1, 2, 3, 4, 5]):
        words = PiecedWords({torch.device("cpu"): CpuWords(WordThreads(2))})
        ends = np.cumsum(sizes)[np.array(cut) - 1]
        pieces, others = ([torch.tensor(each) for each in np.split(total, ends)] for total in (SUM, SUM[::-1].copy()))
        vector = words.encoded(pieces, chosen, KEY)
        words.add(vector, words.encoded(others, chosen, OTHER))
        assert words.leaves(vector, sizes) == whole.leaves(right, sizes)
        masks = [(KEY, -1), (OTHER, 1)]
        for offset, length in ((0, D), (0, 1), (30_001, 10), (30_002, 8192), (38_190, 30), (3, D - 4), (D - 1, 1)):
            part = VectorRange(index=0, offset=offset, length=length)
            assert np.array_equal(words.masked(vector, part, masks), whole.masked(right, part, masks)), (cut, part)


@pytest.mark.parametrize("bits", [32, 64])
def test_guarantee_however_a_vector_is_cut_its_mix_is_the_same_bytes(bits):
    """Mixed by itself it is `mix_into`, and noise of its own draws: pieces begin within a block of noise."""
    chosen, sizes = mixed_mechanism().model_copy(update={"ring_bits": bits}), [1, 30_001, 8192, D - 38_194]
    totals = [np.random.default_rng(seed).normal(size=D) for seed in (1, 2, 3)]
    whole, cut = CpuWords(), PiecedWords({torch.device("cpu"): CpuWords(WordThreads(2))})
    sums = [whole.encoded([torch.tensor(total)], chosen, None) for total in totals]
    before = [each.tobytes() for each in sums]
    expected = np.empty(D, ring_dtype(bits))
    mix_into(sums, chosen.coefficients, expected)
    assert len({each.tobytes() for each in (expected, *sums)}) == 4
    NoiseSampler(chosen.sigma, bits).add_to(expected, KEY)
    found = whole.mixed(sums, chosen, KEY)
    assert np.array_equal(found, expected)
    assert [each.tobytes() for each in sums] == before, "the next step mixes them again"
    pieces = [cut.encoded(list(torch.split(torch.tensor(total), sizes)), chosen, None) for total in totals]
    vector = cut.mixed(pieces, chosen, KEY)
    assert cut.leaves(vector, sizes) == whole.leaves(expected, sizes)
    for offset, length in ((0, D), (29_990, 9000)):
        part = VectorRange(index=0, offset=offset, length=length)
        assert np.array_equal(cut.masked(vector, part, [(OTHER, 1)]), whole.masked(expected, part, [(OTHER, 1)]))


@pytest.mark.parametrize("bits", [32, 64])
def test_a_piece_beyond_2_to_31_words_has_the_words_of_its_place(bits):
    """The end of a vector of 2^31 + 5 words, in pieces that meet at 2^31."""
    chosen, start, word = mechanism(ring_bits=bits), 2**31 - 3, bits // 8
    expected = np.empty(8, ring_dtype(bits))
    encode_into(SUM[:8], ring_of(chosen), expected)
    NoiseSampler(chosen.sigma, bits).add_to(expected, KEY, start=start)
    words, pieces = PiecedWords({torch.device("cpu"): CpuWords()}), [torch.tensor(SUM[:3]), torch.tensor(SUM[3:8])]
    vector = words.encoded(pieces, chosen, KEY, start)
    assert pieces == [], "a sum is free once it has words"
    here = VectorRange(index=0, offset=start, length=8)
    assert np.array_equal(words.masked(vector, here, (), start), expected)
    block, before = divmod(start * word, BLOCK_BYTES)
    mask = np.frombuffer(KeyStream(OTHER, block_counter=block).bytes(before + 8 * word)[before:], expected.dtype)
    assert np.array_equal(words.masked(vector, here, [(OTHER, 1)], start), expected + mask)


def test_without_a_key_there_is_no_noise():
    expected = np.empty(D, np.uint32)
    encode_into(SUM, ring_of(mechanism()), expected)
    assert np.array_equal(CpuWords().encoded([torch.tensor(SUM)], mechanism(), None), expected)


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    compiler.take_triton.cache_clear()
    assert isinstance(words_on([torch.device("cpu")], WordThreads(1)), PiecedWords)
    with pytest.raises(ConfigError, match="no_triton"):
        words_on([torch.device("cuda")], WordThreads(1))


def test_kernels_are_known_by_the_source_of_every_module_that_has_one(tmp_path):
    room = Path(compiler.__file__).parent
    for path in room.glob("*.py"):
        shutil.copy(path, tmp_path)
    assert kernel_digest(tmp_path) == kernel_digest()
    found = {kernel_digest()}
    kernels = [path for path in sorted(tmp_path.glob("*.py")) if "triton.language" in path.read_text()]
    assert {"chacha.py", "leaf_kernel.py", "word_kernels.py"} <= {path.name for path in kernels}
    for path in kernels:
        path.write_text(path.read_text() + "# changed\n")
        found.add(kernel_digest(tmp_path))
    assert len(found) == len(kernels) + 1, "each changes the digest"
    (tmp_path / "words.py").write_text("")
    assert kernel_digest(tmp_path) in found, "what launches them does not"
