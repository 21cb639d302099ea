"""Failures of members at a task: those members leave, and the run ends if all fail alike."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.training.model import Model
from raycloak.coordinator.training.step_context import StepContext
from raycloak.metrics.errors import MORE_MEMORY, RunFailedError


@dataclass(slots=True)
class MemberFailures:
    """The failed members of a session, one task after the other."""

    context: StepContext
    _all_lost: bool = False

    def begin(self) -> None:
        """Begin another task."""
        self._all_lost = False

    def take(self, failures: Mapping[str, str], task: str, step: int, *, everybody: bool) -> None:
        """Take the workers that failed off the run; if all fail alike, others in their place would too, and it ends.

        All may die at once when a node does, so a first such loss counts as an accident.

        Args:
            failures: code by member id.
            task: how messages call it.

        Raises:
            RunFailedError: the code of all.
        """
        code = next(iter(failures.values()), "")
        alike = everybody and len(set(failures.values())) == 1
        if alike and (self._all_lost or code not in ("died", "unreachable")):
            raise RunFailedError(code, f"every worker failed in {task}: {code}", _REMEDIES.get(code, ""), step)
        self._all_lost = alike
        for member_id, cause in failures.items():
            self.context.membership.members.lose(member_id, cause, f"{member_id} failed in {task}")

    def require_model(self, model: Model, causes: Collection[str], task: str, step: int) -> None:
        """Check, when an object that was passed is gone, that it was not the model itself.

        Raises:
            RunFailedError: ``state_lost``.
        """
        if "object_lost" not in causes:
            return
        try:
            for reference in (*model.parameters, *model.states):
                self.context.backend.fetch(reference, self.context.deadline_s)
        except ActorLost as lost:
            raise RunFailedError(
                "state_lost",
                f"the node that held the model went away in {task} ({lost.cause})",
                "Resume from the newest sealed package: raycloak run CONFIG --resume",
                step,
            ) from None


_REMEDIES = {
    "out_of_memory": MORE_MEMORY,
    "nondeterministic_op": "Set allow_nondeterministic: true for a run that is NOT EXACT, or change the model.",
    "worker_error": "The text of the failure stays in the worker; run the model on public data to see it.",
}
