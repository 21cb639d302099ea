"""Measures the words of a step on one thread and on several: encoding, noise, masks, tags, digests, and their sum.

A figure is printed only for words that have the same bytes on one thread and on several.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Secret
from raycloak.coordinator.aggregation.aggregator import decoded_average
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.terms.model_digest import tensor_digests
from raycloak.workers.vectors.masks import masked_sum
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.payload import tag_payload
from raycloak.workers.vectors.ring import RingBits, RingSpec, encode_into, ring_dtype
from raycloak.workers.vectors.threads import ONE_THREAD, PIECE_WORDS, WordThreads, blocks_of
from raycloak.workers.vectors.vector_tag import tensor_leaves, vector_tag

NOISE = {1: 200.0, 2: 2.0e4, 3: 3.0e6, 4: 3.0e8}
"""A deviation in ring units for each number of base draws."""
TOGETHER = ("encode", "noise, 3 draws", "masks", "vector tag", "payload tag", "parameter digests")
"""The phases that a worker does once in each step, if it hosts one virtual worker."""
_HASHED = bytes(2**24)
_KEY = Secret(bytes(32))

Phase = Callable[[WordThreads], object]


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The times of one kind of words, medians in seconds.

    Attributes:
        alone_seconds: on one thread. seconds: on several.
        alone_processor_seconds, processor_seconds: of all threads of the process, in the same turns.
        of_linear: ``alone_seconds`` over ``seconds``, divided by the threads; the median over the rounds.
        over_copy: ``seconds`` over those of a copy of the vector on as many threads; the median over the rounds.
    """

    alone_seconds: float
    seconds: float
    alone_processor_seconds: float
    processor_seconds: float
    of_linear: float
    over_copy: float


@dataclass(frozen=True, slots=True)
class WordsBench:
    """The times of words by phase, and the machine that they were taken on.

    Attributes:
        params, bits, peers, threads, rounds: the measured case; ``peers`` is the number of masks, and of vectors in
            the aggregator's sum.
        cpus: that the process may run on.
        load: mean number of runnable processes of the machine in the minute before, others' included.
        cores_of_linear: what as many threads reach on this machine, in the same rounds, if they share nothing: each
            hashes 16 MiB in one call. Below 1, other work or shared cores take the rest.
        together_of_linear: of all phases in `TOGETHER`.
        phases: by name; of the copy too, which the others are compared with.
    """

    params: int
    bits: int
    peers: int
    threads: int
    rounds: int
    cpus: int
    load: float
    cores_of_linear: float
    together_of_linear: float
    phases: dict[str, PhaseFigures]


def bench_words(params: int, threads: int, bits: RingBits = 32, peers: int = 3, rounds: int = 7) -> WordsBench:
    """Compare the bytes on one thread and on ``threads``, then time both in turns.

    Raises:
        ConfigError: ``bench_input`` for fewer than 13 parameters, two threads, one peer or one round.
        RunFailedError: ``words_differ`` if a byte depends on the number of threads.
    """
    if params < 13 or threads < 2 or peers < 1 or rounds < 1:
        raise ConfigError(
            "bench_input",
            "the bench needs at least 13 parameters, 2 threads, 1 peer and 1 round.",
            "Raise --params, --threads or --peers.",
        )
    load, several, work = os.getloadavg()[0], WordThreads(threads), _Words(params, bits, peers)
    for name, phase in work.phases.items():
        if work.bytes_of(phase, ONE_THREAD) != work.bytes_of(phase, several):
            raise RunFailedError(
                "words_differ",
                f"'{name}' has other bytes on {threads} threads than on one.",
                "A benchmark of wrong words is none: report this as a bug.",
            )
    turns: dict[str, list[tuple[_Times, _Times]]] = {name: [] for name in work.phases}
    cores = []
    for number in range(rounds):
        cores.append(_seconds(ONE_THREAD, _hash_alone).wall / _seconds(several, _hash_alone).wall)
        for name, phase in work.phases.items():
            # Each begins every other time, so that neither always has the warmer caches.
            order = (ONE_THREAD, several) if number % 2 else (several, ONE_THREAD)
            first, second = (_seconds(each, phase) for each in order)
            turns[name].append((first, second) if number % 2 else (second, first))
    copies = [shared.wall for _, shared in turns["copy"]]
    together = [
        tuple(sum(turns[name][number][side].wall for name in TOGETHER) for side in (0, 1)) for number in range(rounds)
    ]
    return WordsBench(
        params=params,
        bits=bits,
        peers=peers,
        threads=threads,
        rounds=rounds,
        cpus=len(os.sched_getaffinity(0)),
        load=load,
        cores_of_linear=statistics.median(cores),
        together_of_linear=statistics.median(alone / shared for alone, shared in together) / threads,
        phases={name: _figures(each, copies, threads) for name, each in turns.items()},
    )


class _Words:
    """The vectors of one worker, and what is done with them.

    Attributes:
        phases: by name; each works on the vectors with the threads that it is given.
    """

    def __init__(self, params: int, bits: RingBits, peers: int) -> None:
        random = np.random.default_rng(0)
        values = random.standard_normal(params, np.float32)
        self._vector = vector = np.zeros(params, ring_dtype(bits))
        self._sent = [random.integers(0, 2**bits, params, vector.dtype.type) for _ in range(peers)]
        # The largest tensor is a third, as GPT-2's embedding is; a dozen others have the rest.
        sizes = [params - 12 * (params * 2 // 36), *[params * 2 // 36] * 12]
        tensors = [TensorSpec(name=f"tensor-{index}", shape=(size,)) for index, size in enumerate(sizes) if size]
        spec = RingSpec(bits, -16, 64.0)
        masks = [(Secret(bytes([index % 256]) * 32), 1 if index % 2 else -1) for index in range(peers)]
        samplers = {draws: NoiseSampler(sigma, bits) for draws, sigma in NOISE.items()}
        assert all(sampler.decomposition.draws == draws for draws, sampler in samplers.items()), "as the names say"

        def noise_of(sampler: NoiseSampler) -> Phase:
            return lambda threads: sampler.add_to(vector, _KEY, threads=threads)

        self.phases: dict[str, Phase] = {
            "copy": lambda threads: _copy(self._sent[0], vector, threads),
            "encode": lambda threads: encode_into(values, spec, vector, threads),
            **{f"noise, {draws} draws": noise_of(sampler) for draws, sampler in samplers.items()},
            "masks": lambda threads: masked_sum([vector], masks, vector, threads),
            "vector tag": lambda threads: vector_tag(
                _KEY, bits, tensor_leaves(vector, [t.size for t in tensors], threads)
            ),
            # One Poly1305 over a whole range: nothing of it can be shared.
            "payload tag": lambda threads: tag_payload(_KEY, vector),
            "parameter digests": lambda threads: tensor_digests(values, tensors, threads),
            "aggregator's average": lambda threads: decoded_average(self._sent, bits, -16, 64.0, np.float32, threads),
        }

    def bytes_of(self, phase: Phase, threads: WordThreads) -> bytes:
        """Return a digest of what a phase makes of a vector of ones, and of what it returns."""
        self._vector.fill(1)
        made = phase(threads)
        returned = made.tobytes() if isinstance(made, np.ndarray) else repr(made).encode()
        return digest(self._vector.tobytes()) + digest(returned)


def _copy(source: np.ndarray, target: np.ndarray, threads: WordThreads) -> None:
    def copy(pieces: Iterator[range]) -> None:
        for place in blocks_of(pieces, PIECE_WORDS):
            np.copyto(target[place], source[place])

    threads.share(threads.cut(len(source), PIECE_WORDS), copy)


def _hash_alone(threads: WordThreads) -> None:
    threads.share(range(threads.count), lambda pieces: [digest(_HASHED) for _ in pieces].clear())


@dataclass(frozen=True, slots=True)
class _Times:
    wall: float
    processor: float


def _seconds(threads: WordThreads, phase: Phase) -> _Times:
    wall, processor = time.perf_counter(), time.process_time()
    phase(threads)
    return _Times(time.perf_counter() - wall, time.process_time() - processor)


def _figures(turns: list[tuple[_Times, _Times]], copies: list[float], threads: int) -> PhaseFigures:
    median = statistics.median
    return PhaseFigures(
        alone_seconds=median(alone.wall for alone, _ in turns),
        seconds=median(shared.wall for _, shared in turns),
        alone_processor_seconds=median(alone.processor for alone, _ in turns),
        processor_seconds=median(shared.processor for _, shared in turns),
        of_linear=median(alone.wall / shared.wall for alone, shared in turns) / threads,
        over_copy=median(shared.wall / copy for (_, shared), copy in zip(turns, copies, strict=True)),
    )
