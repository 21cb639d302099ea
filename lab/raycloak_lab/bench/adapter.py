"""Measures one block of an encrypted adapter beside the clear adapter and TenSEAL's own product."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from raycloak.attestation.core.keys import Secret
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import Rerandomiser
from raycloak_lab.encrypted.parameters import BlockShape
from raycloak_lab.encrypted.projection import PackedProjection

RUNS = 5
_BITS_OF_MM = [60, 40, 40, 60]


@dataclass(frozen=True)
class AdapterFigures:
    """The costs of one projection of one width. Times are medians in milliseconds of processor time.

    Attributes:
        keys_bytes: released once a session.
        up_bytes_per_token, down_bytes_per_token: of a full block.
        clear_bytes_per_token: each way, in float32.
        encrypt_ms, apply_ms, hide_ms, decrypt_ms: of a block; the server applies and hides.
        server_ms_per_token, clear_ms_per_token: the worker's work, and that of the clear adapter in float64.
        tenseal_mm_ms_per_token: both matrices by TenSEAL's `CKKSVector.mm`, a token a ciphertext; it hides nothing.
        tenseal_mm_up_bytes_per_token, tenseal_mm_down_bytes_per_token: of its ciphertexts as TenSEAL writes them.
        largest_error: of the largest delta.
    """

    width: int
    rank: int
    block_tokens: int
    keys_bytes: int
    up_bytes_per_token: float
    down_bytes_per_token: float
    clear_bytes_per_token: int
    tenseal_mm_up_bytes_per_token: int
    tenseal_mm_down_bytes_per_token: int
    keygen_ms: float
    encrypt_ms: float
    apply_ms: float
    hide_ms: float
    decrypt_ms: float
    server_ms_per_token: float
    clear_ms_per_token: float
    tenseal_mm_ms_per_token: float
    largest_error: float


@dataclass(frozen=True)
class AdapterBench:
    """The figures of several widths; ``runs`` measurements are behind each."""

    runs: int
    widths: tuple[AdapterFigures, ...]


CASES = ((384, 8, 64), (768, 8, 64), (4096, 16, 16))
"""Width, rank and tokens of a block: of MiniLM, of BERT, and of a model of 7 billion parameters."""


def bench_adapter() -> AdapterBench:
    """Measure the three widths."""
    return AdapterBench(RUNS, tuple(_figures(*case) for case in CASES))


def _figures(width: int, rank: int, tokens: int) -> AdapterFigures:
    rng = np.random.default_rng(24)
    down, up = rng.normal(size=(rank, width)) / np.sqrt(width), rng.normal(size=(width, rank)) / 50
    states = rng.normal(size=(tokens, width))
    began = time.process_time()
    keys = ClientKeys(BlockShape(tokens, rank))
    keygen_ms = (time.process_time() - began) * 1000
    worker = EvaluationKeys(keys.shape, keys.released)
    projection = PackedProjection(down, up, keys.shape)
    rerandomiser = Rerandomiser(worker, Secret(bytes(32)))
    batch, factors = keys.encrypt(states)
    request = hashlib.sha256(batch).digest()
    deltas = projection.apply(worker.read_batch(batch, width), worker)
    answer = rerandomiser.answer(request, "q", deltas)
    exact = states @ down.T @ up.T
    found = keys.decrypt(answer, width, factors, projection.gain)
    apply_ms = _ms(lambda: projection.apply(worker.read_batch(batch, width), worker))
    mm = _tenseal_mm(states[0], down, up)
    # What it hides does not change what that takes.
    hide_ms = _ms(lambda: rerandomiser.answer(request, "q", [None] * len(deltas)))
    return AdapterFigures(
        width=width,
        rank=rank,
        block_tokens=tokens,
        keys_bytes=len(keys.released),
        up_bytes_per_token=len(batch) / tokens,
        down_bytes_per_token=len(answer) / tokens,
        clear_bytes_per_token=4 * width,
        tenseal_mm_up_bytes_per_token=mm.up_bytes,
        tenseal_mm_down_bytes_per_token=mm.down_bytes,
        keygen_ms=keygen_ms,
        encrypt_ms=_ms(lambda: keys.encrypt(states)),
        apply_ms=apply_ms,
        hide_ms=hide_ms,
        decrypt_ms=_ms(lambda: keys.decrypt(answer, width, factors, projection.gain)),
        server_ms_per_token=(apply_ms + hide_ms) / tokens,
        clear_ms_per_token=_ms(lambda: states @ down.T @ up.T) / tokens,
        tenseal_mm_ms_per_token=mm.ms,
        largest_error=float(np.abs(found - exact).max() / np.abs(exact).max()),
    )


@dataclass(frozen=True)
class _TensealToken:
    ms: float
    up_bytes: int
    down_bytes: int


def _tenseal_mm(token: np.ndarray, down: np.ndarray, up: np.ndarray) -> _TensealToken:
    """Measure one token, once: it takes seconds."""
    import tenseal

    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=_BITS_OF_MM)
    context.global_scale = 2.0**40
    context.generate_galois_keys()
    encrypted = tenseal.ckks_vector(context, token.tolist())
    began = time.process_time()
    answer = encrypted.mm(down.T.tolist()).mm(up.T.tolist())
    taken_ms = (time.process_time() - began) * 1000
    return _TensealToken(taken_ms, len(encrypted.serialize()), len(answer.serialize()))


def _ms(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(RUNS):
        began = time.process_time()
        work()
        taken.append((time.process_time() - began) * 1000)
    return median(taken)
