"""The one parameter set: security, SEAL's opinion of it, and shapes of blocks."""

import dataclasses

import pytest

from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError
from raycloak_lab.encrypted.parameters import (
    ANSWER_BYTES,
    MAX_WIDTH,
    SET_F,
    STANDARD_128_BITS,
    BlockShape,
    context,
    require_allowed,
    require_standard,
)


def test_the_table_is_the_one_that_seal_enforces(seal):
    level = seal.SEC_LEVEL_TYPE.TC128
    assert {n: seal.CoeffModulus.MaxBitCount(n, level) for n in STANDARD_128_BITS} == STANDARD_128_BITS


def test_the_set_has_128_bits_of_security_and_seal_takes_it(seal):
    require_standard(SET_F)
    assert tuple(each.value() for each in seal.CoeffModulus.Create(SET_F.degree, [60, 60, 60])) == SET_F.primes
    assert context().parameters_set()
    assert context().first_context_data().total_coeff_modulus_bit_count() == 120


@pytest.mark.parametrize("change", [{"degree": 4096}, {"primes": SET_F.primes + SET_F.primes[:1]}, {"degree": 8190}])
def test_a_set_below_the_table_is_refused(change):
    with pytest.raises(RefusedError) as refusal:
        require_standard(dataclasses.replace(SET_F, **change))
    assert refusal.value.code == "encryption_too_weak"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SET_F)])
def test_only_the_one_set_is_allowed_and_each_number_is_in_its_digest(field):
    require_allowed(SET_F.digest())
    value = getattr(SET_F, field)
    other = dataclasses.replace(SET_F, **{field: value[:2] if isinstance(value, tuple | str) else value + 1})
    if field == "name":
        other = dataclasses.replace(SET_F, name="P")
    with pytest.raises(ProtocolError) as refusal:
        require_allowed(other.digest())
    assert refusal.value.code == "encryption_set"


@pytest.mark.parametrize(("tokens", "rank"), [(0, 1), (3, 2), (64, 3), (64, 128), (8192, 1), (-64, 8)])
def test_a_block_that_does_not_fit_is_refused(tokens, rank):
    with pytest.raises(ConfigError) as refusal:
        BlockShape(tokens, rank)
    assert refusal.value.code == "block_shape"


@pytest.mark.parametrize(("tokens", "rank", "steps"), [(64, 8, 4), (16, 16, 5), (256, 2, 4), (64, 64, 1), (64, 1, 6)])
def test_keys_are_for_the_needed_rotations_alone(tokens, rank, steps):
    shape = BlockShape(tokens, rank)
    assert len(shape.rotation_steps) == steps
    assert shape.rotation_steps[0] == tokens
    assert all(step < SET_F.slots for step in shape.rotation_steps)


@pytest.mark.parametrize(("tokens", "width"), [(64, 0), (64, -1), (64, MAX_WIDTH + 1), (1024, 1025)])
def test_widths_are_bounded(tokens, width):
    with pytest.raises(ProtocolError) as refusal:
        BlockShape(tokens, 4).ciphertexts(width)
    assert refusal.value.code == "projection_width"


@pytest.mark.parametrize("tokens", [16, 64, 1024])
def test_the_widest_projection_has_an_answer_of_bounded_length(tokens):
    shape = BlockShape(tokens, 4)
    assert shape.answer_bytes(shape.max_width) <= ANSWER_BYTES
