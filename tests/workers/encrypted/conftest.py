"""Keys of one client for all tests of the room: small blocks, so that a file takes seconds."""

import hashlib
import os

import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.workers.encrypted.client_keys import ClientKeys
from raycloak.workers.encrypted.evaluation_keys import EvaluationKeys
from raycloak.workers.encrypted.flooding import Rerandomiser
from raycloak.workers.encrypted.parameters import BlockShape


@pytest.fixture(scope="session")
def seal():
    """Return SEAL's interface; a test that needs it is skipped where the extra is not installed."""
    return pytest.importorskip("tenseal.sealapi", reason="needs tenseal (pip install 'raycloak[he]')")


@pytest.fixture(scope="session")
def client(seal):
    """Return one client's keys, for blocks of 256 tokens at rank 2."""
    return ClientKeys(BlockShape(256, 2))


@pytest.fixture(scope="session")
def evaluation(client):
    """Return the same client's keys as a worker loads them."""
    return EvaluationKeys(client.shape, client.released)


@pytest.fixture
def hide(evaluation):
    """Return a function from an upload and its deltas to the answer of one session."""
    rerandomiser = Rerandomiser(evaluation, Secret(os.urandom(32)))
    return lambda upload, deltas, name="q": rerandomiser.answer(hashlib.sha256(upload).digest(), name, deltas)
