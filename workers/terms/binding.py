"""The ledger's signed permission to decode one step: it names the vectors that the step was bound to."""

from collections.abc import Sequence
from typing import ClassVar

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.messages import Envelope, Message, open_envelope
from raycloak.attestation.core.roster import Query
from raycloak.metrics.errors import ProtocolError
from raycloak.workers.vectors.payload import Header


class Binding(Message):
    """Proof that a charged step was durably bound to its vectors before anything was decoded.

    Attributes:
        query, step: the release of the run's mechanism.
        vectors_digest: see :func:`vectors_digest`.
        fencing: number of the ledger instance; later instances have higher numbers.
        sequence, head: position and hash of the binding's entry in the ledger's chain.
    """

    DOMAIN: ClassVar[str] = "raycloak/binding/v1"

    run_id: str
    query: Query
    step: int
    manifest_digest: bytes
    vectors_digest: bytes
    fencing: int
    sequence: int
    head: bytes


def vectors_digest(headers: Sequence[Header]) -> bytes:
    """Return the digest of the keyed tags in the headers of one attempt, by virtual worker.

    Attempt, hosting and order of the headers do not enter, so that every attempt of a step has the same digest.
    """
    tags = {v: tag for each in headers for v, tag in zip(each.virtual_workers, each.vector_tags, strict=True)}
    return digest(length_prefixed("raycloak/vector-tags/v1", *(tags[v] for v in sorted(tags))))


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
) -> Binding:
    """Verify a binding of exactly these vectors.

    Guarantee: returns only if ``ledger_key`` signed that (run, query, step, manifest) is bound to ``vectors_digest``,
    by an instance whose fencing number is not below ``lowest_fencing``.

    Raises:
        ProtocolError: ``binding_mismatch``, ``binding_fenced``, ``malformed`` or ``signature``.
    """
    binding = open_envelope(Binding, envelope, ledger_key)
    expected = {
        "run_id": run_id,
        "query": query,
        "step": step,
        "manifest_digest": manifest_digest,
        "vectors_digest": vectors_digest,
    }
    differing = [name for name, value in expected.items() if getattr(binding, name) != value]
    if differing:
        names = ", ".join(differing)
        raise ProtocolError("binding_mismatch", f"the binding of step {step} of run {run_id} differs in {names}")
    if binding.fencing < lowest_fencing:
        raise ProtocolError("binding_fenced", f"ledger instance {binding.fencing} was replaced by {lowest_fencing}")
    return binding
