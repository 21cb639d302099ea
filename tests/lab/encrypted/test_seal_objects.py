"""What a peer sends: checked before SEAL sees it."""

import hashlib

import numpy as np
import pytest

from raycloak.metrics.errors import ProtocolError
from raycloak_lab.encrypted import seal_objects
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.parameters import KEY_HEADER, SET_F, BlockShape
from raycloak_lab.encrypted.seal_objects import (
    SEED_BYTES,
    ciphertext,
    read_seeded,
    require_opaque,
    residues_of,
    uniform_residues,
)

WIDTH = 20  # two ciphertexts of 16 columns
POLYNOMIAL_BYTES = 2 * SET_F.degree * 8
PUBLIC = KEY_HEADER.size + SEED_BYTES  # where the public key begins


@pytest.fixture
def upload(client):
    return client.encrypt(np.ones((4, WIDTH)))[0]


def test_a_ciphertext_survives_the_way_through_seal(seal):
    rows = [np.random.default_rng(1).integers(1, prime, (2, SET_F.degree), np.uint64) for prime in SET_F.primes[:2]]
    residues = np.stack(rows, axis=1)
    assert np.array_equal(residues_of(ciphertext(residues, 2.0**60)), residues)


def test_a_seed_stands_for_one_uniform_polynomial():
    drawn = uniform_residues(bytes(32), 5, 2)
    assert np.array_equal(drawn, uniform_residues(bytes(32), 5, 2))
    assert not np.array_equal(drawn, uniform_residues(bytes(32), 6, 2))
    assert np.array_equal(drawn, uniform_residues(bytes(32), 5, 3)[:2])
    assert all((row < prime).all() for row, prime in zip(drawn, SET_F.primes, strict=False))
    # Both sides of a connection must draw the same, whatever their versions of raycloak.
    assert hashlib.sha256(drawn.astype("<u8").tobytes()).hexdigest() == GOLDEN


GOLDEN = "a319c1cab686c112ffa35f057e97133aae98df1b0a6f58ad8a7c9d7e2eefb54f"


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("ciphertext_size", lambda sent: sent[:-1]),
        ("ciphertext_size", lambda sent: sent + b"\0"),
        ("ciphertext_size", lambda sent: b""),
        ("ciphertext_size", lambda sent: sent[:-POLYNOMIAL_BYTES]),
        ("ciphertext_residue", lambda sent: sent[:-8] + b"\xff" * 8),
        ("ciphertext_residue", lambda sent: sent[:-8] + SET_F.primes[1].to_bytes(8, "little")),
        ("ciphertext_zero", lambda sent: sent[:-POLYNOMIAL_BYTES] + bytes(POLYNOMIAL_BYTES)),
        ("ciphertext_zero", lambda sent: bytes(len(sent))),
    ],
)
def test_spoiled_batches_have_named_refusals_before_seal_reads_them(evaluation, upload, monkeypatch, code, spoil):
    monkeypatch.setattr(seal_objects, "_load", lambda *_: pytest.fail("SEAL read what had not been checked"))
    with pytest.raises(ProtocolError) as refusal:
        evaluation.read_batch(spoil(upload), WIDTH)
    assert refusal.value.code == code


def test_a_number_one_below_its_modulus_is_a_residue(evaluation, upload):
    evaluation.read_batch(upload[:-8] + (SET_F.primes[1] - 1).to_bytes(8, "little"), WIDTH)


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("ciphertext_size", lambda sent: sent[:-1]),
        ("ciphertext_size", lambda sent: sent[:39]),
        ("encryption_set", lambda sent: bytes(len(sent))),
        ("key_steps", lambda sent: sent[:32] + bytes(8) + sent[40:]),
        ("ciphertext_zero", lambda sent: sent[:PUBLIC] + bytes(POLYNOMIAL_BYTES) + sent[PUBLIC + POLYNOMIAL_BYTES :]),
        ("ciphertext_zero", lambda sent: sent[: -POLYNOMIAL_BYTES * 3 // 2] + bytes(POLYNOMIAL_BYTES * 3 // 2)),
        ("ciphertext_residue", lambda sent: sent[:-8] + b"\xff" * 8),
    ],
)
def test_spoiled_keys_have_named_refusals_before_seal_reads_them(client, monkeypatch, code, spoil):
    monkeypatch.setattr(seal_objects, "_load", lambda *_: pytest.fail("SEAL read what had not been checked"))
    with pytest.raises(ProtocolError) as refusal:
        EvaluationKeys(client.shape, spoil(client.released))
    assert refusal.value.code == code


@pytest.mark.parametrize("shape", [BlockShape(256, 4), BlockShape(64, 8), BlockShape(256, 16)])
def test_keys_for_other_rotations_are_refused(client, shape):
    with pytest.raises(ProtocolError) as refusal:
        EvaluationKeys(shape, client.released)
    assert refusal.value.code == "key_steps"


def test_keys_of_another_session_are_refused(client, evaluation):
    evaluation.require(client.fingerprint)
    with pytest.raises(ProtocolError) as refusal:
        evaluation.require(ClientKeys(client.shape).fingerprint)
    assert refusal.value.code == "keys_of_another_session"


def test_a_transparent_ciphertext_is_refused(client, evaluation, upload):
    residues = read_seeded(upload, 2, 2)[0]
    require_opaque(ciphertext(residues, 2.0**60))
    residues[1] = 0
    with pytest.raises(ProtocolError) as refusal:
        require_opaque(ciphertext(residues, 2.0**60))
    assert refusal.value.code == "ciphertext_transparent"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("ciphertext_size", bytes(65535)),
        ("ciphertext_zero", bytes(65536)),
        ("ciphertext_zero", b"\1" * 32768 + bytes(32768)),
    ],
)
def test_a_client_checks_answers(client, code, answer):
    with pytest.raises(ProtocolError) as refusal:
        client.decrypt(answer, 16, np.ones(4), 1.0)
    assert refusal.value.code == code
