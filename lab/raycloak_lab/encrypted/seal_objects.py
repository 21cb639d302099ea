"""Bytes to SEAL's objects and back, so that nothing else knows SEAL's file format.

A peer sends residues and seeds. Level, scale, size and parameters of every object are written here, from constants.

Guarantee: no byte of a peer reaches SEAL's parser before its count, its range and its being nonzero were checked. No
object is ever written to a disk: SEAL reads and writes paths, and they lead to anonymous memory.
"""

import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raycloak.attestation.core.keys import Secret
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.vectors.streams import KeyStream
from raycloak_lab.encrypted.parameters import SET_F, context, library
from raycloak_lab.encrypted.residues import Residues, level_primes

SEED_BYTES = 32
"""Length of a public seed: the key of the ChaCha20 stream that a uniform polynomial is read from."""

# Magic, header size, major and minor version, compression, reserved, total size. The version is SEAL's own.
_HEADER = struct.Struct("<HBBBBHQ")
_MAGIC, _SEAL_MAJOR, _SEAL_MINOR, _UNCOMPRESSED = 0xA15E, 4, 3, 0
# Parameter id, NTT flag, polynomials, degree, primes, scale, correction factor (BGV's, always 1).
_CIPHERTEXT = struct.Struct("<32s?QQQdQ")
# Parameter id, coefficients, scale.
_PLAINTEXT = struct.Struct("<32sQd")
_RESIDUE_BYTES = 8


class _Memory:
    """An anonymous file in memory, open for the length of one exchange with SEAL."""

    def __enter__(self) -> "_Memory":
        self._descriptor = os.memfd_create("raycloak-seal", os.MFD_CLOEXEC)
        self.path = f"/proc/self/fd/{self._descriptor}"
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def read(self) -> bytes:
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)


def _file(body: bytes) -> bytes:
    header = _HEADER.pack(_MAGIC, _HEADER.size, _SEAL_MAJOR, _SEAL_MINOR, _UNCOMPRESSED, 0, _HEADER.size + len(body))
    return header + body


def _array(values: Residues) -> bytes:
    return _file(struct.pack("<Q", values.size) + values.astype("<u8", copy=False).tobytes())


def _load(target: Any, content: bytes) -> Any:
    with _Memory() as memory:
        memory.write(content)
        target.load(context(), memory.path)
    return target


def _body(source: Any, body_bytes: int) -> bytes:
    """Return what SEAL saves of an object, uncompressed and without its header."""
    with _Memory() as memory:
        source.save(memory.path)
        content = memory.read()
    return bytes(pa.decompress(content[_HEADER.size :], body_bytes, codec="zstd"))


def parms_id(primes: int) -> bytes:
    """Return SEAL's name of the level with this many primes; KeyError for a level that the set lacks."""
    chosen = {
        len(SET_F.primes): context().key_parms_id,
        len(SET_F.data_primes): context().first_parms_id,
        1: context().last_parms_id,
    }[primes]
    return struct.pack("<4Q", *chosen())


def _ciphertext_body(residues: Residues, scale: float, *, ntt: bool) -> bytes:
    size, primes, degree = residues.shape
    return _CIPHERTEXT.pack(parms_id(primes), ntt, size, degree, primes, scale, 1) + _array(residues)


def ciphertext(residues: Residues, scale: float, *, ntt: bool = True) -> Any:
    """Return a ciphertext of SEAL.

    Args:
        residues: uint64, shape [2, primes, N], each below its prime.
        scale: its CKKS scale.
        ntt: whether the residues are in NTT form; all that a peer sends are.
    """
    return _load(library().Ciphertext(), _file(_ciphertext_body(residues, scale, ntt=ntt)))


def plaintext(residues: Residues, scale: float) -> Any:
    """Return a plaintext of SEAL in NTT form from residues of shape [primes, N]."""
    primes, _ = residues.shape
    body = _PLAINTEXT.pack(parms_id(primes), residues.size, scale) + _array(residues)
    return _load(library().Plaintext(), _file(body))


def galois_keys(elements: Sequence[int], keys: Residues) -> Any:
    """Return the rotation keys of SEAL.

    Args:
        elements: the automorphisms, ascending or not.
        keys: uint64, shape [elements, digits, 2, primes, N] in NTT form.
    """
    count, digits, _, primes, degree = keys.shape
    assert count == len(elements)
    # SEAL stores a list for every automorphism there could be; those without a key are empty.
    of_index = {(element - 1) // 2: keys[number] for number, element in enumerate(elements)}
    parts = [parms_id(primes), struct.pack("<Q", degree)]
    for index in range(degree):
        digit_keys = of_index.get(index)
        parts.append(struct.pack("<Q", 0 if digit_keys is None else digits))
        parts += [] if digit_keys is None else [_file(_ciphertext_body(key, 1.0, ntt=True)) for key in digit_keys]
    return _load(library().GaloisKeys(), _file(b"".join(parts)))


def residues_of(source: Any) -> Residues:
    """Return the residues of SEAL's ciphertext, uint64 of shape [polynomials, primes, N]."""
    shape = (source.size(), source.coeff_modulus_size(), source.poly_modulus_degree())
    start = _CIPHERTEXT.size + _HEADER.size + 8
    body = _body(source, start + _RESIDUE_BYTES * int(np.prod(shape)))
    return np.frombuffer(body, "<u8", offset=start).reshape(shape).astype(np.uint64)


def key_residues(source: Any) -> Residues:
    """Return the residues of SEAL's secret key at the key level, uint64 of shape [primes, N], in NTT form.

    They are read one by one, since SEAL would save them to a file.
    """
    held = source.data()
    return np.array([held.data(index) for index in range(held.coeff_count())], np.uint64).reshape(-1, SET_F.degree)


def uniform_residues(seed: bytes, index: int, primes: int) -> Residues:
    """Return the public uniform polynomial that a seed stands for, uint64 of shape [primes, N].

    Both sides draw it, so a peer sends a seed in place of half a ciphertext, and cannot choose the polynomial.
    """
    stream = KeyStream(Secret(seed), nonce=index)
    drawn = np.empty((primes, SET_F.degree), np.uint64)
    for row, prime in zip(drawn, SET_F.primes, strict=False):
        row[:] = _below(stream, prime, row.size)
    return drawn


def _below(stream: KeyStream, prime: int, count: int) -> Residues:
    accepted = np.empty(0, np.uint64)
    while accepted.size < count:
        words = np.empty(count - accepted.size, "<u8")
        stream.into(words)
        words &= np.uint64(2 ** prime.bit_length() - 1)
        # Rejected about once in 2^36 draws; reducing instead would not be uniform.
        accepted = np.concatenate([accepted, words[words < np.uint64(prime)]])
    return accepted


def seeded_bytes(count: int, primes: int) -> int:
    """Return the length of ``count`` seeded polynomials and their one seed."""
    return SEED_BYTES + count * primes * SET_F.degree * _RESIDUE_BYTES


def write_seeded(seed: bytes, first: Residues) -> bytes:
    """Write first halves of ciphertexts, shape [count, primes, N], behind the seed of their second halves."""
    return seed + first.astype("<u8", copy=False).tobytes()


def read_seeded(content: bytes, count: int, primes: int) -> Residues:
    """Return ciphertexts from :func:`write_seeded`, uint64 of shape [count, 2, primes, N].

    Raises:
        ProtocolError: ``ciphertext_size``, ``ciphertext_residue`` or ``ciphertext_zero``.
    """
    require_size(content, seeded_bytes(count, primes))
    first = np.frombuffer(content, "<u8", offset=SEED_BYTES).reshape(count, primes, SET_F.degree)
    require_residues(first)
    seed = content[:SEED_BYTES]
    both = np.empty((count, 2, primes, SET_F.degree), np.uint64)
    both[:, 0] = first
    for index in range(count):
        both[index, 1] = uniform_residues(seed, index, primes)
    return both


def require_size(content: bytes | bytearray, expected: int) -> None:
    """Require an exact length; ProtocolError ``ciphertext_size``."""
    if len(content) != expected:
        raise ProtocolError(
            "ciphertext_size",
            f"encrypted content of {len(content)} bytes came where {expected} are due.",
            "Send whole blocks of the registered shape.",
        )


def require_residues(values: Residues) -> None:
    """Require residues of shape [count, primes, N] below their primes, and no polynomial that is zero.

    Raises:
        ProtocolError: ``ciphertext_residue`` or ``ciphertext_zero``.
    """
    if (values >= level_primes(values.shape[-2])).any():
        raise ProtocolError(
            "ciphertext_residue", "a ciphertext has a number at or above its modulus.", "Send what raycloak encrypts."
        )
    if not values.any(axis=(-2, -1)).all():
        raise ProtocolError("ciphertext_zero", "a ciphertext is zero.", "Send what raycloak encrypts.")


def require_opaque(encrypted: Any) -> None:
    """Require that a ciphertext is not transparent: that reading it takes the secret key.

    Raises:
        ProtocolError: ``ciphertext_transparent``.
    """
    if encrypted.is_transparent():
        raise ProtocolError(
            "ciphertext_transparent", "a ciphertext could be read without a key.", "Send what raycloak encrypts."
        )
