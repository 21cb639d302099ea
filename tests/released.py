"""Steps as aggregators release them, made by hand: each part may be somebody else's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.lineage import ModelPoint, RangeRelease, SignedStep, StepRelease, TensorDigests
from raycloak.attestation.core.messages import seal
from raycloak.attestation.core.roster import Member, Roster

Tensors = tuple[TensorDigests, ...]


def tensors_of(word: str, *, kept: bool = True) -> tuple[Tensors, Tensors]:
    """Return the tensors of a model in two ranges; each word is another model, with another state of its rule."""

    def one(name: str) -> TensorDigests:
        content, state = (digest(f"{word} {name} {part}".encode()) for part in ("values", "state"))
        return TensorDigests(name=name, shape=(2, 3), content=content, state=state if kept else b"")

    return (one("first"), one("second")), (one("third"),)


def point_of(word: str, *, kept: bool = True) -> ModelPoint:
    """Return the whole model of :func:`tensors_of`."""
    return ModelPoint.of([tensor for part in tensors_of(word, kept=kept) for tensor in part])


START = point_of("start", kept=False)


@dataclass
class Signers:
    """The orchestrator and the two aggregators of a run."""

    run_id: str
    manifest_digest: bytes
    orchestrator: IdentityKey = field(default_factory=IdentityKey.generate)
    aggregators: tuple[IdentityKey, ...] = field(
        default_factory=lambda: (IdentityKey.generate(), IdentityKey.generate())
    )

    def roster(self, step: int, **changes: Any) -> Roster:
        """Return the roster of an attempt, without workers."""
        members = tuple(
            Member(
                member_id=f"aggregator-{index}",
                role="aggregator",
                mask_key=bytes(32),
                identity_key=key.public,
                evidence_digest=bytes(32),
                virtual_workers=(),
                joined=0,
            )
            for index, key in enumerate(self.aggregators)
        )
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "manifest_digest": self.manifest_digest,
            "step": step,
            "attempt": 0,
            "ratchet": step,
            "nonce": bytes([step]) * 32,
            "members": members,
        }
        return Roster(**fields | changes)

    def released(
        self,
        roster: Roster,
        before: ModelPoint,
        after: str,
        binding: bytes,
        *,
        signed_by: Sequence[IdentityKey] | None = None,
        first: Mapping[str, Any] | None = None,
        input_digest: bytes | None = None,
    ) -> SignedStep:
        """Return the release of ``roster``; ``first`` are changes in what the first aggregator signs.

        Args:
            input_digest: of the step, where it is not the model's own.
        """
        parts = []
        for key, tensors in zip(signed_by or self.aggregators, tensors_of(after), strict=True):
            release = StepRelease(
                roster_digest=roster.digest(),
                binding=binding,
                input_digest=before.parameters if input_digest is None else input_digest,
                before=before,
                after=ModelPoint.of(tensors),
            ).model_copy(update={} if parts else first)
            parts.append(RangeRelease(release=seal(release, key), tensors=tensors))
        return SignedStep(roster=seal(roster, self.orchestrator), ranges=tuple(parts))
