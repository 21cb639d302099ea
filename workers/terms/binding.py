"""The ledger's signed permission to decode one step: it names the vectors that the step was bound to."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.core.roster import Query
from raycloak.workers.terms.receipt import LedgerStatement, open_statement
from raycloak.workers.vectors.payload import Header


class Binding(LedgerStatement):
    """Proof that a charged step was durably bound to its vectors before anything was decoded.

    Attributes:
        vectors_digest: see :func:`vectors_digest`.
        sums: see :func:`sum_digests`; left out of the bytes where there are none.
    """

    DOMAIN: ClassVar[str] = "raycloak/binding/v1"

    vectors_digest: bytes
    sums: tuple[bytes, ...] = Field(default=(), exclude_if=lambda sums: not sums)


def vectors_digest(headers: Sequence[Header]) -> bytes:
    """Return the digest of the keyed tags in the headers of one attempt, by virtual worker.

    Attempt, hosting and order of the headers do not enter, so that every attempt of a step has the same digest.
    """
    tags = {v: tag for each in headers for v, tag in zip(each.virtual_workers, each.vector_tags, strict=True)}
    return digest(length_prefixed("raycloak/vector-tags/v2", *(tags[v] for v in sorted(tags))))


def sum_digests(headers: Sequence[Header]) -> tuple[bytes, ...]:
    """Return the digest of all virtual workers' sums of each step that vectors mix, the newest first; else none.

    A sum of an earlier step has the digest that the ledger bound that step with, or it was computed anew as another.
    """
    tags = {v: own for each in headers for v, own in zip(each.virtual_workers, each.sum_tags, strict=False)}
    steps = zip(*(tags[v] for v in sorted(tags)), strict=True)
    return tuple(digest(length_prefixed("raycloak/sum-tags/v1", *of_step)) for of_step in steps)


def check_binding(
    envelope: Envelope,
    *,
    ledger_key: bytes,
    run_id: str,
    query: Query,
    step: int,
    manifest_digest: bytes,
    vectors_digest: bytes,
    lowest_fencing: int,
    sums: tuple[bytes, ...] = (),
) -> Binding:
    """Verify a binding of exactly these vectors, and of the sums that they mix.

    Guarantee: returns only if ``ledger_key`` signed that (run, query, step, manifest) is bound to ``vectors_digest``,
    by an instance whose fencing number is not below ``lowest_fencing``.

    Raises:
        ProtocolError: ``binding_mismatch``, ``binding_fenced``, ``malformed`` or ``signature``.
    """
    expected = {
        "run_id": run_id,
        "query": query,
        "step": step,
        "manifest_digest": manifest_digest,
        "vectors_digest": vectors_digest,
        "sums": sums,
    }
    return open_statement(Binding, envelope, ledger_key, expected, lowest_fencing, "binding")
