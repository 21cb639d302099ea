"""The words of a worker's vectors on the device that computes them, from a clipped sum to a masked range.

CpuWords     `raycloak.workers.vectors` over threads; what it gives defines the bytes
GpuWords     the same bytes by Triton kernels, in a GPU's memory (`raycloak.workers.device.gpu_words`)
PiecedWords  the same bytes by the words of several devices, each for whole tensors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.keys import Secret
from raycloak.workers.device.compiler import take_triton
from raycloak.workers.device.step_clock import StepClock
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.masks import masked_sum
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.ring import RingBits, RingSpec, RingVector, encode_into, mix_into, ring_dtype
from raycloak.workers.vectors.threads import ONE_THREAD, WordThreads
from raycloak.workers.vectors.vector_tag import TensorLeaves, tensor_leaves

if TYPE_CHECKING:
    from raycloak.workers.device.gpu_words import GpuWords

V = TypeVar("V")
_LOOK_GRID: Final = -16, 64.0
"""Binary exponent of the grid, and clamp, of a look at kernels without a run: words that both rings hold."""
_LOOK_SIGMA: Final = 3.0e6
"""Its noise: three base draws, as runs of usual sizes take."""


class Words(Protocol[V]):
    """Computes words of vectors, or of pieces of vectors. Those, of a type V, are opaque to everybody else.

    Guarantee: words, digests and masked ranges are functions of their inputs alone, the same bytes on every device.
    """

    @property
    def clock(self) -> StepClock:
        """The clock of the steps that the device works on."""
        ...

    def encoded(self, total: list[Tensor], mechanism: Mechanism, noise: Secret | None, start: int = 0) -> V:
        """Return a sum's words, clamped and rounded to the mechanism's grid, with the draws of ``noise`` added.

        Args:
            total: the pieces of the sum, float64; words of one device take one. Each is taken out of the list once
                its memory is the vector's, or is free.
            noise: the noise key of one vector; None adds none.
            start: the first draw: of a piece, its first coordinate in the vector.

        Raises:
            ProtocolError: ``encode_non_finite``; ``not_reproducible`` if the device gives other words than a CPU.
        """
        ...

    def mixed(self, sums: Sequence[V], mechanism: Mechanism, noise: Secret, start: int = 0) -> V:
        """Return the mix of encoded sums by the mechanism's coefficients, with the draws of ``noise`` added.

        Args:
            sums: words of :meth:`encoded` without noise, of the newest step first; they stay as they are.
            start: as of :meth:`encoded`.

        Raises:
            ProtocolError: ``not_reproducible``, as :meth:`encoded`.
        """
        ...

    def leaves(self, vector: V, sizes: Sequence[int]) -> list[TensorLeaves]:
        """Hash a vector for its tag; ``sizes`` are the words of each tensor, in order, d together."""
        ...

    def add(self, total: V, vector: V) -> None:
        """Add ``vector`` to ``total`` in place, in the ring."""
        ...

    def masked(self, vector: V, part: VectorRange, masks: Sequence[tuple[Secret, int]], start: int = 0) -> RingVector:
        """Return one range with signed masks added, uint32 or uint64 [part.length] in the host's memory.

        Args:
            start: the first word of each mask: of a piece, its first one in the range.
            masks: (key, +1 or -1), as of `raycloak.workers.vectors.masks.masked_sum`. Without any, the range leaves in
                clear.

        Raises:
            ProtocolError: ``not_reproducible``, as :meth:`encoded`.
        """
        ...


class CpuWords:
    """Words in the host's memory.

    Args:
        threads: that share the blocks.
    """

    def __init__(self, threads: WordThreads = ONE_THREAD) -> None:
        self._threads = threads
        self.clock = StepClock(torch.device("cpu"))

    def encoded(self, total: list[Tensor], mechanism: Mechanism, noise: Secret | None, start: int = 0) -> RingVector:
        """See :meth:`Words.encoded`."""
        (whole,) = total
        values: Any = whole.numpy()
        dtype = ring_dtype(mechanism.ring_bits)
        # In the sum's own memory where the words fit it: of a large model, both would be most of what a worker takes.
        vector = values.view(dtype) if dtype.itemsize == values.itemsize else np.empty(len(values), dtype)
        encode_into(values, ring_of(mechanism), vector, self._threads)
        # After the rounding: noise is an integer, so adding it in the ring is exact.
        if noise is not None:
            NoiseSampler(mechanism.sigma, mechanism.ring_bits).add_to(vector, noise, start=start, threads=self._threads)
        return vector

    def mixed(self, sums: Sequence[RingVector], mechanism: Mechanism, noise: Secret, start: int = 0) -> RingVector:
        """See :meth:`Words.mixed`."""
        vector = np.empty_like(sums[0])
        mix_into(sums, mechanism.coefficients, vector, self._threads)
        NoiseSampler(mechanism.sigma, mechanism.ring_bits).add_to(vector, noise, start=start, threads=self._threads)
        return vector

    def leaves(self, vector: RingVector, sizes: Sequence[int]) -> list[TensorLeaves]:
        """See :meth:`Words.leaves`."""
        return tensor_leaves(vector, sizes, self._threads)

    def add(self, total: RingVector, vector: RingVector) -> None:
        """See :meth:`Words.add`."""
        masked_sum([total, vector], (), total, self._threads)

    def masked(
        self, vector: RingVector, part: VectorRange, masks: Sequence[tuple[Secret, int]], start: int = 0
    ) -> RingVector:
        """See :meth:`Words.masked`."""
        out = np.empty(part.length, vector.dtype)
        masked_sum([vector[part.offset : part.offset + part.length]], masks, out, self._threads, start=start)
        return out


@dataclass(frozen=True, slots=True)
class _TensorWords:
    """Words of whole tensors.

    Attributes:
        words: that they are of.
        vector: the piece, opaque.
        place: its coordinates in the vector.
    """

    words: Words[Any]
    vector: Any
    place: range


class PiecedWords:
    """Words of vectors that are cut into pieces of whole tensors, each on its device.

    Guarantee: however a vector is cut, its words, digests and masked ranges are the same bytes.

    Args:
        words: of each device.
    """

    def __init__(self, words: Mapping[torch.device, Words[Any]]) -> None:
        self._words = words
        self.clock = StepClock(*words)

    def encoded(
        self, total: list[Tensor], mechanism: Mechanism, noise: Secret | None, start: int = 0
    ) -> list[_TensorWords]:
        """See :meth:`Words.encoded`."""
        pieces = list[_TensorWords]()
        while total:
            each = total.pop(0)
            # A measurement is summed in the host's memory.
            words = self._words.get(each.device) or next(iter(self._words.values()))
            length = len(each)
            pieces.append(
                _TensorWords(words, words.encoded([each], mechanism, noise, start), range(start, start + length))
            )
            start += length
        return pieces

    def mixed(
        self, sums: Sequence[list[_TensorWords]], mechanism: Mechanism, noise: Secret, start: int = 0
    ) -> list[_TensorWords]:
        """See :meth:`Words.mixed`."""
        found = list[_TensorWords]()
        for pieces in zip(*sums, strict=True):
            words, place = pieces[0].words, pieces[0].place
            own = [each.vector for each in pieces]
            found.append(_TensorWords(words, words.mixed(own, mechanism, noise, start + place.start), place))
        return found

    def leaves(self, vector: list[_TensorWords], sizes: Sequence[int]) -> list[TensorLeaves]:
        """See :meth:`Words.leaves`."""
        ends, found = list(accumulate(sizes)), list[TensorLeaves]()
        for piece in vector:
            own = [size for size, end in zip(sizes, ends, strict=True) if end - 1 in piece.place]
            found += piece.words.leaves(piece.vector, own)
        return found

    def add(self, total: list[_TensorWords], vector: list[_TensorWords]) -> None:
        """See :meth:`Words.add`."""
        for whole, piece in zip(total, vector, strict=True):
            whole.words.add(whole.vector, piece.vector)

    def masked(
        self, vector: list[_TensorWords], part: VectorRange, masks: Sequence[tuple[Secret, int]], start: int = 0
    ) -> RingVector:
        """See :meth:`Words.masked`."""
        out: NDArray[Any] | None = None
        for piece in vector:
            first = max(part.offset, piece.place.start)
            last = min(part.offset + part.length, piece.place.stop)
            if first < last:
                here = VectorRange(index=part.index, offset=first - piece.place.start, length=last - first)
                masked = piece.words.masked(piece.vector, here, masks, start + first - part.offset)
                if here.length == part.length:
                    return masked
                out = np.empty(part.length, masked.dtype) if out is None else out
                np.copyto(out[first - part.offset : last - part.offset], masked)
        assert out is not None, "a range has words"
        return out


def ring_of(mechanism: Mechanism) -> RingSpec:
    """Return the terms of encoding that a mechanism states."""
    return RingSpec(mechanism.ring_bits, mechanism.gamma_log2, mechanism.clamp)


def words_on(devices: Sequence[torch.device], threads: WordThreads) -> Words[Any]:
    """Return the words of vectors whose sums are on ``devices``.

    Raises:
        ConfigError: ``no_triton`` for a GPU without Triton, which compiles its kernels.
    """
    words: dict[torch.device, Words[Any]] = {
        device: CpuWords(threads) if device.type == "cpu" else _on_gpu(device) for device in devices
    }
    # A GPU's memory holds a sum as one piece.
    return words[devices[0]] if [device.type for device in devices] == ["cuda"] else PiecedWords(words)


def check_kernels(device: torch.device) -> None:
    """Compare public words by every kernel with the CPU's, in both rings, as a worker does before its first vector.

    Args:
        device: a GPU, the current one of this thread.

    Raises:
        ConfigError: ``no_triton``.
        ProtocolError: ``not_reproducible``.
    """
    words = _on_gpu(device)
    for bits in get_args(RingBits):
        words.prove(RingSpec(bits, *_LOOK_GRID), _LOOK_SIGMA)


def kernel_digest(folder: Path = Path(__file__).parent) -> bytes:
    """Return the digest of the source of all modules in ``folder`` that hold a kernel of Triton."""
    sources = {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}
    # A decorator at the beginning of a line: this module names it too.
    held = ((name, source) for name, source in sources.items() if b"\n@triton.jit" in source)
    return digest(length_prefixed("raycloak/kernels/v1", *(part for each in held for part in each)))


def _on_gpu(device: torch.device) -> "GpuWords":
    take_triton()
    # Imported here: it needs Triton.
    from raycloak.workers.device.gpu_words import GpuWords

    return GpuWords(device)
