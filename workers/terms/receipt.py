"""The ledger's signed permission to compute one step, and what all its signed statements have in common."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.lineage import Lineage
from raycloak.attestation.core.messages import Envelope, Message, open_envelope
from raycloak.attestation.core.roster import Query
from raycloak.metrics.errors import ProtocolError


class LedgerStatement(Message):
    """The base of the ledger's signed statements about one release.

    Attributes:
        query, step: the release of the run's mechanism.
        fencing: number of the ledger instance; later instances have higher numbers.
        sequence, head: position and hash of the statement's entry in the ledger's chain.
    """

    run_id: str
    query: Query
    step: int
    manifest_digest: bytes
    fencing: int
    sequence: int
    head: bytes


S = TypeVar("S", bound=LedgerStatement)


def open_statement(
    cls: type[S], envelope: Envelope, ledger_key: bytes, expected: Mapping[str, Any], lowest_fencing: int, kind: str
) -> S:
    """Verify a statement field by field.

    Guarantee: returns only what ``ledger_key`` signed with exactly the ``expected`` fields, by an instance whose
    fencing number is not below ``lowest_fencing``.

    Args:
        kind: ``receipt`` or ``binding``; error codes and messages begin with it.

    Raises:
        ProtocolError: ``<kind>_mismatch``, ``<kind>_fenced``, ``malformed`` or ``signature``.
    """
    statement = open_envelope(cls, envelope, ledger_key)
    differing = [name for name, value in expected.items() if getattr(statement, name) != value]
    if differing:
        where = f"step {expected['step']} of run {expected['run_id']}"
        raise ProtocolError(f"{kind}_mismatch", f"the {kind} for {where} differs in {', '.join(differing)}")
    # A ledger that was replaced may still answer: its entry is not in the chain that counts.
    if statement.fencing < lowest_fencing:
        raise ProtocolError(f"{kind}_fenced", f"ledger instance {statement.fencing} was replaced by {lowest_fencing}")
    return statement


class Receipt(LedgerStatement):
    """Proof that a step was durably charged before anything was computed for it.

    Attributes:
        input_digest: of the parameters the step starts from, and of the batches that a client sent for it; see
            `raycloak.workers.terms.step_input`.
        account, mechanism_digest: the account that pays, and what it pays for.
        dataset_fingerprint: of the data that the ledger registered the run for; the account's own, if it has one.
        data_root: of the commitments to all slices, as the ledger bound the run to it; see :func:`data_root`.
        charged_epsilon: the account's epsilon after this charge, at its delta.
        lineage: by which the ledger has held each model of the run to the one before; None if it has not.
    """

    DOMAIN: ClassVar[str] = "raycloak/receipt/v1"

    input_digest: bytes
    account: str
    mechanism_digest: bytes
    charged_epsilon: float
    dataset_fingerprint: bytes = b""
    data_root: bytes
    lineage: Lineage | None = None


def data_root(commitments: Sequence[bytes]) -> bytes:
    """Return the digest of the keyed commitments to all slices of a run, by virtual worker."""
    return digest(length_prefixed("raycloak/data-root/v1", *commitments))


def check_receipt(
    envelope: Envelope,
    *,
    ledger_key: bytes,
    run_id: str,
    step: int,
    input_digest: bytes,
    manifest_digest: bytes,
    account: str,
    mechanism_digest: bytes,
    lowest_fencing: int,
    query: Query = "gradient",
    dataset_fingerprint: bytes = b"",
    lineage: Lineage | None = None,
) -> Receipt:
    """Verify a receipt for exactly this step.

    Guarantee: returns only if ``ledger_key`` signed that this mechanism was charged to this account for (run, query,
    step, parameters, manifest, dataset), and held the run to ``lineage``. The instance that charged it
    has a fencing number of at least ``lowest_fencing``.

    Raises:
        ProtocolError: ``receipt_mismatch``, ``receipt_fenced`` or ``signature``.
    """
    expected = {
        "run_id": run_id,
        "query": query,
        "step": step,
        "input_digest": input_digest,
        "manifest_digest": manifest_digest,
        "account": account,
        "mechanism_digest": mechanism_digest,
        "dataset_fingerprint": dataset_fingerprint,
        "lineage": lineage,
    }
    return open_statement(Receipt, envelope, ledger_key, expected, lowest_fencing, "receipt")
