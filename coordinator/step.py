"""One step: charge, roster, compute, wait, reduce.

    receipt = ledger.charge(step)                                                          durable before it returns
    roster  = orchestrator.open_step(step, hosting, finished steps)                        asked for one step ahead
    headers, vectors = every worker.step(receipt, roster, parameters)                      masked before they leave
    failed -> move their virtual workers, next attempt: survivors mask their kept vectors again
    report, parameters, state = every aggregator.reduce(roster, headers, vectors)          only refs that are ready
    the coordinator takes all new references at once

Nothing that an aggregator does is state: a step that fails anywhere is repeated from the same references.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from attestation.canonical import digest, length_prefixed
from attestation.commit_book import StepCommit
from attestation.messages import Envelope, parse
from attestation.roster import Roster
from coordinator.aggregator import ReduceReport, ReduceRequest
from coordinator.backend import ActorLost, Backend
from coordinator.control import Control, Pending
from coordinator.hosting import moved
from coordinator.membership import Membership
from coordinator.outcome import Model, StepOutcome
from coordinator.ranges import ParameterRange
from metrics.collectors import RunMetrics
from metrics.errors import ProtocolError, RunFailedError, SenderError
from workers.manifest import Manifest
from workers.parameters import parameter_digest
from workers.payload import Header, VectorRange
from workers.receipt import Receipt
from workers.train_worker import StepReply, StepRequest


@dataclass(frozen=True, slots=True)
class _Answers:
    """Complete answers of one attempt, in the order of the roster's workers."""

    roster: Envelope
    headers: tuple[Envelope, ...]
    vectors: tuple[tuple[Any, ...], ...]
    replies: tuple[StepReply, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A roster that was asked for, and the steps that its answer commits."""

    pending: Pending
    commits: tuple[StepCommit, ...]


@dataclass(slots=True)
class StepRunner:
    """Runs the steps of one session, one after the other.

    Attributes:
        uncommitted: finished steps that no answer of the orchestrator has confirmed as committed yet.
        charged_epsilon: of the account, as the newest receipt states it.
        charging: whether a charge was ever asked for; one whose answer was lost counts as spent.
    """

    backend: Backend
    control: Control
    membership: Membership
    manifest: Manifest
    ranges: Sequence[ParameterRange]
    metrics: RunMetrics
    deadline_s: float
    secure_aggregation: bool
    charged_epsilon: float | None = None
    charging: bool = False
    uncommitted: tuple[StepCommit, ...] = ()
    _tags: dict[int, bytes] = field(default_factory=dict)
    _seen: dict[str, tuple[Envelope, ...]] = field(default_factory=dict)
    _prepared: tuple[Any, _Asked] | None = None
    _all_lost: bool = False

    def run(self, step: int, model: Model) -> tuple[Model, StepOutcome]:
        """Take ``model`` one step further. It is in ``uncommitted`` until a later roster commits it.

        Raises:
            BudgetError: ``cap_exceeded`` before anything was computed.
            RunFailedError: what failed, in which step.
        """
        started = time.perf_counter()
        self.charging = True
        self._tags, self._all_lost = {}, False
        epoch = step // self.manifest.computation.epoch_steps
        self._place(epoch)
        charge = self.control.submit(
            "ledger", "charge", self.manifest.run_id, step, model.digest, self.manifest.digest()
        )
        roster = self._first_roster(step)
        receipt: Envelope = charge.result()
        charged_entry = parse(Receipt, receipt.body)
        self.charged_epsilon = charged_entry.charged_epsilon
        charged = time.perf_counter()
        self.metrics.phase_finished("charge", charged - started)
        attempts = 1
        while True:
            outcome = self._attempt(step, model, receipt, roster)
            if outcome is not None:
                break
            self._place(epoch)
            roster = self._receive(self._ask_roster(step))
            attempts += 1
        answers, reports, updated, compute_seconds, reduce_seconds = outcome
        digests = [digest for report in reports for digest in report.tensor_digests]
        digest = parameter_digest(self.manifest.computation.tensors, digests)
        commit = StepCommit(step, digest, attempts, charged_entry.sequence, charged_entry.head)
        self.uncommitted += (commit,)
        return Model(tuple(p for p, _ in updated), tuple(s for _, s in updated), digest), StepOutcome(
            commit=commit,
            charged_epsilon=self.charged_epsilon,
            masked_bytes=self._masked_bytes(len(answers.headers)),
            seconds=time.perf_counter() - started,
            charge_seconds=charged - started,
            compute_seconds=compute_seconds,
            reduce_seconds=reduce_seconds,
            slowest_worker_seconds=max(reply.seconds for reply in answers.replies),
            roster_digest=parse(Roster, answers.roster.body).digest(),
        )

    def commit(self) -> None:
        """Commit the finished steps that no roster has committed yet."""
        commits, self.uncommitted = self.uncommitted, ()
        if commits:
            self.control.orchestrator("commit", commits)

    def _attempt(
        self, step: int, model: Model, receipt: Envelope, roster: Envelope
    ) -> tuple[_Answers, list[ReduceReport], list[tuple[Any, Any]], float, float] | None:
        """One attempt under ``roster``; None if somebody was lost and another attempt is needed."""
        self.metrics.attempt_started()
        begun = time.perf_counter()
        answers = self._compute(step, model, receipt, roster)
        computed = time.perf_counter()
        self.metrics.phase_finished("compute", computed - begun)
        if answers is None:
            return None
        self._bind_vectors(step)
        reduced = self._reduce(step, model, answers)
        finished = time.perf_counter()
        self.metrics.phase_finished("reduce", finished - computed)
        return (answers, *reduced, computed - begun, finished - computed) if reduced else None

    def _bind_vectors(self, step: int) -> None:
        """Have the vectors of the step known for good before they are summed, so that no other execution differs."""
        tags = [self._tags[v] for v in sorted(self._tags)]
        try:
            self.control.orchestrator("bind_vectors", step, digest(length_prefixed("raycloak/vector-tags/v1", *tags)))
        except ProtocolError as refusal:
            raise RunFailedError(refusal.code, refusal.message, refusal.remedy, step) from None

    def _place(self, epoch: int) -> None:
        """Host the virtual workers of those who left on those who stay, and some on those who joined."""
        before = self.membership.hosting
        self.membership.place(epoch)
        changes = moved(before, self.membership.hosting) if before else {}
        self.metrics.virtual_workers_moved(sum(len(taken) for taken in changes.values()))

    def _first_roster(self, step: int) -> Envelope:
        """The roster that was asked for beside the step before, or a new one if the members have changed since."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == self._standing(step):
            return self._receive(prepared[1])
        # One that rests on former members may be refused by now; what it was to commit is handed in again.
        return self._receive(self._ask_roster(step))

    def _prepare_next(self, step: int) -> None:
        """Ask for the next step's roster while the workers compute; an epoch begins with fresh evidence instead."""
        computation = self.manifest.computation
        planned = step + 1 < computation.mechanism.steps and (step + 1) % computation.epoch_steps != 0
        if planned and self._prepared is None:
            self._prepared = self._standing(step + 1), self._ask_roster(step + 1)

    def _ask_roster(self, step: int) -> _Asked:
        """Ask for the roster of the next attempt of ``step``, which commits finished steps on the way.

        They stay uncommitted until it is there: asked twice, they are committed once.
        """
        hosting, aggregators, commits = dict(self.membership.hosting), self._aggregator_ids(), self.uncommitted
        return _Asked(self.control.submit("orchestrator", "open_step", step, hosting, aggregators, commits), commits)

    def _receive(self, asked: _Asked) -> Envelope:
        roster: Envelope = asked.pending.result()
        self.uncommitted = tuple(commit for commit in self.uncommitted if commit not in asked.commits)
        return roster

    def _standing(self, step: int) -> Any:
        """What a roster of ``step`` rests on."""
        evidence = tuple(self.membership.presentations.items())
        return step, dict(self.membership.hosting), self._aggregator_ids(), evidence

    def _aggregator_ids(self) -> tuple[str, ...]:
        return tuple(actor.member_id for actor in self.membership.aggregators)

    def _compute(self, step: int, model: Model, receipt: Envelope, roster: Envelope) -> _Answers | None:
        """Ask every worker; those that fail are lost, and None is returned."""
        workers = {i: self.membership.workers[i] for i in sorted(self.membership.workers)}
        returns = 1 + len(self.ranges)
        shown = tuple(self.membership.presentations.values())
        calls = {}
        for member_id, worker in workers.items():
            unseen = tuple(envelope for envelope in shown if envelope not in self._seen.get(member_id, ()))
            request = StepRequest(receipt, roster, unseen, self._vector_ranges())
            calls[member_id] = self.backend.call(worker, "step", request, *model.parameters, returns=returns)
        self._prepare_next(step)
        ready = self.backend.wait([reference for call in calls.values() for reference in call], self.deadline_s)
        replies: dict[str, StepReply] = {}
        failures: dict[str, str] = {}
        for member_id, call in calls.items():
            try:
                if not set(call) <= set(ready):
                    raise ActorLost("deadline")
                replies[member_id] = self.backend.fetch(call[0], self.deadline_s)
                if replies[member_id].code != "ok":
                    failures[member_id] = replies[member_id].code
            except ActorLost as lost:
                failures[member_id] = lost.cause
        # Also of an attempt that fails: a late answer may complete it, and both must then decode to one value.
        for member_id, reply in replies.items():
            if member_id not in failures and not self._tags_agree(step, member_id, reply):
                failures[member_id] = "header_mismatch"
        headers = tuple(reply.header for reply in replies.values() if reply.header is not None)
        if failures:
            self._require_model(step, model, failures.values())
            self._lose(step, failures, everybody=len(failures) == len(workers))
            return None
        for reply in replies.values():
            if reply.leaving:
                self.membership.ask_to_leave(reply.member_id, "left")
        self._seen = dict.fromkeys(workers, shown)
        vectors = tuple(tuple(call[1 + r.index] for call in calls.values()) for r in self.ranges)
        return _Answers(roster, headers, vectors, tuple(replies.values()))

    def _reduce(
        self, step: int, model: Model, answers: _Answers
    ) -> tuple[list[ReduceReport], list[tuple[Any, Any]]] | None:
        """Reduce every range; None if an aggregator was lost and replaced, or a worker's vector failed its checks."""
        request = ReduceRequest(answers.roster, answers.headers, model.digest, self._vector_ranges())
        calls = [
            self.backend.call(actor, "reduce", request, parameters, state, *vectors, returns=3)
            for actor, parameters, state, vectors in zip(
                self.membership.aggregators, model.parameters, model.states, answers.vectors, strict=True
            )
        ]
        ready = self.backend.wait([reference for call in calls for reference in call], self.deadline_s)
        reports: list[ReduceReport] = []
        lost: dict[int, str] = {}
        accused: dict[str, str] = {}
        for index, call in enumerate(calls):
            try:
                if not set(call) <= set(ready):
                    raise ActorLost("deadline")
                reports.append(self.backend.fetch(call[0], self.deadline_s))
            except ActorLost as error:
                lost[index] = error.cause
            except SenderError as error:
                if error.member_id not in self.membership.workers:
                    raise
                accused[error.member_id] = error.code
            except RunFailedError as error:
                raise RunFailedError(error.code, f"step {step}: {error.message}", error.remedy, step) from None
        self._require_model(step, model, lost.values())
        for index, cause in lost.items():
            # What was lost then is a vector, with its sender's node; the next attempt finds out.
            if cause != "object_lost":
                self.membership.replace_aggregator(index, cause)
        self._lose(step, accused, everybody=False)
        if lost or accused:
            return None
        self.metrics.aggregate_released()
        return reports, [(call[1], call[2]) for call in calls]

    def _lose(self, step: int, failures: dict[str, str], everybody: bool) -> None:
        """Take those who failed off the run; if all fail alike, others in their place would too, and it ends.

        All may die at once when a node does, so that is taken for an accident the first time.
        """
        code = next(iter(failures.values()), "")
        alike = everybody and len(set(failures.values())) == 1
        if alike and (self._all_lost or code not in ("died", "unreachable")):
            raise RunFailedError(code, f"every worker failed in step {step}: {code}", _REMEDIES.get(code, ""), step)
        self._all_lost = alike
        for member_id, cause in failures.items():
            self.membership.lose(member_id, cause, f"{member_id} failed in step {step}")

    def _require_model(self, step: int, model: Model, causes: Collection[str]) -> None:
        """If something that was passed is gone, make sure that it is not the model itself.

        Raises:
            RunFailedError: ``state_lost``.
        """
        if "object_lost" not in causes:
            return
        try:
            for reference in (*model.parameters, *model.states):
                self.backend.fetch(reference, self.deadline_s)
        except ActorLost as lost:
            raise RunFailedError(
                "state_lost",
                f"the node that held the model went away in step {step} ({lost.cause})",
                "Go on from the newest sealed package: raycloak run CONFIG --resume",
                step,
            ) from None

    def _tags_agree(self, step: int, member_id: str, reply: StepReply) -> bool:
        """Whether a header names what its sender hosts; aggregators verify the rest of it.

        Raises:
            RunFailedError: ``not_reproducible`` if a virtual worker that was computed again has another tag than
                before: two attempts would decode to two values, and the masks would protect nothing.
        """
        try:
            header = parse(Header, reply.header.body) if reply.header else None
        except ProtocolError:
            header = None
        hosted = self.membership.hosting[member_id]
        if header is None or header.virtual_workers != hosted or len(header.vector_tags) != len(hosted):
            return False
        for v, tag in zip(hosted, header.vector_tags, strict=True):
            if self._tags.setdefault(v, tag) != tag:
                raise RunFailedError(
                    "not_reproducible",
                    f"{member_id} computed another vector of virtual worker {v} in step {step} than its former host",
                    "Use one kind of machine and library versions; start a new run.",
                    step,
                )
        return True

    def _vector_ranges(self) -> tuple[VectorRange, ...]:
        return tuple(VectorRange(owned.index, owned.start, owned.size) for owned in self.ranges)

    def _masked_bytes(self, vectors: int) -> int:
        """Bytes of that many vectors, or 0 where workers add no masks: see `TrainWorker`."""
        mechanism = self.manifest.computation.mechanism
        masked = self.secure_aggregation or (mechanism.private and vectors > 1)
        return vectors * mechanism.dimension * mechanism.ring_bits // 8 if masked else 0


_REMEDIES = {
    "out_of_memory": "Lower micro_batch_size, or give the workers more memory.",
    "nondeterministic_op": "Set allow_nondeterministic: true for a run that is NOT EXACT, or change the model.",
    "worker_error": "The text of the failure stays in the worker; run the model on public data to see it.",
}
