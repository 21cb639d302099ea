"""Training: the steps of one execution of a run, from its first model to its last.

It decides when evidence is renewed, what is reported, measured and sealed after a step, and when to end. A step that
an earlier execution committed must give the logged digest before the next step is charged.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from raycloak.attestation.core.lineage import ModelOrigin
from raycloak.attestation.core.roster import Query
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.attestation.sealed.package_manifest import PackageManifest
from raycloak.coordinator.checkpoints.saver import Checkpoints, Published
from raycloak.coordinator.checkpoints.writer import Snapshot
from raycloak.coordinator.planning.claim import claimed_epsilon
from raycloak.coordinator.record.batch_files import BatchFiles
from raycloak.coordinator.record.outcome import Ending, Evaluation, StepOutcome
from raycloak.coordinator.training.admitted import AdmittedRun
from raycloak.coordinator.training.assignment import Order
from raycloak.coordinator.training.early_stopping import EarlyStopping
from raycloak.coordinator.training.evaluation import Evaluator, OrderedEvaluator
from raycloak.coordinator.training.pace import StepLeft
from raycloak.coordinator.training.reporting import StepReport
from raycloak.coordinator.training.sent import NO_BATCHES, BatchesOfSteps, StepBatches
from raycloak.coordinator.training.state_requests import as_model, take, with_inputs
from raycloak.coordinator.training.step import StepRunner
from raycloak.coordinator.training.step_context import Model
from raycloak.metrics.errors import BudgetError, ConfigError, RefusedError, RunFailedError
from raycloak.workers.inputs.sent_rows import row_bytes
from raycloak.workers.terms.model_digest import with_state
from raycloak.workers.terms.step_input import step_input
from raycloak.workers.vectors.threads import WordThreads


@dataclass(slots=True)
class Training:
    """Takes ``model`` from ``finished_steps`` towards ``last_step``; both move on with every step.

    Attributes:
        evaluator: measures released models on an evaluation split; None without one.
        checkpoints: seals packages; None where none are sealed.
        last_step: number of finished steps to end at.
        loads: the last load of earlier executions after so many steps, which must be made again.
        stopping: ends the run early; None without such a rule.
        sent: finds what a client sent for a step; None where the run's data is registered.
        held: the package that holds the current state; None once a step has changed it.
    """

    order: Order
    admitted: AdmittedRun
    runner: StepRunner
    evaluator: Evaluator | OrderedEvaluator | None
    checkpoints: Checkpoints | None
    model: Model
    finished_steps: int
    last_step: int
    loads: Mapping[int, StateLoad]
    stopping: EarlyStopping | None
    sent: BatchesOfSteps | None
    held: Published | None = None
    outcomes: list[StepOutcome] = field(default_factory=list)
    measurement_outcomes: list[StepOutcome] = field(default_factory=list)
    _evaluated: tuple[bytes, Evaluation] | None = None
    _sealed_steps: int = -1

    @classmethod
    def of(
        cls, order: Order, admitted: AdmittedRun, runner: StepRunner, evaluator: Evaluator | OrderedEvaluator | None
    ) -> Self:
        """Return the steps that are left to an execution, from the model of the newest package or of the manifest.

        Args:
            evaluator: measures the models; None if nothing is measured.

        Raises:
            RaycloakError: why the packages cannot be read; nothing was charged.
        """
        control, backend, assignment = order.session.control, order.session.backend, order.assignment
        manifest, planned = admitted.manifest, admitted.plan.mechanism.steps
        restored = None
        if assignment.recorded is not None and assignment.archive is not None:
            restored = assignment.archive.restorer(control, assignment.recorded).newest(assignment.first_step)
        # A run that begins has none. Of several in one place, the last one counts.
        loads = control.orchestrator.loads() if assignment.recorded is not None else ()
        checkpoints = None
        if assignment.charges and assignment.archive is not None:
            # Packages that were asked for stay, and those that a resume or replay of the loads needs.
            wanted = {each.package_digest for each in order.folder.saved()}
            wanted |= {load.package_digest for load in loads}
            checkpoints = assignment.archive.open(control, manifest, admitted.metrics, wanted)
        if restored is not None:
            origin = ModelOrigin(standing=control.orchestrator.model_standing(restored.finished_steps))
            model = as_model(restored, admitted.ranges, backend, origin)
            model = with_inputs(model, control, manifest, restored.finished_steps)
        else:
            # Copies: a view would keep the whole vector alive behind each range.
            parts = tuple(backend.put(admitted.start[owned.start : owned.stop].copy()) for owned in admitted.ranges)
            states = tuple(aggregator.initial_state() for aggregator in admitted.membership.members.aggregators)
            tensors = with_state(admitted.start, {}, manifest.computation.tensors, WordThreads.of_share())
            model = Model(parts, states, manifest.computation.initial_parameters, tensors)
        finished_steps = restored.finished_steps if restored is not None else 0
        return cls(
            order=order,
            admitted=admitted,
            runner=runner,
            evaluator=evaluator,
            checkpoints=checkpoints,
            model=model,
            finished_steps=finished_steps,
            last_step=min(assignment.last_step or planned, planned),
            loads={load.after_step: load for load in loads},
            stopping=_stopping(order, admitted, finished_steps),
            sent=_sent(order, admitted),
            held=restored.package if restored is not None else None,
        )

    def run(self) -> Ending:
        """Train until the course ends, the cap is reached, results no longer get better or a stop is requested.

        Raises:
            RaycloakError: what ended the run; ``model`` is that of the last finished step.
        """
        first = self.finished_steps
        self.admitted.metrics.steps_finished(first)
        while not self.is_over:
            if self.finished_steps != first and (load := self.loads.get(self.finished_steps)) is not None:
                # An earlier execution made it here.
                assert self.order.assignment.archive is not None, "the run that loaded a package had a place for it"
                restorer = self.order.assignment.archive.restorer(self.order.session.control, self.admitted.manifest)
                take(self, restorer.loaded(load))
            # First, since it has an end of its own, also if somebody asks for a stop meanwhile.
            if self._stops_early:
                return self._ended(Ending.EARLY)
            # Between two steps only: a step that is charged is finished.
            if self.order.assignment.stop.made or not self.order.pace.admit(self):
                return Ending.STOPPED
            ages = self.admitted.membership.admission.review()
            if ages or (self.finished_steps != first and self.finished_steps % self.order.config.epoch_steps == 0):
                self.runner.context.renew()
            try:
                if self._cap_reached(self._next):
                    return self._ended(Ending.CAP)
            # The charge and the binding are the ledger's; a resume repeats the step with the same receipt.
            except StepLeft:
                return Ending.STOPPED
        # A finished run is saved and loaded too, until its owner lets it end.
        if not self.order.pace.admit(self):
            return Ending.STOPPED
        is_over = self.finished_steps == self.admitted.plan.mechanism.steps
        return Ending.CAP if is_over and self._cap_reached(self._measure) else Ending.COMPLETE

    def _ended(self, ending: Ending) -> Ending:
        """Return how a run ends that takes no further step, once its owner has saved what it wants of it."""
        return ending if self.order.pace.ends(self, ending.value) else Ending.STOPPED

    def _cap_reached(self, act: Callable[[], None]) -> bool:
        """Call ``act``; returns whether the cap left no room for it."""
        try:
            act()
        except RunFailedError as failure:
            failure.spent_epsilon = failure.spent_epsilon or self.runner.charged_epsilon
            failure.step = self.finished_steps if failure.step is None else failure.step
            raise
        except BudgetError as refusal:
            self.admitted.metrics.step_refused(refusal.code)
            # Without a finished step there is no result, so the refusal is the outcome.
            if refusal.code != "cap_exceeded" or self.finished_steps == 0:
                raise
            return True
        return False

    def _next(self) -> None:
        # Members change between two steps only, because a roster fixes them for an attempt.
        self.admitted.membership.growth.settle()
        # Before the step: a measurement is of the model that the step starts from.
        self._measure()
        # What was measured may end the run, and then the step must not be charged.
        if not self._stops_early:
            # Its owner may have cancelled the step while the measurement was made.
            self.order.pace.resume(self.finished_steps, None)
            self._step()

    @property
    def is_over(self) -> bool:
        """Return whether the course has no further step."""
        return self.finished_steps >= self.last_step

    @property
    def _stops_early(self) -> bool:
        return self.stopping is not None and self.stopping.decided

    def parameters(self) -> np.ndarray:
        """Return the parameters, float32[d]; RunFailedError ``state_lost`` if the node that had them is gone."""
        return self.runner.context.parameters(self.model)

    def exported(self) -> np.ndarray:
        """Return the weights that are evaluated and exported, float32[d]; errors as :meth:`parameters`."""
        return self.runner.context.exported(self.model)

    def evaluate(self) -> Evaluation | None:
        """Return the model's result on the evaluation split, measured once; None without such a split."""
        if self.evaluator is None:
            return None
        if self._evaluated is None or self._evaluated[0] != self.model.digest:
            metrics, reporting, started = self.admitted.metrics, self.order.reporting, time.perf_counter()
            with reporting.traces.span("evaluate", steps=self.finished_steps):
                if isinstance(self.evaluator, Evaluator):
                    evaluation = self.evaluator.measure(self.exported())
                else:
                    evaluation = self.evaluator.measure(self.model, self.finished_steps)
            # Kept by digest, because the end of a run asks for the result of its last step again.
            self._evaluated = self.model.digest, evaluation
            if evaluation.accuracy is not None:
                metrics.accuracy_measured(evaluation.accuracy)
            if evaluation.loss is not None:
                metrics.loss_measured(evaluation.loss)
            for name, value in evaluation.own.items():
                reporting.events.write("metric", steps=self.finished_steps, value_name=name, value=value)
            metrics.phase_finished("evaluate", time.perf_counter() - started)
            reporting.evaluated(self.finished_steps, evaluation)
        return self._evaluated[1]

    def evaluated(self) -> Evaluation | None:
        """Return the result of :meth:`evaluate` if it needs no workers, because a failed run no longer asks them."""
        if isinstance(self.evaluator, OrderedEvaluator):
            return self._known_evaluation
        return self.evaluate()

    @property
    def _known_evaluation(self) -> Evaluation | None:
        """The result of exactly this model, if it was measured."""
        return self._evaluated[1] if self._evaluated and self._evaluated[0] == self.model.digest else None

    def seal(self) -> None:
        """Hand the model of the last finished step over to be sealed, unless it was already."""
        # A state that was loaded is in its package, and no step of this number was committed with it.
        is_sealed = self.held is not None or self._sealed_steps == self.finished_steps
        if self.checkpoints is None or not self.outcomes or is_sealed:
            return
        started = time.perf_counter()
        with self.order.reporting.traces.span("checkpoint", steps=self.finished_steps):
            self.runner.commit()
            # After the commit, without which the orchestrator signs no package.
            self.checkpoints.offer(self._snapshot())
        self._sealed_steps = self.finished_steps
        self.admitted.metrics.phase_finished("checkpoint", time.perf_counter() - started)

    def _measure(self) -> None:
        """Make the releases that are due between two steps. A repeated release gives the same values and is free."""
        plan, charges, reporting = self.admitted.plan, self.order.assignment.charges, self.order.reporting
        for measurement in plan.measurements:
            number = measurement.due(self.finished_steps, plan.mechanism.steps)
            if number is None or not (charges or self._was_charged(measurement.query, number)):
                continue
            run = self.admitted.manifest.run_id
            with reporting.traces.span("measurement", run=run, query=measurement.query, release=number):
                released, outcome = self.runner.measure(measurement, number, self.model)
            self._require_same(outcome.commit)
            self.measurement_outcomes.append(outcome)
            if charges:
                self.order.folder.keep_released(released)
            if self.stopping is not None:
                self.stopping.measured(released)
            self.admitted.metrics.masked_bytes_received(outcome.masked_bytes)
            for name, value in released.values.items():
                reporting.events.write(
                    "measurement",
                    query=released.query,
                    release=released.number,
                    steps=released.after,
                    value_name=name,
                    value=value,
                    noise_deviation=released.deviation[name],
                    epsilon=outcome.charged_epsilon,
                    attempts=outcome.commit.attempts,
                    seconds=round(outcome.seconds, 6),
                )
            reporting.measured(released, outcome.charged_epsilon)

    def _step(self) -> None:
        step, run = self.finished_steps, self.admitted.manifest.run_id
        with self.order.reporting.traces.span("step", run=run, step=step) as span:
            batches = self.sent.of(step, self.model) if self.sent is not None else NO_BATCHES
            # A replay may repeat what was released, and nothing else.
            if not (self.order.assignment.charges or self._was_charged("gradient", step, batches)):
                raise RefusedError(
                    "not_charged",
                    f"step {step} was never charged for these parameters and committed; computing it would release "
                    "something new.",
                    "Replay steps that the run has finished.",
                )
            model, outcome = self.runner.run(step, self.model, batches)
            self._require_same(outcome.commit)
            self.model, self.held = model, None
            self.finished_steps += 1
            self.outcomes.append(outcome)
            self._report(outcome)
            if self.checkpoints is not None:
                if self.checkpoints.due(self.finished_steps):
                    self.seal()
                self.checkpoints.poll()
            span.set(attempts=outcome.commit.attempts)

    def _was_charged(self, query: Query, step: int, batches: StepBatches = NO_BATCHES) -> bool:
        """Return whether a release was charged for exactly this input, and committed."""
        status = self.order.session.control.ledger.status(self.admitted.manifest.run_id, step, query)
        start, before = self.model.exported, b""
        if query == "gradient":
            start, before = self.model.digest, self.model.input_before
        is_charged = status.charged and status.input_digest == step_input(start, batches.digests, before)
        return is_charged and (query, step) in self.admitted.committed

    def _require_same(self, commit: StepCommit) -> None:
        """Refuse a step that differs from what an earlier execution committed, before it is committed itself."""
        known = self.admitted.committed.get((commit.query, commit.step))
        if known is not None and known.model.digests != commit.model.digests:
            # Withdrawn, so that the failure's last commits do not log it.
            self.runner.uncommitted = tuple(each for each in self.runner.uncommitted if each.plain != commit)
            raise RunFailedError(
                "not_reproducible",
                f"{commit.query} {commit.step} gave the digest {commit.model.exported.hex()}; the evidence log has "
                f"{known.model.exported.hex()}",
                "Nothing further was charged. Compare this machine and its libraries with the run's.",
                commit.step,
            )

    def _snapshot(self) -> Snapshot:
        outcome, evaluation, plan = self.outcomes[-1], self._known_evaluation, self.admitted.plan
        manifest, log = self.admitted.manifest, self.order.session.control.orchestrator.log_position()
        claim = claimed_epsilon(plan, {"gradient": self.finished_steps})
        stated = PackageManifest(
            run_id=manifest.run_id,
            manifest_digest=self.runner.context.manifest_digest,
            step=self.finished_steps,
            ranges=1,
            model_digest=self.model.digest,
            averaged_digest=self.model.averaged,
            epsilon=claim if plan.mechanism.private else None,
            delta=plan.delta,
            evidence_class=self.admitted.evidence_class,
            roster_digest=outcome.roster_digest,
            ledger_sequence=outcome.commit.ledger_sequence,
            ledger_hash=outcome.commit.ledger_hash,
            log_length=log.length,
            log_hash=log.root,
            previous=b"",
            evaluation_accuracy=evaluation.accuracy if evaluation else None,
            evaluation_loss=evaluation.loss if evaluation else None,
            created_at=0,
            payloads=(),
            recipients=(),
        )
        context = self.runner.context
        state = {**context.state(self.model), **context.earlier(self.model)}
        return Snapshot(stated, self.parameters(), state)

    def _report(self, outcome: StepOutcome) -> None:
        """Tell metrics, events and progress of a finished step."""
        plan, done = self.admitted.plan, self.finished_steps
        private, workers = plan.mechanism.private, len(self.admitted.membership.members.workers)
        due = self.evaluator is not None and (done % self.evaluator.every == 0 or done == plan.mechanism.steps)
        evaluation = self.evaluate() if due else None
        # Before the model is sealed: a resume from its package does not measure it again.
        if evaluation is not None and self.stopping is not None:
            self.stopping.evaluated(done, evaluation)
        self.admitted.metrics.steps_finished(done)
        self.order.reporting.stepped(self.admitted.metrics, outcome, private, workers, evaluation)
        self.order.reporting.progress(
            StepReport(
                step=done,
                steps=plan.mechanism.steps,
                epsilon=outcome.charged_epsilon if private else None,
                epsilon_cap=plan.epsilon_cap if private else None,
                evaluation_accuracy=evaluation.accuracy if evaluation else None,
                workers=workers,
                model_digest=self.model.digest.hex(),
                seconds=outcome.seconds,
                evaluation_loss=evaluation.loss if evaluation else None,
                exact=plan.exact,
                epsilon_planned=plan.epsilon if private else None,
                evaluation_metrics=evaluation.own if evaluation else {},
                grad_norm=outcome.grad_norm,
            )
        )


def _sent(order: Order, admitted: AdmittedRun) -> BatchesOfSteps | None:
    """Return where the batches of steps are found; None if the run's data is registered.

    Raises:
        ConfigError: ``key_service`` if sent examples could be opened by nobody.
    """
    form = order.setup.dataset.sent
    if form is None:
        return None
    if admitted.manifest.key_service is None:
        raise ConfigError(
            "key_service",
            "the examples are sent by a client, and no key service gives workers its half of the keys.",
            "Give key_service; see docs/sending.md.",
        )
    return BatchesOfSteps(
        backend=order.session.backend,
        control=order.session.control,
        manifest=admitted.manifest,
        files=BatchFiles(order.folder.path),
        offered=order.pace.batches,
        row_bytes=row_bytes(form),
    )


def _stopping(order: Order, admitted: AdmittedRun, finished_steps: int) -> EarlyStopping | None:
    """Return the rule that may end the run early, with what it has seen up to ``finished_steps``.

    Raises:
        ConfigError: ``early_stopping``.
    """
    config, folder = order.config, order.folder
    # A replay ends where it was asked to.
    if config.early_stopping is None or not order.assignment.charges:
        return None
    stopping = EarlyStopping(config.early_stopping, folder.watched(), folder.keep_watched)
    if config.early_stopping.metric.startswith("evaluation_"):
        assert config.evaluation is not None, "the configuration was checked"
        due = range(config.evaluation.every, finished_steps + 1, config.evaluation.every)
    else:
        (every,) = (each.every for each in admitted.plan.measurements if each.query == "evaluation")
        # A model is sealed before what is released about it, and the release is then made again.
        due = range(every, finished_steps, every)
    stopping.restore(finished_steps, due)
    return stopping
