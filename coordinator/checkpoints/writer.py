"""Writes a package: turns a snapshot into encrypted files and a manifest that can be signed."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.hpke import hpke_seal
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.chunk_stream import CHUNK_BYTES, write_payload
from raycloak.attestation.sealed.package_keys import RecipientPublic
from raycloak.attestation.sealed.package_manifest import PackageManifest, Recipient
from raycloak.coordinator.checkpoints.arrays import safetensors_pieces
from raycloak.coordinator.checkpoints.storage import Draft
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import AVERAGED, split_flat

PARAMETERS = "parameters.safetensors.enc"
OPTIMIZER = "optimizer.safetensors.enc"
AVERAGED_WEIGHTS = "averaged.safetensors.enc"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run between two steps: everything needed to resume there, and nothing that is secret.

    Attributes:
        stated: the package's manifest, with one range, and still without what its writer adds: payloads, recipients,
            the package before, and the time.
        parameters: float32[d], in canonical order.
        state: optimizer state of all tensors, with their averages.
    """

    stated: PackageManifest
    parameters: NDArray[np.float32]
    state: Mapping[str, np.ndarray]


def write_draft(
    draft: Draft,
    snapshot: Snapshot,
    run: Manifest,
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
    data_key, stated, tensors = Secret(secrets.token_bytes(32)), snapshot.stated, run.computation.tensors
    parts = zip(tensors, split_flat(snapshot.parameters, tensors), strict=True)
    state = dict(snapshot.state)
    averages = {each.name: state.pop(f"{each.name}/{AVERAGED}") for each in tensors if stated.averaged_digest}
    contents = {
        PARAMETERS: ({tensor.name: part.reshape(tensor.shape) for tensor, part in parts}, stated.model_digest),
        OPTIMIZER: ({f"0/{name}": array for name, array in state.items()}, stated.model_digest),
    }
    if averages:
        contents[AVERAGED_WEIGHTS] = averages, stated.averaged_digest
    payloads = []
    for name, (arrays, digest) in contents.items():
        with draft.sink(name) as sink:
            metadata = {"run_id": run.run_id, "step": str(stated.step), "model_digest": digest.hex()}
            pieces = safetensors_pieces(arrays, metadata)
            payloads.append(write_payload(sink, data_key, stated.context(), name, pieces, chunk_bytes))
    unwrapped = tuple(Recipient(name=each.name, key_id=each.key_id, wrapped_key=b"") for each in recipients)
    written = {"previous": previous, "created_at": created_at, "payloads": tuple(payloads), "recipients": unwrapped}
    manifest = stated.model_copy(update=written)
    # The wrapped keys are not part of it, because they are made with it.
    info = manifest.info()
    wrapped = tuple(
        entry.model_copy(update={"wrapped_key": hpke_seal(data_key.reveal(), recipient.key, info)})
        for entry, recipient in zip(manifest.recipients, recipients, strict=True)
    )
    return manifest.model_copy(update={"recipients": wrapped})
