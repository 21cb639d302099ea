"""The one parameter set of encrypted adapters, its check against the 128-bit table, and the shape of a block of tokens.

Guarantee: no object of SEAL exists under other parameters. What a peer sends holds residues and no parameters, so it
cannot choose any.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError

STANDARD_128_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
"""Most bits of a modulus at each ring degree: 128 bits against classical attacks, ternary secrets (HE standard, 2018).

This is the standard's table 1 and no opinion of ours; SEAL enforces the same one as ``TC128``.
"""


@dataclass(frozen=True)
class ParameterSet:
    """The numbers that decide ciphertexts, security and noise.

    Args:
        name: short name, part of the digest.
        degree: ring degree N; a ciphertext has N / 2 slots.
        primes: the RNS moduli; the last one serves key switching alone.
        activation_scale_bits: log2 of the scale of encrypted activations.
        weight_scale_bits: log2 of the scale of an encoded matrix; two follow each other.
        amplitude_bits: log2 of the norm to which a client scales each token.
        flooding_shift_bits: log2 of the largest error that the flooding noise has to hide.
        dropped_bits: low bits of a response that are not sent.
    """

    name: str
    degree: int
    primes: tuple[int, ...]
    activation_scale_bits: int
    weight_scale_bits: int
    amplitude_bits: int
    flooding_shift_bits: int
    dropped_bits: int

    @property
    def slots(self) -> int:
        """The real numbers in a ciphertext."""
        return self.degree // 2

    @property
    def data_primes(self) -> tuple[int, ...]:
        """The moduli of an encrypted activation."""
        return self.primes[:-1]

    @property
    def product_scale_bits(self) -> int:
        """The log2 of the scale after both matrices, before the rescale."""
        return self.activation_scale_bits + 2 * self.weight_scale_bits

    def digest(self) -> bytes:
        """Return the SHA-256 that names the set in requests, registrations and the log."""
        numbers = (
            self.degree,
            *self.primes,
            self.activation_scale_bits,
            self.weight_scale_bits,
            self.amplitude_bits,
            self.flooding_shift_bits,
            self.dropped_bits,
        )
        return digest(length_prefixed("raycloak/encrypted-adapter/parameters/v1", self.name, *numbers))


SET_F = ParameterSet(
    name="F",
    degree=8192,
    # The largest primes of 60 bits that are 1 modulo 2N, as SEAL's own search gives them.
    primes=(1152921504606683137, 1152921504606748673, 1152921504606830593),
    activation_scale_bits=60,
    weight_scale_bits=24,
    # A delta is at most 2^10 where a row of the adapter has norm 1. The modulus leaves 2^11 at both levels; the rest
    # is for the flooding noise, which the last bit holds with room to spare.
    amplitude_bits=10,
    # Errors of an honest block stay below 2^54, and below 2^56 where all rows of an adapter are alike
    # (tests/lab/encrypted/test_flooding.py measures them).
    flooding_shift_bits=55,
    # After the rescale the noise has a deviation of 2^35; 28 dropped bits add little to it, and halve a response.
    dropped_bits=28,
)
"""The one allowed set: N = 8192 and three primes of 60 bits, with room for 40 bits of flooding."""

# Two polynomials of upper halves, as u32.
_ANSWERED_BYTES = 2 * SET_F.degree * 4

MAX_WIDTH = 8192
"""Widest projection: hidden states of a model of encoder size have at most half of it. It bounds memory."""

ANSWER_BYTES = 16 * 2**20
"""Longest answer to one request. It bounds a message, memory, and how long a request keeps others waiting."""


def require_standard(parameters: ParameterSet) -> None:
    """Require at least 128 bits of security by the standard's table.

    Raises:
        RefusedError: ``encryption_too_weak``.
    """
    bits = sum(prime.bit_length() for prime in parameters.primes)
    if bits > STANDARD_128_BITS.get(parameters.degree, 0):
        raise RefusedError(
            "encryption_too_weak",
            f"a modulus of {bits} bits at ring degree {parameters.degree} has less than 128 bits of security.",
            f"Use parameter set {SET_F.name}.",
        )


def require_allowed(set_digest: bytes) -> None:
    """Require that a peer means the one allowed set.

    Raises:
        ProtocolError: ``encryption_set``.
    """
    if set_digest != SET_F.digest():
        raise ProtocolError(
            "encryption_set",
            "the message names another set of encryption parameters.",
            f"Use a raycloak whose parameter set is {SET_F.name} with digest {SET_F.digest().hex()[:16]}.",
        )


@dataclass(frozen=True)
class BlockShape:
    """The shape of one encrypted block: slot ``b * tokens + t`` holds column b of token t.

    Args:
        tokens: T, a power of two.
        rank: r, a power of two; a smaller adapter is padded with zeros.

    Raises:
        ConfigError: ``block_shape`` if either is no power of two, or r blocks of T tokens do not fit the slots.
    """

    tokens: int
    rank: int

    def __post_init__(self) -> None:
        if any(value < 1 or value & (value - 1) for value in (self.tokens, self.rank)) or (
            self.tokens * self.rank > SET_F.slots
        ):
            raise ConfigError(
                "block_shape",
                f"a block of {self.tokens} tokens for rank {self.rank} does not fit {SET_F.slots} slots in powers of "
                "two.",
                "Use tokens and rank whose product is a power of two of at most 4096.",
            )

    @property
    def columns(self) -> int:
        """The columns of a matrix that one ciphertext holds."""
        return SET_F.slots // self.tokens

    def ciphertexts(self, width: int) -> int:
        """Return how many ciphertexts hold ``width`` columns.

        Raises:
            ProtocolError: ``projection_width`` unless it is in [1, max_width].
        """
        if not 1 <= width <= self.max_width:
            raise ProtocolError(
                "projection_width",
                f"a projection of width {width} is not served in blocks of {self.tokens} tokens.",
                f"Use a model whose projections have at most {self.max_width} columns, or smaller blocks.",
            )
        return -(-width // self.columns)

    @property
    def max_width(self) -> int:
        """The widest projection whose answer is not too long."""
        return min(MAX_WIDTH, ANSWER_BYTES // _ANSWERED_BYTES * self.columns)

    def answer_bytes(self, width: int) -> int:
        """Return the length of an answer of ``width`` columns; ProtocolError ``projection_width``."""
        return self.ciphertexts(width) * _ANSWERED_BYTES

    @property
    def rotation_steps(self) -> tuple[int, ...]:
        """The slot rotations that a projection needs, and the only ones that a client gives keys for."""
        step, steps = self.tokens * self.rank, [self.tokens]
        while step < SET_F.slots:
            steps.append(step)
            step *= 2
        # At rank 1 the first doubling is the single step again.
        return tuple(dict.fromkeys(steps)) if self.tokens < SET_F.slots else ()

    @property
    def galois_elements(self) -> tuple[int, ...]:
        """The automorphisms behind the rotations, in their order."""
        return tuple(pow(3, step, 2 * SET_F.degree) for step in self.rotation_steps)


KEY_HEADER = struct.Struct(">32sII")
"""The head of released keys: digest of the parameter set, tokens and rank, which say the rotation steps."""


def key_header(shape: BlockShape) -> bytes:
    """Return the head of keys for this shape."""
    return KEY_HEADER.pack(SET_F.digest(), shape.tokens, shape.rank)


def require_key_header(content: bytes, shape: BlockShape) -> None:
    """Require that released keys say the one parameter set and this shape.

    Raises:
        ProtocolError: ``ciphertext_size``, ``encryption_set`` or ``key_steps``.
    """
    if len(content) < KEY_HEADER.size:
        raise ProtocolError("ciphertext_size", "the keys are cut short.", "Send what raycloak releases.")
    set_digest, tokens, rank = KEY_HEADER.unpack_from(content)
    require_allowed(set_digest)
    if (tokens, rank) != (shape.tokens, shape.rank):
        raise ProtocolError(
            "key_steps",
            f"the keys are for the rotations of {tokens} tokens at rank {rank}, not of {shape.tokens} at {shape.rank}.",
            "Make keys for the shape that the adapter's server states.",
        )


def library() -> Any:
    """Return ``tenseal.sealapi``, imported when it is first needed: commands that encrypt nothing do without."""
    import tenseal.sealapi

    return tenseal.sealapi


@lru_cache(maxsize=1)
def context() -> Any:
    """Return SEAL's context of the one set, built once a process and after both tables agreed to it.

    Raises:
        RefusedError: ``encryption_too_weak``; also where SEAL does not accept the set.
    """
    seal = library()
    require_standard(SET_F)
    parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
    parameters.set_poly_modulus_degree(SET_F.degree)
    parameters.set_coeff_modulus([seal.Modulus(prime) for prime in SET_F.primes])
    built = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
    if not built.parameters_set():
        raise RefusedError(
            "encryption_too_weak",
            "SEAL does not accept the parameter set.",
            "Install raycloak-lab's tenseal.",
        )
    return built
