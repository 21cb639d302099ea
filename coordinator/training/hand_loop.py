"""A step loop that its caller writes: sampling, vectors, aggregate; the update is the caller's.

Hides everything before the first step and between two: admission, keys, rosters, receipts, bindings, lost workers,
fresh evidence at each epoch. No step can be resumed or replayed, because nothing records the update that gave its
parameters.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.lineage import ModelPoint
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.config.sections import OptimizerConfig
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.record.outcome import Ending
from raycloak.coordinator.training.assignment import Order
from raycloak.coordinator.training.attempt import Step
from raycloak.coordinator.training.phases import Coordinator
from raycloak.coordinator.training.step_context import Model
from raycloak.metrics.errors import ConfigError, RaycloakError, RunFailedError
from raycloak.metrics.registry import FAILED
from raycloak.workers.terms.manifest import BY_HAND
from raycloak.workers.terms.model_digest import model_digest, tensor_digests


class HandLoop:
    """The admitted members of a run, and its steps one by one.

    Guarantee: whatever its caller computes from an average costs no epsilon, since the average is released. A step is
    charged before a worker computes it, only the whole sum of its bound vectors is decoded, and only once. Wherever the
    loop ends, the run claims ``plan.epsilon_outsiders``: its caller may have looked. Precondition: the caller sees only
    released values.

    The manifest names no update rule. So no aggregator answers for the parameters: they are the caller's word.

    Attributes:
        plan: what the steps cost; ``plan.mechanism`` has the noise in each average.
        initial_parameters: float32 [d], in the order of the model's ``named_parameters``.

    Raises:
        RaycloakError: the reason why the run is refused; nothing was charged.
    """

    def __init__(self, order: Order) -> None:
        rule = OptimizerConfig.model_construct(name=BY_HAND)
        self._order = order = replace(order, config=order.config.model_copy(update={"optimizer": rule}))
        self._is_over = False
        self._coordinator = Coordinator(order)
        try:
            self._admitted = self._coordinator.admitted()
        except Exception:
            self.close()
            raise
        self._runner = self._coordinator.step_runner(self._admitted)
        self.plan: Plan = self._admitted.plan
        self.initial_parameters: NDArray[np.float32] = self._admitted.start
        self._finished = 0
        # What the next `aggregate` may be given.
        self._gathered: Step | None = None
        # The newest step, until the parameters that its caller makes of it are known.
        self._released: Step | None = None

    @property
    def finished_steps(self) -> int:
        """The number of steps whose average was released."""
        return self._finished

    def vectors(self, parameters: NDArray[np.floating[Any]]) -> Step:
        """Charge the next step, and have every worker draw its sample, clip, sum, add noise and mask.

        Args:
            parameters: float [d], of which the gradients are; rounded to float32.

        Returns:
            Masked vectors, for :meth:`aggregate` alone.

        Raises:
            BudgetError: ``cap_exceeded``; nothing was computed.
            ConfigError: ``loop_over`` once the loop has ended.
            RunFailedError: ``non_finite_parameters``, ``complete`` after the planned steps, or what failed.
        """
        self._require_open()
        if self._finished == self.plan.mechanism.steps:
            raise RunFailedError("complete", f"all {self._finished} planned steps are done.", "Plan more steps.")
        flat = self._flat(parameters)
        membership, runner = self._admitted.membership, self._runner
        # Evidence ages, and another epoch needs it anew.
        starts_epoch = self._finished > 0 and self._finished % self._order.config.epoch_steps == 0
        if membership.admission.review() or starts_epoch:
            runner.context.renew()
        membership.growth.settle()
        digest = self._digest(flat)
        self._commit(digest)
        backend = self._order.session.backend
        parts = tuple(backend.put(flat[owned.start : owned.stop].copy()) for owned in self._admitted.ranges)
        self._gathered = runner.gather(self._finished, Model(parts, (), digest))
        return self._gathered

    def aggregate(self, vectors: Step) -> NDArray[np.float64]:
        """Have the ledger bind the vectors for good and the aggregators add them.

        Args:
            vectors: the newest ones; they are given once.

        Returns:
            The released average, float64 [d]: sum of clipped gradients and noise, over the expected batch size.

        Raises:
            ConfigError: ``vectors_used`` for vectors that were aggregated, or are not the newest; ``loop_over``.
            RunFailedError: ``unreachable`` if an aggregator was lost; the step stays charged, and the vectors may be
                given again.
        """
        self._require_open()
        if vectors is not self._gathered:
            raise ConfigError(
                "vectors_used",
                f"after {self._finished} steps, these vectors were aggregated already, or newer ones were gathered.",
                "Give aggregate what vectors returned last, and once: both take one step.",
            )
        average = self._runner.release(vectors)
        self._gathered, self._released = None, vectors
        self._finished += 1
        self._admitted.metrics.steps_finished(self._finished)
        return average

    def finish(self, parameters: NDArray[np.floating[Any]]) -> str:
        """Commit the last step, write ``parameters`` into the run directory and end the evidence log.

        Returns:
            The hexadecimal digest of the parameters.

        Raises:
            ConfigError: ``loop_over`` once the loop has ended. RunFailedError: ``non_finite_parameters``.
        """
        self._require_open()
        flat = self._flat(parameters)
        digest = self._digest(flat)
        self._commit(digest)
        self._runner.commit()
        self._order.folder.write_parameters(self._admitted.manifest, flat, digest)
        self._coordinator.finish_log(destroy=True)
        self._is_over = True
        self._coordinator.ended(Ending.COMPLETE.value)
        return digest.hex()

    def close(self) -> None:
        """End the evidence log of a loop that was not finished; its secret is destroyed, for nobody can resume it."""
        if not self._is_over:
            self._is_over = True
            self._coordinator.ended(FAILED)
            # The error that ended the loop is the one to report.
            with suppress(ActorLost, RaycloakError):
                self._coordinator.finish_log(destroy=True)

    def _require_open(self) -> None:
        if self._is_over:
            raise ConfigError("loop_over", "the loop was finished, or left.", "Start another one: raycloak.by_hand.")

    def _flat(self, parameters: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            flat = np.array(parameters).astype(np.float32).reshape(-1)
        if flat.shape != self.initial_parameters.shape or not np.isfinite(flat).all():
            raise RunFailedError(
                "non_finite_parameters",
                f"after {self._finished} steps, {self.initial_parameters.size} finite parameters are needed.",
                "Give the initial ones, updated.",
                self._finished,
            )
        return flat

    def _commit(self, digest: bytes) -> None:
        """Have the newest step committed, and logged, with the parameters that its caller made of it."""
        if self._released is not None:
            outcome, self._released = self._runner.outcome(self._released, ModelPoint.of_values(digest)), None
            workers, private = len(self._admitted.membership.members.workers), self.plan.mechanism.private
            self._order.reporting.stepped(self._admitted.metrics, outcome, private, workers)

    def _digest(self, flat: NDArray[np.float32]) -> bytes:
        tensors = self._admitted.manifest.computation.tensors
        return model_digest(tensors, tensor_digests(flat, tensors))
