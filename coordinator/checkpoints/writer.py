"""Writes a package: turns a snapshot into encrypted files and a manifest that can be signed."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.hpke import hpke_seal
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.log.entries import LogHead
from raycloak.attestation.sealed.chunk_stream import CHUNK_BYTES, write_payload
from raycloak.attestation.sealed.package_keys import RecipientPublic
from raycloak.attestation.sealed.package_manifest import PackageManifest, Payload, Recipient, package_context
from raycloak.coordinator.aggregation.ranges import split_ranges
from raycloak.coordinator.checkpoints.arrays import State, joined_states, safetensors_pieces
from raycloak.coordinator.checkpoints.storage import Draft
from raycloak.coordinator.ledger.entries import Head
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import split_flat

PARAMETERS = "parameters.safetensors.enc"
OPTIMIZER = "optimizer.safetensors.enc"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run between two steps: everything needed to resume there, and nothing that is secret.

    Attributes:
        finished_steps: number of steps behind these parameters, at least 1.
        parameters: float32, one vector per range, in the order of the ranges.
        states: optimizer state of each range.
        model_digest: digest over all ranges together.
        epsilon: what the run claims however it ends; None if it is not private.
        roster_digest: digest of the roster of the last step's last attempt.
        ledger_head: the ledger's newest entry about the last step, its binding.
        log_head: the orchestrator's ``log_position`` at the time of the snapshot.
        evaluation: of exactly these parameters on the public split, if they were measured.
    """

    finished_steps: int
    parameters: tuple[NDArray[np.float32], ...]
    states: tuple[State, ...]
    model_digest: bytes
    epsilon: float | None
    roster_digest: bytes
    ledger_head: Head
    log_head: LogHead
    evaluation: Evaluation | None


@dataclass(frozen=True, slots=True)
class PackageOrigin:
    """The part that all packages of a run share.

    Attributes:
        delta: the account's delta.
        evidence_class: the evidence class of the run's members.
    """

    manifest: Manifest
    delta: float
    evidence_class: str


def write_draft(
    draft: Draft,
    snapshot: Snapshot,
    terms: PackageOrigin,
    recipients: Sequence[RecipientPublic],
    *,
    previous: bytes,
    created_at: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> PackageManifest:
    """Encrypt the payloads of ``snapshot`` into ``draft``; return the manifest to sign.

    Args:
        previous: digest of the package published before this one; empty for the first.
        created_at: unix seconds.

    Raises:
        STORAGE_ERRORS of `raycloak.coordinator.checkpoints.storage`.
    """
    # Every package has a key of its own, which each recipient gets wrapped.
    data_key = Secret(secrets.token_bytes(32))
    run_id, manifest_digest = terms.manifest.run_id, terms.manifest.digest()
    context = package_context(run_id, manifest_digest, snapshot.finished_steps, snapshot.model_digest)
    metadata = {
        "run_id": run_id,
        "step": str(snapshot.finished_steps),
        "model_digest": snapshot.model_digest.hex(),
    }
    payloads = []
    for name, arrays in _contents(snapshot, terms.manifest).items():
        with draft.sink(name) as sink:
            pieces = safetensors_pieces(arrays, metadata)
            payloads.append(write_payload(sink, data_key, context, name, pieces, chunk_bytes))
    manifest = _unwrapped(snapshot, terms, recipients, payloads, previous, created_at)
    assert manifest.context() == context, "the payloads are bound to the package they are in"
    # The wrapped keys are not part of it, because they are made with it.
    info = manifest.info()
    wrapped = tuple(
        entry.model_copy(update={"wrapped_key": hpke_seal(data_key.reveal(), recipient.key, info)})
        for entry, recipient in zip(manifest.recipients, recipients, strict=True)
    )
    return manifest.model_copy(update={"recipients": wrapped})


def _contents(snapshot: Snapshot, manifest: Manifest) -> Mapping[str, Mapping[str, np.ndarray]]:
    """Return the arrays of each payload: parameters as named tensors in their shape, states by range and name."""
    ranges = split_ranges(manifest.computation.tensors, len(snapshot.parameters))
    parameters = {
        tensor.name: part.reshape(tensor.shape)
        for owned, vector in zip(ranges, snapshot.parameters, strict=True)
        for tensor, part in zip(owned.tensors, split_flat(vector, owned.tensors), strict=True)
    }
    return {PARAMETERS: parameters, OPTIMIZER: joined_states(snapshot.states)}


def _unwrapped(
    snapshot: Snapshot,
    terms: PackageOrigin,
    recipients: Sequence[RecipientPublic],
    payloads: Sequence[Payload],
    previous: bytes,
    created_at: int,
) -> PackageManifest:
    """Build the manifest without any wrapped key."""
    evaluation = snapshot.evaluation
    return PackageManifest(
        run_id=terms.manifest.run_id,
        manifest_digest=terms.manifest.digest(),
        step=snapshot.finished_steps,
        ranges=len(snapshot.parameters),
        model_digest=snapshot.model_digest,
        epsilon=snapshot.epsilon,
        delta=terms.delta,
        evidence_class=terms.evidence_class,
        roster_digest=snapshot.roster_digest,
        ledger_sequence=snapshot.ledger_head.sequence,
        ledger_hash=snapshot.ledger_head.hash,
        log_length=snapshot.log_head.length,
        log_hash=snapshot.log_head.root,
        previous=previous,
        evaluation_accuracy=evaluation.accuracy if evaluation else None,
        evaluation_loss=evaluation.loss if evaluation else None,
        created_at=created_at,
        payloads=tuple(payloads),
        recipients=tuple(Recipient(name=each.name, key_id=each.key_id, wrapped_key=b"") for each in recipients),
    )
