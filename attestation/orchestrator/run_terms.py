"""The terms that the orchestrator of a run, or of a standalone service, receives once."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.keys.release import KeyContract
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.sealed.sealed_data import SealedSource

C = TypeVar("C", bound=KeyContract, covariant=True)

# An observer may look; it gets no keys and no place in a roster.
OBSERVER: Final = "observer"
# Only observers have such names, so that none of them can take the name of another member.
OBSERVER_PREFIX: Final = "observer-"


@dataclass(frozen=True, slots=True)
class SparseMasks:
    """The terms of a mask graph in which not all pairs of workers mask.

    Attributes:
        colluding_workers: number of workers that it must withstand.
        releases: of the whole run, over all its mechanisms.
    """

    colluding_workers: int
    releases: int


@dataclass(frozen=True, slots=True)
class RunTerms(Generic[C]):
    """The terms of a run: the policy that evidence is judged by, and the manifest that it is for.

    Attributes:
        contract: the manifest of a run, or the contract of a standalone service. Keys derive from it alone, so nobody
            can have the keys of one manifest released under another. It alone says how many keys there are, and how
            many of them one machine may have.
        sealed, evaluation: the training examples and the evaluation split, where they are sealed.
        displaces: whether a newcomer takes the place of the members on its machine or its GPUs, instead of being
            refused. At a key service members come one after the other, so a member that is still there has died.
        charged: whether the ledger had charged the run before this execution. Its keys have then been released before,
            and the books of the run must know of it.
        masks: which pairs of workers mask in a large roster; None for all pairs.
        lasting: names of the members that are kept when their evidence expires; None for all but observers. A
            standalone service admits any name with accepted evidence, so it keeps only the members of its table.
    """

    contract: C
    policy: Policy
    collateral: CollateralBundle
    sealed: SealedSource | None = None
    evaluation: SealedSource | None = None
    displaces: bool = False
    lasting: tuple[str, ...] | None = None
    charged: bool = False
    masks: SparseMasks | None = None

    @property
    def manifest_digest(self) -> bytes:
        """The digest that every piece of evidence states."""
        return self.contract.digest()

    def lasts(self, member_id: str) -> bool:
        """Return whether a member is kept when its evidence expires; an observer, known by its name, never is."""
        if member_id.startswith(OBSERVER_PREFIX):
            return False
        return self.lasting is None or member_id in self.lasting
