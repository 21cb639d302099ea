"""Measures the cost of masking: clamp, encode, mask and tag one worker's vector on one core, against bare ChaCha20."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raycloak.attestation.core.keys import AgreementKey, IdentityKey, Secret
from raycloak.attestation.core.mask_graph import LARGEST_COMPLETE, MaskGraph, draw_circle
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Member, Roster
from raycloak.metrics.errors import ConfigError
from raycloak.workers.vectors.masks import PairSecret, masked_sum, roster_masks
from raycloak.workers.vectors.payload import VectorRange, VerifiedAttempt, payload_key, seal_header, tag_payload
from raycloak.workers.vectors.ring import (
    CACHE_BLOCK_BYTES,
    FloatVector,
    RingBits,
    RingDemand,
    RingSpec,
    RingVector,
    encode_into,
    fit_ring,
    ring_dtype,
)
from raycloak.workers.vectors.streams import KeyStream

PLANNED_STEPS = 10_000
"""Steps of the run whose mask graph is measured: a long one, since more steps need more neighbours."""


@dataclass(frozen=True, slots=True)
class MaskBench:
    """The times of one worker's masking path, medians in seconds on one core.

    Attributes:
        params, workers, bits, dtype, repeats: the measured case; ``dtype`` is the clear vector's float type.
        colluding_workers: number that a sparse mask graph withstands; None where all pairs mask.
        neighbours: workers that one masks with.
        encode_seconds: clamp and encode. mask_seconds: ``neighbours`` masks. tag_seconds: Poly1305.
        key_seconds: the neighbours found, the secrets of all pairs ratcheted once, and the keys of the masks.
        keystream_seconds: ``neighbours`` bare keystreams, written block by block to one buffer in the cache.
        chacha20_ratio: ``keystream_seconds`` over encoding and masks together, median over the repeats.
        bytes_per_parameter: payload bytes of one masked vector per parameter.
        framing_bytes: size of the signed header that accompanies it.
        cost_vs_32_workers: keys, encoding, masks and tag over the same of one of 32 workers of which all pairs mask,
            median over the repeats; None where all pairs mask.
    """

    params: int
    workers: int
    bits: int
    dtype: str
    repeats: int
    colluding_workers: int | None
    neighbours: int
    encode_seconds: float
    mask_seconds: float
    tag_seconds: float
    key_seconds: float
    keystream_seconds: float
    chacha20_ratio: float
    bytes_per_parameter: float
    framing_bytes: int
    cost_vs_32_workers: float | None


def bench_mask(
    params: int,
    workers: int,
    bits: RingBits = 32,
    dtype: Literal["float32", "float64"] = "float32",
    repeats: int = 5,
    colluding_workers: int | None = None,
) -> MaskBench:
    """Measure the masking path of one worker among ``workers``, each hosting one virtual worker.

    All phases run in every repeat, so that a slow moment of the machine meets both sides of the ratio.

    Args:
        colluding_workers: number that a sparse mask graph is to withstand in `PLANNED_STEPS` steps.

    Raises:
        ConfigError: ``bench_input`` for fewer than one parameter, two workers or one repeat, or if each worker would
            mask with all others anyway.
    """
    if params < 1 or workers < 2 or repeats < 1:
        raise ConfigError(
            "bench_input",
            "the bench needs at least 1 parameter, 2 workers and 1 repeat.",
            "Raise --params or --workers.",
        )
    own = _OneOf(workers, colluding_workers, bits, params)
    other = _OneOf(LARGEST_COMPLETE, None, bits, params) if colluding_workers is not None else None
    demand = RingDemand(
        max_grad_norm=1.0,
        clamp=1.0,
        dimension=params,
        virtual_workers=workers,
        noise_multiplier=1.0,
        honest_share=1.0,
    )
    ring = fit_ring(demand, bits=bits)
    random = np.random.default_rng(0)
    values: FloatVector = random.standard_normal(params, np.float32).astype(dtype, copy=False)
    vector: RingVector = np.zeros(params, ring_dtype(bits))
    times, ratios = [], []
    for step in range(1, repeats + 1):
        times.append((own.bare_keystreams(vector.nbytes), *own.mask(step, ring, values, vector)))
        if other is not None:
            ratios.append(sum(times[-1][1:]) / sum(other.mask(step, ring, values, vector)))
    keystream, key, encode, mask, tag = (statistics.median(column) for column in zip(*times, strict=True))
    header = own.header(vector)
    return MaskBench(
        params=params,
        workers=workers,
        bits=bits,
        dtype=dtype,
        repeats=repeats,
        colluding_workers=colluding_workers,
        neighbours=own.neighbours,
        encode_seconds=encode,
        mask_seconds=mask,
        tag_seconds=tag,
        key_seconds=key,
        keystream_seconds=keystream,
        chacha20_ratio=statistics.median(bare / (encoded + masked) for bare, _, encoded, masked, _ in times),
        bytes_per_parameter=vector.nbytes / params,
        framing_bytes=len(header.body) + len(header.signature),
        cost_vs_32_workers=statistics.median(ratios) if ratios else None,
    )


class _OneOf:
    """The first of ``workers`` workers that host one virtual worker each, and what it does at each step.

    Attributes:
        neighbours: number of workers that it masks with.
    """

    def __init__(self, workers: int, colluding: int | None, bits: RingBits, params: int) -> None:
        self._bits, self._ranges = bits, [VectorRange(index=0, offset=0, length=params)]
        self._keys = [AgreementKey.generate() for _ in range(workers + 1)]
        self._identity = IdentityKey.generate()
        members = tuple(
            Member(
                member_id=f"worker-{index}" if index < workers else "aggregator-0",
                role="worker" if index < workers else "aggregator",
                mask_key=key.public,
                identity_key=self._identity.public,
                evidence_digest=bytes(32),
                virtual_workers=(index,) if index < workers else (),
                joined=0,
            )
            for index, key in enumerate(self._keys)
        )
        circle = None if colluding is None else draw_circle(bytes(32), workers, colluding, PLANNED_STEPS)
        if colluding is not None and circle is None:
            raise ConfigError(
                "bench_input",
                f"to withstand {colluding} colluding workers, each of {workers} would mask with all others.",
                "Leave out --colluding-workers, or raise --workers.",
            )
        self._roster = Roster(
            run_id="0" * 16,
            manifest_digest=bytes(32),
            step=0,
            attempt=0,
            ratchet=0,
            nonce=bytes(32),
            members=members,
            circle=circle,
        )
        own, *peers = members[:-1]
        self._pairs = {
            peer.member_id: PairSecret(self._keys[0], own, peer, run_id="0" * 16, manifest_digest=bytes(32))
            for peer in peers
        }
        self.neighbours = len(MaskGraph(self._roster).neighbours(own.member_id))
        self._tag_key = Secret(bytes(32))

    def mask(
        self, step: int, ring: RingSpec, values: FloatVector, vector: RingVector
    ) -> tuple[float, float, float, float]:
        """Return the seconds of keys, encoding, masks and tag of a step; steps count up from 1."""
        roster = self._roster.model_copy(update={"step": step, "ratchet": step})
        began = time.perf_counter()
        for pair in self._pairs.values():
            pair.advance_to(step)
        (masks,) = roster_masks(self._pairs, roster, "worker-0", input_digest=bytes(32), ranges=self._ranges)
        key = time.perf_counter() - began
        return (
            key,
            _seconds(lambda: encode_into(values, ring, vector)),
            _seconds(lambda: masked_sum([vector], masks, vector)),
            _seconds(lambda: tag_payload(self._tag_key, vector)),
        )

    def bare_keystreams(self, count: int) -> float:
        """Return the seconds of as many keystreams of ``count`` bytes as it adds, of which none is kept."""
        keys = [Secret(peer.to_bytes(32)) for peer in range(self.neighbours)]
        return _seconds(lambda: _bare_keystreams(keys, count))

    def header(self, vector: RingVector) -> Envelope:
        """Sign the header of a vector in one range."""
        attempt = VerifiedAttempt.of(self._roster, bytes(32), self._ranges, self._bits)
        aggregator = self._roster.members[-1]
        key = payload_key(self._keys[0], aggregator, attempt, range_index=0, sender="worker-0")
        tags = [tag_payload(key, vector)]
        return seal_header(attempt, "worker-0", self._identity, vector_tags=[bytes(16)], payload_tags=tags)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _bare_keystreams(keys: list[Secret], count: int) -> None:
    """Generate ``count`` bytes of each key's stream and keep none."""
    buffer = np.empty(min(count, CACHE_BLOCK_BYTES), np.uint8)
    for key in keys:
        stream = KeyStream(key)
        for start in range(0, count, len(buffer)):
            stream.into(buffer[: count - start])
