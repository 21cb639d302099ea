"""The functions that `test_gpu_words.py` runs by name, in processes with ``TRITON_INTERPRET=1``."""

import sys
import tempfile
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.gpu.golden import cases, digest, random_cases, stored, words_of
from benchmarks.gpu.kernels import computed
from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ProtocolError, RefusedError, RunFailedError
from raycloak.workers.device import gpu_words, launches
from raycloak.workers.device import words as words_module
from raycloak.workers.device.gpu_words import GpuWords
from raycloak.workers.device.launches import NoiseTables
from raycloak.workers.device.memory import free_spans, zero_span
from raycloak.workers.device.words import CpuWords, PiecedWords, check_kernels
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.vectors.noise import BLOCK, NoiseSampler
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.streams import MAX_BLOCKS
from raycloak_lab.bench import device_words
from raycloak_lab.bench.device_words import bench_device_words
from tests.mixed import mixed_mechanism
from tests.protocol import RENYI, mechanism, whole_run

HERE = torch.device("cpu")
KEY, OTHER = Secret(bytes(range(32))), Secret(bytes(range(1, 33)))
D = 83


def on_interpreter(proven=True):
    """Return words on the interpreter's device; those that are proven skip the golden words, which take a minute."""
    words = GpuWords(HERE)
    if proven:
        words._prove = lambda *_: None
    return words


def total():
    return torch.from_numpy(np.random.default_rng(3).normal(size=D))


def random_words():
    """Random keys, lengths, starts, grids and deviations from 2^4 to 2^40."""
    for case in random_cases(7, 2, 700):
        made = computed(case, HERE)
        assert not int(made.unfinite) + int(made.unsettled), case
        assert np.array_equal(made.vector.numpy(), words_of(case)), case


def ends_of_streams():
    """The last blocks of a keystream, and none after them."""
    right, last = stored(), [case for case in cases() if case.kind == "masks" and case.start > 1]
    assert len(last) == 2
    for case in last:
        assert digest(computed(case, HERE).vector.numpy()) == right[case.name]
        with pytest.raises(RefusedError, match="keystream_exhausted"):
            computed(replace(case, start=MAX_BLOCKS), HERE)
    tables = NoiseTables.of(NoiseSampler(300.0, 32), HERE)
    with pytest.raises(RefusedError, match="keystream_exhausted"):
        launches.add_noise(torch.zeros(1, dtype=torch.uint32), tables, KEY, 2**37)


def leaves():
    """Lengths at which the padding takes a block of its own, and parts that begin anywhere."""
    words = torch.arange(100, dtype=torch.int32).view(torch.uint32)
    lengths = (1, 13, 14, 15, 16, 29, 30, 32)
    parts = [range(4 * at, 4 * (at + length)) for at, length in enumerate(lengths)]
    raw = words.numpy().tobytes()
    assert launches.leaf_digests(words, parts) == [sha256(raw[part.start : part.stop]).digest() for part in parts]


def vectors():
    """Encoded, added, hashed and masked words of both rings: those of the CPU."""
    for bits in (32, 64):
        chosen, own, cpu = mechanism(ring_bits=bits), on_interpreter(), CpuWords()
        ours, theirs = (words.encoded([total()], chosen, KEY) for words in (own, cpu))
        for words, vector in ((own, ours), (cpu, theirs)):
            words.add(vector, words.encoded([total()], chosen, OTHER))
        assert np.array_equal(ours.numpy(), theirs)
        sizes = (3, 20, 60)
        assert own.leaves(ours, sizes) == cpu.leaves(theirs, sizes)
        masks = [(KEY, 1), (OTHER, -1), (Secret(bytes(32)), 1)]
        for offset, length in ((0, D), (7, 50), (82, 1)):
            part = VectorRange(index=0, offset=offset, length=length)
            assert np.array_equal(own.masked(ours, part, masks), cpu.masked(theirs, part, masks))


def mixes():
    """Mixed sums of both rings, fewer than there are coefficients too: those of the CPU, also of pieces."""
    values = [torch.from_numpy(np.random.default_rng(seed).normal(size=BLOCK + 50)) for seed in (4, 5, 6)]
    for bits in (32, 64):
        # Fewer draws, of which the interpreter computes a block in a second.
        chosen, cpu, own = mixed_mechanism().model_copy(update={"ring_bits": bits, "sigma": 300.0}), CpuWords(), {}
        for count in (1, 3):
            short = [[each[:D].clone()] for each in values[:count]]
            theirs, ours = (
                [words.encoded(each, chosen, None) for each in copies(short)] for words in (cpu, on_interpreter())
            )
            assert [each.tobytes() for each in theirs] == [each.numpy().tobytes() for each in ours]
            right = cpu.mixed(theirs, chosen, KEY)
            assert np.array_equal(on_interpreter().mixed(ours, chosen, KEY).numpy(), right), (bits, count)
            assert [each.tobytes() for each in theirs] == [each.numpy().tobytes() for each in ours], "sums stay"
            own[count] = right
        assert not np.array_equal(own[1], own[3])
    # Pieces that begin within a block of noise.
    right = cpu.mixed([cpu.encoded([each.clone()], chosen, None) for each in values], chosen, KEY)
    cut = PiecedWords({HERE: on_interpreter()})
    pieces = [cut.encoded([part.clone() for part in torch.split(each, [50, BLOCK])], chosen, None) for each in values]
    vector = cut.mixed(pieces, chosen, KEY)
    for offset, length in ((0, 50), (45, 10), (49, 4000), (BLOCK, 50)):
        part = VectorRange(index=0, offset=offset, length=length)
        assert np.array_equal(cut.masked(vector, part, [(OTHER, -1)]), cpu.masked(right, part, [(OTHER, -1)]))


def copies(totals):
    """Return sums that may be zeroed."""
    return [[each.clone() for each in total] for total in totals]


def a_wrong_mix():
    """A mix of a device that rounds or multiplies in another way is found by the block that the CPU mixes too."""
    chosen, words = mixed_mechanism().model_copy(update={"sigma": 300.0}), on_interpreter()
    sums = [words.encoded([total()], chosen, None) for _ in range(3)]
    words.mixed(sums, chosen, KEY)
    with patch.object(gpu_words, "COEFFICIENT_UNIT", 2**15), pytest.raises(ProtocolError, match="not_reproducible"):
        words.mixed(sums, chosen, KEY)


def look():
    """The look without a run passes, and finds a kernel that zeroes nothing."""
    # Fewer draws, of which the interpreter computes a block in a second.
    with patch.object(words_module, "_LOOK_SIGMA", 300.0):
        check_kernels(HERE)
        with (
            patch.object(gpu_words, "zero_span", lambda *_: None),
            pytest.raises(ProtocolError, match="not_reproducible"),
        ):
            check_kernels(HERE)


def pieces():
    """Words of pieces that begin within a block of noise and of a mask."""
    values = torch.from_numpy(np.random.default_rng(4).normal(size=BLOCK + 50))
    for bits in (32, 64):
        # Fewer draws, of which the interpreter computes a block in a second.
        chosen, cpu = mechanism(ring_bits=bits, sigma=300.0), CpuWords()
        right = cpu.encoded([values.clone()], chosen, KEY)
        cut = PiecedWords({HERE: on_interpreter()})
        vector = cut.encoded([each.clone() for each in torch.split(values, [50, BLOCK])], chosen, KEY)
        for offset, length in ((45, 10), (49, 4000)):
            part = VectorRange(index=0, offset=offset, length=length)
            assert np.array_equal(cut.masked(vector, part, [(OTHER, -1)]), cpu.masked(right, part, [(OTHER, -1)]))
        # Few words: the interpreter takes minutes for a whole leaf.
        short, sizes = cut.encoded(list(torch.split(total(), [3, 20, 60])), chosen, KEY), (3, 8, 12, 60)
        assert cut.leaves(short, sizes) == cpu.leaves(cpu.encoded([total()], chosen, KEY), sizes)


def sums_and_keys_are_zeroed():
    given, seen, keys = total(), [], launches._keys
    with patch.object(launches, "_keys", lambda *given: seen.append(keys(*given)) or seen[-1]):
        words = on_interpreter()
        vector = words.encoded([given], mechanism(), KEY)
        words.masked(vector, VectorRange(index=0, offset=0, length=D), [(OTHER, 1)])
    assert not given.any()
    assert len(seen) == 3
    assert not any(each.view(torch.int32).any() for each in seen)


def free_memory_is_zeroed():
    memory = torch.full((5000,), 7, dtype=torch.int32)
    begin = memory.data_ptr()
    states = [("active_allocated", 400), ("inactive", 12_000), ("active_awaiting_free", 100), ("inactive", 400)]
    segment = {"address": begin + 4, "blocks": [{"size": size, "state": state} for state, size in states]}
    for address, size in free_spans([segment]):
        zero_span(address, size, HERE)
    zeros = set(np.flatnonzero(memory.numpy() == 0))
    assert zeros == {*range(101, 3101), *range(3126, 3226)}


def a_sum_that_is_not_finite():
    given = total()
    given[5] = torch.inf
    with pytest.raises(ProtocolError, match="encode_non_finite"):
        on_interpreter().encoded([given], mechanism(), KEY)
    assert not given.any()


def a_list_that_is_too_short():
    """Its words are counted, none is written beyond it, and there is no vector."""
    with patch.object(launches, "room_for", lambda mean, words: 5), pytest.raises(RefusedError, match="proof_bound"):
        on_interpreter().encoded([total()], mechanism(), KEY)


def wrong_kernels():
    """Each is found by the golden words, and without them by the block of the vector that it computed."""
    ring, limits, derive = launches._ring, launches._limits, launches.derive
    encoding = {
        "_limits": lambda *given: limits(*given) * 0.5,
        "derive": lambda key, purpose: derive(key, launches.Purpose.NOISE_INDEX),
    }
    for name, change in encoding.items():
        with patch.object(launches, name, change):
            for proven in (False, True):
                with pytest.raises(ProtocolError, match="not_reproducible"):
                    on_interpreter(proven).encoded([total()], mechanism(), KEY)
    words = on_interpreter()
    vector = words.encoded([total()], mechanism(), KEY)
    added = partial(lambda numbers, *rest: ring([abs(number) for number in numbers], *rest))
    with patch.object(launches, "_ring", added), pytest.raises(ProtocolError, match="not_reproducible"):
        words.masked(vector, VectorRange(index=0, offset=0, length=D), [(KEY, -1)])


def bench():
    """The bench's words on a device are measured where they are the CPU's, and not where they are others."""
    with patch.object(device_words, "NOISE", {1: 200.0}), patch.object(device_words, "words_on", on_interpreter_of):
        found = bench_device_words(HERE, D, 1, peers=2, rounds=1)
        assert set(found.phases) == {"encode", "encode, noise of 1 draws", "add", "tag", "masks", "to the host"}
        assert min(each.seconds for each in found.phases.values()) > 0
        digests = launches.leaf_digests
        with (
            patch.object(launches, "leaf_digests", lambda *given: digests(*given)[::-1]),
            pytest.raises(RunFailedError, match="words_differ: 'tag'"),
        ):
            bench_device_words(HERE, D, 1, peers=2, rounds=1)


def on_interpreter_of(device, threads):
    return on_interpreter()


def whole():
    """A whole run whose vectors are computed by the kernels has the digests that it has on a CPU."""
    fields = {"num_workers": 2, "virtual_workers": 2, "steps": 1, "dp_config": RENYI}
    with tempfile.TemporaryDirectory() as folder:
        usual = whole_run(Path(folder) / "cpu", **fields)
        usual.train()
        made = []

        def interpreted(device, threads):
            made.append(on_interpreter(proven=bool(made)))
            return made[-1]

        with patch("raycloak.workers.workload.words_on", interpreted):
            run = whole_run(Path(folder) / "gpu", **fields)
            run.train()
        assert len(made) >= 2
        assert all(words._proven for words in made), "they computed vectors"
        assert run.digests == usual.digests
        assert len(usual.digests) == 1


if __name__ == "__main__":
    pin_numerics()
    globals()[sys.argv[1]]()
