"""The outset of training: what is known of an execution before its first step."""

from dataclasses import dataclass

from raycloak.coordinator.planning.plan import Plan
from raycloak.workers.terms.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Outset:
    """The terms of an execution whose members are admitted and whose model is there.

    Attributes:
        finished_steps: steps that earlier executions finished.
        charged_steps: of the run by now, by the ledger's record.
        charged_epsilon: of the account by now, by the ledger's record.
    """

    manifest: Manifest
    plan: Plan
    evidence_class: str
    finished_steps: int
    charged_steps: int
    charged_epsilon: float
