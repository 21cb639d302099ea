"""Measures the cost of masking: clamp, encode, mask and tag one worker's vector on one core, against bare ChaCha20."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raycloak.attestation.core.keys import AgreementKey, IdentityKey, Secret
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Member, Roster
from raycloak.metrics.errors import ConfigError
from raycloak.workers.vectors.masks import apply_masks
from raycloak.workers.vectors.payload import VectorRange, VerifiedAttempt, payload_key, seal_header, tag_payload
from raycloak.workers.vectors.ring import (
    CACHE_BLOCK_BYTES,
    FloatVector,
    RingBits,
    RingVector,
    encode_into,
    fit_ring,
    ring_dtype,
)
from raycloak.workers.vectors.streams import KeyStream


@dataclass(frozen=True, slots=True)
class MaskBench:
    """The times of one worker's masking path, medians in seconds on one core.

    Attributes:
        params, workers, bits, dtype, repeats: the measured case; ``dtype`` is the clear vector's float type.
        encode_seconds: clamp and encode. mask_seconds: ``workers`` - 1 masks. tag_seconds: Poly1305.
        keystream_seconds: ``workers`` - 1 bare keystreams, written block by block to one buffer in the cache.
        chacha20_ratio: ``keystream_seconds`` over encoding and masks together, median over the repeats.
        bytes_per_parameter: payload bytes of one masked vector per parameter.
        framing_bytes: size of the signed header that accompanies it.
    """

    params: int
    workers: int
    bits: int
    dtype: str
    repeats: int
    encode_seconds: float
    mask_seconds: float
    tag_seconds: float
    keystream_seconds: float
    chacha20_ratio: float
    bytes_per_parameter: float
    framing_bytes: int


def bench_mask(
    params: int, workers: int, bits: RingBits = 32, dtype: Literal["float32", "float64"] = "float32", repeats: int = 5
) -> MaskBench:
    """Measure the masking path of one worker among ``workers``, each hosting one virtual worker.

    All phases run in every repeat, so that a slow moment of the machine meets both sides of the ratio.

    Raises:
        ConfigError: ``bench_input`` for fewer than one parameter, two workers or one repeat.
    """
    if params < 1 or workers < 2 or repeats < 1:
        raise ConfigError(
            "bench_input",
            "the bench needs at least 1 parameter, 2 workers and 1 repeat.",
            "Raise --params or --workers.",
        )
    ring = fit_ring(
        max_grad_norm=1.0,
        clamp=1.0,
        dimension=params,
        virtual_workers=workers,
        noise_multiplier=1.0,
        honest_share=1.0,
        bits=bits,
    )
    random = np.random.default_rng(0)
    values: FloatVector = random.standard_normal(params, np.float32).astype(dtype, copy=False)
    vector: RingVector = np.zeros(params, ring_dtype(bits))
    masks = [(Secret(random.bytes(32)), 1 if peer % 2 else -1) for peer in range(workers - 1)]
    tag_key = Secret(random.bytes(32))

    times = np.array(
        [
            (
                _seconds(lambda: _bare_keystreams([key for key, _ in masks], vector.nbytes)),
                _seconds(lambda: encode_into(values, ring.spec, vector)),
                _seconds(lambda: apply_masks(vector, masks)),
                _seconds(lambda: tag_payload(tag_key, vector)),
            )
            for _ in range(repeats)
        ]
    )
    keystream, encode, mask, tag = (statistics.median(column.tolist()) for column in times.T)
    header = _example_header(vector, workers, bits)
    return MaskBench(
        params=params,
        workers=workers,
        bits=bits,
        dtype=dtype,
        repeats=repeats,
        encode_seconds=encode,
        mask_seconds=mask,
        tag_seconds=tag,
        keystream_seconds=keystream,
        chacha20_ratio=float(np.median(times[:, 0] / (times[:, 1] + times[:, 2]))),
        bytes_per_parameter=vector.nbytes / params,
        framing_bytes=len(header.body) + len(header.signature),
    )


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


def _example_header(vector: RingVector, workers: int, bits: RingBits) -> Envelope:
    """Sign the header of the first of ``workers`` workers that host one virtual worker each, with one range."""
    keys = [AgreementKey.generate() for _ in range(workers + 1)]
    identity = IdentityKey.generate()
    members = tuple(
        Member(
            member_id=f"worker-{index}" if index < workers else "aggregator-0",
            role="worker" if index < workers else "aggregator",
            mask_key=key.public,
            identity_key=identity.public,
            evidence_digest=bytes(32),
            virtual_workers=(index,) if index < workers else (),
            joined=0,
        )
        for index, key in enumerate(keys)
    )
    roster = Roster(
        run_id="0" * 16, manifest_digest=bytes(32), step=0, attempt=0, ratchet=0, nonce=bytes(32), members=members
    )
    attempt = VerifiedAttempt.of(roster, bytes(32), [VectorRange(0, 0, len(vector))], bits)
    key = payload_key(keys[0], members[-1], attempt, range_index=0, sender="worker-0")
    tags = [tag_payload(key, vector)]
    return seal_header(attempt, "worker-0", identity, vector_tags=[bytes(16)], payload_tags=tags)
