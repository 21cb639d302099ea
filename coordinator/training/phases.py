"""Coordinator: one execution of a run, as a state machine whose phases hand each other finished objects.

    PREPARING  start workers, open data, build models           -> Founders
    ADMITTING  plan, manifest, account, evidence, keys          -> AdmittedRun
    TRAINING   step by step, until the planned steps or the cap -> Training, and how it ended
    FINISHING  commit the last step, export the evidence log    -> Finished
    DONE | FAILED

It holds configuration, references and public facts; never examples, gradients or keys.
"""

from contextlib import suppress
from enum import Enum
from pathlib import Path

import numpy as np

from raycloak.coordinator.cluster.remote import WorkerActor
from raycloak.coordinator.ledger.view import data_standing
from raycloak.coordinator.membership.founders import Founders
from raycloak.coordinator.membership.members import Backoff, Departures, Members, Timer
from raycloak.coordinator.planning.cross_check import load_accountants
from raycloak.coordinator.planning.references import sealed_terms
from raycloak.coordinator.record.outcome import Ending, Evaluation, Finished
from raycloak.coordinator.training.admitted import AdmittedRun, admit
from raycloak.coordinator.training.assignment import Order
from raycloak.coordinator.training.evaluation import Evaluator, OrderedEvaluator, PublicEvaluation
from raycloak.coordinator.training.reporting import Outset, Reporter
from raycloak.coordinator.training.step import StepRunner
from raycloak.coordinator.training.step_context import StepContext
from raycloak.coordinator.training.steps import Training
from raycloak.metrics.errors import RunFailedError
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
        self._public: PublicEvaluation | None = None
        # None where the workers measure, or nobody.
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
        self._training: Training | None = None

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
                runner = self.step_runner(admitted)
                training = Training.of(order, admitted, runner, self._evaluator or self._ordered(admitted, runner))
                self._training = training
                accounts = order.session.control.ledger.view().accounts
                account = next((each for each in accounts if each.name == admitted.run.account), None)
                runs = account.runs if account is not None else ()
                order.reporting.begun(
                    Outset(
                        manifest=admitted.manifest,
                        plan=admitted.plan,
                        evidence_class=admitted.evidence_class,
                        finished_steps=training.finished_steps,
                        # Zero before the first charge of a run that opens its account.
                        charged_steps=sum(run.charged_steps for run in runs if run.run_id == order.session.run_id),
                        charged_epsilon=account.spent_epsilon if account is not None else 0.0,
                    )
                )
                ending = training.run()
            self._enter(Phase.FINISHING)
            with traces.span("finish"):
                finished = self._conclude(training, ending)
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

        def build() -> None:
            # While each worker does the same for itself.
            load_accountants(self.order.config)
            self._public = self.order.public()

        self._enter(Phase.PREPARING)
        with traces.span("prepare"):
            founders = Founders.prepare(self._members, self.order.setup, self.order.session.crew, build)
            if self._public is not None and not founders.facts.measures:
                # Built now that the workers have found out how large the model is.
                self._evaluator = self._public.evaluator()
        self._enter(Phase.ADMITTING)
        metrics = tuple(metric.code for metric in self._public.own) if self._public else ()
        with traces.span("admit"):
            return admit(self.order, founders, self._reporter, self._evaluation, metrics)

    def step_runner(self, admitted: AdmittedRun) -> StepRunner:
        """Return what runs the steps of an admitted run."""
        order, control = self.order, self.order.session.control

        def renew() -> None:
            admitted.membership.admission.renew()
            self._reporter.presented(control.orchestrator.view())

        context = StepContext(
            backend=order.session.backend,
            control=control,
            membership=admitted.membership,
            manifest=admitted.manifest,
            metrics=admitted.metrics,
            deadline_s=order.config.failure.step_deadline_s,
            renew=renew,
            traces=order.reporting.traces,
        )
        return StepRunner(context, admitted.run, admitted.ranges, order.config.secure_aggregation, order.pace)

    def _ordered(self, admitted: AdmittedRun, runner: StepRunner) -> OrderedEvaluator | None:
        """Return what has the workers measure; None if nothing is measured."""
        split = admitted.evaluation or (self._public.split if self._public is not None else None)
        return OrderedEvaluator.of(self.order.config, split, runner)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.order.reporting.phase(_SAID[phase])

    def _conclude(self, training: Training, ending: Ending) -> Finished:
        """Seal and write the last model, commit the last step and export the log.

        A generated secret is destroyed if the run is complete.

        Raises:
            RunFailedError: ``stopped`` if no step was finished.
        """
        training.seal()
        self._close_checkpoints(training)
        if training.finished_steps == 0:
            raise RunFailedError(
                "stopped", "the run was stopped before its first step", "Resume it: raycloak run CONFIG --resume"
            )
        finished = self._result(training, ending, training.exported(), training.evaluate())
        training.runner.commit()
        if self.order.assignment.charges:
            # Packages cannot be opened any more once the secret is gone: the model must be on disk before.
            self._write(training, finished.parameters)
            if ending is Ending.STOPPED:
                self._export_log()
            else:
                self.finish_log(destroy=self.order.config.secret_retention == "run")
        return finished

    def finished(self) -> Finished | None:
        """Return the result so far, measured if it was not yet; None before the first step is done."""
        training = self._training
        if training is None or training.finished_steps == 0:
            return None
        return self._result(training, None, training.exported(), training.evaluate())

    @property
    def step(self) -> int | None:
        """The step that is under way or comes next; None before training."""
        return self._training.finished_steps if self._training else None

    @property
    def charged_epsilon(self) -> float | None:
        """The account's epsilon after the last charge of this execution; None if it has charged nothing."""
        return self._training.runner.charged_epsilon if self._training else None

    @property
    def begun(self) -> bool:
        """Return whether the run must stay as it is, because it has charged anything or may have.

        An earlier execution of a resumed run counts. So does a client that may have sealed examples for this manifest,
        whose ids it has counted: no other run could open them.
        """
        training = self._training
        is_relied_on = training is not None and (training.runner.charging or training.sent is not None)
        return is_relied_on or self.order.assignment.recorded is not None

    def salvage(self, destroy: bool) -> Finished | None:
        """Seal and write what a failed execution has, export the log, and destroy a generated secret if asked.

        Guarantee: the log is exported whatever else fails, if the orchestrator answers; ``log_is_saved`` tells.

        Returns:
            The result so far; None if no step was finished.
        """
        training = self._training
        try:
            if training is None:
                return None
            try:
                with suppress(RunFailedError):  # The model itself may have been lost; earlier packages stay.
                    training.seal()
                self._close_checkpoints(training)
            finally:
                # Whatever keeps the model from being sealed: its steps were released.
                training.runner.commit()
            if training.finished_steps == 0:
                return None
            parameters = training.exported()
            # Before the ledger is asked, which may be what is lost.
            self._write(training, parameters)
            return self._result(training, None, parameters, training.evaluated())
        finally:
            if destroy:
                self.finish_log(destroy=True)
            else:
                self._export_log()
            self.log_is_saved = True

    def _result(
        self, training: Training, ending: Ending | None, parameters: np.ndarray, evaluation: Evaluation | None
    ) -> Finished:
        admitted, control = training.admitted, self.order.session.control
        view = control.ledger.view()
        account = next(each for each in view.accounts if each.name == admitted.run.account)
        (run,) = (run for run in account.runs if run.run_id == self.order.session.run_id)
        return Finished(
            manifest=admitted.manifest,
            plan=admitted.plan,
            parameters=parameters,
            model_digest=training.model.exported,
            steps=training.finished_steps,
            most_hosted=control.orchestrator.most_hosted(),
            workers=len(admitted.membership.members.workers),
            charged={each.query: each.charged for each in run.queries},
            charged_epsilon=account.spent_epsilon,
            account=account.name,
            data=data_standing(view, account.name),
            evaluation=evaluation,
            loads=tuple((load.after_step, load.step) for load in control.orchestrator.loads()),
            released=self.order.folder.released(),
            evidence_class=admitted.evidence_class,
            links=admitted.links,
            outcomes=tuple(training.outcomes),
            measurement_outcomes=tuple(training.measurement_outcomes),
            colocated=admitted.colocated,
            ending=ending,
            rollback_witness=admitted.rollback_witness,
        )

    def _write(self, training: Training, parameters: np.ndarray) -> None:
        self.order.folder.write_parameters(training.admitted.manifest, parameters, training.model.exported)

    def _close_checkpoints(self, training: Training) -> None:
        if training.checkpoints is not None:
            training.checkpoints.close(self.order.config.failure.step_deadline_s)

    def _export_log(self) -> None:
        """Export the evidence log of a run that may be resumed."""
        self.order.session.control.orchestrator.export_log(str(self.order.folder.path / "evidence.jsonl"))

    def finish_log(self, *, destroy: bool) -> None:
        """End the evidence log for good and export it; a generated secret is destroyed if asked."""
        self.order.session.control.orchestrator.finish(str(self.order.folder.path / "evidence.jsonl"), destroy)
