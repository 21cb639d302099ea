"""The model digest follows its specification and does not depend on ranges."""

import hashlib

import numpy as np
import pytest

from raycloak.attestation.core.lineage import parameters_digest
from raycloak.metrics.errors import RefusedError
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.terms.model_digest import dimension, model_digest, split_flat, tensor_digests, with_state

TENSORS = (
    TensorSpec(name="0.weight", shape=(3, 2)),
    TensorSpec(name="scale", shape=()),
    TensorSpec(name="0.bias", shape=(3,)),
)
FLAT = np.arange(10, dtype=np.float32) - 4.5


def prefixed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def test_the_digest_is_the_specified_one() -> None:
    fields = [b"raycloak/parameters/v1"]
    for name, shape, part in ((b"0.weight", b"3,2", FLAT[:6]), (b"scale", b"", FLAT[6:7]), (b"0.bias", b"3", FLAT[7:])):
        fields += [name, b"float32", shape, hashlib.sha256(part.astype("<f4").tobytes()).digest()]
    expected = hashlib.sha256(prefixed(*fields)).digest()
    assert model_digest(TENSORS, tensor_digests(FLAT, TENSORS)) == expected


def test_digests_of_ranges_join_to_the_digest_of_the_whole() -> None:
    parts = tensor_digests(FLAT[:7], TENSORS[:2]) + tensor_digests(FLAT[7:], TENSORS[2:])
    assert parts == tensor_digests(FLAT, TENSORS)


def test_every_name_shape_and_bit_counts() -> None:
    digests = tensor_digests(FLAT, TENSORS)
    renamed = (TENSORS[0].model_copy(update={"name": "1.weight"}), *TENSORS[1:])
    reshaped = (TENSORS[0].model_copy(update={"shape": (2, 3)}), *TENSORS[1:])
    flipped = FLAT.copy()
    flipped.view(np.uint32)[9] ^= 1
    seen = {
        model_digest(TENSORS, digests),
        model_digest(renamed, digests),
        model_digest(reshaped, digests),
        model_digest(TENSORS, tensor_digests(flipped, TENSORS)),
    }
    assert len(seen) == 4


def test_a_read_only_vector_is_accepted_and_another_size_or_dtype_is_not() -> None:
    frozen = FLAT.copy()
    frozen.setflags(write=False)
    assert tensor_digests(frozen, TENSORS) == tensor_digests(FLAT, TENSORS)
    assert dimension(TENSORS) == 10
    with pytest.raises(RefusedError, match="proof_bound"):
        split_flat(FLAT[:9], TENSORS)
    with pytest.raises(RefusedError, match="proof_bound"):
        tensor_digests(FLAT.astype(np.float64), TENSORS)


def test_a_models_digests_are_the_same_whether_threads_share_them_or_not(monkeypatch):
    state = {f"{tensor.name}/moment": np.arange(tensor.size, dtype=np.float64) for tensor in TENSORS[:2]}
    alone = with_state(FLAT, state, TENSORS)
    monkeypatch.setattr("raycloak.workers.terms.model_digest._LARGE", 0)
    assert with_state(FLAT, state, TENSORS) == alone
    assert [each.content for each in alone] == tensor_digests(FLAT, TENSORS)
    assert parameters_digest(alone) == model_digest(TENSORS, tensor_digests(FLAT, TENSORS))
    assert [bool(each.state) for each in alone] == [True, True, *[False] * (len(TENSORS) - 2)]


@pytest.mark.parametrize(
    "other",
    [
        {"first": np.zeros(2, np.float32)},
        {"second": np.zeros(3, np.float32)},
        {"second": np.zeros(2, np.float64)},
        {"second": np.zeros((2, 1), np.float32)},
        {"second": np.ones(2, np.float32)},
        {"second": np.zeros(2, np.float32), "third": np.zeros(0, np.float32)},
    ],
    ids=["field", "size", "type", "shape", "values", "one more"],
)
def test_any_difference_of_a_rules_state_shows_in_its_digest(other):
    name = TENSORS[0].name
    base = with_state(FLAT, {f"{name}/second": np.zeros(2, np.float32)}, TENSORS)
    changed = with_state(FLAT, {f"{name}/{field}": array for field, array in other.items()}, TENSORS)
    assert base[0].state != changed[0].state
    assert base[1:] == changed[1:]
