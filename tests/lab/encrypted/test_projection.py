"""The delta of an adapter over encrypted activations, against float64."""

import os
import pickle

import numpy as np
import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ModelError
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import Rerandomiser
from raycloak_lab.encrypted.parameters import BlockShape
from raycloak_lab.encrypted.projection import PackedProjection, padded_rank

LARGEST_ERROR = 5e-3
"""Of the largest delta of a block, as docs/encrypted-adapters.md promises."""


def adapter(seed):
    """Return a random A and B: ranks, widths, sizes and structure vary with the seed; every tenth B is zero."""
    rng = np.random.default_rng(seed)
    rank, width_in, width_out = rng.integers([1, 1, 1], [3, 33, 17])
    down = rng.normal(size=(rank, width_in)) * 10.0 ** rng.uniform(-6, 6)
    up = rng.normal(size=(width_out, rank)) * 10.0 ** rng.uniform(-6, 6)
    match seed % 10:
        case 0:
            up[:] = 0
        case 1:  # two terms that nearly cancel
            down[-1], up[:, -1] = -down[0], up[:, 0] * (1 + 1e-3 * rng.normal(size=width_out))
        case 2:  # rows of very different sizes
            up *= 10.0 ** rng.uniform(-6, 0, (width_out, 1))
        case 3:  # columns of very different sizes
            down *= 10.0 ** rng.uniform(-6, 0, width_in)
        case 4:
            down[0] = 0
    return down, up


@pytest.mark.parametrize("decade", range(10))
def test_the_error_is_at_most_5e_3_of_the_largest_delta(client, evaluation, hide, decade):
    for seed in range(10 * decade, 10 * decade + 10):
        down, up = adapter(seed)
        tokens = np.random.default_rng(1000 + seed).normal(size=(seed % 256 + 1, down.shape[1])) * 3.0 ** (seed % 9)
        projection = PackedProjection(down, up, client.shape)
        upload, factors = client.encrypt(tokens)
        answer = hide(upload, projection.apply(evaluation.read_batch(upload, down.shape[1]), evaluation))
        delta = client.decrypt(answer, up.shape[0], factors, projection.gain)
        exact = tokens @ down.T @ up.T
        assert delta.shape == exact.shape
        assert np.abs(delta - exact).max() <= LARGEST_ERROR * np.abs(exact).max(), seed


@pytest.mark.parametrize(("tokens", "rank", "width"), [(64, 8, 384), (16, 16, 300), (64, 1, 100), (64, 64, 65)])
def test_other_shapes_and_two_projections_of_one_upload(seal, tokens, rank, width):
    rng = np.random.default_rng(tokens + rank)
    keys = ClientKeys(BlockShape(tokens, rank))
    worker = EvaluationKeys(keys.shape, keys.released)
    rerandomiser = Rerandomiser(worker, Secret(os.urandom(32)))
    states = rng.normal(size=(tokens, width))
    upload, factors = keys.encrypt(states)
    batch = worker.read_batch(upload, width)
    for name in ("query", "value"):
        down, up = rng.normal(size=(rank, width)), rng.normal(size=(width + 3, rank))
        projection = PackedProjection(down, up, keys.shape)
        answer = rerandomiser.answer(bytes(32), name, projection.apply(batch, worker))
        exact = states @ down.T @ up.T
        delta = keys.decrypt(answer, width + 3, factors, projection.gain)
        assert np.abs(delta - exact).max() <= LARGEST_ERROR * np.abs(exact).max()


def test_a_token_of_zeros_has_a_delta_of_zero(client, evaluation, hide):
    down, up = np.ones((2, 16)), np.ones((16, 2))
    projection = PackedProjection(down, up, client.shape)
    states = np.ones((3, 16))
    states[1] = 0
    upload, factors = client.encrypt(states)
    delta = client.decrypt(
        hide(upload, projection.apply(evaluation.read_batch(upload, 16), evaluation)), 16, factors, projection.gain
    )
    assert (delta[1] == 0).all()
    assert np.abs(delta[0] - 32).max() < 0.2


def test_an_adapter_of_zeros_is_answered_by_a_fresh_encryption(client, evaluation, hide):
    projection = PackedProjection(np.ones((2, 16)), np.zeros((16, 2)), client.shape)
    upload, _ = client.encrypt(np.ones((4, 16)))
    deltas = projection.apply(evaluation.read_batch(upload, 16), evaluation)
    assert deltas == [None]
    assert projection.gain == 0
    assert np.abs(client.decrypt_slots(hide(upload, deltas), 1)).min() > 0


@pytest.mark.parametrize(
    ("code", "down", "up"),
    [
        ("adapter_shape", (3, 16), (16, 3)),
        ("adapter_shape", (2, 16), (16, 1)),
        ("adapter_shape", (2, 8193), (16, 2)),
        ("adapter_shape", (2, 16), (0, 2)),
        ("adapter_shape", (16,), (16, 2)),
        ("adapter_not_finite", np.full((2, 16), np.nan), (16, 2)),
        ("adapter_not_finite", (2, 16), np.full((16, 2), np.inf)),
    ],
)
def test_matrices_that_cannot_be_served_are_refused(code, down, up):
    matrices = [np.zeros(each) if isinstance(each, tuple) else each for each in (down, up)]
    with pytest.raises(ModelError) as refusal:
        PackedProjection(*matrices, BlockShape(256, 2))
    assert refusal.value.code == code


def test_ranks_are_padded_to_powers_of_two_from_2():
    assert [padded_rank(rank) for rank in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, 16]


def test_secret_keys_are_neither_pickled_nor_shown_nor_saved(seal, client, monkeypatch):
    monkeypatch.setattr(seal.SecretKey, "save", lambda *_: pytest.fail("SEAL wrote the secret key to a file"))
    ClientKeys(client.shape)
    with pytest.raises(TypeError, match="must not leave its process"):
        pickle.dumps(client)
    assert repr(client) == f"<ClientKeys {client.fingerprint.hex()[:16]}>"
