"""One step: charge, roster, compute, wait, reduce.

    receipt = ledger.charge(step)                                                     durable before it returns
    roster  = orchestrator.open_step(step, hosting, finished steps)                   asked for one step ahead
    headers, vectors = every worker.step(receipt, roster, parameters)                 masked before they leave
    a worker failed -> move its virtual workers, next attempt                         survivors mask kept vectors again
    binding = ledger.bind_vectors(step, digest of the headers' tags)                  durable before it returns
    report, parameters, state = every aggregator.reduce(roster, headers, binding, vectors)     only what is ready
    the coordinator takes all new references at once

Workers are asked while the ledger charges, and aggregators while it binds. The backend delivers each
question when the answer that it depends on is there, and not at all if that answer is a refusal.

An aggregator keeps no state between steps, so a step that fails anywhere is repeated from the same references.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.core.roster import Query, Roster
from raycloak.attestation.orchestrator.commits import StepCommit
from raycloak.coordinator.aggregation.ranges import ParameterRange
from raycloak.coordinator.cluster.backend import Backend
from raycloak.coordinator.cluster.control import Control, Pending
from raycloak.coordinator.ledger.ledger import RunStart
from raycloak.coordinator.ledger.rules import RegistrationTerms
from raycloak.coordinator.membership.hosting import moved
from raycloak.coordinator.membership.membership import Membership
from raycloak.coordinator.record.outcome import StepOutcome
from raycloak.coordinator.training.attempt import Answers, AttemptRunner, OwedAnswers, Reduced, Task
from raycloak.coordinator.training.model import Model
from raycloak.coordinator.training.pace import OPEN, Pace
from raycloak.coordinator.training.sent import NO_BATCHES, StepBatches
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.errors import BudgetError, EvidenceError, RunFailedError
from raycloak.metrics.traces import OFF, Traces
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Measurement, Released, released, values_digest
from raycloak.workers.terms.model_digest import model_digest
from raycloak.workers.terms.receipt import Receipt, data_root
from raycloak.workers.vectors.payload import VectorRange


@dataclass(frozen=True, slots=True)
class _AskedRoster:
    """A roster that was asked for, and the finished steps that the answer commits."""

    pending: Pending[Envelope]
    commits: tuple[StepCommit, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The masked vectors of a charged step, which nobody can read one by one.

    Attributes:
        model: the one that they were computed for.
        answers: references to the vectors, and their signed headers.
        seconds: wall time until they were there; ``charge_seconds`` and ``compute_seconds`` of it as in `StepOutcome`.
    """

    task: Task
    model: Model
    answers: Answers
    paid: Receipt
    attempts: int
    seconds: float
    charge_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """A step that every aggregator has reduced, the receipt that paid for it, and its times; see `StepOutcome`."""

    task: Task
    answers: Answers
    reduced: Reduced
    paid: Receipt
    attempts: int
    seconds: float
    charge_seconds: float
    compute_seconds: float
    reduce_seconds: float


@dataclass(slots=True)
class StepRunner:
    """Runs the steps and measurements of one session, one after another.

    Attributes:
        run_terms: what the first charge of the run registers it with.
        renew: gets fresh evidence of every member, where it has aged during a step.
        pace: says when the sum of a training step may be decoded.
        charged_epsilon: epsilon of the account, as the newest receipt states it.
        charging: whether a charge was ever asked for; a charge whose answer was lost counts as spent.
        uncommitted: finished steps that no answer of the orchestrator has confirmed as committed yet.
    """

    backend: Backend
    control: Control
    membership: Membership
    manifest: Manifest
    run_terms: RegistrationTerms
    ranges: Sequence[ParameterRange]
    metrics: RunMetrics
    deadline_s: float
    secure_aggregation: bool
    renew: Callable[[], None]
    traces: Traces = OFF
    pace: Pace = OPEN
    charged_epsilon: float | None = None
    charging: bool = False
    uncommitted: tuple[StepCommit, ...] = ()
    _attempting: AttemptRunner = field(init=False)
    _manifest_digest: bytes = field(init=False)
    _prepared: tuple[object, _AskedRoster] | None = None
    _last_paid: tuple[int, tuple[Query, int] | None] = (0, None)
    _started: bool = False

    def __post_init__(self) -> None:
        self._manifest_digest = self.manifest.digest()
        self._attempting = AttemptRunner(
            backend=self.backend,
            control=self.control,
            membership=self.membership,
            manifest=self.manifest,
            metrics=self.metrics,
            deadline_s=self.deadline_s,
            traces=self.traces,
            renew=self.renew,
        )

    def run(self, step: int, model: Model, batches: StepBatches = NO_BATCHES) -> tuple[Model, StepOutcome]:
        """Take ``model`` one step further. The step stays in ``uncommitted`` until a later roster commits it.

        Args:
            batches: what a client sent for the step.

        Raises:
            BudgetError: ``cap_exceeded`` before anything is computed; ``ledger_rolled_back`` before a sum is decoded.
            RunFailedError: what failed, in which step.
            StepLeft: a stop came while the step waited for its release; it stays charged and bound.
        """
        done = self._execute(Task("gradient", step, self._vector_ranges(), batches=batches), model)
        digests = [each for report in done.reduced.reports for each in report.tensor_digests]
        parameters = model_digest(self.manifest.computation.tensors, digests)
        updated = done.reduced.updated
        model = Model(tuple(p for p, _ in updated), tuple(s for _, s in updated), parameters)
        return model, self.outcome(done, parameters)

    def measure(self, measurement: Measurement, number: int, model: Model) -> tuple[Released, StepOutcome]:
        """Make release ``number`` of a measurement of ``model``, which does not change; otherwise as :meth:`run`."""
        # The measurement's roster commits a step and so moves the ratchet on; workers refuse an older one after it.
        self._prepared = None
        whole = VectorRange(index=0, offset=0, length=measurement.mechanism.dimension)
        done = self._execute(Task(measurement.query, number, (whole,)), model)
        (average,) = done.reduced.averages
        values = values_digest(measurement.query, number, average)
        planned = self.manifest.computation.mechanism.steps
        return released(measurement, number, planned, average), self.outcome(done, values)

    def gather(self, step: int, model: Model) -> Gathered:
        """Charge a training step once, and have every worker sample, clip, add noise and mask; worker by worker.

        Raises:
            BudgetError, RunFailedError: as :meth:`run`.
        """
        task, started = Task("gradient", step, self._vector_ranges(), updates=False), time.perf_counter()
        with self.traces.span("step", run=self.manifest.run_id, step=step):
            with self.traces.span("charge"):
                receipt, paid, asked = self._charge(task, model)
            attempts, charged = 1, time.perf_counter()
            begun = charged
            self.metrics.attempt_started()
            while (answers := self._collect(task, model, asked)) is None:
                self.metrics.attempt_failed()
                attempts, begun = attempts + 1, time.perf_counter()
                asked = self._attempting.ask(task, model, receipt, self._roster_again(task))
                self.metrics.attempt_started()
        now = time.perf_counter()
        return Gathered(
            task=task,
            model=model,
            answers=answers,
            paid=paid,
            attempts=attempts,
            seconds=now - started,
            charge_seconds=charged - started,
            compute_seconds=now - begun,
        )

    def release(self, gathered: Gathered) -> tuple[NDArray[np.float64], Done]:
        """Return the average of a gathered step, float64 [d], and the step for :meth:`outcome`.

        Raises:
            RunFailedError: ``unreachable`` if an aggregator was lost, or a vector failed its checks.
        """
        task, started = gathered.task, time.perf_counter()
        with self.traces.span("reduce", step=task.step):
            reduced = self._attempting.reduce(task, gathered.model, gathered.answers)
        if reduced is None:
            raise RunFailedError(
                "unreachable", f"{task.name} lost an aggregator or a vector.", "Run it again.", task.step
            )
        took = time.perf_counter() - started
        done = Done(
            task=task,
            answers=gathered.answers,
            reduced=reduced,
            paid=gathered.paid,
            attempts=gathered.attempts,
            seconds=gathered.seconds + took,
            charge_seconds=gathered.charge_seconds,
            compute_seconds=gathered.compute_seconds,
            reduce_seconds=took,
        )
        return np.concatenate(reduced.averages), done

    def _charge(self, task: Task, model: Model) -> tuple[Envelope, Receipt, OwedAnswers]:
        """Charge a step, and ask the workers for its first attempt."""
        # Before the ledger is asked: a charge whose answer is lost counts as spent.
        self.charging = True
        self._attempting.begin()
        self.place(self.manifest.computation.epoch_of(task.query, task.step))
        receipt, asked = self._pay(task, model)
        paid = parse(Receipt, receipt.body)
        self._require_later(task, paid)
        self.charged_epsilon = paid.charged_epsilon
        return receipt, paid, asked

    def _roster_again(self, task: Task) -> Envelope:
        """Return the roster of another attempt, by the members that are left."""
        self.place(self.manifest.computation.epoch_of(task.query, task.step))
        return self._receive(task, self._ask_roster(task))

    def _execute(self, task: Task, model: Model) -> Done:
        """Charge a step once, and attempt it until every aggregator has reduced it."""
        started = time.perf_counter()
        with self.traces.span("charge"):
            receipt, paid, asked = self._charge(task, model)
        charged = time.perf_counter()
        self.metrics.phase_finished("charge", charged - started, self.traces.trace_id)
        # Only now: the workers have been asked, so this call overlaps with their computation.
        self._prepare_next(task)
        attempts, begun = 1, charged
        while (finished := self._attempt(task, model, asked, begun, attempts)) is None:
            self._attempting.await_wanted(task, self._pace_of(task), self._stated_epsilon)
            roster = self._roster_again(task)
            # Another attempt keeps the receipt: a step is charged once.
            attempts, begun = attempts + 1, time.perf_counter()
            asked = self._attempting.ask(task, model, receipt, roster)
        answers, reduced, computed = finished
        # A step is as long as it takes the machines, and not its owner.
        now = time.perf_counter() - self._attempting.waited_s
        return Done(
            task=task,
            answers=answers,
            reduced=reduced,
            paid=paid,
            attempts=attempts,
            seconds=now - started,
            charge_seconds=charged - started,
            compute_seconds=computed - begun,
            reduce_seconds=now - computed,
        )

    def _pay(self, task: Task, model: Model) -> tuple[Envelope, OwedAnswers]:
        """Have the step charged and, at the same time, ask workers for the first attempt; returns the receipt too."""
        # Once all slices are hosted, their commitments are known: the receipt states the root of the run's data.
        start = None if self._started else RunStart(self.run_terms, data_root(self.membership.hosts.commitments))
        run_id, manifest = self.manifest.run_id, self._manifest_digest
        charge = self.control.ledger.charge(run_id, task.step, task.input_from(model), manifest, task.query, start)
        if start is not None:
            # The ledger may refuse a run's data, and then no worker is asked for anything of them.
            charge.result()
        roster = self._first_roster(task)
        awaited = charge.reference
        asked = self._attempting.ask(task, model, awaited, roster)
        receipt = charge.result()
        self._started = True
        if charge.reference is not awaited:
            # The ledger was lost before it answered, and the workers' questions that waited for it have failed.
            asked = self._attempting.ask(task, model, receipt, roster)
        return receipt, asked

    def _require_later(self, task: Task, paid: Receipt) -> None:
        """Refuse a ledger that was rolled back during the run: a later charge must stand later in its chain.

        A step that its caller gathers again has the charge that it had.
        """
        step, (sequence, paid_for) = (task.query, task.step), self._last_paid
        if paid.sequence < sequence or (paid.sequence == sequence and paid_for != step):
            raise BudgetError(
                "ledger_rolled_back",
                f"{task.name} was charged by the ledger's entry {paid.sequence}, but entry {sequence} was seen before.",
                "Put the ledger's newest file back; an older one forgets what was spent.",
            )
        self._last_paid = paid.sequence, step

    def outcome(self, done: Done, released: bytes) -> StepOutcome:
        """Return the record of a finished step, and leave its commit to the next roster.

        Args:
            released: digest of the parameters after the step, or of the values of a measurement.
        """
        task, paid, bound = done.task, done.paid, done.reduced.binding
        # The binding's entry and not the charge's: the evidence log then pins both against a ledger that is put back.
        commit = StepCommit(
            step=task.step,
            released_digest=released,
            attempts=done.attempts,
            ledger_sequence=bound.sequence,
            ledger_hash=bound.head,
            query=task.query,
        )
        self.uncommitted += (commit,)
        return StepOutcome(
            commit=commit,
            charged_epsilon=paid.charged_epsilon,
            masked_bytes=self._masked_bytes(task.query, len(done.answers.headers)),
            seconds=done.seconds,
            charge_seconds=done.charge_seconds,
            compute_seconds=done.compute_seconds,
            reduce_seconds=done.reduce_seconds,
            slowest_worker_seconds=max(reply.seconds for reply in done.answers.replies),
            roster_digest=parse(Roster, done.answers.roster.body).digest(),
            grad_norm=done.reduced.grad_norm,
        )

    def commit(self) -> None:
        """Commit the finished steps that no roster has committed yet, and wait for that."""
        commits, self.uncommitted = self.uncommitted, ()
        if commits:
            with self.traces.span("commit", steps=len(commits)):
                self.control.orchestrator.commit(commits)

    def _attempt(
        self, task: Task, model: Model, asked: OwedAnswers, begun: float, number: int
    ) -> tuple[Answers, Reduced, float] | None:
        """Make one attempt; returns also when its answers were complete, or None if another attempt is needed."""
        self.metrics.attempt_started()
        with self.traces.span("attempt", attempt=number, workers=len(asked.answers)) as attempt:
            answers = self._collect(task, model, asked, self._pace_of(task))
            computed = time.perf_counter()
            self.metrics.phase_finished("compute", computed - begun, self.traces.trace_id)
            reduced = None
            if answers is not None:
                waited = self._attempting.waited_s
                with self.traces.span("reduce"):
                    reduced = self._attempting.reduce(task, model, answers, self._pace_of(task), self._stated_epsilon)
                took = time.perf_counter() - computed - (self._attempting.waited_s - waited)
                self.metrics.phase_finished("reduce", took, self.traces.trace_id)
            if answers is None or reduced is None:
                attempt.fail("repeated")
                self.metrics.attempt_failed()
                return None
        return answers, reduced, computed

    def _collect(self, task: Task, model: Model, asked: OwedAnswers, pace: Pace = OPEN) -> Answers | None:
        with self.traces.span("compute") as compute:
            return self._attempting.collect(task, model, asked, pace, compute.began_ns)

    def _pace_of(self, task: Task) -> Pace:
        # A measurement is due between two steps, so its owner has nothing to hold or to release.
        return self.pace if task.query == "gradient" else OPEN

    @property
    def _stated_epsilon(self) -> float | None:
        """The account's epsilon by the newest receipt; None if the run is not private."""
        return self.charged_epsilon if self.manifest.computation.mechanism.private else None

    def place(self, epoch: int) -> None:
        """Move the virtual workers of members that left to members that stay, and some to newcomers."""
        before = self.membership.hosts.hosting
        self.membership.hosts.place(epoch)
        changes = moved(before, self.membership.hosts.hosting) if before else {}
        self.metrics.virtual_workers_moved(sum(len(taken) for taken in changes.values()))

    def _first_roster(self, task: Task) -> Envelope:
        """Return the roster that was prepared during the step before, or a new one if members have changed since."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == self._standing(task):
            return self._receive(task, prepared[1])
        # The prepared roster is not read: it rests on former members, so it may have been refused. The steps that it
        # was to commit are still in `uncommitted`, and the new question commits them.
        return self._receive(task, self._ask_roster(task))

    def _prepare_next(self, task: Task) -> None:
        """Ask for the next step's roster while the workers compute this one.

        The first step of an epoch is left out, because evidence is renewed before it. So is a step that a measurement
        precedes, because the measurement needs a roster of its own first.
        """
        computation = self.manifest.computation
        following, planned = task.step + 1, computation.mechanism.steps
        if task.query != "gradient" or following >= planned or following % computation.epoch_steps == 0:
            return
        measures = any(each.due(following, planned) is not None for each in computation.measurements)
        if not measures and self._prepared is None:
            after = Task("gradient", following, task.ranges)
            self._prepared = self._standing(after), self._ask_roster(after)

    def _ask_roster(self, task: Task) -> _AskedRoster:
        """Ask for the roster of the next attempt of a step; the same question commits the finished steps.

        They stay in `uncommitted` until the answer is there. Asked twice, the orchestrator commits them once.
        """
        hosting, commits = dict(self.membership.hosts.hosting), self.uncommitted
        aggregators = self._aggregator_ids(task)
        roster = self.control.orchestrator.open_step(task.step, hosting, aggregators, commits, task.query)
        return _AskedRoster(roster, commits)

    def _receive(self, task: Task, asked: _AskedRoster) -> Envelope:
        """Return the roster, or another one if a member's evidence has expired or was revoked since the last review."""
        with self.traces.span("roster"):
            return self._received(task, asked)

    def _received(self, task: Task, asked: _AskedRoster) -> Envelope:
        try:
            roster = asked.pending.result()
        except EvidenceError as refusal:
            if refusal.code != "evidence_expired":
                raise
            if self.membership.admission.review(now=True):
                self.renew()
            self.place(self.manifest.computation.epoch_of(task.query, task.step))
            asked = self._ask_roster(task)
            roster = asked.pending.result()
        self.uncommitted = tuple(commit for commit in self.uncommitted if commit not in asked.commits)
        return roster

    def _standing(self, task: Task) -> object:
        """Return everything that a roster of a step depends on, for comparison."""
        evidence = tuple(self.membership.members.presentations.items())
        return task.query, task.step, dict(self.membership.hosts.hosting), self._aggregator_ids(task), evidence

    def _aggregator_ids(self, task: Task) -> tuple[str, ...]:
        return tuple(actor.member_id for actor in self.membership.members.aggregators[: len(task.ranges)])

    def _vector_ranges(self) -> tuple[VectorRange, ...]:
        return tuple(VectorRange(index=owned.index, offset=owned.start, length=owned.size) for owned in self.ranges)

    def _masked_bytes(self, query: Query, vectors: int) -> int:
        """Return the bytes of that many vectors, or 0 where workers add no masks; see `TrainWorker`."""
        mechanism = self.manifest.computation.mechanism_of(query)
        masked = self.secure_aggregation or (mechanism.private and vectors > 1)
        return vectors * mechanism.dimension * mechanism.ring_bits // 8 if masked else 0
