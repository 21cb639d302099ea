"""Arrays in a package survive bit for bit, and the safetensors library reads what we write."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load

from raycloak.coordinator.checkpoints.arrays import load_arrays, safetensors_pieces
from raycloak.metrics.errors import EvidenceError


def file_of(arrays):
    return b"".join(bytes(piece) for piece in safetensors_pieces(arrays, {"a": "b"}))


def chunks_of(content, size=7):
    return (content[start : start + size] for start in range(0, len(content), size))


@pytest.mark.parametrize(
    "dtype", ["bool", "u1", "i1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8", ">f4"]
)
def test_every_dtype_and_shape_survives_bit_for_bit(dtype):
    generator = np.random.default_rng(0)
    bits = np.frombuffer(generator.bytes(6 * 8), np.uint8)[: 6 * np.dtype(dtype).itemsize]
    values = (bits & 1).view("bool") if dtype == "bool" else bits.view(dtype)
    arrays = {
        "matrix": values.reshape(2, 3),
        "transposed": values.reshape(2, 3).T,
        "scalar": values[:1].reshape(()),
        "empty": values[:0].reshape(0, 4),
        "strided": values[::2],
    }
    content = file_of(arrays)
    found, own = load(content), load_arrays(chunks_of(content))
    assert found.keys() == own.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (own[name].dtype, own[name].shape) == (found[name].dtype, found[name].shape)
        assert own[name].tobytes() == found[name].tobytes()
        assert found[name].dtype == array.dtype.newbyteorder("<")
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()


def test_no_copy_of_the_arrays_is_made():
    arrays = {str(i): np.ones(2**18, np.float32) for i in range(16)}
    tracemalloc.start()
    try:
        total = sum(len(piece) for piece in safetensors_pieces(arrays, {}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total > 16 * 2**20
    assert peak < 2**20


def test_arrays_are_read_into_their_places_without_a_copy():
    arrays = {str(i): np.full(2**18, i, np.float32) for i in range(16)}
    content = file_of(arrays)
    flat = np.empty(16 * 2**18, np.float32)
    places = dict(zip(arrays, np.split(flat, 16), strict=True))
    tracemalloc.start()
    try:
        load_arrays(chunks_of(content, 2**16), places)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert flat.tobytes() == np.concatenate(list(arrays.values())).tobytes()
    assert peak < 2**20


def changed(content, **fields):
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["x"] |= fields
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content[8 + size :]


def test_another_file_is_malformed():
    content = file_of({"x": np.arange(3, dtype=np.float32)})
    cases = {
        "nothing": b"",
        "an array cut short": content[:-1],
        "more": content + b"0",
        "no header": b"\x08" + bytes(7) + b"12345678",
        "an endless header": b"\xff" * 8 + content[8:],
        "another dtype": changed(content, dtype="C64"),
        "another shape": changed(content, shape=[2]),
        "a shape of text": changed(content, shape="3"),
        "a gap": changed(content, data_offsets=[4, 16]),
    }
    found = {}
    for name, each in cases.items():
        with pytest.raises(EvidenceError) as refusal:
            load_arrays(chunks_of(each))
        found[name] = refusal.value.code
    assert found == dict.fromkeys(cases, "package_malformed")


@pytest.mark.parametrize("place", [np.empty(3, np.float64), np.empty(4, np.float32), np.empty((3, 1), np.float32)])
def test_an_array_that_does_not_fit_its_place_is_malformed(place):
    content = file_of({"x": np.arange(3, dtype=np.float32)})
    with pytest.raises(EvidenceError, match="x is not what it should be"):
        load_arrays(chunks_of(content), {"x": place})
