"""The step state of a client: how far its steps are submitted, allowed, charged and finished. Values alone."""

from dataclasses import dataclass, replace

from raycloak.coordinator.service.pipe import Allow


@dataclass(frozen=True, slots=True)
class StepState:
    """The steps of a client, submitted, allowed and finished. Transitions return the new state.

    `due` is the command that follows from it.

    Attributes:
        submitted_steps: optimizer steps that were submitted and neither cancelled nor failed.
        pending: number of the newest ``forward_backward`` that no ``optim_step`` follows yet; -1 if there is none.
        sent_examples: of the step that the client sends examples for now.
        allowed_charges, allowed_releases: the watermarks that the driver is told; the second falls where a step that
            ran is cancelled.
        held: whether the driver is told to leave the step that it computes, and not to compute it before it is told.
        charged, finished: steps that the driver reported as charged and as released.
    """

    submitted_steps: int = 0
    pending: int = -1
    sent_examples: int = 0
    allowed_charges: int = 0
    allowed_releases: int = 0
    held: bool = False
    charged: int = 0
    finished: int = 0

    @property
    def is_begun(self) -> bool:
        """Return whether a step has begun that was not released."""
        return self.pending >= 0 or self.allowed_charges > self.submitted_steps

    def due(self, told: Allow | None) -> Allow | None:
        """Return the command for a driver that was ``told`` another one last, if there is one."""
        allow = Allow(computed=self.allowed_charges, released=self.allowed_releases, held=self.held)
        return allow if allow != told else None

    def forward_submitted(self, number: int, examples: int = 0) -> "StepState":
        """Return the state after a ``forward_backward`` was submitted with so many examples of the client's."""
        return replace(self, pending=number, sent_examples=self.sent_examples + examples)

    def optim_submitted(self) -> "StepState":
        """Return the state after an ``optim_step`` was submitted: what is sent next is for the step after it."""
        return replace(self, pending=-1, sent_examples=0, submitted_steps=self.submitted_steps + 1)

    def retired(self, number: int, is_optim: bool) -> "StepState":
        """Return the state after an operation ended without a result."""
        pending = -1 if self.pending == number else self.pending
        return replace(self, pending=pending, submitted_steps=self.submitted_steps - is_optim)

    def reopened(self, pending: int, examples: int) -> "StepState":
        """Return the state after an ``optim_step`` was cancelled: its ``forward_backward`` waits for another one."""
        return replace(self, pending=pending, sent_examples=examples)

    def handed(self, is_optim: bool) -> "StepState":
        """Let a part of the next step run: it is charged, and by its ``optim_step`` released."""
        charges = max(self.allowed_charges, self.finished + 1)
        releases = max(self.allowed_releases, self.finished + 1) if is_optim else self.allowed_releases
        return replace(self, allowed_charges=charges, allowed_releases=releases, held=False)

    def holding(self, held: bool) -> "StepState":
        """Have the driver leave the step that it computes, or no longer."""
        return replace(self, held=held)

    def paid(self, charged: int) -> "StepState":
        """Count the steps that a driver knows as charged: one may be lost between a charge and its report."""
        return replace(self, charged=max(self.charged, charged))

    def computed(self, step: int) -> "StepState":
        """Return the state after a step was charged and computed, so that a cancellation came too late."""
        # A driver that resumed from an earlier package has not reached the step that is to be cancelled.
        return replace(self.paid(step + 1), held=self.held and step < self.finished)

    def left(self, step: int) -> "StepState":
        """Return the state after the driver left a step that is held."""
        return replace(self, allowed_releases=min(self.allowed_releases, step))

    def released(self, step: int) -> "StepState":
        """Return the state after a step was finished."""
        return replace(self, finished=max(self.finished, step + 1))

    def over(self) -> "StepState":
        """Allow no further step: a driver that resumes the run is not to try one that nobody waits for."""
        return replace(self, allowed_charges=self.finished, allowed_releases=self.finished)
