"""The words of a worker's vectors on the device that computes them, from a clipped sum to a masked range.

CpuWords   `raycloak.workers.vectors` over threads; what it gives defines the bytes
GpuWords   the same bytes by Triton kernels, in a GPU's memory (`raycloak.workers.device.gpu_words`)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.keys import Secret
from raycloak.workers.device.compiler import take_triton
from raycloak.workers.device.step_clock import StepClock
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.masks import masked_sum
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.ring import RingBits, RingSpec, RingVector, encode_into, ring_dtype
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
    """Computes words on one device. Its vectors, of a type V, are opaque to everybody else.

    Guarantee: words, digests and masked ranges are functions of their inputs alone, the same bytes on every device.
    """

    @property
    def clock(self) -> StepClock:
        """The clock of the steps that the device works on."""
        ...

    def encoded(self, total: Tensor, mechanism: Mechanism, noise: Secret | None) -> V:
        """Return a sum's words, clamped and rounded to the mechanism's grid, with the draws of ``noise`` added.

        Args:
            total: float64 [d]; its memory may become the vector's, or is zeroed.
            noise: the noise key of one vector; None adds none.

        Raises:
            ProtocolError: ``encode_non_finite``; ``not_reproducible`` if the device gives other words than a CPU.
        """
        ...

    def leaves(self, vector: V, sizes: Sequence[int]) -> list[TensorLeaves]:
        """Hash a vector for its tag; ``sizes`` are the words of each tensor, in order, d together."""
        ...

    def add(self, total: V, vector: V) -> None:
        """Add ``vector`` to ``total`` in place, in the ring."""
        ...

    def masked(self, vector: V, part: VectorRange, masks: Sequence[tuple[Secret, int]]) -> RingVector:
        """Return one range with signed masks added, uint32 or uint64 [part.length] in the host's memory.

        Args:
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

    def encoded(self, total: Tensor, mechanism: Mechanism, noise: Secret | None) -> RingVector:
        """See :meth:`Words.encoded`."""
        values: Any = total.numpy()
        dtype = ring_dtype(mechanism.ring_bits)
        # In the sum's own memory where the words fit it: of a large model, both would be most of what a worker takes.
        vector = values.view(dtype) if dtype.itemsize == values.itemsize else np.empty(len(values), dtype)
        encode_into(values, ring_of(mechanism), vector, self._threads)
        # After the rounding: noise is an integer, so adding it in the ring is exact.
        if noise is not None:
            NoiseSampler(mechanism.sigma, mechanism.ring_bits).add_to(vector, noise, threads=self._threads)
        return vector

    def leaves(self, vector: RingVector, sizes: Sequence[int]) -> list[TensorLeaves]:
        """See :meth:`Words.leaves`."""
        return tensor_leaves(vector, sizes, self._threads)

    def add(self, total: RingVector, vector: RingVector) -> None:
        """See :meth:`Words.add`."""
        masked_sum([total, vector], (), total, self._threads)

    def masked(self, vector: RingVector, part: VectorRange, masks: Sequence[tuple[Secret, int]]) -> RingVector:
        """See :meth:`Words.masked`."""
        out = np.empty(part.length, vector.dtype)
        masked_sum([vector[part.offset : part.offset + part.length]], masks, out, self._threads)
        return out


def ring_of(mechanism: Mechanism) -> RingSpec:
    """Return the terms of encoding that a mechanism states."""
    return RingSpec(mechanism.ring_bits, mechanism.gamma_log2, mechanism.clamp)


def words_on(device: torch.device, threads: WordThreads) -> Words[Any]:
    """Return the words of vectors whose sums are on ``device``.

    Raises:
        ConfigError: ``no_triton`` for a GPU without Triton, which compiles its kernels.
    """
    return CpuWords(threads) if device.type == "cpu" else _on_gpu(device)


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
