"""A sent batch: the examples that a data owner's client sends for one step, encrypted to virtual workers.

The bytes are a prefix, the clear head, then one part for each virtual worker that has an example of the batch:

    "RAYCLOAK sent batch 1\\n"  length of the head (4 bytes, big-endian)  head  part  part  ...

An example takes a place of the step; places are counted over all batches of the step. Place p belongs to virtual
worker p mod V. A part holds its examples in the order of their places, under AES-256-GCM.

Guarantee: a part opens only with its virtual worker's key of the epoch, and only under the head it was sealed with. So
a batch serves one step of one run, at one position, in whole or not at all.
"""

import io
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, Final, Literal, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import Field, model_validator

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.keys import Purpose, Secret, derive
from raycloak.attestation.core.messages import Message, parse
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound

HASH_BYTES: Final = 16
"""Length of a keyed hash of an example's id: two of a billion ids are alike with a chance of 2^-69."""

_PREFIX: Final = b"RAYCLOAK sent batch 1\n"
_LENGTH_BYTES: Final = 4
_TAG_BYTES: Final = 16
_SALT_BYTES: Final = 32
# The text of a head without hashes, and of one hash; twice what any needs.
_HEAD_TEXT_BYTES: Final = 2**12
_HASH_TEXT_BYTES: Final = 4 * HASH_BYTES
# Every part has a key of its own, since the head that the key is bound to has a fresh salt. So one nonce is enough.
_NONCE: Final = bytes(12)


class SentHead(Message):
    """The clear text of a batch.

    Attributes:
        manifest_digest: of the run's manifest, whose terms the owner has accepted.
        client_id: of the training client that the batch was sent by.
        step: the step that the batch is for.
        epoch: of the keys that its parts are sealed under.
        number: batches of the step before this one.
        first: examples of the step before this batch's, and so the place of its first one.
        virtual_workers: V.
        row_bytes: size of one encoded example.
        hashes: 16 bytes for each example, in their order: an HMAC of its id under a key of the owner's.
        salt: drawn for this sealing.
    """

    DOMAIN: ClassVar[str] = "raycloak/sent-data/head/v1"

    format: Literal[1] = 1
    run_id: str
    manifest_digest: bytes = Field(min_length=32, max_length=32)
    client_id: str = Field(max_length=256)
    step: int = Field(ge=0, lt=2**63)
    epoch: int = Field(ge=0, lt=2**63)
    number: int = Field(ge=0, lt=2**32)
    first: int = Field(ge=0, lt=2**32)
    virtual_workers: int = Field(gt=0, lt=2**32)
    row_bytes: int = Field(gt=0, lt=2**32)
    hashes: bytes = Field(min_length=HASH_BYTES, max_length=HASH_BYTES * 2**24)
    salt: bytes = Field(min_length=_SALT_BYTES, max_length=_SALT_BYTES)

    @model_validator(mode="after")
    def _whole_hashes(self) -> Self:
        if len(self.hashes) % HASH_BYTES:
            raise ValueError("a hash is cut off")
        return self

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.hashes) // HASH_BYTES

    @property
    def example_hashes(self) -> tuple[bytes, ...]:
        """The hash of each example, in order."""
        return tuple(self.hashes[i : i + HASH_BYTES] for i in range(0, len(self.hashes), HASH_BYTES))

    def places(self, v: int) -> range:
        """Return the places of the step that virtual worker ``v`` has of this batch."""
        return range(
            self.first + (v - self.first) % self.virtual_workers, self.first + self.examples, self.virtual_workers
        )

    def part_bytes(self, v: int) -> int:
        """Return the size of virtual worker ``v``'s part; 0 without an example of it."""
        rows = len(self.places(v))
        return rows * self.row_bytes + _TAG_BYTES if rows else 0


def fresh_salt() -> bytes:
    """Return the salt of one sealing."""
    return secrets.token_bytes(_SALT_BYTES)


def seal_sent(head: SentHead, rows: Sequence[bytes], key_of: Callable[[int], Secret]) -> bytes:
    """Encrypt a batch.

    Args:
        head: with a salt that no other sealing has.
        rows: the encoded examples, in order, each of ``head.row_bytes``.
        key_of: the key of a virtual worker in ``head.epoch``; see `raycloak.attestation.keys.halves.sent_key`.
    """
    sized = len(rows) == head.examples and all(len(row) == head.row_bytes for row in rows)
    require_bound(sized, "a sent batch has one row for each example that is counted, all of one size")
    encoded = head.encode()
    parts = [_PREFIX, len(encoded).to_bytes(_LENGTH_BYTES, "big"), encoded]
    name = digest(encoded)
    for v in _receivers(head):
        plain = b"".join(rows[place - head.first] for place in head.places(v))
        parts.append(_cipher(key_of(v), name, v).encrypt(_NONCE, plain, _associated(name, v)))
    return b"".join(parts)


def head_of(file: BinaryIO, size: int, examples: int) -> SentHead:
    """Read the head of a batch of ``size`` bytes that is said to have so many examples.

    It is for a service, which has no use for the parts. Of what is no batch, little is read.

    Raises:
        ProtocolError: ``batch_malformed``.
    """
    head = _read_head(file, size, _HEAD_TEXT_BYTES + examples * _HASH_TEXT_BYTES)
    if head.examples != examples:
        raise _malformed("it has another number of examples")
    return head


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch whose form was checked; its parts are still sealed.

    Attributes:
        digest: SHA-256 of all its bytes.
    """

    head: SentHead
    digest: bytes
    _content: bytes
    _name: bytes
    _starts: dict[int, int]

    @classmethod
    def read(cls, content: bytes) -> Self:
        """Read a batch; ProtocolError ``batch_malformed`` unless its head is one and every byte belongs to it."""
        file = io.BytesIO(content)
        head = _read_head(file, len(content), len(content))
        start, end = len(_PREFIX) + _LENGTH_BYTES, file.tell()
        starts, place = {}, end
        for v in _receivers(head):
            starts[v] = place
            place += head.part_bytes(v)
        return cls(head, digest(content), content, digest(content[start:end]), starts)

    def open(self, v: int, key: Secret) -> dict[int, bytes]:
        """Return the encoded examples of virtual worker ``v`` by their places; none if the batch has none for it.

        Raises:
            ProtocolError: ``batch_sealed`` if ``key`` does not open it.
        """
        head, start = self.head, self._starts.get(v)
        if start is None:
            return {}
        sealed = self._content[start : start + head.part_bytes(v)]
        try:
            plain = _cipher(key, self._name, v).decrypt(_NONCE, sealed, _associated(self._name, v))
        except InvalidTag:
            raise ProtocolError(
                "batch_sealed",
                f"virtual worker {v} cannot open its part of batch {head.number} of step {head.step}",
                "Seal it with the secret of the key service that the manifest names, and send it unchanged.",
            ) from None
        size = head.row_bytes
        return {place: plain[i * size : (i + 1) * size] for i, place in enumerate(head.places(v))}


def require_step(
    batches: Sequence[SentBatch],
    *,
    run_id: str,
    manifest_digest: bytes,
    step: int,
    epoch: int,
    virtual_workers: int,
    row_bytes: int,
    places: int,
) -> None:
    """Require batches to be all that one step has, in their order.

    Guarantee: passes only if each was sealed for this step of this run, they fill places 0, 1, ... without a gap, at
    most ``places``, and no example is in them twice.

    Args:
        row_bytes: size of an encoded example of the run.

    Raises:
        ProtocolError: ``batch_foreign``, ``batch_order``, ``batch_repeated`` or ``batch_too_large``.
    """
    first, seen = 0, set[bytes]()
    of_step = (run_id, manifest_digest, step, epoch, virtual_workers, row_bytes)
    for number, batch in enumerate(batches):
        head = batch.head
        found = (head.run_id, head.manifest_digest, head.step, head.epoch, head.virtual_workers, head.row_bytes)
        if found != of_step or head.client_id != batches[0].head.client_id:
            raise ProtocolError(
                "batch_foreign",
                f"batch {number} of step {step} was sealed for another run, step, client or form of examples",
                "Seal it by the manifest of this run, for the step that comes next.",
            )
        if (head.number, head.first) != (number, first):
            raise ProtocolError(
                "batch_order",
                f"batch {number} of step {step} was sealed as batch {head.number}, from place {head.first}",
                "Send the batches of a step whole, and in the order they were sealed in.",
            )
        first += head.examples
        seen.update(head.example_hashes)
        if len(seen) != first:
            raise ProtocolError(
                "batch_repeated", f"step {step} has an example twice", "Send an example once in a step."
            )
    if first > places:
        raise ProtocolError(
            "batch_too_large", f"step {step} has {first} examples, where {places} are the most", "Send fewer of them."
        )


def _read_head(file: BinaryIO, size: int, most: int) -> SentHead:
    """Read a head of at most ``most`` bytes, and leave ``file`` behind it."""
    start = file.read(len(_PREFIX) + _LENGTH_BYTES)
    if start[: len(_PREFIX)] != _PREFIX or len(start) < len(_PREFIX) + _LENGTH_BYTES:
        raise _malformed("it does not begin as one")
    length = int.from_bytes(start[len(_PREFIX) :], "big")
    if length > most:
        raise _malformed("its head is too long")
    try:
        head = parse(SentHead, file.read(length))
    except ProtocolError:
        raise _malformed("its head is none") from None
    if file.tell() + sum(head.part_bytes(v) for v in _receivers(head)) != size:
        raise _malformed("its size is not the one that its head gives")
    return head


def _receivers(head: SentHead) -> list[int]:
    """Return the virtual workers that have an example of the batch, ascending."""
    count = min(head.examples, head.virtual_workers)
    return sorted((head.first + i) % head.virtual_workers for i in range(count))


def _cipher(key: Secret, name: bytes, v: int) -> AESGCM:
    return AESGCM(derive(key, Purpose.SENT_PART, name, v).reveal())


def _associated(name: bytes, v: int) -> bytes:
    return length_prefixed("raycloak/sent-data/part/v1", name, v)


def _malformed(why: str) -> ProtocolError:
    return ProtocolError("batch_malformed", f"the bytes of a sent batch are no batch: {why}", "Send it unchanged.")
