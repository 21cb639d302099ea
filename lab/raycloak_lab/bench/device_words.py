"""Measures a worker's words on a GPU beside those on its CPU: encoding, noise, sums, tag, masks, way to the host.

Both sides do all that a worker does: a GPU compares a block of each vector with the CPU, and zeroes what it used.
A figure is printed only for words that have the CPU's bytes.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.device.words import CpuWords, Words, words_on
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.ring import RingBits, RingVector
from raycloak.workers.vectors.threads import WordThreads
from raycloak_lab.bench.gpu_use import device_name
from raycloak_lab.bench.words import NOISE

_KEY: Final = Secret(bytes(32))
_SUM_BYTES: Final = 8
"""Of a clipped sum, which is float64."""


@dataclass(frozen=True, slots=True)
class DevicePhase:
    """The times of one kind of words, medians in seconds.

    Attributes:
        cpu_seconds: on the CPU, by the threads of the bench. seconds: on the device.
        of_copy: bytes that it reads and writes, a second, over those of a copy on the device; None of what goes over
            the link to the host.
    """

    cpu_seconds: float
    seconds: float
    of_copy: float | None


@dataclass(frozen=True, slots=True)
class DeviceWordsBench:
    """The times of words on a device.

    Attributes:
        device: its model.
        params, bits, peers, threads, rounds: the measured case; ``peers`` is the number of masks, and ``threads`` those
            of the CPU.
        copy_bytes_per_second: read and written by a copy of a vector on the device.
        phases: by name.
    """

    device: str
    params: int
    bits: int
    peers: int
    threads: int
    rounds: int
    copy_bytes_per_second: float
    phases: dict[str, DevicePhase]


def bench_device_words(
    device: torch.device, params: int, threads: int, bits: RingBits = 32, peers: int = 3, rounds: int = 7
) -> DeviceWordsBench:
    """Compare the bytes on ``device`` with the CPU's, then time both in turns.

    Raises:
        ConfigError: ``bench_input`` for no parameter, thread, peer or round; as `words_on`.
        RunFailedError: ``words_differ`` if a byte is not the CPU's.
        ProtocolError: ``not_reproducible`` if the device finds so itself.
    """
    if min(params, threads, peers, rounds) < 1:
        raise ConfigError("bench_input", "the bench needs at least 1 parameter, thread, peer and round.", "Raise it.")
    pool = WordThreads(threads)
    sides = (
        _Side(CpuWords(pool), torch.device("cpu"), params, bits, peers),
        _Side(words_on([device], pool), device, params, bits, peers),
    )
    for name in sides[0].works:
        if len({side.bytes_of(name) for side in sides}) > 1:
            raise RunFailedError(
                "words_differ",
                f"'{name}' has other bytes on {device_name(device)} than on the CPU.",
                "A benchmark of wrong words is none: report this as a bug.",
            )
    turns = [tuple(side.seconds() for side in sides) for _ in range(rounds)]
    phases = {
        name: tuple(statistics.median(turn[side][name] for turn in turns) for side in (0, 1)) for name in turns[0][0]
    }
    word = bits // 8
    copied = 2 * params * word / phases.pop("copy")[1]
    moved = {"masks": 2 * word, "add": 3 * word, "tag": word}
    moved |= {name: _SUM_BYTES + word for name in phases if name.startswith("encode")}
    return DeviceWordsBench(
        device=device_name(device),
        params=params,
        bits=bits,
        peers=peers,
        threads=threads,
        rounds=rounds,
        copy_bytes_per_second=copied,
        phases={
            name: DevicePhase(cpu, own, moved[name] * params / own / copied if name in moved else None)
            for name, (cpu, own) in phases.items()
        },
    )


class _Side:
    """The vectors of one worker on one device.

    Attributes:
        works: by name, what is done with them; each returns the words that it made, or the tag.
    """

    def __init__(self, words: Words[Any], device: torch.device, params: int, bits: RingBits, peers: int) -> None:
        self._words = words
        self._sum = torch.from_numpy(np.random.default_rng(0).standard_normal(params)).to(device)
        usual = mechanism_of_rows(params, 1)
        plain = usual.model_copy(update={"ring_bits": bits, "gamma_log2": -16, "clamp": 64.0})
        self._vector = words.encoded([self._sum.clone()], plain, None)
        self._target = words.encoded([self._sum.clone()], plain, None)
        masks = [(Secret(bytes([index % 256]) * 32), 1 if index % 2 else -1) for index in range(peers)]
        # The largest tensor is a third, as GPT-2's embedding is; a dozen others have the rest.
        sizes = [params - 12 * (params * 2 // 36), *[params * 2 // 36] * 12]
        self._whole = VectorRange(index=0, offset=0, length=params)

        def encode(mechanism: Mechanism, noise: Secret | None) -> Callable[[], Any]:
            def work() -> Any:
                total = self._sum.clone()
                words.clock.start()
                words.clock.begin("words")
                return words.encoded([total], mechanism, noise)

            return work

        def add() -> Any:
            words.add(self._target, self._vector)
            return self._target

        self.works: dict[str, Callable[[], Any]] = {
            "copy": lambda: _copied(self._target, self._vector),
            "encode": encode(plain, None),
            **{
                f"encode, noise of {draws} draws": encode(plain.model_copy(update={"sigma": sigma}), _KEY)
                for draws, sigma in NOISE.items()
            },
            "add": add,
            "tag": lambda: words.leaves(self._vector, [size for size in sizes if size]),
            "masks": lambda: words.masked(self._vector, self._whole, masks),
        }

    def bytes_of(self, name: str) -> bytes:
        """Return a digest of what a work makes."""
        made = self.works[name]()
        if name == "tag":
            return digest(repr(made).encode())
        # Without a mask a vector leaves its device in clear, whatever holds it there.
        words: RingVector = made if name == "masks" else self._words.masked(made, self._whole, ())
        return digest(words.tobytes())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each work by its name, and of the way to the host."""
        found, clock = dict[str, float](), self._words.clock
        for name, work in self.works.items():
            clock.start()
            # An encoding starts the clock again, once it has a sum to encode.
            clock.begin("masks" if name == "masks" else "words")
            work()
            spent = clock.stop()
            found[name] = spent.words_seconds + spent.masks_seconds
            if name == "masks":
                found["to the host"] = spent.out_seconds
        return found


def _copied(target: Any, source: Any) -> Any:
    if isinstance(target, Tensor):
        return target.copy_(source)
    if isinstance(target, list):
        # A CPU's vector is a list of pieces.
        for to, each in zip(target, source, strict=True):
            _copied(to.vector, each.vector)
    else:
        np.copyto(target, source)
    return target
