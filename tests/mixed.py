"""The small run with correlated noise, driven message by message."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from raycloak.attestation.core.lineage import ModelPoint
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.coordinator.aggregation.aggregator import ReduceReport, ReduceRequest
from raycloak.coordinator.planning.plan import plan_mechanism
from raycloak.workers.terms.binding import sum_digests
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.payload import Header
from tests.protocol import RENYI, Asked, HandRun, config

BANDS, EPOCH, STEPS = 3, 4, 8
FIELDS: dict[str, Any] = {
    "steps": STEPS,
    "epoch_steps": EPOCH,
    "dp_config": RENYI | {"noise": {"correlated": "auto", "bands": BANDS}},
    # On by default: a run by hand commits models without an average.
    "optimizer": {"learning_rate": 0.5, "momentum": 0.9, "averaged_weights": False},
    "measurements": {},
    "expected_batch_size": 12,
}


@cache
def mixed_mechanism() -> Mechanism:
    """Return the mechanism of the small run, whose steps mix the sums of three."""
    return plan_mechanism(config(**FIELDS), 40, 83)


class MixedRun(HandRun):
    """A run by hand whose steps mix sums: it keeps what later steps need of the finished ones.

    Attributes:
        models: parameters of each finished step, one array per range.
        befores: input digest of the step before each of them.
        solved: released gradients of each, one array per range.
        newest: the same of the step that was reduced last. sums: the digests of the sums that each of them mixed.
        model_digest: of the current parameters. point: the model before the next step, with its state.
    """

    def __init__(self, home: Path, workers: int = 2, **fields: Any) -> None:
        super().__init__(home, workers, **FIELDS | fields)
        self.models: list[tuple[np.ndarray, ...]] = []
        self.befores: list[bytes] = []
        self.solved: list[tuple[np.ndarray, ...]] = []
        self.sums: list[tuple[bytes, ...]] = []
        self.model_digest = self.digest
        self.point = ModelPoint.initial(self.digest)
        self.newest: tuple[np.ndarray, ...] = ()

    def with_past(self, request: Asked, past: int) -> tuple[Asked, tuple[np.ndarray, ...]]:
        """Return a question that comes with the models of so many finished steps, and what is given with it."""
        first = len(self.models) - past
        before = [*self.befores, self.input_before][first]
        models = [part for model in self.models[first:] for part in model]
        return replace(request, past=past, input_before=before), (*models, *self.parameters)

    def reduce(
        self,
        request: ReduceRequest,
        vectors: Sequence[Sequence[np.ndarray]],
        index: int = 0,
        binding: Envelope | None = None,
        earlier: Sequence[np.ndarray] | None = None,
    ) -> tuple[ReduceReport, np.ndarray, Any]:
        """As of a run by hand; ``earlier`` stands for the releases that the step is solved by."""
        bound = self.binding(request) if binding is None else binding
        reach = self.manifest.computation.reach(len(self.models))
        given = [each[index] for each in self.solved[: len(self.models)][::-1][:reach]] if earlier is None else earlier
        own = self.parameters[index], self.states[index]
        report, parameters, state, solved = self.aggregators[index].reduce(
            request, bound, *own, *given, *vectors[index]
        )
        self.newest = (*(self.newest if index else ()), solved)
        return report, parameters, state

    def finish(
        self, roster: Envelope, computed: tuple[ReduceRequest, list[tuple[np.ndarray, ...]]], step: int = 0
    ) -> StepCommit:
        """As of a run by hand; the next input is chained to this one."""
        self.newest = ()
        model, before = self.parameters, self.digest
        commit = super().finish(roster, computed, step)
        self.models.append(model)
        self.befores.append(self.input_before)
        self.solved.append(self.newest)
        self.sums.append(sum_digests([parse(Header, each.body) for each in computed[0].headers]))
        self.input_before, self.model_digest, self.point = before, commit.released_digest, commit.model
        self.digest = step_input(commit.released_digest, (), before)
        return commit
