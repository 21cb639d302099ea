"""Masked vectors on the wire: the tag of each array, and the signed header that comes with them.

A worker answers one attempt with one signed header and one array per parameter range. The header names everything
the arrays belong to and carries a Poly1305 tag per array, so the arrays themselves travel as raw ring words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.poly1305 import Poly1305
from pydantic import ConfigDict, Field

from raycloak.attestation.core.keys import AgreementKey, IdentityKey, Purpose, Secret, derive
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, seal
from raycloak.attestation.core.roster import Member, Roster
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.vectors.ring import RingBits, RingVector, ring_dtype
from raycloak.workers.vectors.vector_tag import VECTOR_TAG_BYTES

# Base64 instead of hexadecimal: eight vector tags and three ranges then fit one kibibyte with the signature.
_COMPACT_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class VectorRange(Message):
    """The coordinates [offset, offset + length) of the flat vector, owned by the aggregator with this index."""

    DOMAIN: ClassVar[str] = "raycloak/vector-range/v1"

    index: int
    offset: int
    length: int


class PayloadInfo(Message):
    """One masked array: which coordinates it holds, and its Poly1305 tag (16 bytes)."""

    DOMAIN: ClassVar[str] = "raycloak/payload-info/v1"
    model_config = _COMPACT_BYTES

    range_index: int
    offset: int
    length: int
    tag: bytes


class Header(Message):
    """The header of a worker's masked arrays: the attempt that they belong to.

    Attributes:
        input_digest: that of the step's receipt.
        sender: member id of the worker.
        virtual_workers: all whose vectors are in the sum, as in the roster.
        vector_tags: per virtual worker, `raycloak.workers.vectors.vector_tag.vector_tag` of its vector.
        sum_tags: per virtual worker, the tags of the sums that its vector mixes, the newest first. Left out of the
            bytes where there are none.
        payloads: one per parameter range, in range order.
    """

    DOMAIN: ClassVar[str] = "raycloak/header/v1"
    model_config = _COMPACT_BYTES

    run_id: str
    manifest_digest: bytes
    step: int
    attempt: int
    roster_digest: bytes
    input_digest: bytes
    sender: str
    virtual_workers: tuple[int, ...]
    vector_tags: tuple[bytes, ...]
    payloads: tuple[PayloadInfo, ...]
    ring_bits: Literal[32, 64]
    sum_tags: tuple[tuple[bytes, ...], ...] = Field(default=(), exclude_if=lambda tags: not tags)


@dataclass(frozen=True, slots=True)
class VerifiedAttempt:
    """One attempt of a step, as a member knows it from inputs that it verified; headers are compared with it.

    Attributes:
        mixed: how many sums of each virtual worker its vector mixes; 0 where it is one sum.
    """

    roster: Roster
    roster_digest: bytes
    input_digest: bytes
    ranges: tuple[VectorRange, ...]
    ring_bits: RingBits
    mixed: int = 0

    @classmethod
    def of(
        cls,
        roster: Roster,
        input_digest: bytes,
        ranges: Sequence[VectorRange],
        ring_bits: RingBits,
        mixed: int = 0,
    ) -> "VerifiedAttempt":
        """Return the attempt of a roster that :func:`raycloak.attestation.core.roster.open_roster` has verified."""
        return cls(roster, roster.digest(), input_digest, tuple(ranges), ring_bits, mixed)

    def header_of(self, sender: str) -> dict[str, Any]:
        """Return the fields of ``sender``'s header that follow from the attempt; ProtocolError ``roster_member``."""
        roster = self.roster
        return {
            "run_id": roster.run_id,
            "manifest_digest": roster.manifest_digest,
            "step": roster.step,
            "attempt": roster.attempt,
            "roster_digest": self.roster_digest,
            "input_digest": self.input_digest,
            "sender": sender,
            "virtual_workers": roster.member(sender).virtual_workers,
            "ring_bits": self.ring_bits,
        }


def payload_key(
    own_key: AgreementKey, peer: Member, attempt: VerifiedAttempt, *, range_index: int, sender: str
) -> Secret:
    """Return the one-time Poly1305 key of one array, which its worker and the range's aggregator can both derive.

    Guarantee: the key differs for every (run, roster, step, attempt, parameters, range, sender). It authenticates
    one array only: a worker must answer a repeated attempt with the same bytes or not at all.

    Args:
        peer: the aggregator of the range, for the worker; the sender, for the aggregator.

    Raises:
        ProtocolError: ``pair_key`` if the peer's key is a low-order point.
    """
    try:
        shared = own_key.agree(peer.mask_key)
    except ValueError:
        raise ProtocolError("pair_key", f"the mask key of {peer.member_id} is not usable") from None
    roster = attempt.roster
    context = (roster.run_id, attempt.roster_digest, roster.step, roster.attempt, attempt.input_digest)
    return derive(shared, Purpose.PAYLOAD_TAG, *context, range_index, sender)


def tag_payload(key: Secret, array: RingVector) -> bytes:
    """Return the Poly1305 tag (16 bytes) over the raw words of ``array``, which is not copied."""
    return Poly1305.generate_tag(key.reveal(), _raw(array))


def check_payload(key: Secret, array: RingVector, header: Header, *, range_index: int) -> None:
    """Verify the array of one range against an opened header, in constant time and without a copy.

    Guarantee: returns only if ``array`` has the ring and length the header signs and every bit its sender tagged.

    Raises:
        ProtocolError: ``length_mismatch`` or ``payload_tag``.
    """
    info = next(payload for payload in header.payloads if payload.range_index == range_index)
    if array.dtype != ring_dtype(header.ring_bits) or array.shape != (info.length,):
        raise ProtocolError(
            "length_mismatch",
            f"range {range_index} of {header.sender} holds {array.shape} {array.dtype}, its header says "
            f"{info.length} words of {header.ring_bits} bits",
        )
    try:
        Poly1305.verify_tag(key.reveal(), _raw(array), info.tag)
    except InvalidSignature:
        raise ProtocolError("payload_tag", f"range {range_index} of {header.sender} is not what it tagged") from None


def seal_header(
    attempt: VerifiedAttempt,
    sender: str,
    identity: IdentityKey,
    *,
    vector_tags: Sequence[bytes],
    payload_tags: Sequence[bytes],
    sum_tags: Sequence[tuple[bytes, ...]] = (),
) -> Envelope:
    """Sign the header of ``sender``'s arrays.

    Args:
        vector_tags: one per hosted virtual worker, in the roster's order.
        payload_tags: one per range, in range order.
        sum_tags: as of the header.
    """
    payloads = tuple(
        PayloadInfo(range_index=part.index, offset=part.offset, length=part.length, tag=tag)
        for part, tag in zip(attempt.ranges, payload_tags, strict=True)
    )
    own = attempt.header_of(sender)
    header = Header(**own, vector_tags=tuple(vector_tags), sum_tags=tuple(sum_tags), payloads=payloads)
    return seal(header, identity)


def open_header(envelope: Envelope, attempt: VerifiedAttempt, sender: str) -> Header:
    """Verify a header against what its receiver knows.

    Guarantee: returns only a header that ``sender``, a worker of the roster, signed. It is for exactly this run,
    manifest, step, attempt, roster, parameters, ring, virtual workers and ranges.

    Raises:
        ProtocolError: ``roster_member``, ``signature``, ``malformed``, ``header_mismatch``, ``range_mismatch`` or
            ``length_mismatch``; the message names the fields that differ.
    """
    member = attempt.roster.member(sender)
    if member.role != "worker":
        raise ProtocolError("roster_member", f"{sender} is not a worker in the roster of step {attempt.roster.step}")
    header = open_envelope(Header, envelope, member.identity_key)
    differing = [name for name, value in attempt.header_of(sender).items() if getattr(header, name) != value]
    # The length alone: a receiver has no key of a tag. The ledger compares the tags of all attempts at a step.
    if [len(tag) for tag in header.vector_tags] != [VECTOR_TAG_BYTES] * len(member.virtual_workers):
        differing.append("vector_tags")
    wanted = [[VECTOR_TAG_BYTES] * attempt.mixed] * len(member.virtual_workers) if attempt.mixed else []
    if [[len(tag) for tag in tags] for tags in header.sum_tags] != wanted:
        differing.append("sum_tags")
    if differing:
        raise ProtocolError("header_mismatch", f"the header of {sender} differs in {', '.join(differing)}")
    found, asked = [each.range_index for each in header.payloads], [part.index for part in attempt.ranges]
    if found != asked:
        raise ProtocolError("range_mismatch", f"{sender} sent ranges {found} where {asked} were asked for")
    for payload, part in zip(header.payloads, attempt.ranges, strict=True):
        if (payload.offset, payload.length) != (part.offset, part.length):
            raise ProtocolError(
                "length_mismatch",
                f"range {part.index} of {sender} is [{payload.offset}, +{payload.length}), "
                f"not [{part.offset}, +{part.length})",
            )
    return header


def _raw(array: RingVector) -> memoryview:
    """Return the bytes of a C-contiguous array, not copied."""
    return array.data.cast("B")
