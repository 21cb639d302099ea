"""Rotation keys that lie: what they change of an answer, and the one attack with them that works, which is refused.

A key of rotation σ turns a ciphertext (c0, c1) into σ(c0) + f(σ(c1)) and g(σ(c1)). The client chooses f at will. It
cannot choose g, whose key comes from a seed. So c0, which holds what was encrypted, takes the same way under any keys.
"""

import os

import numpy as np
import pytest

from raycloak.attestation.core.keys import Secret
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import Rerandomiser
from raycloak_lab.encrypted.parameters import KEY_HEADER, SET_F, BlockShape, context
from raycloak_lab.encrypted.projection import PackedProjection, padded_rank
from raycloak_lab.encrypted.residues import added, subtracted
from raycloak_lab.encrypted.seal_objects import (
    SEED_BYTES,
    ciphertext,
    read_seeded,
    residues_of,
    seeded_bytes,
    uniform_residues,
)

TOKENS, WIDTH, DIGITS = 16, 48, len(SET_F.data_primes)
KEYS = KEY_HEADER.size + seeded_bytes(1, DIGITS) + SEED_BYTES  # where the first halves of the rotation keys begin


def with_first_halves(released, change):
    """Return released keys with other first halves of the rotation keys, shape [steps, digits, primes, N]."""
    shape = (-1, DIGITS, len(SET_F.primes), SET_F.degree)
    halves = np.frombuffer(released, "<u8", offset=KEYS).reshape(shape).astype(np.uint64)
    return released[:KEYS] + change(halves).astype("<u8").tobytes()


def junk(halves):
    """Return uniform residues."""
    seed = os.urandom(32)
    drawn = [uniform_residues(seed, index, len(SET_F.primes)) for index in range(halves.shape[0] * DIGITS)]
    return np.stack(drawn).reshape(halves.shape)


@pytest.mark.parametrize("rank", [1, 4])
def test_under_any_keys_an_answer_depends_on_the_plaintext_as_under_true_ones(seal, rank):
    """Exactly, modulo both primes: what false keys add is a number that the plaintext has no part in."""
    keys = ClientKeys(BlockShape(TOKENS, rank))
    rng = np.random.default_rng(rank)
    projection = PackedProjection(rng.normal(size=(rank, WIDTH)), rng.normal(size=(8, rank)), keys.shape)
    mask = uniform_residues(bytes(32), 0, DIGITS)
    plain = [uniform_residues(bytes(32), index, DIGITS) for index in (1, 2)]
    changes = []
    for released in (keys.released, with_first_halves(keys.released, junk)):
        worker = EvaluationKeys(keys.shape, released)
        both = [
            residues_of(projection.apply([ciphertext(np.stack([each, mask]), 2.0**60)], worker)[0]) for each in plain
        ]
        assert np.array_equal(both[0][1], both[1][1])
        changes.append(subtracted(both[0][0], both[1][0]))
    assert np.array_equal(*changes)


class Liar:
    """A client whose first rotation gives zeros, so that the first of the sums over columns adds up nothing.

    It works for one ciphertext alone: the lie divides what was encrypted by the ciphertext's second half.
    """

    def __init__(self, seal, rank):
        self._seal = seal
        self.keys = ClientKeys(BlockShape(TOKENS, rank))
        rng = np.random.default_rng(7)
        self.states = 30 * (rng.normal(size=(WIDTH, TOKENS)) + 1j * rng.normal(size=(WIDTH, TOKENS)))
        slots = np.zeros((self.keys.shape.columns, TOKENS), complex)
        slots[:WIDTH] = self.states
        self.upload = self.keys.encrypt_slots(slots.reshape(1, -1))
        first, mask = read_seeded(self.upload, 1, DIGITS)[0]
        lie = self._rotated(quotients(added(first, self.keys._secret.times(mask)), mask))
        self.released = with_first_halves(self.keys.released, lambda halves: without(halves, lie))

    def _rotated(self, residues):
        """Return an element of the ring under the automorphism of the first rotation."""
        evaluator = self._seal.Evaluator(context())
        holder = ciphertext(np.stack([residues, residues]), 1.0)
        evaluator.transform_from_ntt_inplace(holder)
        coefficients = residues_of(holder)[0]
        powers = np.arange(SET_F.degree) * self.keys.shape.galois_elements[0] % (2 * SET_F.degree)
        negative = subtracted(np.zeros_like(coefficients), coefficients)
        moved = np.empty_like(coefficients)
        moved[:, powers % SET_F.degree] = np.where(powers < SET_F.degree, coefficients, negative)
        holder = ciphertext(np.stack([moved, moved]), 1.0, ntt=False)
        evaluator.transform_to_ntt_inplace(holder)
        return residues_of(holder)[0]

    def answer(self, down, up, released):
        """Return what the client reads, complex of shape [rows, tokens]."""
        worker = EvaluationKeys(self.keys.shape, released)
        projection = PackedProjection(down, up, self.keys.shape)
        deltas = projection.apply(worker.read_batch(self.upload, WIDTH), worker)
        hidden = Rerandomiser(worker, Secret(os.urandom(32))).answer(bytes(32), "q", deltas)
        return self.keys.decrypt_slots(hidden, 1).reshape(-1, TOKENS)[: len(up)] * projection.gain


def quotients(dividend, divisor):
    """Return the quotients modulo each prime."""
    rows = zip(SET_F.primes, dividend, divisor, strict=False)
    return np.array([[int(x) * pow(int(y), -1, q) % q for x, y in zip(a, b, strict=True)] for q, a, b in rows])


def without(halves, lie):
    """Return keys whose first rotation adds minus the product of a second half and ``lie``."""
    changed, special = halves.copy(), SET_F.primes[-1]
    for digit, prime in enumerate(SET_F.data_primes):
        pairs = zip(halves[0, digit, digit], lie[digit], strict=True)
        changed[0, digit, digit] = [(int(old) - special * int(each)) % prime for old, each in pairs]
    return changed


def solved(states, seen):
    """Return the weights that fit real and imaginary parts of one row, least squares."""
    known, found = (np.concatenate([each.real, each.imag], axis=-1) for each in (states, seen))
    return np.linalg.lstsq(known.T, found.T, rcond=None)[0]


def relative_error(found, down):
    """Return how far weights are from the only row of A, over its norm."""
    return float(np.linalg.norm(found - down[0]) / np.linalg.norm(down[0]))


def halves_solved(liar, down, up):
    """Return the weights that the lie gives: even rows hold the sum over even columns, odd rows that over odd ones.

    The client knows each half up to a factor from B; the division here is so that a comparison can see it.
    """
    seen = liar.answer(down, up, liar.released)
    found = np.empty(WIDTH)
    for parity in (0, 1):
        found[parity::2] = solved(liar.states[parity::2], seen[parity] / up[parity, 0])
    return found


def test_false_rotation_keys_double_what_a_block_tells_at_rank_1_and_no_adapter_is_served_at_it(seal):
    """A layer of 48 columns from 16 tokens, which give 32 equations to an honest client.

    Guarantee: adapters of rank 1 are served as rank 2, where the same lie drowns the answer.
    """
    rng = np.random.default_rng(5)
    down, up = rng.normal(size=(1, WIDTH)), rng.normal(size=(8, 1))
    liar = Liar(seal, 1)
    honest = liar.answer(down, up, liar.keys.released)[0] / up[0, 0]
    assert relative_error(solved(liar.states, honest), down) > 0.3
    assert relative_error(halves_solved(liar, down, up), down) < 3e-2

    served = Liar(seal, padded_rank(1))
    assert relative_error(halves_solved(served, down, up), down) > 1e3
    exact = up @ down @ served.states
    seen = served.answer(down, up, served.released)
    alignment = abs(np.vdot(seen, exact)) / np.linalg.norm(seen) / np.linalg.norm(exact)
    assert alignment < 6 / np.sqrt(exact.size)
