"""The batches that a client sent for one step: checked as a whole, and opened one virtual worker at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.attestation.sealed.sent_batch import SentBatch, require_step
from raycloak.metrics.errors import EvidenceError, ProtocolError
from raycloak.workers.inputs.sent_rows import SentForm, SentRows, row_bytes
from raycloak.workers.terms.manifest import Manifest


def own_batches(given: Sequence[np.ndarray], digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the bytes of each batch, in this process's own memory, which no other can change after the check.

    Raises:
        ProtocolError: ``batch_changed`` if they are not those with these digests.
    """
    contents = tuple(each.tobytes() for each in given)
    if [digest(each) for each in contents] != list(digests):
        raise ProtocolError("batch_changed", "the bytes of a batch are not those that the step was asked for")
    return contents


@dataclass(frozen=True, slots=True)
class SentStep:
    """The batches of one step, of this run and complete, but still sealed."""

    batches: tuple[SentBatch, ...]
    form: SentForm

    @classmethod
    def read(cls, contents: Sequence[bytes], manifest: Manifest, step: int, form: SentForm) -> Self:
        """Read the batches of ``step``.

        Raises:
            ProtocolError: ``batch_malformed``, or as `raycloak.attestation.sealed.sent_batch.require_step`.
        """
        batches = tuple(SentBatch.read(each) for each in contents)
        computation = manifest.computation
        require_step(
            batches,
            run_id=manifest.run_id,
            manifest_digest=manifest.digest(),
            step=step,
            epoch=computation.epoch_of("gradient", step),
            virtual_workers=computation.mechanism.virtual_workers,
            row_bytes=row_bytes(form.form),
            places=computation.mechanism.num_examples,
        )
        return cls(batches, form)

    def rows(self, v: int, keys: VirtualWorkerKeys) -> SentRows:
        """Decrypt the examples of virtual worker ``v``.

        Raises:
            ProtocolError: ``batch_sealed`` if they were not sealed under its key.
            EvidenceError: ``release_denied`` if the run has no key service, whose half opens them.
        """
        if keys.sent is None:
            raise EvidenceError("release_denied", f"no half of a data owner's key for virtual worker {v}")
        found: dict[int, bytes] = {}
        for batch in self.batches:
            found |= batch.open(v, keys.sent)
        return SentRows(self.form, found)
