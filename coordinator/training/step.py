"""One step: charge, roster, compute, wait, reduce.

    receipt = ledger.charge(step)                                                     durable before it returns
    roster  = orchestrator.open_step(step, hosting, finished steps)                   asked for one step ahead
    headers, vectors = every worker.step(receipt, roster, parameters)                 masked before they leave
    a worker failed -> move its virtual workers, next attempt                         survivors mask kept vectors again
    binding = ledger.bind_vectors(step, digest of the headers' tags)                  durable before it returns
    report, parameters, state = every aggregator.reduce(roster, headers, binding, vectors)     only what is ready
    the report is signed, and goes with the next charge and the commit: see `raycloak.attestation.core.lineage`
    the coordinator takes all new references at once

Workers are asked while the ledger charges, and aggregators while it binds. The backend delivers each
question when the answer that it depends on is there, and not at all if that answer is a refusal.

An aggregator keeps no state between steps, so a step that fails anywhere is repeated from the same references. What
an attempt does with workers and aggregators is in `raycloak.coordinator.training.attempt`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.lineage import ModelOrigin, ModelPoint
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.core.roster import Query, Roster
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.cluster.control import Pending
from raycloak.coordinator.ledger.ledger import RunStart
from raycloak.coordinator.ledger.rules import RegistrationTerms
from raycloak.coordinator.membership.hosting import moved
from raycloak.coordinator.record.outcome import StepOutcome
from raycloak.coordinator.training.attempt import Step
from raycloak.coordinator.training.pace import OPEN, Pace
from raycloak.coordinator.training.sent import NO_BATCHES, StepBatches
from raycloak.coordinator.training.step_context import EarlierStep, Model, StepContext
from raycloak.metrics.errors import BudgetError, EvidenceError, RunFailedError
from raycloak.workers.terms.measurement import Measurement, Released, released, values_digest
from raycloak.workers.terms.receipt import Receipt, data_root
from raycloak.workers.vectors.payload import VectorRange

T = TypeVar("T")

_RestsOn = tuple[int, Query, dict[str, tuple[int, ...]], tuple[str, ...], tuple[tuple[str, Envelope], ...]]
"""All that a roster depends on: step, query, hosting, aggregators, and the presentations of its members."""


@dataclass(frozen=True, slots=True)
class _AskedRoster:
    """A roster that was asked for; ``commits`` are the finished steps that the answer commits."""

    rests_on: _RestsOn
    pending: Pending[Envelope]
    commits: tuple[StepCommit, ...]


@dataclass(slots=True)
class StepRunner:
    """Runs the steps and measurements of one session, one after another.

    Attributes:
        run_terms: what the first charge of the run registers it with.
        pace: says when the sum of a training step may be decoded.
        charged_epsilon: epsilon of the account, as the newest receipt states it.
        charging: whether a charge was ever asked for; a charge whose answer was lost counts as spent.
        uncommitted: finished steps that no answer of the orchestrator has confirmed as committed yet.
    """

    context: StepContext
    run_terms: RegistrationTerms
    ranges: Sequence[ParameterRange]
    secure_aggregation: bool
    pace: Pace = OPEN
    charged_epsilon: float | None = None
    charging: bool = False
    uncommitted: tuple[StepCommit, ...] = ()
    _seen: dict[str, frozenset[Envelope]] = field(default_factory=dict)
    _prepared: _AskedRoster | None = None
    _last_paid: tuple[int, tuple[Query, int] | None] = (0, None)
    _started: bool = False
    _mixed_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self, number: int, model: Model, batches: StepBatches = NO_BATCHES) -> tuple[Model, StepOutcome]:
        """Take ``model`` one step further. The step stays in ``uncommitted`` until a later roster commits it.

        Args:
            batches: what a client sent for the step.

        Raises:
            BudgetError: ``cap_exceeded`` before anything is computed; ``ledger_rolled_back`` before a sum is decoded.
            RunFailedError: what failed, in which step.
            StepLeft: a stop came while the step waited for its release; it stays charged and bound.
        """
        step = Step(self.context, "gradient", number, model, self._cut(), self._seen, batches=batches, pace=self.pace)
        step.mixed_by = self._mixed_by
        self._execute(step)
        self._mixed_by = dict(self.context.membership.hosts.hosting)
        released = step.released
        tensors = tuple(tensor for part in (released.ranges if released else ()) for tensor in part.tensors)
        point = ModelPoint.of(tensors)
        parameters, states = zip(*step.updated, strict=True)
        updated = Model(
            parameters, states, point.parameters, tensors, ModelOrigin(released=released), averaged=point.averaged
        )
        return self._following(step, updated), self.outcome(step, point)

    def _following(self, step: Step, updated: Model) -> Model:
        """Return the model after a step with what the next one needs of it, where noise is correlated."""
        computation, model = self.context.manifest.computation, step.model
        if computation.mechanism.bands == 1:
            return updated
        finished = EarlierStep(model.parameters, model.input_before, step.solved)
        earlier = (finished, *model.earlier)[: computation.reach(step.number + 1)]
        return replace(updated, input_before=step.input_digest, earlier=earlier)

    def measure(self, measurement: Measurement, number: int, model: Model) -> tuple[Released, StepOutcome]:
        """Make release ``number`` of a measurement of ``model``, as it is exported; otherwise as :meth:`run`."""
        # The measurement's roster commits a step and so moves the ratchet on; workers refuse an older one after it.
        self._prepared = None
        whole = VectorRange(index=0, offset=0, length=measurement.mechanism.dimension)
        # At no pace: it is due between two steps, so its owner has nothing to hold or to release.
        exported = self.context.as_exported(model)
        step = Step(self.context, measurement.query, number, exported, (whole,), self._seen)
        self._execute(step)
        (average,) = step.averages
        values = values_digest(measurement.query, number, average)
        planned = self.context.manifest.computation.mechanism.steps
        return released(measurement, number, planned, average), self.outcome(step, ModelPoint.of_values(values))

    def gather(self, number: int, model: Model) -> Step:
        """Charge a training step once, and have every worker sample, clip, add noise and mask; worker by worker.

        Raises:
            BudgetError, RunFailedError: as :meth:`run`.
        """
        step = Step(self.context, "gradient", number, model, self._cut(), self._seen, updates=False)
        with self.context.traces.span("step", run=self.context.manifest.run_id, step=number):
            self._execute(step)
        return step

    def release(self, step: Step) -> NDArray[np.float64]:
        """Return the average of a gathered step, float64 [d]; the step is then ready for :meth:`outcome`.

        Raises:
            RunFailedError: ``unreachable`` if an aggregator was lost, or a vector failed its checks.
        """
        started = time.perf_counter()
        with self.context.traces.span("reduce", step=step.number):
            if not step.reduce():
                raise RunFailedError(
                    "unreachable", f"{step.name} lost an aggregator or a vector.", "Run it again.", step.number
                )
        step.reduce_seconds = time.perf_counter() - started
        step.seconds += step.reduce_seconds
        return np.concatenate(step.averages)

    def _execute(self, step: Step) -> None:
        """Charge a step once, and attempt it until all vectors are there, and reduced if they are to update."""
        started = time.perf_counter()
        with self.context.traces.span("charge"):
            receipt = self._charge(step)
        begun = time.perf_counter()
        step.charge_seconds = begun - started
        self.context.metrics.phase_finished("charge", step.charge_seconds, self.context.traces.trace_id)
        # Only now: the workers have been asked, so this call overlaps with their computation.
        self._prepare_next(step)
        while not self._attempt(step, begun):
            step.await_wanted()
            # Another attempt keeps the receipt: a step is charged once.
            begun = self._ask_again(step, receipt)
        # A step is as long as it takes the machines, and not its owner.
        step.seconds = time.perf_counter() - step.waited_s - started

    def _charge(self, step: Step) -> Envelope:
        """Have the step charged and, at the same time, ask workers for the first attempt; returns the receipt.

        Raises:
            BudgetError: ``ledger_rolled_back`` if the ledger was put back during the run: a later charge must stand
                later in its chain. A step that its caller gathers again has the charge that it had.
        """
        # Before the ledger is asked: a charge whose answer is lost counts as spent.
        self.charging = True
        self.place(step.epoch)
        # Once all slices are hosted, their commitments are known: the receipt states the root of the run's data.
        commitments = self.context.membership.hosts.commitments
        start = None if self._started else RunStart(self.run_terms, data_root(commitments))
        run_id, manifest = self.context.manifest.run_id, self.context.manifest_digest
        asked = run_id, step.number, step.input_digest, manifest, step.query, start
        charge = self.context.control.ledger.charge(*asked, step.model.origin, step.batches.digests)
        if start is not None:
            # The ledger may refuse a run's data, and then no worker is asked for anything of them.
            charge.result()
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.rests_on != self._rests_on(step, step.number):
            # The prepared roster is not read: it rests on former members, so it may have been refused. The steps that
            # it was to commit are still in `uncommitted`, and the new question commits them.
            prepared = self._ask_roster(step, step.number)
        roster = self._receive(step, prepared)
        awaited = charge.reference
        step.ask(awaited, roster)
        receipt = charge.result()
        self._started = True
        if charge.reference is not awaited:
            # The ledger was lost before it answered, and the workers' questions that waited for it have failed.
            step.ask(receipt, roster)
        step.paid = paid = parse(Receipt, receipt.body)
        own, (sequence, paid_for) = (step.query, step.number), self._last_paid
        if paid.sequence < sequence or (paid.sequence == sequence and paid_for != own):
            raise BudgetError(
                "ledger_rolled_back",
                f"{step.name} was charged by the ledger's entry {paid.sequence}, but entry {sequence} was seen before.",
                "Put the ledger's newest file back; an older one forgets what was spent.",
            )
        self._last_paid = paid.sequence, own
        self.charged_epsilon = paid.charged_epsilon
        step.epsilon = paid.charged_epsilon if self.context.manifest.computation.mechanism.private else None
        return receipt

    def outcome(self, step: Step, point: ModelPoint) -> StepOutcome:
        """Return the record of a finished step, and leave its commit to the next roster.

        Args:
            point: the model after the step, or the values of a measurement.
        """
        # The binding's entry and not the charge's: the evidence log then pins both against a ledger that is put back.
        commit = StepCommit(
            step=step.number,
            released_digest=point.parameters,
            attempts=step.attempts,
            ledger_sequence=step.binding.sequence,
            ledger_hash=step.binding.head,
            query=step.query,
            state_digest=point.state,
            averaged_digest=point.averaged,
            released=step.released,
        )
        self.uncommitted += (commit,)
        mechanism, vectors = self.context.manifest.computation.mechanism_of(step.query), len(step.headers)
        # As in `TrainWorker`: otherwise workers add no masks.
        masked = self.secure_aggregation or (mechanism.private and vectors > 1)
        squares = [report.squares for report in step.reports if report.squares is not None]
        return StepOutcome(
            # Without the signatures: a run keeps the record of every step.
            commit=commit.plain,
            charged_epsilon=step.paid.charged_epsilon,
            masked_bytes=vectors * mechanism.dimension * mechanism.ring_bits // 8 if masked else 0,
            seconds=step.seconds,
            charge_seconds=step.charge_seconds,
            compute_seconds=step.compute_seconds,
            reduce_seconds=step.reduce_seconds,
            slowest_worker_seconds=max(reply.seconds for reply in step.replies),
            roster_digest=parse(Roster, step.roster.body).digest(),
            grad_norm=math.sqrt(sum(squares)) if squares else None,
        )

    def commit(self) -> None:
        """Commit the finished steps that no roster has committed yet, and wait for that."""
        commits, self.uncommitted = self.uncommitted, ()
        if commits:
            with self.context.traces.span("commit", steps=len(commits)):
                self.context.control.orchestrator.commit(commits)

    def _attempt(self, step: Step, begun: float) -> bool:
        """Make one attempt; returns False if another is needed."""
        metrics, traces = self.context.metrics, self.context.traces
        metrics.attempt_started()
        with traces.span("attempt", attempt=step.attempts, workers=len(step.asked)) as attempt:
            with traces.span("compute") as compute:
                is_whole = step.collect(compute.began_ns)
            computed, waited = time.perf_counter(), step.waited_s
            step.compute_seconds = computed - begun
            metrics.phase_finished("compute", step.compute_seconds, traces.trace_id)
            if is_whole and step.updates:
                with traces.span("reduce"):
                    is_whole = step.reduce()
                step.reduce_seconds = time.perf_counter() - computed - (step.waited_s - waited)
                metrics.phase_finished("reduce", step.reduce_seconds, traces.trace_id)
            if not is_whole:
                attempt.fail("repeated")
                metrics.attempt_failed()
        return is_whole

    def _ask_again(self, step: Step, receipt: Envelope) -> float:
        """Ask the members that are left for another attempt; returns when."""
        self.place(step.epoch)
        roster = self._receive(step, self._ask_roster(step, step.number))
        step.attempts += 1
        begun = time.perf_counter()
        step.ask(receipt, roster)
        return begun

    def place(self, epoch: int) -> None:
        """Move the virtual workers of members that left to members that stay, and some to newcomers."""
        before = self.context.membership.hosts.hosting
        self.context.membership.hosts.place(epoch)
        changes = moved(before, self.context.membership.hosts.hosting) if before else {}
        self.context.metrics.virtual_workers_moved(sum(len(taken) for taken in changes.values()))

    def _prepare_next(self, step: Step) -> None:
        """Ask for the next step's roster while the workers compute this one.

        The first step of an epoch is left out, because evidence is renewed before it. So is a step that a measurement
        precedes, because the measurement needs a roster of its own first, and one that its caller has to make.
        """
        computation = self.context.manifest.computation
        following, planned = step.number + 1, computation.mechanism.steps
        is_followed = step.query == "gradient" and step.updates and following < planned
        if not is_followed or following % computation.epoch_steps == 0:
            return
        measures = any(each.due(following, planned) is not None for each in computation.measurements)
        if not measures and self._prepared is None:
            self._prepared = self._ask_roster(step, following)

    def _ask_roster(self, step: Step, number: int) -> _AskedRoster:
        """Ask for the roster of the next attempt of a step; the same question commits the finished steps.

        They stay in `uncommitted` until the answer is there. Asked twice, the orchestrator commits them once.

        Args:
            number: of the step, which is cut as ``step``, or is this one.
        """
        rests_on, commits = self._rests_on(step, number), self.uncommitted
        _, _, hosting, aggregators, _ = rests_on
        roster = self.context.control.orchestrator.open_step(number, hosting, aggregators, commits, step.query)
        return _AskedRoster(rests_on, roster, commits)

    def _receive(self, step: Step, asked: _AskedRoster) -> Envelope:
        """Return the roster, or another one if a member's evidence has expired or was revoked since the last review."""
        with self.context.traces.span("roster"):
            return self.on_fresh_evidence(
                step.epoch, lambda: self._received(asked), lambda: self._received(self._ask_roster(step, step.number))
            )

    def _received(self, asked: _AskedRoster) -> Envelope:
        roster = asked.pending.result()
        self.uncommitted = tuple(commit for commit in self.uncommitted if commit not in asked.commits)
        return roster

    def on_fresh_evidence(self, epoch: int, ask: Callable[[], T], again: Callable[[], T]) -> T:
        """Return the orchestrator's answer; if a member's evidence has aged since the last review, renew it first."""
        try:
            return ask()
        except EvidenceError as refusal:
            if refusal.code != "evidence_expired":
                raise
            if self.context.membership.admission.review(now=True):
                self.context.renew()
            self.place(epoch)
            return again()

    def _rests_on(self, step: Step, number: int) -> _RestsOn:
        members = self.context.membership.members
        aggregators = tuple(actor.member_id for actor in members.aggregators[: len(step.ranges)])
        evidence = tuple(members.presentations.items())
        return number, step.query, dict(self.context.membership.hosts.hosting), aggregators, evidence

    def _cut(self) -> tuple[VectorRange, ...]:
        return tuple(VectorRange(index=owned.index, offset=owned.start, length=owned.size) for owned in self.ranges)
