"""The marks of a dataset: what an account knows the people in it by, and the rule by which two marks are of the same.

Marks say whose data it is without an example. They are of two kinds. Under the key of a fingerprint: what all examples
add up to, and a sketch of them. Without a key: digests of where the data lies.

Guarantee: examples in another order have the same fingerprint and sketch. Of two datasets that share half of all their
examples, the sketches are found alike except with probability 3e-10, and of two that share less than a hundredth of
them with probability 2e-6 at most (`docs/proofs/014-data-marks.md`).

Not guaranteed: that changed examples, another key at another place, or a new place without a key, is seen.
"""

from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import ClassVar, Self

from pydantic import Field, model_validator

from raycloak.attestation.core.messages import Message

SKETCH_SIZE = 64
"""Least codes of examples that a sketch has. Twice as many would not halve the share that can be told apart."""

CODE_BYTES = 8
PLACE_BYTES = 16

MOST_PLACES = 64
"""Most digests of places. Of a large set of files, the least ones stand for all, as in a sketch."""

_ALIKE = 8
"""One in so many of the least codes of both datasets together must be in both."""


class Likeness(IntEnum):
    """The reason why two datasets are taken for one, the strongest last."""

    PLACE = 1
    MOST_EXAMPLES = 2
    ALL_EXAMPLES = 3

    @property
    def words(self) -> str:
        """The words for what they share, to follow "has"."""
        return _WORDS[self]


_WORDS = {
    Likeness.PLACE: "the place",
    Likeness.MOST_EXAMPLES: "many of the examples",
    Likeness.ALL_EXAMPLES: "the very examples",
}


class DataMarks(Message):
    """The marks of one dataset, as a process that opened it states them.

    Attributes:
        key: public name of the key that ``fingerprint`` and ``sketch`` were computed with, 32 bytes; empty without one.
        fingerprint: of all examples, in any order, 32 bytes; of a sealed dataset, the digest of its header. Empty
            without a key.
        sketch: least codes of the distinct features of examples, ascending, `CODE_BYTES` each.
        places: digests of where the data lies, ascending, `PLACE_BYTES` each.
    """

    DOMAIN: ClassVar[str] = "raycloak/data-marks/v1"

    key: bytes = Field(default=b"", max_length=32)
    fingerprint: bytes = Field(default=b"", max_length=32)
    sketch: bytes = Field(default=b"", max_length=SKETCH_SIZE * CODE_BYTES)
    places: bytes = Field(default=b"", max_length=MOST_PLACES * PLACE_BYTES)

    @model_validator(mode="after")
    def _well_formed(self) -> Self:
        if len(self.key) not in (0, 32) or len(self.fingerprint) not in (0, 32):
            raise ValueError("a key's name and a fingerprint have 32 bytes, or none")
        if self.key and not self.fingerprint:
            raise ValueError("what is keyed has a fingerprint")
        # One form for one set: marks are compared, and signed.
        for field, size in ((self.sketch, CODE_BYTES), (self.places, PLACE_BYTES)):
            if len(field) % size or field != joined(set(_split(field, size))):
                raise ValueError("codes and places are ascending, each once")
        return self

    @property
    def empty(self) -> bool:
        """Return whether nothing is known of the data."""
        return not (self.fingerprint or self.places)


def joined(parts: AbstractSet[bytes]) -> bytes:
    """Return the codes or places of a set as marks have them."""
    return b"".join(sorted(parts))


def likeness(one: DataMarks, other: DataMarks) -> Likeness | None:
    """Return why two marks are taken to be of the same people; None if nothing says so."""
    if one.fingerprint and one.fingerprint == other.fingerprint:
        return Likeness.ALL_EXAMPLES
    # Codes under two keys have nothing in common, whatever the examples.
    if one.key and one.key == other.key and _are_alike(one.sketch, other.sketch):
        return Likeness.MOST_EXAMPLES
    if set(_split(one.places, PLACE_BYTES)) & set(_split(other.places, PLACE_BYTES)):
        return Likeness.PLACE
    return None


def _are_alike(one: bytes, other: bytes) -> bool:
    """Return whether enough of the least codes of two sketches together are in both.

    The least codes of a union are least codes of the set that they come from. So their share in both is that of a
    random sample of the union.
    """
    first, second = set(_split(one, CODE_BYTES)), set(_split(other, CODE_BYTES))
    least = sorted(first | second)[:SKETCH_SIZE]
    shared = sum(code in first and code in second for code in least)
    return shared * _ALIKE >= len(least) > 0


def _split(field: bytes, size: int) -> list[bytes]:
    return [field[start : start + size] for start in range(0, len(field), size)]


NO_MARKS = DataMarks()
"""Of data that nothing is known of, such as examples that a client sends."""
