"""The reports of a run under way: events, metric series, and callbacks of its caller."""

import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Literal

from raycloak.attestation.orchestrator.admissions import OrchestratorView
from raycloak.coordinator.cluster.control import Restart
from raycloak.coordinator.membership.members import Departure
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.record.outcome import Evaluation, StepOutcome
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.events import EventWriter
from raycloak.metrics.registry import exactness_mark, privacy_mark
from raycloak.metrics.reports import Fact, Physical, Release, report
from raycloak.metrics.traces import OFF, Traces
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released


@report
class StepReport:
    """The public facts of a committed step.

    Attributes:
        step: number of committed steps, 1 to ``steps``.
        steps: planned steps.
        epsilon: charged to the account so far, by all its runs; None if the run is not private. It is no claim: a run
            that is stopped because of what it shows claims what its plan costs.
        epsilon_cap: what the account may spend; None if the run is not private.
        epsilon_planned: what the whole plan costs a fresh account; None if the run is not private.
        evaluation_accuracy: share in [0, 1] on the public split, if it was measured after this step.
        evaluation_loss: mean on the public split, in its place where a loss is measured.
        evaluation_metrics: values of the user's own metrics beside it, by name.
        workers: workers that took part.
        model_digest: hexadecimal digest of the parameters after the step.
        seconds: wall time of the step.
        exact: whether every operation has a deterministic kernel.
        grad_norm: l2 norm of the step's average gradient; None if the run is private.
    """

    step: Fact[int]
    steps: Fact[int]
    epsilon: Release[float | None]
    epsilon_cap: Fact[float | None]
    evaluation_accuracy: Release[float | None]
    workers: Fact[int]
    model_digest: Release[str]
    seconds: Physical[float]
    evaluation_loss: Release[float | None] = None
    exact: Fact[bool] = True
    epsilon_planned: Fact[float | None] = None
    evaluation_metrics: Release[Mapping[str, float]] = field(default_factory=dict)
    grad_norm: Release[float | None] = None


@report
class MembershipReport:
    """A worker or aggregator that joined the running training, or that the run has lost.

    Attributes:
        change: ``joined``; ``left`` between two steps, as it was asked to; ``lost``; or ``refused`` before it joined.
        member: its id.
        code: stable code of the reason; None of a join.
        workers: admitted workers after the change.
    """

    change: Fact[Literal["joined", "left", "lost", "refused"]]
    member: Fact[str]
    code: Fact[str | None]
    workers: Fact[int]


@dataclass(frozen=True, slots=True)
class Outset:
    """The terms of an execution whose members are admitted and whose model is there.

    Attributes:
        finished_steps: steps that earlier executions finished.
        charged_steps: of the run by now, by the ledger's record.
        charged_epsilon: of the account by now, by the ledger's record.
    """

    manifest: Manifest
    plan: Plan
    evidence_class: str
    finished_steps: int
    charged_steps: int
    charged_epsilon: float


@dataclass(frozen=True, slots=True)
class Reporting:
    """The callbacks and event log of a coordinator's caller.

    Attributes:
        metrics: makes the run's series once its public facts are known.
        progress: called after every finished step.
        departure: called when a member is refused, is lost or leaves.
        joined: called with the member id of a worker that joins the run after its start.
        restart: called when the ledger or the orchestrator was started again.
        warned: called with each warning of the plan, before anything is charged.
        phase: called with a few words when another phase begins.
        begun: called once before the first step of an execution.
        evaluated: called with the finished steps and the result of every evaluation.
        traces: the spans of the execution.
        measured: called with every release of a measurement, and the epsilon of the account after its charge.
        changed: called with every change of the members.
    """

    metrics: Callable[[Manifest, str], RunMetrics]
    events: EventWriter
    progress: Callable[[StepReport], None]
    departure: Callable[[Departure], None]
    joined: Callable[[str], None]
    restart: Callable[[Restart], None]
    warned: Callable[[str], None] = lambda warning: None
    phase: Callable[[str], None] = lambda what: None
    begun: Callable[[Outset], None] = lambda outset: None
    evaluated: Callable[[int, Evaluation], None] = lambda steps, evaluation: None
    traces: Traces = OFF
    measured: Callable[[Released, float], None] = lambda released, epsilon: None
    changed: Callable[[MembershipReport], None] = lambda change: None

    def stepped(
        self, metrics: RunMetrics, outcome: StepOutcome, private: bool, workers: int, found: Evaluation | None = None
    ) -> None:
        """Count and log a committed training step, with its result on the evaluation split if there is one."""
        metrics.step_committed(outcome.seconds)
        metrics.masked_bytes_received(outcome.masked_bytes)
        self.events.write(
            "step",
            step=outcome.commit.step,
            model_digest=outcome.commit.released_digest.hex(),
            epsilon=outcome.charged_epsilon if private else None,
            evaluation_accuracy=found.accuracy if found else None,
            evaluation_loss=found.loss if found else None,
            workers=workers,
            attempts=outcome.commit.attempts,
            seconds=round(outcome.seconds, 6),
            charge_seconds=round(outcome.charge_seconds, 6),
            compute_seconds=round(outcome.compute_seconds, 6),
            reduce_seconds=round(outcome.reduce_seconds, 6),
            masked_bytes=outcome.masked_bytes,
        )


@dataclass(slots=True)
class Reporter:
    """Tells events, metrics and the caller what happens to members and to the two durable actors.

    Attributes:
        workers: those that take part now; it changes as they come and go.
        metrics: the run's series; None until it has admitted its first members.
    """

    to: Reporting
    workers: Sized
    metrics: RunMetrics | None = None

    def admitted(
        self, manifest: Manifest, plan: Plan, view: OrchestratorView, refused: Iterable[Departure]
    ) -> RunMetrics:
        """Make the series once the first members are admitted, and log the terms of the steps.

        Args:
            refused: members that were refused or lost before there were series to count them in.
        """
        mechanism = manifest.computation.mechanism
        self.metrics = self.to.metrics(manifest, view.evidence_class)
        self.to.events.write(
            "admitted",
            run=manifest.run_id,
            account=manifest.account,
            manifest_digest=manifest.digest().hex(),
            evidence_class=view.evidence_class,
            privacy=privacy_mark(mechanism.private),
            exactness=exactness_mark(manifest.computation.exact),
            steps_planned=mechanism.steps,
            virtual_workers=mechanism.virtual_workers,
            parameters=mechanism.dimension,
            noise_multiplier=mechanism.noise_multiplier if mechanism.private else None,
            epsilon_planned=plan.epsilon_outsiders if mechanism.private else None,
            epsilon_cap=plan.epsilon_cap if mechanism.private else None,
            delta=plan.delta if mechanism.private else None,
            workers=len(self.workers),
        )
        self.presented(view)
        for departure in refused:
            self.metrics.worker_refused(departure.code)
        return self.metrics

    def presented(self, view: OrchestratorView) -> None:
        """Report that members have presented evidence, at first or anew."""
        assert self.metrics is not None, "series exist once members are admitted"
        self.metrics.workers_admitted(len(self.workers))
        self.metrics.collateral_taken(view.collateral_ends)
        for role, expires_at in view.earliest_expiry.items():
            self.metrics.evidence_accepted(role, view.evidence_class, expires_at)

    def ended(self, ending: str) -> None:
        """Report how the execution ended."""
        if self.metrics is not None:
            self.metrics.ended(ending)

    def departed(self, departure: Departure) -> None:
        """Report that a member was refused, was lost, or left."""
        self.to.departure(departure)
        self.to.events.write("departure", code=departure.code)
        gone: Literal["left", "lost"] = "left" if departure.asked_for else "lost"
        change: Literal["left", "lost", "refused"] = gone if departure.joined else "refused"
        self.to.changed(MembershipReport(change, departure.member_id, departure.code, len(self.workers)))
        if (metrics := self.metrics) is not None:
            counts = {"refused": metrics.worker_refused, "left": metrics.worker_left, "lost": metrics.worker_failed}
            counts[change](departure.code)
            metrics.workers_admitted(len(self.workers))

    def joined(self, member_id: str) -> None:
        """Report that a worker joined between two steps."""
        self.to.joined(member_id)
        self.to.events.write("join", workers=len(self.workers))
        self.to.changed(MembershipReport("joined", member_id, None, len(self.workers)))
        assert self.metrics is not None, "series exist once members are admitted"
        self.metrics.worker_joined()
        self.metrics.workers_admitted(len(self.workers))

    def restarted(self, restart: Restart) -> None:
        """Report that the ledger or the orchestrator was started again."""
        self.to.restart(restart)
        began_ns = time.time_ns() - int(restart.seconds * 1e9)
        self.to.traces.record("recover", began_ns, restart.seconds, role=restart.role, cause=restart.cause)
        self.to.events.write("restart", role=restart.role, cause=restart.cause, seconds=round(restart.seconds, 6))
        if self.metrics is not None:
            self.metrics.phase_finished("recover", restart.seconds)
