"""Arrays in a package survive bit for bit, and the safetensors library reads what we write."""

import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load

from raycloak.coordinator.checkpoints.arrays import safetensors_pieces


def file_of(arrays):
    return b"".join(bytes(piece) for piece in safetensors_pieces(arrays, {"a": "b"}))


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
    found = load(file_of(arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
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
