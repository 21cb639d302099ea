"""Evaluation orders: the parameters that workers may measure on a split.

A result on a sealed split leaves without noise. Anyone who may choose the parameters learns an example from enough
results. So a worker measures only parameters that its orchestrator has signed an order for.

Guarantee: the evidence log has an order's parameters as the outcome of a training step of the run. An order is for
members with valid evidence, and the log has it before anybody gets it.
Not guaranteed: that a step really gave those parameters. A lying driver gets only one set of them for each step of the
run. Its claim is in the log, where repeating the step exposes it.
"""

from typing import ClassVar

from pydantic import JsonValue

from raycloak.attestation.core.messages import Envelope, Message, open_envelope
from raycloak.attestation.core.roster import Member, RosterMembers
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.orchestrator.loads import LoadBook
from raycloak.metrics.errors import ProtocolError


class EvaluationOrder(Message):
    """One evaluation of the model after a number of steps.

    Attributes:
        finished_steps: the steps after which the model is measured; at least 1.
        model_digest: the digest that the last of them was committed with.
        members: the workers, each with the virtual workers whose slices it measures.
    """

    DOMAIN: ClassVar[str] = "raycloak/evaluation-order/v1"

    run_id: str
    manifest_digest: bytes
    finished_steps: int
    model_digest: bytes
    members: tuple[Member, ...]

    def member(self, member_id: str) -> Member:
        """Return the entry of ``member_id``; ProtocolError ``order_mismatch`` if it has none."""
        for member in self.members:
            if member.member_id == member_id:
                return member
        raise ProtocolError("order_mismatch", f"{member_id} is not in the order of this evaluation")


def place_order(order: EvaluationOrder, virtual_workers: int, loads: LoadBook, log: EvidenceLog) -> None:
    """Log ``order`` if the run may have it, in the caller's transaction.

    Raises:
        ProtocolError: ``not_committed`` if the last of the steps was not committed with these parameters, and they
            were not loaded after it.
            ``order_mismatch`` unless each of ``virtual_workers`` is measured by one worker.
    """
    if not loads.made(order.finished_steps, order.model_digest):
        raise ProtocolError(
            "not_committed", f"{order.finished_steps} steps of the run did not give the parameters to be measured"
        )
    check_cover(order, virtual_workers)
    body: dict[str, JsonValue] = {
        "finished_steps": order.finished_steps,
        "model_digest": order.model_digest.hex(),
        "digest": order.digest().hex(),
        "members": RosterMembers(members=order.members).digest().hex(),
    }
    # Logged before it is handed out: the log has an order before anybody gets it.
    log.append("evaluation_ordered", body)


def open_order(
    envelope: Envelope, *, orchestrator_key: bytes, run_id: str, manifest_digest: bytes, virtual_workers: int
) -> EvaluationOrder:
    """Verify an order of evaluation.

    Guarantee: returns only an order that the orchestrator signed for this run and manifest, in which each of
    ``virtual_workers`` is measured by exactly one worker.

    Raises:
        ProtocolError: ``signature``, ``malformed`` or ``order_mismatch``.
    """
    order = open_envelope(EvaluationOrder, envelope, orchestrator_key)
    if (order.run_id, order.manifest_digest) != (run_id, manifest_digest):
        raise ProtocolError("order_mismatch", "the order of an evaluation is for another run or manifest")
    check_cover(order, virtual_workers)
    return order


def check_cover(order: EvaluationOrder, virtual_workers: int) -> None:
    """Require each of ``virtual_workers`` to be measured by one worker of ``order``; ProtocolError
    ``order_mismatch``."""
    covered = sorted(v for member in order.members for v in member.virtual_workers)
    if covered != list(range(virtual_workers)) or any(member.role != "worker" for member in order.members):
        raise ProtocolError(
            "order_mismatch", f"an evaluation measures each of {virtual_workers} slices once; this one {covered}"
        )
