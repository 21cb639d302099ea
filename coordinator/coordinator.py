"""Coordinator: the run as a small state machine over membership and steps.

    PREPARING  start workers, open data, build models, agree on the known answer
    ADMITTING  plan, manifest, account, evidence, keys
    TRAINING   step by step, until the planned steps or the cap
    FINISHING  commit the last step, export the evidence log
    DONE | FAILED

It holds configuration, references and public facts; never examples, gradients or keys.
"""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np

from attestation.admissions import OrchestratorView
from attestation.attester import EvidenceSource
from attestation.commit_book import StepCommit
from attestation.evidence import CollateralBundle
from attestation.hybrid_signature import SignerPublic
from attestation.policy import Policy
from attestation.roster import Query
from coordinator.archive import Archive
from coordinator.backend import ActorLost, Backend
from coordinator.checkpoints import Checkpoints, Restored
from coordinator.config import RunConfig
from coordinator.control import Control
from coordinator.crew import Crew
from coordinator.crosscheck import checked, load_accountants
from coordinator.departures import START_AGAIN, Departures
from coordinator.evaluation import Evaluator
from coordinator.joining import Timer
from coordinator.key_service import given_contract
from coordinator.ledger_view import AccountView
from coordinator.manifest import build_computation, build_manifest, epochs, run_terms
from coordinator.membership import Membership
from coordinator.model import Model
from coordinator.outcome import Ending, Finished
from coordinator.payer import NamedAccount, account_cap, named_account
from coordinator.plan import Plan, make_plan
from coordinator.ranges import ParameterRange, split_ranges
from coordinator.reporting import Reporter, Reporting
from coordinator.resume import require_ledger, require_same_manifest
from coordinator.run_folder import RunFolder
from coordinator.sealed_evaluation import SealedEvaluator
from coordinator.sealed_terms import sealed_terms
from coordinator.step import StepRunner
from coordinator.stopping import StopRequest
from coordinator.training import Course, Training
from coordinator.tssp_writer import PackageTerms
from metrics.collectors import RunMetrics
from metrics.errors import RunFailedError
from workers.halves import check_key_service
from workers.manifest import Manifest, key_context
from workers.worker_messages import Admission, WorkerFacts, WorkerSetup


class Phase(Enum):
    """Where a run is."""

    PREPARING = "preparing"
    ADMITTING = "admitting"
    TRAINING = "training"
    FINISHING = "finishing"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (Phase.DONE, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class Session:
    """The actors of one run and what evidence they are judged by, started and owned by the caller.

    Attributes:
        revocations: how many there are so far; see `attestation.revocations.count_revocations`.
        source: of the orchestrator's own evidence, on whatever node it is.
        collateral_now: gives newer collateral before evidence is renewed; None if there is none but the first.
        crew: the first members, if they were started already.
    """

    run_id: str
    orchestrator_key: SignerPublic
    backend: Backend
    control: Control
    policy: Policy
    collateral: CollateralBundle
    revocations: Callable[[], int]
    source: EvidenceSource
    collateral_now: Callable[[], CollateralBundle] | None = None
    crew: Crew | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What of its run an execution is to do.

    Attributes:
        archive: where the sealed packages of the run are; None to seal none.
        recorded: manifest of the run that is gone on with; None for one that begins.
        start_at_most: start from the newest package of at most so many finished steps; None for the newest of all.
        last_step: finished steps to end at; None for all that are planned.
        releases: False to repeat steps only that were charged and committed before.
    """

    archive: Archive | None = None
    recorded: Manifest | None = None
    start_at_most: int | None = None
    last_step: int | None = None
    releases: bool = True
    stop: StopRequest = field(default_factory=StopRequest)


class Coordinator:
    """Drives one execution of a run in one session."""

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        setup: WorkerSetup,
        evaluator: Evaluator | None,
        reporting: Reporting,
        folder: RunFolder,
        assignment: Assignment,
        timer: Timer | None = None,
    ) -> None:
        self.config = config
        self.session = session
        self._ledger = session.control.ledger
        self._orchestrator = session.control.orchestrator
        self.phase = Phase.PREPARING
        self._setup = setup
        self._evaluator = evaluator
        # A replay measures nothing, so it needs no keys for it either.
        self._evaluation = sealed_terms(config, Path(setup.base), "evaluation") if assignment.releases else None
        self._reporting = reporting
        self._folder = folder
        self._assignment = assignment
        self._committed: Mapping[tuple[Query, int], StepCommit] = {}
        self._account = config.ledger.account or f"run-{session.run_id}"
        self._reporter = Reporter(reporting, lambda: len(self._membership.workers))
        departures = Departures(config.failure.max_failures, self._reporter.departed)
        self._membership = Membership(
            config=config,
            backend=session.backend,
            control=session.control,
            departures=departures,
            on_join=self._reporter.joined,
            timer=timer or Timer(),
            revocations=session.revocations,
            crew=session.crew,
        )
        session.control.on_restart = self._reporter.restarted
        self._plan: Plan | None = None
        self._steps: Training | None = None
        self._ending: Ending | None = None
        self._rollback_witness = False

    def run(self) -> Finished:
        """From starting the workers to the exported evidence log.

        Raises:
            RaycloakError: what ended the run; nothing is half-written and what was charged stays charged.
        """
        try:
            facts = self._membership.start_workers(self._setup, partial(load_accountants, self.config))
            self.phase = Phase.ADMITTING
            manifest, metrics = self._admit(facts)
            self.phase = Phase.TRAINING
            self._steps = self._training(facts, manifest, metrics)
            self._ending = self._steps.run()
            self.phase = Phase.FINISHING
            finished = self._conclude(self._steps)
            self.phase = Phase.DONE
            return finished
        except BaseException:
            self.phase = Phase.FAILED
            raise

    def _admit(self, facts: WorkerFacts) -> tuple[Manifest, RunMetrics]:
        account = self._named_account()
        dimension = sum(tensor.size for tensor in facts.tensors)
        plan = self._plan = checked(make_plan(self.config, facts.num_examples, dimension, account))
        self._reporter.planned(plan)
        known_answer = self._membership.known_answer(plan.mechanism, plan.measurements)
        manifest = self._manifest(facts, plan, known_answer)
        if self._assignment.recorded is not None:
            self._require_same_run(self._assignment.recorded, manifest)
        self._open_account(plan, manifest, account)
        sealed = sealed_terms(self.config, Path(self._setup.base))
        terms = run_terms(manifest, self.session.policy, self.session.collateral, sealed, self._evaluation)
        self._orchestrator.begin(terms, secrets.token_hex(16))
        self._ranges = split_ranges(facts.tensors, self.config.aggregators)
        self._membership.admit_all(self._admission(manifest), self._ranges)
        if self._assignment.recorded is None:
            self._folder.write_manifest(manifest)
        view = self._view()
        self._evidence_class, self._colocated = view.evidence_class, self._is_colocated()
        metrics = self._reporter.admitted(manifest, view)
        for departure in self._membership.departures.all:
            metrics.worker_refused(departure.code)
        return manifest, metrics

    def _admission(self, manifest: Manifest) -> Admission:
        session = self.session
        evidence = self._orchestrator.present(session.source)
        return Admission(
            manifest,
            session.policy,
            session.collateral,
            self.config.secure_aggregation,
            evidence,
            key_service=self.config.key_service.address if self.config.key_service else None,
        )

    def _require_same_run(self, recorded: Manifest, manifest: Manifest) -> None:
        """Before anything is registered or charged: this is the run that was begun, and nothing of it was put back."""
        require_same_manifest(recorded, manifest)
        self._committed = {(commit.query, commit.step): commit for commit in self._orchestrator.committed()}
        require_ledger(self._committed.values(), self._ledger.hash_at)

    def _named_account(self) -> NamedAccount | None:
        """The named account that pays; None if the run opens its own."""
        if self.config.ledger.account is None:
            return None
        return named_account(self._ledger.view(), self.config, self.session.run_id)

    def _manifest(self, facts: WorkerFacts, plan: Plan, known_answer: bytes) -> Manifest:
        computation = build_computation(
            self.config, self._setup.model.name, self._setup.dataset, facts, plan.mechanism, plan.measurements
        )
        commitments = self._orchestrator.key_commitments(
            key_context(computation, known_answer), self.config.virtual_workers, epochs(self.config)
        )
        key_service = given_contract(self.config.key_service, Path(self._setup.base))
        view = self._ledger.view()
        self._rollback_witness = view.rollback_witness
        manifest = build_manifest(
            computation,
            run_id=self.session.run_id,
            account=self._account,
            known_answer=known_answer,
            policy_digest=self.session.policy.digest(),
            ledger_key=view.public_key,
            orchestrator_key=self.session.orchestrator_key,
            key_commitments=commitments,
            dataset_fingerprint=facts.dataset_fingerprint,
            key_service=key_service,
        )
        check_key_service(manifest)
        return manifest

    def _open_account(self, plan: Plan, manifest: Manifest, named: NamedAccount | None) -> None:
        if named is None:
            accountant = plan.mechanism.accountant
            self._ledger.open_account(self._account, account_cap(self.config), plan.delta, accountant=accountant)
        mechanisms = manifest.computation.mechanisms
        terms = mechanisms, manifest.digest(), manifest.dataset_fingerprint
        self._ledger.register_run(self.session.run_id, self._account, *terms)

    def _training(self, facts: WorkerFacts, manifest: Manifest, metrics: RunMetrics) -> Training:
        """The steps that are left to this execution, from the model that the newest package or the manifest gives."""
        runner = StepRunner(
            backend=self.session.backend,
            control=self.session.control,
            membership=self._membership,
            manifest=manifest,
            ranges=self._ranges,
            metrics=metrics,
            deadline_s=self.config.failure.step_deadline_s,
            secure_aggregation=self.config.secure_aggregation,
        )
        plan, restored = self._plan, self._restore()
        assert plan is not None, "a run that trains was planned"
        return Training(
            config=self.config,
            plan=plan,
            course=Course(
                last_step=min(self._assignment.last_step or plan.mechanism.steps, plan.mechanism.steps),
                committed=self._committed,
                releases=self._assignment.releases,
            ),
            runner=runner,
            membership=self._membership,
            reporting=self._reporting,
            metrics=metrics,
            evaluator=self._evaluator or SealedEvaluator.of(self.config, self._evaluation, runner),
            stop=self._assignment.stop,
            checkpoints=self._open_checkpoints(manifest, plan, metrics),
            model=self._model(facts, manifest, restored),
            finished_steps=restored.finished_steps if restored else 0,
            renew=self._renew,
            measured=self._folder.keep_released if self._assignment.releases else lambda released: None,
        )

    def _renew(self) -> None:
        if self.session.collateral_now is not None:
            self._membership.take_collateral(self.session.collateral_now())
        self._membership.renew()
        self._reporter.presented(self._view())

    def _restore(self) -> Restored | None:
        """What the newest package that may be used holds; None to start from the manifest's parameters."""
        recorded, archive = self._assignment.recorded, self._assignment.archive
        if recorded is None or archive is None:
            return None
        return archive.restore(self.session.control, recorded, at_most=self._assignment.start_at_most)

    def _open_checkpoints(self, manifest: Manifest, plan: Plan, metrics: RunMetrics) -> Checkpoints | None:
        archive = self._assignment.archive
        if archive is None or not self._assignment.releases:
            return None
        terms = PackageTerms(manifest, plan.delta, self._evidence_class)
        return archive.open(self.session.control, terms, metrics)

    def _model(self, facts: WorkerFacts, manifest: Manifest, restored: Restored | None) -> Model:
        backend = self.session.backend
        flat, digest = facts.initial_parameters, manifest.computation.initial_parameters
        states = tuple(aggregator.initial_state() for aggregator in self._membership.aggregators)
        if restored is not None:
            flat, digest = np.concatenate(restored.parameters), restored.parameter_digest
            merged = {key: value for state in restored.states for key, value in state.items()}
            states = tuple(backend.put(_state_of(merged, owned)) for owned in self._ranges)
        parameters = tuple(backend.put(flat[owned.start : owned.stop].copy()) for owned in self._ranges)
        return Model(parameters, states, digest)

    def _is_colocated(self) -> bool:
        backend, session = self.session.backend, self.session
        try:
            nodes = {backend.node(each) for each in self._membership.aggregators}
        except ActorLost as lost:
            raise RunFailedError(
                "unreachable", f"an aggregator was lost at admission ({lost.cause}).", START_AGAIN
            ) from None
        return session.control.node("orchestrator") in nodes

    def finished(self) -> Finished | None:
        """What the execution has come to so far; None before its first step is done."""
        training = self._steps
        if training is None or training.finished_steps == 0:
            return None
        assert self._plan is not None, "a run that trains was planned"
        return Finished(
            manifest=training.runner.manifest,
            plan=self._plan,
            parameters=training.parameters(),
            parameter_digest=training.model.digest,
            steps=training.finished_steps,
            most_hosted=self._orchestrator.most_hosted(),
            workers=len(self._membership.workers),
            charged_epsilon=self._account_epsilon() if self.charged_epsilon is None else self.charged_epsilon,
            evaluation=training.evaluate() if self.phase is not Phase.FAILED else training.evaluated(),
            released=self._folder.released(),
            measured=self._measured(),
            evidence_class=self._evidence_class,
            outcomes=tuple(training.outcomes),
            measurement_outcomes=tuple(training.measurement_outcomes),
            colocated=self._colocated,
            ending=self._ending,
            rollback_witness=self._rollback_witness,
        )

    @property
    def step(self) -> int | None:
        """The step that is under way or comes next; None before training."""
        return self._steps.finished_steps if self._steps else None

    @property
    def charged_epsilon(self) -> float | None:
        """Epsilon of the account after the last charge of this execution; None if it has charged nothing."""
        return self._steps.runner.charged_epsilon if self._steps else None

    @property
    def begun(self) -> bool:
        """Whether the run has charged anything, in this execution or, as it goes on with one, maybe before."""
        return self._assignment.recorded is not None or (self._steps is not None and self._steps.runner.charging)

    def salvage(self, destroy: bool) -> Finished | None:
        """After a failure: seal and write what there is, export the log, and destroy a generated secret if asked.

        Returns:
            What the execution had come to; None if no step was finished.
        """
        log = str(self._folder.path / "evidence.jsonl")
        if self._steps is not None:
            with suppress(RunFailedError):  # The model may be what was lost; earlier packages stay.
                self._steps.seal()
            self._close_checkpoints(self._steps)
            self._steps.runner.commit()
        if destroy:
            self._orchestrator.finish((), log, destroy=True)
        else:
            self._orchestrator.export_log(log)
        finished = self.finished()
        if finished is not None:
            self._folder.write_parameters(finished)
        return finished

    def _conclude(self, training: Training) -> Finished:
        """Seal and write the last model, commit the last step and export the log; destroy a generated secret if all is
        done."""
        training.seal()
        self._close_checkpoints(training)
        finished = self.finished()
        if finished is None:
            raise RunFailedError("stopped", "the run was stopped before its first step", _RESUME)
        training.runner.commit()
        if self._assignment.releases:
            # Packages cannot be opened any more once the secret is gone: the model must be on disk before.
            self._folder.write_parameters(finished)
            log = str(self._folder.path / "evidence.jsonl")
            if self._ending is Ending.STOPPED:
                self._orchestrator.export_log(log)
            else:
                self._orchestrator.finish((), log, self.config.secret_retention == "run")
        return finished

    def _close_checkpoints(self, training: Training) -> None:
        if training.checkpoints is not None:
            training.checkpoints.close(self.config.failure.step_deadline_s)

    def _account_epsilon(self) -> float:
        return self._account_view().spent_epsilon

    def _measured(self) -> dict[Query, int]:
        """How often each measurement was charged, whether or not its release arrived."""
        if self._plan is None or not self._plan.measurements:
            return {}
        (run,) = (run for run in self._account_view().runs if run.run_id == self.session.run_id)
        return {each.query: each.charged for each in run.queries}

    def _account_view(self) -> AccountView:
        return next(account for account in self._ledger.view().accounts if account.name == self._account)

    def _view(self) -> OrchestratorView:
        return self._orchestrator.view()


def _state_of(merged: Mapping[str, np.ndarray], owned: ParameterRange) -> dict[str, np.ndarray]:
    """The part of an optimizer state that belongs to the tensors of a range."""
    names = {tensor.name for tensor in owned.tensors}
    return {key: value for key, value in merged.items() if key.rpartition("/")[0] in names}


_RESUME = "Go on with it: raycloak run CONFIG --resume"
