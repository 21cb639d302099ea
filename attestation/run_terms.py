"""What the orchestrator of a run, or of a standalone service, is told once: by what it judges, and for what."""

from dataclasses import dataclass
from typing import Final

from attestation.evidence import CollateralBundle
from attestation.policy import Policy
from attestation.sealed_data import SealedTerms

MAX_EPOCHS: Final = 65_536
OBSERVER: Final = "observer"
"""Role of whoever may look, and gets no keys and no place in a roster."""
OBSERVER_PREFIX: Final = "observer-"


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What the orchestrator needs of a run's manifest.

    Attributes:
        sealed, evaluation: the training examples and the evaluation split, where they are sealed.
        displaces: whether a member takes the place of who is enrolled on its machine or its GPUs, instead of being
            refused: where members come one after the other, as at a key service, who is still there has died.
        epochs: how many epochs of keys the manifest or the contract commits to; no key of a later one is released.
        lasting: names of the members that are kept when their evidence expires, as the run goes on with them; None for
            all but observers. At a standalone service anybody whose evidence is accepted is admitted, under any name.
    """

    manifest_digest: bytes
    key_context: bytes
    virtual_workers: int
    known_answer: bytes
    policy: Policy
    collateral: CollateralBundle
    sealed: SealedTerms | None = None
    evaluation: SealedTerms | None = None
    displaces: bool = False
    lasting: frozenset[str] | None = None
    epochs: int = MAX_EPOCHS

    def lasts(self, member_id: str) -> bool:
        """Whether a member is kept when its evidence expires; of observers, whom their names tell, none is."""
        if member_id.startswith(OBSERVER_PREFIX):
            return False
        return self.lasting is None or member_id in self.lasting
