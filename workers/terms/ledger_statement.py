"""A statement that the ledger signs about one step of a run, and the check that receipts and bindings share."""

from collections.abc import Mapping
from typing import Any, TypeVar

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
