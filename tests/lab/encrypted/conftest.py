"""Keys of one client for all tests of the room: small blocks, so that a file takes seconds."""

import hashlib
import os

import pytest

from raycloak.attestation.core.keys import Secret
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import Rerandomiser
from raycloak_lab.encrypted.parameters import BlockShape, library


@pytest.fixture(scope="session")
def seal():
    """Return SEAL's interface."""
    return library()


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
