"""The batches of a step whose examples a client sends: found, checked from outside, and given to workers encrypted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raycloak.attestation.sealed.sent_batch import SentBatch, require_step
from raycloak.coordinator.cluster.backend import Backend
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.cluster.remote import Ciphertext
from raycloak.coordinator.record.batch_files import BatchFiles, Digests
from raycloak.coordinator.training.step_context import Model
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.errors import RefusedError
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.step_input import step_input


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches that a client sent for one step.

    Attributes:
        digests: SHA-256 of each batch, in their order.
        references: to their bytes, encrypted.
    """

    digests: Digests = ()
    references: tuple[Reference[Ciphertext], ...] = ()


NO_BATCHES = StepBatches()
"""The batches of a step on registered data."""


@dataclass(frozen=True, slots=True)
class BatchesOfSteps:
    """The batches of a run's steps, from its client or from the run's directory.

    Attributes:
        offered: the files that the client has sent for a step by now; none for a step that it sent before a restart.
        row_bytes: size of an encoded example.
    """

    backend: Backend
    control: Control
    manifest: Manifest
    files: BatchFiles
    offered: Callable[[int], tuple[Path, ...]]
    row_bytes: int

    def of(self, step: int, model: Model) -> StepBatches:
        """Return the batches of ``step``, which starts from ``model``; nothing is charged yet.

        Guarantee: returns only batches that are kept on disk, whole, and sealed for this step of this run. So a step is
        charged for nothing that its workers refuse by its clear head.

        Raises:
            RefusedError: ``no_batches``, ``batch_missing`` or ``batch_altered``.
            ProtocolError: as `raycloak.attestation.sealed.sent_batch.require_step`.
        """
        given = self.offered(step)
        digests = self.files.keep(step, given) if given else self._charged(step, model)
        contents = self.files.read(step, digests)
        computation = self.manifest.computation
        require_step(
            [SentBatch.read(each) for each in contents],
            run_id=self.manifest.run_id,
            manifest_digest=self.manifest.digest(),
            step=step,
            epoch=computation.epoch_of("gradient", step),
            virtual_workers=computation.mechanism.virtual_workers,
            row_bytes=self.row_bytes,
            places=computation.mechanism.num_examples,
        )
        return StepBatches(digests, tuple(self.backend.put(np.frombuffer(each, np.uint8)) for each in contents))

    def _charged(self, step: int, model: Model) -> Digests:
        """Return the digests of the batches that an earlier execution charged the step for."""
        status = self.control.ledger.status(self.manifest.run_id, step, "gradient")
        if not status.charged:
            raise RefusedError(
                "no_batches",
                f"nobody has sent examples for step {step}.",
                "Train on data that a client sends through a training service: raycloak serve.",
            )
        for digests in self.files.sets(step):
            if step_input(model.digest, digests) == status.input_digest:
                return digests
        raise RefusedError(
            "batch_missing",
            f"the run's directory does not have the batches that step {step} was charged for.",
            "Bring batches.jsonl and the folder batches back, as the run wrote them.",
        )
