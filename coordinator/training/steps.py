"""Training: the steps of one execution of a run, from its first model to its last.

It decides when evidence is renewed, what is reported, measured and sealed after a step, and when to end. A step that
an earlier execution committed must give the logged digest before the next step is charged.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from raycloak.attestation.core.roster import Query
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.attestation.orchestrator.loads import StateLoad
from raycloak.coordinator.checkpoints.saver import Checkpoints
from raycloak.coordinator.checkpoints.writer import Snapshot
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.entries import Head
from raycloak.coordinator.membership.membership import Membership
from raycloak.coordinator.planning.claim import claimed_epsilon
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.record.outcome import Ending, Evaluation, StepOutcome
from raycloak.coordinator.training.early_stopping import EarlyStopping
from raycloak.coordinator.training.model import Model, ModelReader
from raycloak.coordinator.training.pace import OPEN, Pace, StepLeft
from raycloak.coordinator.training.reporting import Reporting, StepReport
from raycloak.coordinator.training.sent import NO_BATCHES, BatchesOfSteps, StepBatches
from raycloak.coordinator.training.state_requests import (
    CopyRequest,
    LoadedState,
    LoadRequest,
    PackagedState,
    SaveRequest,
    StateKeeper,
)
from raycloak.coordinator.training.step import StepRunner
from raycloak.coordinator.training.stop_signals import StopRequest
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import BudgetError, RefusedError, RunFailedError
from raycloak.workers.terms.measurement import Released
from raycloak.workers.terms.step_input import step_input


@dataclass(frozen=True, slots=True)
class Course:
    """The steps that an execution covers.

    Attributes:
        last_step: number of finished steps to end at.
        committed: steps that earlier executions committed, by query, which must come out the same.
        charges: whether steps may be charged that were not; a replay only repeats.
        loads: the last load of earlier executions after so many steps, which must be made again.
    """

    last_step: int
    committed: Mapping[tuple[Query, int], StepCommit]
    charges: bool
    loads: Mapping[int, StateLoad] = field(default_factory=dict)


class ModelEvaluator(Protocol):
    """Measures released models on data whose results are public."""

    @property
    def every(self) -> int:
        """Steps between two evaluations."""
        ...

    @property
    def asks_workers(self) -> bool:
        """Return whether workers measure; a failed run no longer asks them."""
        ...

    def measure(self, model: Model, finished_steps: int) -> Evaluation:
        """Measure the model that ``finished_steps`` steps gave."""
        ...


@dataclass(slots=True)
class Training:
    """Takes ``model`` from ``finished_steps`` towards the end of ``course``; both move on with every step.

    Attributes:
        renew: gets fresh evidence of every member, as each epoch needs it, and evidence that ages.
        measured: takes what a measurement released.
        states: saves and loads states between two steps.
        stopping: ends the run early; None without such a rule.
        pace: says when the next step may be charged.
        sent: finds what a client sent for a step, of the given input model; None where the run's data is registered.
    """

    config: RunConfig
    plan: Plan
    course: Course
    runner: StepRunner
    membership: Membership
    reporting: Reporting
    metrics: RunMetrics
    evaluator: ModelEvaluator | None
    reader: ModelReader
    stop: StopRequest
    checkpoints: Checkpoints | None
    model: Model
    finished_steps: int
    renew: Callable[[], None]
    measured: Callable[[Released], None]
    states: StateKeeper
    stopping: EarlyStopping | None = None
    pace: Pace = OPEN
    sent: BatchesOfSteps | None = None
    outcomes: list[StepOutcome] = field(default_factory=list)
    measurement_outcomes: list[StepOutcome] = field(default_factory=list)
    _evaluated: tuple[bytes, Evaluation] | None = None
    _sealed_steps: int = -1

    def run(self) -> Ending:
        """Train until the course ends, the cap is reached, results no longer get better or a stop is requested.

        Raises:
            RaycloakError: what ended the run; ``model`` is that of the last finished step.
        """
        first = self.finished_steps
        self.metrics.steps_finished(first)
        while self.finished_steps < self.course.last_step:
            if self.finished_steps != first:
                self._follow_load()
            # First, since it has an end of its own, also if somebody asks for a stop meanwhile.
            if self._stops_early:
                return self._ended(Ending.EARLY)
            # Between two steps only: a step that is charged is finished.
            if self.stop.made or not self.pace.admit(self):
                return Ending.STOPPED
            ages = self.membership.admission.review()
            if ages or (self.finished_steps != first and self.finished_steps % self.config.epoch_steps == 0):
                self.renew()
            try:
                if self._cap_reached(self._next):
                    return self._ended(Ending.CAP)
            # The charge and the binding are the ledger's; a resume repeats the step with the same receipt.
            except StepLeft:
                return Ending.STOPPED
        # A finished run is saved and loaded too, until its owner lets it end.
        if not self.pace.admit(self):
            return Ending.STOPPED
        is_over = self.finished_steps == self.plan.mechanism.steps
        return Ending.CAP if is_over and self._cap_reached(self._measure) else Ending.COMPLETE

    def _ended(self, ending: Ending) -> Ending:
        """Return how a run ends that takes no further step, once its owner has saved what it wants of it."""
        return ending if self.pace.ends(self, ending.value) else Ending.STOPPED

    def _cap_reached(self, act: Callable[[], None]) -> bool:
        """Call ``act``; returns whether the cap left no room for it."""
        try:
            act()
        except RunFailedError as failure:
            failure.spent_epsilon = failure.spent_epsilon or self.runner.charged_epsilon
            failure.step = self.finished_steps if failure.step is None else failure.step
            raise
        except BudgetError as refusal:
            self.metrics.step_refused(refusal.code)
            # Without a finished step there is no result, so the refusal is the outcome.
            if refusal.code != "cap_exceeded" or self.finished_steps == 0:
                raise
            return True
        return False

    def _next(self) -> None:
        # Members change between two steps only, because a roster fixes them for an attempt.
        self.membership.growth.settle()
        # Before the step: a measurement is of the model that the step starts from.
        self._measure()
        # What was measured may end the run, and then the step must not be charged.
        if not self._stops_early:
            # Its owner may have cancelled the step while the measurement was made.
            self.pace.resume(self.finished_steps, None)
            self._step()

    @property
    def is_over(self) -> bool:
        """Return whether the course has no further step."""
        return self.finished_steps == self.course.last_step

    @property
    def _stops_early(self) -> bool:
        return self.stopping is not None and self.stopping.decided

    def parameters(self) -> np.ndarray:
        """Return the parameters, float32[d]; RunFailedError ``state_lost`` if the node that had them is gone."""
        return self.reader.parameters(self.model)

    def evaluate(self) -> Evaluation | None:
        """Return the model's result on the evaluation split, measured once; None without such a split."""
        if self.evaluator is None:
            return None
        if self._evaluated is None or self._evaluated[0] != self.model.digest:
            started = time.perf_counter()
            with self.reporting.traces.span("evaluate", steps=self.finished_steps):
                evaluation = self.evaluator.measure(self.model, self.finished_steps)
            # Kept by digest, because the end of a run asks for the result of its last step again.
            self._evaluated = self.model.digest, evaluation
            if evaluation.accuracy is not None:
                self.metrics.accuracy_measured(evaluation.accuracy)
            if evaluation.loss is not None:
                self.metrics.loss_measured(evaluation.loss)
            for name, value in evaluation.own.items():
                self.reporting.events.write("metric", steps=self.finished_steps, value_name=name, value=value)
            self.metrics.phase_finished("evaluate", time.perf_counter() - started)
            self.reporting.evaluated(self.finished_steps, evaluation)
        return self._evaluated[1]

    def evaluated(self) -> Evaluation | None:
        """Return the result of :meth:`evaluate` if it needs no workers, because a failed run no longer asks them."""
        if self.evaluator is not None and self.evaluator.asks_workers:
            return self._known_evaluation
        return self.evaluate()

    @property
    def _known_evaluation(self) -> Evaluation | None:
        """The result of exactly this model, if it was measured."""
        return self._evaluated[1] if self._evaluated and self._evaluated[0] == self.model.digest else None

    def seal(self) -> None:
        """Hand the model of the last finished step over to be sealed, unless it was already."""
        # A state that was loaded is in its package, and no step of this number was committed with it.
        if self.checkpoints is None or not self.outcomes or self.states.held is not None:
            return
        if self._sealed_steps == self.finished_steps:
            return
        started = time.perf_counter()
        with self.reporting.traces.span("checkpoint", steps=self.finished_steps):
            self.runner.commit()
            # After the commit, without which the orchestrator signs no package.
            self.checkpoints.offer(self._snapshot())
        self._sealed_steps = self.finished_steps
        self.metrics.phase_finished("checkpoint", time.perf_counter() - started)

    def save(self, request: SaveRequest) -> PackagedState:
        """Save the current state, between two steps; as `StateKeeper.save`."""
        return self.states.save(self, request)

    def copy(self, request: CopyRequest) -> bytes:
        """Write the current parameters to a file, between two steps; as `StateKeeper.copy`."""
        return self.states.copy(self, request)

    def load(self, request: LoadRequest) -> LoadedState:
        """Go on from an earlier state, between two steps; as `StateKeeper.load`."""
        before = self.model.digest
        loaded = self.states.load(self, request)
        if self.model.digest != before:
            digest = loaded.model_digest.hex()
            self.reporting.events.write("load", steps=self.finished_steps, step=loaded.step, model_digest=digest)
        return loaded

    def commit(self) -> None:
        """Commit all finished steps."""
        self.runner.commit()

    def charged_next(self) -> bool:
        """Return whether a release of the current parameters was charged, as before a crash; it must be repeated."""
        planned = self.plan.mechanism.steps
        due = [(each.query, each.due(self.finished_steps, planned)) for each in self.plan.measurements]
        places: list[tuple[Query, int]] = [("gradient", self.finished_steps)]
        places += [(query, number) for query, number in due if number is not None]
        run, ledger = self.runner.context.manifest.run_id, self.runner.context.control.ledger
        return any(ledger.status(run, number, query).charged for query, number in places)

    def _follow_load(self) -> None:
        """Make the load again that an earlier execution made here."""
        load = self.course.loads.get(self.finished_steps)
        if load is not None:
            self.model = self.states.follow(load)

    def _measure(self) -> None:
        """Make the releases that are due between two steps. A repeated release gives the same values and is free."""
        planned = self.plan.mechanism.steps
        for measurement in self.plan.measurements:
            number = measurement.due(self.finished_steps, planned)
            if number is None or not (self.course.charges or self._was_charged(measurement.query, number)):
                continue
            run = self.runner.context.manifest.run_id
            with self.reporting.traces.span("measurement", run=run, query=measurement.query, release=number):
                released, outcome = self.runner.measure(measurement, number, self.model)
            self._require_same(outcome.commit)
            self.measurement_outcomes.append(outcome)
            self.measured(released)
            if self.stopping is not None:
                self.stopping.measured(released)
            self._report_measured(released, outcome)

    def _step(self) -> None:
        with self.reporting.traces.span(
            "step", run=self.runner.context.manifest.run_id, step=self.finished_steps
        ) as span:
            self._take_step()
            span.set(attempts=self.outcomes[-1].commit.attempts)

    def _take_step(self) -> None:
        step = self.finished_steps
        batches = self.sent.of(step, self.model) if self.sent is not None else NO_BATCHES
        # A replay may repeat what was released, and nothing else.
        if not self.course.charges:
            self._require_charged(step, batches)
        model, outcome = self.runner.run(step, self.model, batches)
        self._require_same(outcome.commit)
        self.model, self.states.held = model, None
        self.finished_steps += 1
        self.outcomes.append(outcome)
        self._report(outcome)
        if self.checkpoints is not None:
            if self.checkpoints.due(self.finished_steps):
                self.seal()
            self.checkpoints.poll()

    def _was_charged(self, query: Query, step: int, batches: StepBatches = NO_BATCHES) -> bool:
        """Return whether a step was charged for these parameters and batches, and committed."""
        status = self.runner.context.control.ledger.status(self.runner.context.manifest.run_id, step, query)
        is_charged = status.charged and status.input_digest == step_input(self.model.digest, batches.digests)
        return is_charged and (query, step) in self.course.committed

    def _require_charged(self, step: int, batches: StepBatches) -> None:
        if not self._was_charged("gradient", step, batches):
            raise RefusedError(
                "not_charged",
                f"step {step} was never charged for these parameters and committed; computing it would release "
                "something new.",
                "Replay steps that the run has finished.",
            )

    def _require_same(self, commit: StepCommit) -> None:
        """Refuse a step that differs from what an earlier execution committed, before it is committed itself."""
        known = self.course.committed.get((commit.query, commit.step))
        if known is not None and known.released_digest != commit.released_digest:
            # Withdrawn, so that the failure's last commits do not log it.
            self.runner.uncommitted = tuple(each for each in self.runner.uncommitted if each != commit)
            raise RunFailedError(
                "not_reproducible",
                f"{commit.query} {commit.step} gave the digest {commit.released_digest.hex()}; the evidence log has "
                f"{known.released_digest.hex()}",
                "Nothing further was charged. Compare this machine and its libraries with the run's.",
                commit.step,
            )

    def _snapshot(self) -> Snapshot:
        outcome = self.outcomes[-1]
        state = self.reader.state(self.model)
        claim = claimed_epsilon(self.plan, {"gradient": self.finished_steps})
        return Snapshot(
            finished_steps=self.finished_steps,
            parameters=(self.parameters(),),
            states=(state,),
            model_digest=self.model.digest,
            epsilon=claim if self.plan.mechanism.private else None,
            roster_digest=outcome.roster_digest,
            ledger_head=Head(outcome.commit.ledger_sequence, outcome.commit.ledger_hash),
            log_head=self.runner.context.control.orchestrator.log_position(),
            evaluation=self._known_evaluation,
        )

    def _report_measured(self, released: Released, outcome: StepOutcome) -> None:
        self.metrics.masked_bytes_received(outcome.masked_bytes)
        for name, value in released.values.items():
            self.reporting.events.write(
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
        self.reporting.measured(released, outcome.charged_epsilon)

    def _report(self, outcome: StepOutcome) -> None:
        """Tell metrics, events and progress of a finished step."""
        metrics, private = self.metrics, self.plan.mechanism.private
        done = self.finished_steps
        due = self.evaluator is not None and (done % self.evaluator.every == 0 or done == self.plan.mechanism.steps)
        evaluation = self.evaluate() if due else None
        # Before the model is sealed: a resume from its package does not measure it again.
        if evaluation is not None and self.stopping is not None:
            self.stopping.evaluated(done, evaluation)
        accuracy, loss = (evaluation.accuracy, evaluation.loss) if evaluation else (None, None)
        metrics.steps_finished(done)
        metrics.step_committed(outcome.seconds)
        metrics.masked_bytes_received(outcome.masked_bytes)
        self.reporting.write_step(outcome, private, len(self.membership.members.workers), accuracy, loss)
        self.reporting.progress(
            StepReport(
                step=done,
                steps=self.plan.mechanism.steps,
                epsilon=outcome.charged_epsilon if private else None,
                epsilon_cap=self.plan.epsilon_cap if private else None,
                evaluation_accuracy=accuracy,
                workers=len(self.membership.members.workers),
                model_digest=self.model.digest.hex(),
                seconds=outcome.seconds,
                evaluation_loss=loss,
                exact=self.plan.exact,
                epsilon_planned=self.plan.epsilon if private else None,
                evaluation_metrics=evaluation.own if evaluation else {},
                grad_norm=outcome.grad_norm,
            )
        )
