"""The operations of a client: their requests checked against bounds, and their rows as messages of the wire."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from raycloak.attestation.core.messages import parse
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.pipe import Ready
from raycloak.coordinator.service.sampling.requests import wrong_field
from raycloak.coordinator.service.store import ArtifactRow, ClientRow, ClientState, OperationRow, OperationState, Store
from raycloak.metrics.service_errors import (
    BudgetExceededError,
    FutureCancelledError,
    ServiceError,
    ServiceNotFoundError,
    ServiceValidationError,
)

ID_BYTES: Final = 16
"""Length of the keyed hash of an example's id."""
CAP: Final = "cap_exceeded"
"""The ending of a run whose account has no room for the next step; also the code of that refusal."""

RETRY_S: Final = 1.0
"""The advice of when to ask again where a queue is full."""
_ENDINGS: Final = {
    "early_stopped": "the run was stopped early: its result no longer got better.",
    "complete": "the run is complete.",
}
_LISTS: Final = {
    "client": "ServiceClient.list_clients()",
    "future": "TrainingClient.futures()",
    "artifact": "TrainingClient.artifacts()",
}
_MOST_KEY: Final = 128
_MOST_METADATA: Final = 32
_MOST_NAME, _MOST_NOTE = 64, 512


def fingerprint(message: Any) -> bytes:
    """Return a digest of what a request asks, without its idempotency key."""
    copy = type(message)()
    copy.CopyFrom(message)
    copy.idempotency_key = ""
    # Deterministic, because a map's order on the wire is not.
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()


def check_key(key: str) -> None:
    """Refuse an idempotency key that is missing, too long or holds a null, which PostgreSQL takes in no text."""
    if not key or len(key) > _MOST_KEY or "\0" in key:
        raise invalid("idempotency_key", f"give 1 to {_MOST_KEY} characters, and no null")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse notes that are no notes for a person."""
    if len(metadata) > _MOST_METADATA:
        raise invalid("metadata", f"give at most {_MOST_METADATA} entries")
    if any(not name or len(name) > _MOST_NAME or len(note) > _MOST_NOTE for name, note in metadata.items()):
        raise invalid("metadata", f"an entry has a name of 1 to {_MOST_NAME} characters and a note of {_MOST_NOTE}")


def check_sample(sample: wire.Sample, run_config: str) -> None:
    """Refuse what no sampler can do for this model."""
    model = json.loads(run_config)["model"]
    if not isinstance(model, dict) or model["task"] != "causal_lm":
        raise invalid("model", "this client's model predicts no text; sample needs a causal_lm of Hugging Face")
    wrong = wrong_field(sample)
    if wrong is not None:
        raise invalid(*wrong)


def check_batch(head: wire.BatchHead, client: ClientRow, largest: int) -> list[bytes]:
    """Return the hashes of a batch's examples, if its head is one for this client."""
    hashes = head.example_hashes
    if len(hashes) != head.examples * ID_BYTES:
        raise invalid("example_ids", f"there are {len(hashes)} bytes of hashes for {head.examples} examples")
    if not 1 <= head.examples <= client.most_sent:
        raise invalid("batch", f"a step takes 1 to {client.most_sent} examples")
    if not 1 <= head.bytes <= largest:
        raise invalid("batch", f"a batch has 1 to {largest} bytes of ciphertext")
    if len(head.sha256) != hashlib.sha256().digest_size:
        raise invalid("sha256", "it is no SHA-256")
    return [hashes[start : start + ID_BYTES] for start in range(0, len(hashes), ID_BYTES)]


def invalid(field: str, problem: str, code: str = "invalid") -> ServiceValidationError:
    """Return the refusal of a field."""
    return ServiceValidationError(code, f"{field}: {problem}.", field=field)


def not_found(resource: str) -> ServiceNotFoundError:
    return ServiceNotFoundError(
        "not_found", f"this tenant has no such {resource}.", f"{_LISTS[resource]} lists what it has.", resource=resource
    )


def operation_id(row: OperationRow | ArtifactRow) -> str:
    """Return the name of an operation on the wire, and of the artifact that it made."""
    return f"{row.client_id}.{row.number}"


def number_of(client_id: str, name: str) -> int | None:
    """Return the number in the name of a client's operation or artifact; None if it is no such name."""
    owner, _, number = name.rpartition(".")
    canonical = number.isascii() and number.isdigit() and len(number) < 16 and str(int(number)) == number
    return int(number) if owner == client_id and canonical else None


def operation_of(store: Store, client: ClientRow, name: str) -> OperationRow:
    """Return the operation of a client that a name says; ServiceNotFoundError if it has no such one."""
    number = number_of(client.client_id, name)
    operation = store.operation(client.client_id, number) if number is not None else None
    if operation is None:
        raise not_found("future")
    return operation


def operation_to_wire(row: OperationRow) -> wire.Operation:
    """Return the message of an operation."""
    message = wire.Operation(
        operation_id=operation_id(row),
        client_id=row.client_id,
        kind=row.kind,
        state=row.state,
        number=row.number,
        revision=row.revision,
        submitted_unix_s=row.submitted,
        idempotency_key=row.idempotency_key,
    )
    if row.state == OperationState.DONE:
        getattr(message, row.kind).MergeFromString(row.result)
        # A result without any field that is set must be there too.
        getattr(message, row.kind).SetInParent()
    elif row.state in (OperationState.FAILED, OperationState.CANCELLED):
        message.error.MergeFromString(row.error)
    return message


def artifact_to_wire(row: ArtifactRow) -> wire.Artifact:
    """Return the message of an artifact."""
    return wire.Artifact(
        artifact_id=operation_id(row),
        client_id=row.client_id,
        step=row.step,
        package_digest=row.package_digest,
        model_digest=row.model_digest,
        metadata=json.loads(row.metadata),
        created_unix_s=row.created,
        bytes=row.size,
    )


@lru_cache(maxsize=64)  # each operation asks it again and again, and a manifest is long
def plan_of(facts: str) -> Ready:
    """Return the facts of a client, without its manifest."""
    return parse(Ready, facts.encode()).model_copy(update={"manifest": {}})


def dp_metrics(row: ClientRow) -> wire.DpMetrics | None:
    """Return the account and the plan of a client; None before its run was admitted."""
    if not row.facts:
        return None
    facts = plan_of(row.facts)
    same = ("epsilon_cap", "epsilon_planned", "delta", "noise_multiplier", "sample_rate", "max_grad_norm", "accountant")
    return wire.DpMetrics(
        epsilon_spent=row.epsilon,
        steps_charged=row.steps.charged if row.private else 0,
        steps_planned=facts.steps,
        private=row.private,
        **{name: getattr(facts, name) for name in same},
    )


def client_status(row: ClientRow) -> str:
    """Return the status on the wire."""
    if row.status == ClientState.LIVE:
        return "BUSY" if row.open else "READY"
    return row.status


def client_to_wire(row: ClientRow, phase: str) -> wire.Client:
    """Return the whole message of a client."""
    message = listed_client(row, phase)
    message.config_json = row.config
    manifest = json.loads(row.facts)["manifest"] if row.facts else None
    message.manifest_json = json.dumps(manifest) if manifest else ""
    return message


def listed_client(row: ClientRow, phase: str) -> wire.Client:
    """Return the message of a client without configuration and manifest, whose size a tenant decides."""
    facts = plan_of(row.facts) if row.facts else None
    config = json.loads(row.config)
    message = wire.Client(
        client_id=row.client_id,
        name=row.name,
        status=client_status(row),
        step=row.steps.finished,
        dp_metrics=dp_metrics(row),
        run_id=row.run_id,
        evidence_class=facts.evidence_class if facts else "",
        account=facts.account if facts else "",
        metadata=config.get("metadata", {}),
        created_unix_s=row.created,
        phase=phase,
        revision=row.changed,
        model_digest=row.digest,
        queued=row.open,
        operations=row.next_number,
    )
    if row.error:
        message.error.MergeFromString(row.error)
    return message


def out_of_budget(row: ClientRow, message: str, remedy: str) -> BudgetExceededError:
    """Return the cause that an account has no room for a client's next step."""
    cap = plan_of(row.facts).epsilon_cap if row.facts else None
    return BudgetExceededError(CAP, message, remedy, current_epsilon=row.epsilon, max_epsilon=cap)


def cancelled(charged: bool) -> ServiceError:
    """Return what a cancelled operation tells of its charge."""
    if charged:
        message = "the operation was cancelled while it ran; its step stays charged."
        return FutureCancelledError("cancelled", message, "Submit the step again: it is not charged a second time.")
    return FutureCancelledError("cancelled", "the operation was cancelled; no step was charged for it.")


def run_ended(row: ClientRow, kind: type[ServiceError], is_step: bool = True) -> ServiceError:
    """Return the cause that a client's run computes no further step, for an operation that is one or waits for one."""
    if is_step and row.ending == CAP:
        message = "the account has no room for another step."
        remedy = "Save what was released; train on with another client, with more noise or under a higher cap."
        return out_of_budget(row, message, remedy)
    return kind("run_ended", _ENDINGS.get(row.ending, "the run has ended."))


def steps_done(kind: type[ServiceError]) -> ServiceError:
    """Return the cause that a client's run has no further step."""
    remedy = "Save the state; a client with more steps is another client."
    return kind("steps_done", "all planned steps are done.", remedy)


def texts_full(most: int, kind: type[ServiceError]) -> ServiceError:
    """Return the cause that a client's samples have written ``most`` bytes."""
    message = f"this client's samples have written as much as the service keeps of one client, {most} bytes."
    return kind("texts_full", message, "Sample with another client.", retry_after_s=RETRY_S)
