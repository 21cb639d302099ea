"""Pairwise masks: the key that each pair of workers shares in an attempt, and how masks are added.

The worker with the lower id adds the keystream of the pair's mask key as ring words, and the other subtracts it. In the
sum over a whole roster the masks cancel completely (`docs/proofs/003-mask-cancellation.md`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.keys import AgreementKey, Purpose, Secret, derive
from raycloak.attestation.core.mask_graph import MaskGraph
from raycloak.attestation.core.roster import Member, Roster
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.vectors.payload import VectorRange
from raycloak.workers.vectors.ring import CACHE_BLOCK_BYTES, RingVector
from raycloak.workers.vectors.streams import BLOCK_BYTES, KeyStream
from raycloak.workers.vectors.threads import ONE_THREAD, PIECE_WORDS, WordThreads, blocks_of


class PairSecret:
    """The secret that two workers share, at one ratchet index.

    Guarantee: both ends reach the same secret at the same index; from the secret at one index none of an earlier
    one can be computed; two pairs, runs or manifests never share a secret.

    Attributes:
        secret: at ``index``.
        sign: +1 for the end with the lower member id, -1 for the other.
        index: number of commits the secret has been ratcheted past; equal to ``Roster.ratchet`` when in use.
    """

    __slots__ = ("index", "secret", "sign")

    def __init__(
        self, own_key: AgreementKey, own: Member, peer: Member, *, run_id: str, manifest_digest: bytes
    ) -> None:
        """Agree with ``peer`` at the admission of the later of the two.

        Raises:
            ProtocolError: ``pair_key`` if the peer's key is our own or a low-order point.
        """
        if own.member_id == peer.member_id or own.mask_key == peer.mask_key or own_key.public != own.mask_key:
            raise ProtocolError("pair_key", f"{own.member_id} and {peer.member_id} do not have two keys of their own")
        try:
            shared = own_key.agree(peer.mask_key)
        # The library refuses a point of low order, under which every secret would be zero.
        except ValueError:
            raise ProtocolError("pair_key", f"the mask key of {peer.member_id} is not usable") from None
        # Sorted, so that both ends derive from the same bytes.
        low, high = sorted((own, peer), key=lambda member: member.member_id)
        parties = (low.member_id, low.mask_key, high.member_id, high.mask_key)
        self.secret = derive(shared, Purpose.PAIR, run_id, manifest_digest, *parties)
        self.sign = 1 if own is low else -1
        # The pair begins with the later of the two: a newcomer knows nothing of earlier commits.
        self.index = max(own.joined, peer.joined)

    def advance(self) -> None:
        """Ratchet past one commit; the old secret is dropped."""
        self.index += 1
        self.secret = derive(self.secret, Purpose.PAIR_RATCHET, self.index)

    def advance_to(self, index: int) -> None:
        """Ratchet up to ``index``; ProtocolError ``ratchet_behind`` if the secret is already past it."""
        if index < self.index:
            raise ProtocolError("ratchet_behind", f"index {index} was asked for, the pair stands at {self.index}")
        while self.index < index:
            self.advance()


def keystream_key(
    pair: Secret,
    *,
    roster_digest: bytes,
    step: int,
    attempt: int,
    input_digest: bytes,
    cut: bytes,
    range_index: int,
) -> Secret:
    """Return the ChaCha20 key of one pair's mask over one parameter range.

    Guarantee: two keys are equal only if pair secret, roster digest, step, attempt, input digest, the cut of all
    ranges and the range are. Workers that were told different ranges therefore add masks that do not cancel.
    A roster has a fresh nonce, so even an attempt counter that restarts cannot bring a key back.
    """
    return derive(pair, Purpose.MASK, roster_digest, step, attempt, input_digest, cut, range_index)


def cut_digest(ranges: Sequence[VectorRange]) -> bytes:
    """Return 32 bytes that name how a vector is cut into ranges."""
    numbers = [number for part in ranges for number in (part.index, part.offset, part.length)]
    return digest(length_prefixed("raycloak/cut/v1", *numbers))


def roster_masks(
    pairs: Mapping[str, PairSecret],
    roster: Roster,
    own_id: str,
    *,
    input_digest: bytes,
    ranges: Sequence[VectorRange],
) -> tuple[tuple[tuple[Secret, int], ...], ...]:
    """Return the masks of ``own_id`` in an attempt: per range, one (key, sign) for every neighbour in the mask graph.

    Guarantee: there is at least one mask per range, so no vector masked with the result is in clear.

    Args:
        ranges: how the whole vector is cut.
        pairs: by peer id; a neighbour's is advanced to the roster's ratchet index.

    Raises:
        ProtocolError: ``roster_too_small`` without another worker, ``pair_missing``, ``roster_member`` or
            ``ratchet_behind``.
    """
    peers = [peer.member_id for peer in MaskGraph(roster).neighbours(own_id)]
    if not peers:
        raise ProtocolError("roster_too_small", f"{own_id} is the only worker of step {roster.step}: nothing masks it")
    for peer in peers:
        if peer not in pairs:
            raise ProtocolError("pair_missing", f"{own_id} has no pair secret with {peer}")
        pairs[peer].advance_to(roster.ratchet)
    key = partial(
        keystream_key,
        roster_digest=roster.digest(),
        step=roster.step,
        attempt=roster.attempt,
        input_digest=input_digest,
        cut=cut_digest(ranges),
    )
    return tuple(
        tuple((key(pairs[peer].secret, range_index=part.index), pairs[peer].sign) for peer in peers) for part in ranges
    )


def masked_sum(
    vectors: Sequence[RingVector],
    masks: Sequence[tuple[Secret, int]],
    out: RingVector,
    threads: WordThreads = ONE_THREAD,
    *,
    start: int = 0,
) -> None:
    """Write the ring sum of ``vectors`` and signed masks to ``out``, all of one length and ring.

    Guarantee: ``out`` is Σ vectors + Σ sign·keystream mod 2^bits, in any order of either; no mask exists
    beyond one cache-sized block of each thread, and an unmasked sum of several vectors never exists as a whole.

    Args:
        vectors: at least one; they are only read. The first may be ``out`` itself.
        masks: (key, +1 or -1); each keystream is read as little-endian ring words.
        out: C-contiguous.
        threads: that share the blocks.
        start: the first word of each keystream.
    """
    alike = all(vector.shape == out.shape and vector.dtype == out.dtype for vector in vectors)
    require_bound(bool(vectors) and alike, "vectors of one ring and length are masked")
    require_bound(all(sign in (1, -1) for _, sign in masks), "a mask is added or subtracted once")
    block = CACHE_BLOCK_BYTES // out.itemsize

    def mask_pieces(pieces: Iterator[range]) -> None:
        keystream = np.empty(min(block, len(out)), out.dtype)
        for piece in pieces:
            counter, unread = divmod((start + piece.start) * out.itemsize, BLOCK_BYTES)
            streams = [
                (KeyStream(key, block_counter=counter), np.add if sign > 0 else np.subtract) for key, sign in masks
            ]
            for stream, _ in streams:
                stream.bytes(unread)
            for place in blocks_of([piece], block):
                target = out[place]
                mask = keystream[: len(target)]
                # The first vector is copied block by block: whole, `out` would be an unmasked sum for a while.
                if vectors[0] is not out:
                    np.copyto(target, vectors[0][place])
                for vector in vectors[1:]:
                    np.add(target, vector[place], out=target)
                for stream, combine in streams:
                    stream.into(mask)
                    combine(target, mask, out=target)

    threads.share(threads.cut(len(out), PIECE_WORDS), mask_pieces)
