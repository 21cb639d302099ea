"""Coordinator: one execution of a run, as a state machine whose phases hand each other finished objects.

    PREPARING  start workers, open data, build models           -> Founders
    ADMITTING  plan, manifest, account, evidence, keys          -> AdmittedRun
    TRAINING   step by step, until the planned steps or the cap -> Training, and how it ended
    FINISHING  commit the last step, export the evidence log    -> Finished
    DONE | FAILED

It holds configuration, references and public facts; never examples, gradients or keys.
"""

from enum import Enum
from pathlib import Path

from raycloak.coordinator.cluster.remote import WorkerActor
from raycloak.coordinator.membership.departures import Departures
from raycloak.coordinator.membership.founders import Founders
from raycloak.coordinator.membership.members import Members
from raycloak.coordinator.membership.timing import Backoff, Timer
from raycloak.coordinator.planning.cross_check import load_accountants
from raycloak.coordinator.planning.references import sealed_terms
from raycloak.coordinator.record.outcome import Finished
from raycloak.coordinator.training.admitted import AdmittedRun, admit
from raycloak.coordinator.training.assembly import assemble
from raycloak.coordinator.training.assignment import Order
from raycloak.coordinator.training.conclusion import Conclusion, end_log
from raycloak.coordinator.training.outset import Outset
from raycloak.coordinator.training.public_evaluation import Evaluator
from raycloak.coordinator.training.reporting import Reporter
from raycloak.metrics.registry import FAILED


class Phase(Enum):
    """The phases of an execution, in their order."""

    PREPARING = "preparing"
    ADMITTING = "admitting"
    TRAINING = "training"
    FINISHING = "finishing"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (Phase.DONE, Phase.FAILED)


_SAID = {
    Phase.PREPARING: "opening data and building the model",
    Phase.ADMITTING: "planning",
    Phase.TRAINING: "training",
    Phase.FINISHING: "writing the result",
}
"""The words by which a watcher is told of a phase."""


class Coordinator:
    """Drives one execution of a run in one session.

    Raises:
        ConfigError: as `raycloak.coordinator.planning.references.sealed_terms` of the evaluation split.
    """

    def __init__(self, order: Order, timer: Timer | None = None) -> None:
        self.order = order
        self.phase = Phase.PREPARING
        # A replay evaluates nothing, so its orchestrator needs no keys of the split either.
        self._evaluation = (
            sealed_terms(order.config, Path(order.setup.base), "evaluation") if order.assignment.charges else None
        )
        config, session, timer = order.config, order.session, timer or Timer()
        workers: dict[str, WorkerActor] = {}
        self._evaluator: Evaluator | None = None
        self._reporter = Reporter(order.reporting, workers)
        # Ledger and orchestrator are started before there is a run to report to.
        session.control.on_restart = self._reporter.restarted
        self._members = Members(
            config=config,
            backend=session.backend,
            control=session.control,
            departures=Departures(config.failure.max_failures, self._reporter.departed),
            timer=timer,
            backoff=Backoff(timer),
            workers=workers,
        )
        # Whether the run directory has the evidence log of an execution that failed.
        self.log_is_saved = False
        # None until members are admitted: an execution that fails before has nothing to conclude.
        self._conclusion: Conclusion | None = None

    def run(self) -> Finished:
        """Go from starting the workers to the exported evidence log.

        Raises:
            RaycloakError: what ended the run; nothing is half-written and what was charged stays charged.
        """
        order, traces = self.order, self.order.reporting.traces
        try:
            admitted = self.admitted()
            self._enter(Phase.TRAINING)
            with traces.span("train"):
                training = assemble(order, admitted, self._reporter, self._evaluator)
                self._conclusion = Conclusion(order, admitted, training)
                charged_steps, charged_epsilon = self._conclusion.charged()
                order.reporting.begun(
                    Outset(
                        manifest=admitted.manifest,
                        plan=admitted.plan,
                        evidence_class=admitted.evidence_class,
                        finished_steps=training.finished_steps,
                        charged_steps=charged_steps,
                        charged_epsilon=charged_epsilon,
                    )
                )
                ending = training.run()
            self._enter(Phase.FINISHING)
            with traces.span("finish"):
                finished = self._conclusion.conclude(ending)
            self.phase = Phase.DONE
            self.ended(ending.value)
            return finished
        except BaseException:
            self.phase = Phase.FAILED
            self.ended(FAILED)
            raise

    def ended(self, ending: str) -> None:
        """Show how the execution ended, where its series are shown."""
        self._reporter.ended(ending)

    def admitted(self) -> AdmittedRun:
        """Start the workers, plan the run and admit its members; nothing is charged yet.

        Raises:
            RaycloakError: what refuses the run.
        """
        traces = self.order.reporting.traces
        self._enter(Phase.PREPARING)
        with traces.span("prepare"):
            founders = Founders.prepare(self._members, self.order.setup, self.order.session.crew, self._build)
        self._enter(Phase.ADMITTING)
        metrics = tuple(metric.code for metric in self._evaluator.own) if self._evaluator else ()
        with traces.span("admit"):
            return admit(self.order, founders, self._reporter, self._evaluation, metrics)

    def _build(self) -> None:
        """Load and build what this process needs, while each worker does the same for itself."""
        load_accountants(self.order.config)
        self._evaluator = self.order.evaluator()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.order.reporting.phase(_SAID[phase])

    def finished(self) -> Finished | None:
        """Return the result so far; None before the first step is done."""
        return self._conclusion.finished() if self._conclusion else None

    @property
    def step(self) -> int | None:
        """The step that is under way or comes next; None before training."""
        return self._conclusion.training.finished_steps if self._conclusion else None

    @property
    def charged_epsilon(self) -> float | None:
        """The account's epsilon after the last charge of this execution; None if it has charged nothing."""
        return self._conclusion.training.runner.charged_epsilon if self._conclusion else None

    @property
    def begun(self) -> bool:
        """Return whether the run must stay as it is, because it has charged anything or may have.

        An earlier execution of a resumed run counts. So does a client that may have sealed examples for this manifest,
        whose ids it has counted: no other run could open them.
        """
        if self._conclusion is None:
            return self.order.assignment.recorded is not None
        training = self._conclusion.training
        is_relied_on = training.runner.charging or training.sent is not None
        return is_relied_on or self.order.assignment.recorded is not None

    def salvage(self, destroy: bool) -> Finished | None:
        """Seal and write what a failed execution has, export the log, and destroy a generated secret if asked.

        Guarantee: the log is exported whatever else fails, if the orchestrator answers; ``log_is_saved`` tells.

        Returns:
            The result so far; None if no step was finished.
        """
        try:
            return self._conclusion.salvage() if self._conclusion else None
        finally:
            end_log(self.order, destroy=destroy)
            self.log_is_saved = True
