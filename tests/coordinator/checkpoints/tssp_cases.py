"""A small sealed package, and what a test does to it."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raycloak.attestation.core.hpke import HpkeKey
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.sealed.package_keys import PackageSigner, RecipientPublic, TrustStore
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.checkpoints.reader import NOTHING_EXPECTED, Expected, VerifiedPackage, verify_package
from raycloak.coordinator.checkpoints.storage import MANIFEST, RUN_MANIFEST, SIGNATURE, PackageStorage
from raycloak.coordinator.checkpoints.writer import Snapshot, write_draft
from raycloak.metrics.errors import EvidenceError
from raycloak.workers.gradients.numerics import current_numerics
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import BY_HAND, Computation, Manifest, OptimizerSpec, TensorSpec
from raycloak.workers.terms.model_digest import model_digest, tensor_digests
from tests import protocol

NOW = 1_800_000_000
TENSORS = (TensorSpec(name="layer.weight", shape=(3, 4)), TensorSpec(name="layer.bias", shape=(3,)))


def run_manifest(tensors: tuple[TensorSpec, ...] = TENSORS, **changes: Any) -> Manifest:
    """Return the manifest of a run that was never trained: its steps are made by hand."""
    optimizer = OptimizerSpec(
        name=BY_HAND, learning_rate=0.5, momentum=0.0, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8,
        schedule="constant", warmup_steps=0,
    )  # fmt: skip
    computation = Computation(
        mechanism=protocol.mechanism(), largest_rows=64, model="m:f", model_code=b"",
        loss=LossSpec.of("mse"), loss_code=b"",
        tensors=tensors,
        initial_parameters=bytes(32), frozen=bytes(32), optimizer=optimizer, numerics=current_numerics("cpu"),
        dataset=b"", epoch_steps=100,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "run_id": "0123456789abcdef", "computation": computation, "known_answer": b"", "policy_digest": b"",
        "account": "a", "ledger_key": b"", "orchestrator_key": b"", "orchestrator_ml_dsa": b"", "key_commitments": (),
    }  # fmt: skip
    return Manifest(**fields | changes)


def snapshot(manifest: Manifest, step: int = 3, **changes: Any) -> Snapshot:
    """Return parameters and Adam-like state that depend on the step; ``changes`` are of it or of what it states."""
    tensors = manifest.computation.tensors
    flat = np.arange(sum(tensor.size for tensor in tensors), dtype=np.float32) + np.float32(step)
    state = {
        f"{tensor.name}/{name}": value
        for tensor in tensors
        for name, value in (
            ("exp_avg", np.full(tensor.shape, 0.1 * step, np.float32)),
            ("step", np.float32(step).reshape(())),
        )
    }
    stated = PackageManifest(
        run_id=manifest.run_id, manifest_digest=manifest.digest(), step=step, ranges=1,
        model_digest=model_digest(tensors, tensor_digests(flat, tensors)),
        epsilon=1.5, delta=1e-5, evidence_class="simulated", roster_digest=bytes(32),
        ledger_sequence=7, ledger_hash=b"l" * 32, log_length=9, log_hash=b"e" * 32, previous=b"",
        evaluation_accuracy=None, evaluation_loss=None, created_at=0, payloads=(), recipients=(),
    )  # fmt: skip
    parameters, state = changes.pop("parameters", flat), changes.pop("state", state)
    assert changes.keys() <= PackageManifest.model_fields.keys()
    return Snapshot(stated.model_copy(update=changes), parameters, state)


@dataclass
class Site:
    """A storage, a signer that readers trust, and a recipient."""

    home: Path
    manifest: Manifest = field(default_factory=run_manifest)
    recipient: HpkeKey = field(default_factory=HpkeKey.generate)
    storage: PackageStorage = field(init=False)

    def __post_init__(self) -> None:
        self.signer = PackageSigner.load_or_create(self.home / "signer")
        self.trust = TrustStore.of("site", self.signer.public)
        self.storage = PackageStorage.open(str(self.home / "packages"))

    def publish(self, step: int = 3, chunk_bytes: int = 64, signer: PackageSigner | None = None, **changes: Any) -> str:
        """Publish a package of a snapshot with changes; return its name."""
        return self.publish_snapshot(snapshot(self.manifest, step, **changes), chunk_bytes, signer)

    def publish_snapshot(self, made: Snapshot, chunk_bytes: int, signer: PackageSigner | None = None) -> str:
        draft = self.storage.draft(made.stated.step)
        manifest = write_draft(
            draft,
            made,
            self.manifest,
            [RecipientPublic(name="auditor", key=self.recipient.public)],
            previous=b"",
            created_at=NOW,
            chunk_bytes=chunk_bytes,
        )
        body = manifest.encode()
        signature = (signer or self.signer).sign(body).encode()
        return draft.publish({RUN_MANIFEST: self.manifest.encode(), MANIFEST: body, SIGNATURE: signature})

    def folder(self, name: str) -> Path:
        return self.home / "packages" / name

    def stated(self, name: str) -> PackageManifest:
        return PackageManifest.model_validate_json((self.folder(name) / MANIFEST).read_bytes())

    def resign(self, name: str, **changes: Any) -> None:
        """Let the trusted signer itself sign a manifest with changes."""
        body = self.stated(name).model_copy(update=changes).encode()
        (self.folder(name) / MANIFEST).write_bytes(body)
        (self.folder(name) / SIGNATURE).write_bytes(self.signer.sign(body).encode())

    def verify(self, name: str, expected: Expected = NOTHING_EXPECTED) -> VerifiedPackage:
        return verify_package(self.storage, name, self.trust, expected)

    def data_key(self, package: VerifiedPackage) -> Secret:
        return package.unwrap(self.recipient)

    def refusal(self, name: str, expected: Expected = NOTHING_EXPECTED) -> str:
        """Return the code with which the package is refused; empty if it is not."""
        try:
            self.verify(name, expected)
        except EvidenceError as error:
            return error.code
        return ""

    def copy(self, name: str, other: str) -> None:
        shutil.copytree(self.folder(name), self.folder(other))
