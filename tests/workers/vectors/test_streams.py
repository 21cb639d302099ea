"""Keystreams against RFC 8439, and their positions."""

import numpy as np
import pytest

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import RefusedError
from raycloak.workers.vectors.streams import MAX_BLOCKS, KeyStream

KEY = Secret(bytes(range(32)))

# RFC 8439, appendix A.1 (vectors 1 to 5) and section 2.3.2: key, nonce, block counter, keystream.
RFC_8439 = [
    (
        "00" * 32,
        "00" * 12,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        "00" * 12,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        "00" * 12,
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        "00" * 12,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "00" * 32,
        "00" * 11 + "02",
        0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
    (
        bytes(range(32)).hex(),
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
]


@pytest.mark.parametrize(("key", "nonce", "counter", "expected"), RFC_8439)
def test_rfc_8439_vectors(key: str, nonce: str, counter: int, expected: str) -> None:
    number = int.from_bytes(bytes.fromhex(nonce), "little")
    stream = KeyStream(Secret(bytes.fromhex(key)), block_counter=counter, nonce=number)
    assert stream.bytes(64).hex() == expected


def test_equal_positions_give_equal_bytes_however_they_are_read() -> None:
    whole = KeyStream(KEY).bytes(400_000)
    stream = KeyStream(KEY)
    buffer = np.empty(49_999, "<u4")
    parts = [stream.bytes(1), b"", stream.bytes(63), stream.bytes(100)]
    stream.into(buffer)
    parts += [buffer.tobytes(), stream.bytes(7)]
    joined = b"".join(parts)
    assert joined == whole[: len(joined)]


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4", "<u8"])
def test_into_fills_every_dtype_and_shape(dtype: str) -> None:
    buffer = np.full((3, 5), 1, dtype)
    KeyStream(KEY).into(buffer)
    assert buffer.tobytes() == KeyStream(KEY).bytes(buffer.nbytes)


def test_into_an_empty_buffer_reads_nothing() -> None:
    stream = KeyStream(KEY)
    stream.into(np.empty((0, 2), np.uint64))
    assert stream.bytes(8) == KeyStream(KEY).bytes(8)


def test_seek_is_by_64_byte_blocks() -> None:
    whole = KeyStream(KEY).bytes(1000)
    stream = KeyStream(KEY, block_counter=3)
    assert stream.bytes(10) == whole[192:202]
    stream.seek(1)
    assert stream.bytes(70) == whole[64:134]


def test_no_position_is_reached_twice_by_wrapping() -> None:
    stream = KeyStream(KEY, block_counter=MAX_BLOCKS - 1)
    assert len(stream.bytes(60)) == 60
    buffer = np.zeros(5, np.uint8)
    for read in (lambda: stream.bytes(5), lambda: stream.into(buffer)):
        with pytest.raises(RefusedError, match="keystream_exhausted"):
            read()
    assert not buffer.any()
    assert len(stream.bytes(4)) == 4
    with pytest.raises(RefusedError, match="keystream_exhausted"):
        stream.bytes(1)


def test_every_kind_of_read_moves_towards_the_end() -> None:
    for read in (lambda stream: stream.bytes(60), lambda stream: stream.into(np.empty(60, np.uint8))):
        stream = KeyStream(KEY, block_counter=MAX_BLOCKS - 1)
        read(stream)
        with pytest.raises(RefusedError, match="keystream_exhausted"):
            stream.bytes(5)


@pytest.mark.parametrize("block", [-1, MAX_BLOCKS + 1])
def test_seek_outside_the_stream_is_refused(block: int) -> None:
    with pytest.raises(RefusedError, match="keystream_exhausted"):
        KeyStream(KEY, block_counter=block)


def test_the_end_itself_can_be_sought_and_yields_nothing() -> None:
    with pytest.raises(RefusedError, match="keystream_exhausted"):
        KeyStream(KEY, block_counter=MAX_BLOCKS).bytes(1)


def test_nonces_and_keys_give_unrelated_streams() -> None:
    """Equal bits of two streams of 1 Mbit are Binomial(2^20, 1/2); false-alarm rate below 1e-6 (5.2 deviations)."""
    base = np.frombuffer(KeyStream(KEY).bytes(1 << 17), np.uint64)
    others = [KeyStream(KEY, nonce=1), KeyStream(Secret(bytes(32))), KeyStream(KEY, block_counter=1)]
    for other in others:
        differing = np.bitwise_count(base ^ np.frombuffer(other.bytes(1 << 17), np.uint64)).sum()
        assert abs(int(differing) - 2**19) < 5.2 * 2**9


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="key"):
        KeyStream(Secret(bytes(16)))
