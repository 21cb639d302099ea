"""The attack that the last step of an answer stops: the adapter from one answer to zeros, by a linear system.

The client knows the errors of its own ciphertexts. An answer to zeros is the adapter applied to these errors, so each
token gives two real equations for a row of B·A. 256 tokens give 512, and a row has 384 unknowns.
"""

import hashlib
import os

import numpy as np
import pytest

from raycloak.attestation.core.keys import Secret
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import Rerandomiser
from raycloak_lab.encrypted.parameters import SET_F, BlockShape, context
from raycloak_lab.encrypted.projection import PackedProjection

TOKENS, WIDTH, ROWS, RANK = 256, 384, 16, 4


@pytest.fixture(scope="module")
def keys(seal):
    return ClientKeys(BlockShape(TOKENS, RANK))


@pytest.fixture(scope="module")
def worker(keys):
    return EvaluationKeys(keys.shape, keys.released)


@pytest.fixture(scope="module")
def matrices():
    rng = np.random.default_rng(24)
    return rng.normal(size=(RANK, WIDTH)), rng.normal(size=(ROWS, RANK))


class Client:
    """A client that knows all about its own ciphertexts, and solves for the adapter."""

    def __init__(self, seal, keys, worker, size):
        self._seal, self._keys = seal, keys
        rng = np.random.default_rng(7)
        shape = (2, keys.shape.ciphertexts(WIDTH), SET_F.slots)
        # No decoder tells such a number from zero: it is far below an honest answer's error.
        zeros = size * (rng.normal(size=shape) + 1j * rng.normal(size=shape))[0]
        self.upload = keys.encrypt_slots(zeros)
        self.batch = worker.read_batch(self.upload, WIDTH)
        self.errors = np.concatenate([self.slots(each) for each in self.batch])

    def slots(self, encrypted):
        """Return the complex slots behind a ciphertext, shape [columns, tokens]."""
        plain = self._seal.Plaintext()
        self._keys._decryptor.decrypt(encrypted, plain)
        return np.array(self._keys._encoder.decode_complex(plain)).reshape(-1, TOKENS)

    def solve(self, answer):
        """Return the rows of B·A that fit complex slots of shape [rows, tokens]."""
        known = np.concatenate([self.errors.real, self.errors.imag], axis=1)
        seen = np.concatenate([answer.real, answer.imag], axis=1)
        return np.linalg.lstsq(known.T, seen.T, rcond=None)[0].T


def relative_error(found, matrices, gain):
    """Return the norm of the miss over the norm of B·A."""
    exact = matrices[1] @ matrices[0]
    return np.linalg.norm(found * gain - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize(("size", "rescaled"), [(0.0, False), (2.0**-26, True)])
def test_one_answer_gives_the_adapter_away_without_rerandomisation_and_nothing_with_it(
    seal, keys, worker, matrices, size, rescaled
):
    client = Client(seal, keys, worker, size)
    projection = PackedProjection(*matrices, keys.shape)
    deltas = projection.apply(client.batch, worker)
    bare = seal.Ciphertext()
    evaluator = seal.Evaluator(context())
    if rescaled:
        evaluator.rescale_to_next(deltas[0], bare)
    without = client.slots(bare if rescaled else deltas[0])
    assert relative_error(client.solve(without), matrices, projection.gain) < 1e-2

    request = hashlib.sha256(client.upload).digest()
    answer = Rerandomiser(worker, Secret(os.urandom(32))).answer(request, "q", deltas)
    hidden = keys.decrypt_slots(answer, 1).reshape(-1, TOKENS)
    found = client.solve(hidden)
    assert relative_error(found, matrices, projection.gain) > 1e3
    # Not a matter of scale either: the direction of the solution is that of noise.
    exact = matrices[1] @ matrices[0]
    alignment = np.vdot(found, exact) / np.linalg.norm(found) / np.linalg.norm(exact)
    assert abs(alignment) < 6 / np.sqrt(ROWS * WIDTH)
