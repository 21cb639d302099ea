"""One virtual worker's vector: a function only of its keys, its slice, the step and the parameters.

Host, attempt, roster and arrival order do not enter it, so a vector recomputed elsewhere is the same vector. This makes
recovery safe: two attempts of a step decode to one value.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycloak.attestation.core.keys import Purpose, derive
from raycloak.attestation.core.roster import Query
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.device.words import CpuWords, Words
from raycloak.workers.gradients.clipping import MicroBatch, micro_batches
from raycloak.workers.gradients.sum_engines import SumEngine
from raycloak.workers.inputs.augmentation import WORDS, Versions
from raycloak.workers.inputs.datasets import Batch, Dataset, slice_digest, slice_ids
from raycloak.workers.inputs.sent_rows import SentRows, SentSlots
from raycloak.workers.inputs.units import Units
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.public_sums import PublicSums
from raycloak.workers.vectors.sampling import draw_ids, uniform_words, unit_places
from raycloak.workers.vectors.vector_tag import vector_tag

_KeyContext = tuple[Query, int, bytes, bytes, bytes]
"""Query, step, step input, slice digest and data root: what the keys of a step's streams and tags depend on."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The units of one virtual worker: ascending ids and the digest of their rows' bytes.

    For data that a client sends, ids are places of a step, and there is no example to digest.
    """

    ids: np.ndarray
    digest: bytes


@dataclass(frozen=True, slots=True)
class OwnSum:
    """A clamped and encoded sum of one step, before it is mixed and has noise; it never leaves its worker.

    Attributes:
        values: words of the computer's, opaque to all but these.
    """

    values: Any
    tag: bytes


@dataclass(frozen=True, slots=True)
class EncodedVector:
    """A clamped, encoded and noised sum in the ring, with its keyed tag.

    Attributes:
        values: a vector of the computer's words, opaque to all but these.
        counted: exact sums over its examples; None where the mechanism is private, and of measurements.
        own: its step's part of it; None where sums are not mixed.
    """

    values: Any
    tag: bytes
    counted: PublicSums | None = None
    own: OwnSum | None = None


class VirtualWorkerComputer:
    """Computes vectors of any hosted virtual worker, for one mechanism.

    Args:
        mechanism: how examples are sampled, clipped, encoded and noised.
        engine: computes what an example contributes, and clips it.
        dataset: all examples that this process may open.
        spare: synthetic examples for rows that no example was drawn for; see
            `raycloak.workers.gradients.spare_rows`.
        units: of the dataset's examples; None where each is a unit of its own.
        versions: that a step computes of each row; None where it computes the row itself.
        slices: by virtual worker, the slices whose digest is known; computers on one dataset may share them.
        words: compute the vectors; a CPU's, of one thread, by default.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        engine: SumEngine,
        dataset: Dataset,
        spare: Batch,
        units: Units | None = None,
        versions: Versions | None = None,
        slices: dict[int, Slice] | None = None,
        words: Words[Any] | None = None,
    ) -> None:
        require_bound(units is not None or mechanism.rows_chosen == 1, "an example alone is one row")
        copies = 1 if versions is None else versions.copies
        require_bound(copies == mechanism.copies, "the mechanism counts the versions of a row")
        self._mechanism = mechanism
        self._engine = engine
        self._dataset = dataset
        self._spare = spare
        self._units = units
        self._versions = versions
        self._slices = {} if slices is None else slices
        self._words = CpuWords() if words is None else words

    def beside(self, mechanism: Mechanism, engine: SumEngine) -> "VirtualWorkerComputer":
        """Return a computer for a measurement on the same slices, which are read for their digests only once.

        It counts rows as they are.
        """
        of_data = self._dataset, self._spare, self._units
        return VirtualWorkerComputer(mechanism, engine, *of_data, slices=self._slices, words=self._words)

    def slice(self, v: int) -> Slice:
        """Return the slice of virtual worker ``v``; its digest reads every example once."""
        if v not in self._slices:
            ids = slice_ids(v, self._mechanism.virtual_workers, self._mechanism.num_examples)
            registered = ids[:0] if isinstance(self._dataset, SentSlots) else ids
            self._slices[v] = Slice(ids, slice_digest(self._dataset, registered, self._units))
        return self._slices[v]

    def vector(
        self,
        v: int,
        keys: VirtualWorkerKeys,
        step: int,
        step_input: bytes,
        data_root: bytes,
        parameters: np.ndarray,
        sent: SentRows | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        past: Sequence[OwnSum] = (),
    ) -> EncodedVector:
        """Sample, clip, encode and noise virtual worker ``v``'s contribution to ``step``.

        Guarantee: the result is the same bytes for the same (keys, slice bytes, step, input, data root) in one
        numerics class. Noise and sampling keys depend on all of them and on the query. So another model, another query
        of the same step, other data in any slice of the run, or other batches for the step never meet this noise.

        Args:
            step_input: see `raycloak.workers.terms.step_input`.
            data_root: of the run, as its receipt states it; see `raycloak.workers.terms.receipt.data_root`.
            parameters: float32[d], whose digest is in ``step_input``.
            sent: the examples that a client sent this virtual worker for the step, all of which are used; None exactly
                where the run's data is registered.
            is_cancelled: is asked before every micro-batch.
            past: sums of the steps before, the newest first, that the mechanism mixes into this one.

        Returns:
            d words of the ring, owned by the caller.

        Raises:
            ProtocolError: ``cancelled``, and no further micro-batch is computed.
        """
        mechanism = self._mechanism
        context = self._context(v, step, step_input, data_root)
        noise = derive(keys.stream, Purpose.NOISE, *context) if mechanism.private else None
        if mechanism.bands == 1:
            clipped_sum = self._clipped_sum(v, keys, context, parameters, sent, is_cancelled)
            vector, own = self._words.encoded(clipped_sum, mechanism, noise), None
        else:
            assert noise is not None, "only a private mechanism mixes sums"
            own = self.own_sum(v, keys, step, step_input, data_root, parameters, is_cancelled)
            vector = self._words.mixed([own.values, *(each.values for each in past)], mechanism, noise)
        return EncodedVector(vector, self._tag(keys, Purpose.VECTOR_TAG, context, vector), self._engine.counted, own)

    def own_sum(
        self,
        v: int,
        keys: VirtualWorkerKeys,
        step: int,
        step_input: bytes,
        data_root: bytes,
        parameters: np.ndarray,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> OwnSum:
        """Sample, clip and encode virtual worker ``v``'s examples of ``step``, without noise; as :meth:`vector`."""
        context = self._context(v, step, step_input, data_root)
        clipped_sum = self._clipped_sum(v, keys, context, parameters, None, is_cancelled)
        values = self._words.encoded(clipped_sum, self._mechanism, None)
        return OwnSum(values, self._tag(keys, Purpose.SUM_TAG, context, values))

    def _context(self, v: int, step: int, step_input: bytes, data_root: bytes) -> _KeyContext:
        return self._mechanism.query, step, step_input, self.slice(v).digest, data_root

    def _clipped_sum(
        self,
        v: int,
        keys: VirtualWorkerKeys,
        context: _KeyContext,
        parameters: np.ndarray,
        sent: SentRows | None,
        is_cancelled: Callable[[], bool],
    ) -> list[Tensor]:
        batches = _until_cancelled(self._batches(keys, self.slice(v), context, sent), is_cancelled)
        clock = self._words.clock
        # A measurement's engine tells of no phases.
        clock.begin("model")
        clipped_sum = self._engine.clipped_sum(parameters, batches)
        clock.begin("words")
        return clipped_sum

    def _tag(self, keys: VirtualWorkerKeys, purpose: Purpose, context: _KeyContext, values: Any) -> bytes:
        leaves = self._words.leaves(values, self._engine.sizes)
        return vector_tag(derive(keys.stream, purpose, *context), self._mechanism.ring_bits, leaves)

    def _batches(
        self, keys: VirtualWorkerKeys, data: Slice, context: _KeyContext, sent: SentRows | None
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches of a step, whose keys have this ``context``."""
        mechanism, step = self._mechanism, context[1]
        places = unit_places(
            derive(keys.stream, Purpose.PLACES, *context), mechanism.micro_batch_size, mechanism.micro_batches
        )
        found: NDArray[np.bool_] | bool = True
        if sent is None:
            sampling = derive(keys.stream, Purpose.SAMPLING, *context)
            # With correlated noise an example takes part in one of `bands` consecutive steps at most.
            part = data.ids[step % mechanism.bands :: mechanism.bands]
            ids = draw_ids(sampling, part, mechanism.sample_rate, len(places))
        else:
            # All slots of the step, the empty ones too: a missing example leaves every other one in its row.
            ids, found = data.ids, sent.present(data.ids)
        require_bound(len(ids) <= len(places), "a draw is cut to the capacity")
        # An own unit in every place without one: of a sealed dataset a worker can read no other.
        drawn, present = np.full(len(places), data.ids[0]), np.zeros(len(places), np.bool_)
        drawn[: len(ids)], present[: len(ids)] = ids, found
        rows, there = drawn[:, None], present[:, None]
        if self._units is not None:
            # For every place, the empty ones too: the choice takes one time for any draw.
            choice = derive(keys.stream, Purpose.UNIT_ROWS, *context)
            words = uniform_words(choice, len(places), mechanism.rows_chosen)
            rows, chosen = self._units.chosen(drawn, mechanism.rows_chosen, words)
            there = there & chosen
        source = self._dataset if sent is None else sent
        batches = micro_batches(source, rows, there, mechanism, places, self._spare)
        if self._versions is None:
            return batches
        # By place, for the empty ones too: a version takes one time whatever the row.
        key = derive(keys.stream, Purpose.VERSIONS, *context)
        shape = mechanism.micro_batches, mechanism.micro_batch_rows, WORDS
        return _versions(batches, self._versions, uniform_words(key, *shape))


def _versions(batches: Iterable[MicroBatch], versions: Versions, words: NDArray[np.uint64]) -> Iterator[MicroBatch]:
    for batch, of_rows in zip(batches, words, strict=True):
        features, labels, valid = batch
        origin = np.arange(len(of_rows)) // versions.copies
        yield versions.of(features[origin], of_rows), labels[origin], valid[origin]


def _until_cancelled(batches: Iterable[MicroBatch], is_cancelled: Callable[[], bool]) -> Iterator[MicroBatch]:
    for batch in batches:
        if is_cancelled():
            raise ProtocolError("cancelled", "the attempt was cancelled")
        yield batch
