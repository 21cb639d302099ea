"""The last step of an answer: a fresh encryption of zero and flooding noise, so that only the delta can be read.

Without it the client, who knows the errors of its ciphertexts, reads the adapter from one answer to zeros by solving a
linear system (tests/lab/encrypted/test_attack.py does).

Guarantee: an answer is a function of the worker's secret and the request, so a repeated request gets the same bytes,
and averaging over repetitions removes no noise.

The noise hides errors of up to 2^55 with 40 bits to spare. Such an error shifts a Gaussian of deviation 2^40 by at
most one unit, which is a Kullback-Leibler divergence of 2^-81 for each coefficient. So a million ciphertexts with and
without their errors can be told apart with an advantage below 2^-24. The bound on errors is an average case, for a
client that follows the protocol and rows of B·A that differ. Rows that are all alike gather errors of up to 2^56 in few
coefficients, which the noise hides with 39 bits to spare. It is no proof against a client that does not follow.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.workers.vectors.noise import NoiseSampler
from raycloak.workers.vectors.streams import KeyStream
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.parameters import SET_F, context, library
from raycloak_lab.encrypted.residues import Factor, Residues, added, lifted
from raycloak_lab.encrypted.seal_objects import ciphertext, plaintext, residues_of

FLOODING_BITS = 40
"""Bits by which the noise exceeds the largest error that it hides; the most that `NoiseSampler` is proved for."""

_LEVEL = len(SET_F.data_primes)
_SHIFT = Factor(np.full((_LEVEL, 1), 2**SET_F.flooding_shift_bits, np.uint64))
# A centred binomial of 21 pairs has deviation 3.24, that of SEAL's own errors.
_ERROR_PAIRS = np.uint32(2**21 - 1)


class Rerandomiser:
    """Hides the results of requests under one client's keys.

    Args:
        keys: the client's.
        secret: 32 random bytes, the same for all sessions, which never leave the worker.
    """

    def __init__(self, keys: EvaluationKeys, secret: Secret) -> None:
        self._secret = secret
        self._fingerprint = keys.fingerprint
        self._zero = ciphertext(keys.zero, 2.0**SET_F.product_scale_bits)
        self._sampler = NoiseSampler(2.0**FLOODING_BITS, 64)

    def answer(self, request: bytes, projection: str, deltas: list[Any | None]) -> bytes:
        """Return the bytes for the client.

        Args:
            request: SHA-256 of the encrypted batch.
            projection: name of the projection; it parts the streams of two that share an upload.
            deltas: from `PackedProjection.apply`; changed in place.

        Returns:
            For each ciphertext two polynomials of N coefficients, little-endian u32 of the upper 32 of 60 bits.
        """
        answered = []
        for index, delta in enumerate(deltas):
            key = derive(self._secret, Purpose.ADAPTER_ANSWER, self._fingerprint, request, projection, index)
            answered.append(self._hidden(delta, key))
        return b"".join(answered)

    def _hidden(self, delta: Any | None, key: Secret) -> bytes:
        evaluator = library().Evaluator(context())
        hidden = self._fresh_zero(key)
        if delta is not None:
            evaluator.add_inplace(hidden, delta)
        evaluator.rescale_to_next_inplace(hidden)
        # Only coefficients have low bits; the NTT form spreads them over all.
        evaluator.transform_from_ntt_inplace(hidden)
        words = residues_of(hidden)[:, 0] >> np.uint64(SET_F.dropped_bits)
        return words.astype("<u4").tobytes()

    def _fresh_zero(self, key: Secret) -> Any:
        """Return u·pk + (F, e): under RLWE a uniform ciphertext of the noise alone, even for the owner of the key.

        F is so much wider than a common error that its half needs no other.
        """
        evaluator = library().Evaluator(context())
        mask = KeyStream(derive(key, Purpose.ADAPTER_MASK))
        error = KeyStream(derive(key, Purpose.ADAPTER_ERROR))
        noise = np.stack([self._flooding(key), lifted(_binomial(error), _LEVEL)])
        hidden = ciphertext(noise, 2.0**SET_F.product_scale_bits, ntt=False)
        evaluator.transform_to_ntt_inplace(hidden)
        ternary = lifted(_ternary(mask), _LEVEL)
        factor = ciphertext(np.stack([ternary, ternary]), 1.0, ntt=False)
        evaluator.transform_to_ntt_inplace(factor)
        product = library().Ciphertext()
        evaluator.multiply_plain(self._zero, plaintext(residues_of(factor)[0], 1.0), product)
        evaluator.add_inplace(hidden, product)
        return hidden

    def _flooding(self, key: Secret) -> Residues:
        """Return G·2^55 + U modulo each prime: G Gaussian of deviation 2^40, U uniform below 2^55."""
        upper = np.zeros(SET_F.degree, np.uint64)
        self._sampler.add_to(upper, derive(key, Purpose.ADAPTER_FLOODING))
        lower = np.empty(SET_F.degree, "<u8")
        KeyStream(derive(key, Purpose.ADAPTER_FLOODING_LOW)).into(lower)
        lower >>= np.uint64(64 - SET_F.flooding_shift_bits)
        return added(_SHIFT.times(lifted(upper.view(np.int64), _LEVEL)), np.stack([lower] * _LEVEL))


def _ternary(stream: KeyStream) -> NDArray[np.int64]:
    """Return N draws from {-1, 0, 1}, each within 2^-63 of uniform."""
    words = np.empty(SET_F.degree, "<u8")
    stream.into(words)
    return (words % np.uint64(3)).astype(np.int64) - 1


def _binomial(stream: KeyStream) -> NDArray[np.int64]:
    """Return N draws of a centred binomial distribution of deviation 3.24."""
    words = np.empty((2, SET_F.degree), "<u4")
    stream.into(words)
    counts = np.bitwise_count(words & _ERROR_PAIRS).astype(np.int64)
    return np.asarray(counts[0] - counts[1])
