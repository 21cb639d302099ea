"""The ledger's signed permission to compute one step."""

from typing import ClassVar

from raycloak.attestation.core.messages import Envelope, Message, open_envelope
from raycloak.attestation.core.roster import Query
from raycloak.metrics.errors import ProtocolError


class Receipt(Message):
    """Proof that a step was durably charged before anything was computed for it.

    Attributes:
        query, step: the release of the run's mechanism that is paid for.
        parameter_digest: of the parameters the step starts from.
        account, mechanism_digest: the account that pays, and what it pays for.
        dataset_fingerprint: of the data that the ledger registered the run for; the account's own, if it has one.
        fencing: number of the ledger instance; later instances have higher numbers.
        sequence, head: position and hash of the charge's entry in the ledger's chain.
        charged_epsilon: the account's epsilon after this charge, at its delta.
    """

    DOMAIN: ClassVar[str] = "raycloak/receipt/v1"

    run_id: str
    query: Query = "gradient"
    step: int
    parameter_digest: bytes
    manifest_digest: bytes
    account: str
    mechanism_digest: bytes
    fencing: int
    sequence: int
    head: bytes
    charged_epsilon: float
    dataset_fingerprint: bytes = b""


def check_receipt(
    envelope: Envelope,
    *,
    ledger_key: bytes,
    run_id: str,
    step: int,
    parameter_digest: bytes,
    manifest_digest: bytes,
    account: str,
    mechanism_digest: bytes,
    lowest_fencing: int,
    query: Query = "gradient",
    dataset_fingerprint: bytes = b"",
) -> Receipt:
    """Verify a receipt for exactly this step.

    Guarantee: returns only if ``ledger_key`` signed that this mechanism was charged to this account for (run, query,
    step, parameters, manifest, dataset). The instance that charged it has a fencing number of at least
    ``lowest_fencing``.

    Raises:
        ProtocolError: ``receipt_mismatch``, ``receipt_fenced`` or ``signature``.
    """
    receipt = open_envelope(Receipt, envelope, ledger_key)
    expected = {
        "run_id": run_id,
        "query": query,
        "step": step,
        "parameter_digest": parameter_digest,
        "manifest_digest": manifest_digest,
        "account": account,
        "mechanism_digest": mechanism_digest,
        "dataset_fingerprint": dataset_fingerprint,
    }
    differing = [name for name, value in expected.items() if getattr(receipt, name) != value]
    if differing:
        names = ", ".join(differing)
        raise ProtocolError("receipt_mismatch", f"the receipt for step {step} of run {run_id} differs in {names}")
    # A ledger that was replaced may still answer: its charge is not in the chain that counts.
    if receipt.fencing < lowest_fencing:
        raise ProtocolError("receipt_fenced", f"ledger instance {receipt.fencing} was replaced by {lowest_fencing}")
    return receipt
