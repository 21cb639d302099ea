"""The records of steps, evaluations and executions; plain data that is passed on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from raycloak.attestation.core.evidence import Links
from raycloak.attestation.core.roster import Query
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.coordinator.ledger.view import DataStanding
from raycloak.coordinator.planning.plan import Plan
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released

if TYPE_CHECKING:
    # It imports torch, and readers of a record need none.
    from raycloak.workers.evaluation import Metric


class Ending(Enum):
    """The reason why the steps of an execution ended."""

    COMPLETE = "complete"
    CAP = "cap_exceeded"
    EARLY = "early_stopped"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A result on an evaluation split, which is public.

    Attributes:
        metric: ``accuracy``: share of labels that are the largest output, in [0, 1]; or ``loss``: mean over examples.
        value: of the metric.
        num_examples: how many it was measured on.
        f1: macro F1 beside an accuracy; None for a sealed split, whose scores are sums alone.
        own: values of the user's own metrics, by name; one that failed is not there.
    """

    metric: "Metric"
    value: float
    num_examples: int
    f1: float | None = None
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The value if it is an accuracy."""
        return self.value if self.metric == "accuracy" else None

    @property
    def loss(self) -> float | None:
        """The value if it is a loss."""
        return self.value if self.metric == "loss" else None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step that every aggregator finished.

    Attributes:
        charged_epsilon: of the account, as the receipt states it.
        masked_bytes: payload bytes of all vectors that were accepted, if they were masked; else 0.
        seconds: wall time of the step; ``charge_seconds``, ``compute_seconds`` and ``reduce_seconds`` of it are the
            receipt and first roster, and asking workers and aggregators in the last attempt.
        slowest_worker_seconds: the longest any worker took on its own in the last attempt.
        roster_digest: of the last attempt's roster.
        grad_norm: l2 norm of the average gradient; None in a private run, and of a measurement.
    """

    commit: StepCommit
    charged_epsilon: float
    masked_bytes: int
    seconds: float
    charge_seconds: float
    compute_seconds: float
    reduce_seconds: float
    slowest_worker_seconds: float
    roster_digest: bytes
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of an execution so far.

    Attributes:
        parameters: the weights that are exported, float32[d] in canonical order; ``model_digest`` is theirs.
        steps: finished steps of the run, in earlier executions too.
        most_hosted: most virtual workers whose keys of one epoch one machine has got, in any execution of the run.
        charged: how often each mechanism of the run was charged, by the ledger's record, in any execution. A step that
            failed after its charge counts: its sum may have been decoded.
        charged_epsilon: of the account by now, by the ledger's record.
        account: the one that pays. ``data``: of all accounts of the same data by now.
        loads: as in `raycloak.coordinator.record.verdict.Verdict`.
        released: what the measurements of the run say, earlier executions included.
        links: what evidence shows of the links between a worker's GPUs; None without a GPU.
        outcomes, measurement_outcomes: of the steps and measurements of this execution.
        colocated: whether an aggregator ran on the orchestrator's node.
        ending: why it ended; None if it failed.
        rollback_witness: whether the ledger had a witness on other storage.
    """

    manifest: Manifest
    plan: Plan
    parameters: np.ndarray
    model_digest: bytes
    steps: int
    most_hosted: int
    workers: int
    charged: Mapping[Query, int]
    charged_epsilon: float
    account: str
    data: DataStanding
    evaluation: Evaluation | None
    loads: tuple[tuple[int, int], ...]
    released: tuple[Released, ...]
    evidence_class: str
    links: Links | None
    outcomes: tuple[StepOutcome, ...]
    measurement_outcomes: tuple[StepOutcome, ...]
    colocated: bool
    ending: Ending | None
    rollback_witness: bool = False

    @property
    def masked_bytes(self) -> int:
        """The payload bytes of all masked vectors that reached the aggregators."""
        return sum(outcome.masked_bytes for outcome in (*self.outcomes, *self.measurement_outcomes))
