"""The noise that hides an answer: its law, what it has to hide, and repeated requests."""

import math

import numpy as np
import pytest

from raycloak.attestation.core.keys import Secret
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import FLOODING_BITS, Rerandomiser
from raycloak_lab.encrypted.parameters import SET_F, BlockShape, context
from raycloak_lab.encrypted.projection import PackedProjection
from raycloak_lab.encrypted.seal_objects import ciphertext, residues_of

KEY = Secret(bytes(range(32)))
DEVIATION = 2.0 ** (FLOODING_BITS + SET_F.flooding_shift_bits)


@pytest.fixture
def rerandomiser(evaluation):
    return Rerandomiser(evaluation, KEY)


def centred(residues):
    """Return the integers of least size behind residues of the two primes."""
    first, second = SET_F.data_primes
    modulus = first * second
    to_first, to_second = second * pow(second, -1, first), first * pow(first, -1, second)
    values = [(int(a) * to_first + int(b) * to_second) % modulus for a, b in zip(*residues, strict=True)]
    return [value - modulus if value > modulus // 2 else value for value in values]


def test_the_noise_is_one_integer_at_both_primes_of_the_stated_deviation(rerandomiser):
    noise = centred(rerandomiser._flooding(KEY))
    assert max(map(abs, noise)) < 7 * DEVIATION
    scaled = np.array([float(value) for value in noise]) / DEVIATION
    assert abs(scaled.mean()) < 5 / math.sqrt(SET_F.degree)
    assert abs(scaled.std() - 1) < 5 / math.sqrt(2 * SET_F.degree)
    # The low bits are uniform, and not those of a float.
    assert abs(np.mean([value & 1 for value in noise]) - 0.5) < 5 / (2 * math.sqrt(SET_F.degree))
    assert len({value % 2**SET_F.flooding_shift_bits for value in noise}) == SET_F.degree


@pytest.mark.parametrize(
    ("tokens", "rank", "width", "alike", "bits"), [(64, 8, 384, False, 54), (16, 2, 16, True, 56.5)]
)
def test_the_errors_of_an_honest_block_are_below_what_is_stated(seal, tokens, rank, width, alike, bits):
    """Rows alike have 32 coefficients with a deviation of 2^53.7, so 2^56.5 fails by chance once in 10^10."""
    keys = ClientKeys(BlockShape(tokens, rank))
    worker = EvaluationKeys(keys.shape, keys.released)
    rng = np.random.default_rng(tokens)
    rows = keys.shape.columns
    up = np.ones((rows, rank)) if alike else rng.normal(size=(rows, rank))
    down = np.eye(1, width).repeat(rank, 0) if alike else rng.normal(size=(rank, width))
    projection = PackedProjection(down, up, keys.shape)
    # Zeros have a delta of zero, so all that is there are errors.
    upload = keys.encrypt_slots(np.zeros((keys.shape.ciphertexts(width), SET_F.slots)))
    largest = 0
    for delta in projection.apply(worker.read_batch(upload, width), worker):
        plain = seal.Plaintext()
        keys._decryptor.decrypt(delta, plain)
        largest = max(largest, *map(abs, coefficients(seal, plain)))
    assert 2**40 < largest < 2**bits


def coefficients(seal, plain):
    """Return the coefficients of SEAL's plaintext, as centred integers."""
    values = np.array([plain.data(index) for index in range(2 * SET_F.degree)], np.uint64)
    holder = ciphertext(np.stack([values.reshape(2, -1)] * 2), 1.0)
    seal.Evaluator(context()).transform_from_ntt_inplace(holder)
    return centred(residues_of(holder)[0])


def test_a_repeated_request_gets_the_same_bytes(evaluation, client):
    projection = PackedProjection(np.ones((2, 16)), np.ones((16, 2)), client.shape)
    upload, _ = client.encrypt(np.ones((4, 16)))

    def answer(secret=KEY, request=bytes(32), name="q"):
        deltas = projection.apply(evaluation.read_batch(upload, 16), evaluation)
        return Rerandomiser(evaluation, secret).answer(request, name, deltas)

    first = answer()
    assert answer() == first
    others = [answer(Secret(bytes(32))), answer(request=bytes(31) + b"\1"), answer(name="v")]
    assert len({first, *others}) == 4


def test_no_two_ciphertexts_share_noise(rerandomiser):
    answer = rerandomiser.answer(bytes(32), "q", [None, None])
    assert len(answer) == 2 * 2 * SET_F.degree * 4
    first, second = np.frombuffer(answer, "<u4").reshape(2, 2, -1)
    # Either half: the second has no noise but u·pk, and of one u twice the adapter's share would remain.
    assert ((first != second).mean(axis=1) > 0.99).all()
