"""Execution: one session of a run on the Ray cluster that is there or on a local one.

It hides how actors, platforms, metrics and logs of a session start and end. A new run, a resumed run and
a replay differ in their assignment only.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.keys.run_secret import exposure
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.service.serving_orchestrator import EvidenceOrchestrator
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.cluster.actors import (
    GpuSamplers,
    alive_nodes,
    disconnect,
    job_folder,
    require_no_secret_in_job,
)
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.control import Control, Restart
from raycloak.coordinator.cluster.placement import Placement
from raycloak.coordinator.cluster.ray_calls import ask, fetch
from raycloak.coordinator.cluster.remote import Actor
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.console.output import attach_log, json_text
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.membership.members import Departure
from raycloak.coordinator.planning.key_files import require_none_in_job
from raycloak.coordinator.planning.listed_code import listed_code
from raycloak.coordinator.planning.model_source import compute_mode, loss_spec, micro_batch_bytes
from raycloak.coordinator.planning.own_metrics import Metric
from raycloak.coordinator.planning.payer import data_name
from raycloak.coordinator.planning.references import descriptor, split_of_workers
from raycloak.coordinator.record.folder import RunFolder, run_lock
from raycloak.coordinator.record.outcome import Ending, Finished
from raycloak.coordinator.record.same_run import require_same_config
from raycloak.coordinator.record.verdict import Boundary
from raycloak.coordinator.runs.evidence_address import announce
from raycloak.coordinator.runs.ray_session import Launched, launch
from raycloak.coordinator.runs.ray_start import start_ray
from raycloak.coordinator.runs.verdict import metrics_view, run_facts, verdict_of
from raycloak.coordinator.training.assignment import Assignment, NewRun, Order, ReplayedRun, ResumedRun
from raycloak.coordinator.training.callback_caller import CallbackCaller
from raycloak.coordinator.training.callbacks import Callback
from raycloak.coordinator.training.evaluation import public_evaluation
from raycloak.coordinator.training.pace import OPEN, Pace, StopRequest, stop_on_signals
from raycloak.coordinator.training.phases import Coordinator
from raycloak.coordinator.training.reporting import Outset, Reporting, StepReport
from raycloak.metrics.collectors import (
    GpuReadingCollector,
    LedgerCollector,
    RunMetrics,
    ServiceCollector,
)
from raycloak.metrics.errors import ConfigError, DatasetError, RaycloakError, RunFailedError
from raycloak.metrics.events import EventWriter
from raycloak.metrics.exporter import Exporter
from raycloak.metrics.server import MetricsServer
from raycloak.metrics.traces import OFF, UNRECORDED, Span, Traces, tracing
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.inputs.in_memory import export_in_memory, unused_keys
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released

T = TypeVar("T")


@dataclass(eq=False)
class Execution:
    """Executes one run, resumed as often as it is lost.

    Args:
        model: given by the configuration or by the caller.
        base: folder that relative paths and ``module:function`` names start from.
        in_memory: a map-style dataset instead of ``config.dataset``.
        progress: called after every finished step.
        phase: called with a few words when another phase begins.
        opened: called with the directory of the run, before anything is charged.
        begun: called when members are admitted, before the first step of each execution.
        measured: called with every release of a measurement, and the epsilon of the account after its charge.
        notice: told, in one line each, what a watcher needs to know.
        stop: asked between two steps.
        handle_signals: whether SIGINT and SIGTERM make ``stop`` while a run executes; main thread only.
        metrics: functions of the user's own of outputs and labels of the public split, beside the configuration's.
        callbacks: of the user's own; checked.
        reserved: a placement group with places for the initial workers, as `Placement` takes it.
        pace: when steps may be charged and released; a replay asks nobody.
        small_epsilon: whether a cap that is rarely meant is meant.
    """

    config: RunConfig
    model: ModelSource
    base: str
    _: KW_ONLY
    notice: Callable[[str], None]
    in_memory: Any | None = None
    progress: Callable[[StepReport], None] = lambda report: None
    phase: Callable[[str], None] = lambda what: None
    opened: Callable[[RunFolder], None] = lambda folder: None
    begun: Callable[[Outset], None] = lambda outset: None
    measured: Callable[[Released, float], None] = lambda released, epsilon: None
    stop: StopRequest = field(default_factory=StopRequest)
    handle_signals: bool = False
    metrics: Sequence[Metric] = ()
    callbacks: InitVar[Sequence[Callback]] = ()
    reserved: Any | None = None
    pace: Pace = OPEN
    small_epsilon: bool = False
    # Kept over every execution of the run: an outcome warns of what happened in any of them.
    warnings: list[str] = field(init=False, default_factory=list)
    # None until a run is opened: a resume after a failure needs to know which one it was.
    folder: RunFolder | None = field(init=False, default=None)
    _callbacks: CallbackCaller = field(init=False)
    # What the account had been charged when this execution began to train.
    _charged: float = field(init=False, default=0.0)
    # The address of the evidence service; None until members are admitted, and where nothing is served.
    _served: str | None = field(init=False, default=None)
    _demands_boundary: bool = field(init=False, default=False)
    # That each worker of this execution is given.
    _gpus: float = field(init=False, default=0.0)
    _traces: Traces = field(init=False, default=OFF)
    _span: Span = field(init=False, default=UNRECORDED)

    def __post_init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = CallbackCaller(callbacks, self._warn)

    def begin(self, secret_file: str | None) -> "Outcome":
        """Execute a new run, in a directory of its own."""
        self._warn_of(secret_file)
        with ExitStack() as stack:
            # First, so that it comes last: no process is kept up for callbacks that are still at work.
            stack.callback(self._callbacks.finish)
            launched, key, folder = self._new(stack, secret_file)
            return self._conduct(stack, launched, key, folder, NewRun(self._archive(folder), self.stop))

    def resume(self, folder: RunFolder) -> "Outcome":
        """Resume an unfinished run, from its newest package."""
        archive, recorded = self._archive(folder), folder.manifest()
        if recorded is None:  # It ended before it had a manifest, and so before anything was charged.
            return self._again(folder, NewRun(archive, self.stop))
        return self._again(folder, ResumedRun(recorded, archive, self.stop))

    def go_on(self, folder: RunFolder) -> "Outcome":
        """Resume a run that was begun with this configuration.

        Raises:
            RefusedError: ``resume_differs``.
            ConfigError: ``nothing_to_resume`` if it is complete, though it was not marked so.
        """
        require_same_config(folder.config(), self.config)
        try:
            return self.resume(folder)
        except ConfigError as error:
            if error.code != "secret_destroyed" or not (folder.path / "parameters.safetensors").exists():
                raise
            # The process ended after the run was complete, and before it was marked so.
            folder.mark("done")
            raise ConfigError(
                "nothing_to_resume",
                f"the run in {folder.path} is complete.",
                "Run without --resume to start another one.",
            ) from None

    def recovered(self, execute: Callable[[], "Outcome"]) -> "Outcome":
        """Return the outcome of ``execute``; resume from the newest package if the node with the model is lost."""
        # Bounded, because a cluster that loses its node each time would go on for ever.
        for _ in range(self.config.failure.max_failures):
            try:
                return execute()
            except RunFailedError as error:
                if error.code != "state_lost":
                    raise
                self.notice(f"{error.message}; resuming from the newest sealed package")
                assert self.folder is not None, "it has begun"
                execute = partial(self.resume, self.folder)
        return execute()

    def replay(self, folder: RunFolder, recorded: Manifest, first: int, last: int) -> Finished:
        """Compute finished steps of a run again; its directory stays as it is, but for ``replay.log``.

        Args:
            recorded: the run's manifest.
            first, last: the range of steps; it begins earlier if the newest package before ``first`` does.
        """
        return self._again(folder, ReplayedRun(recorded, self._archive(folder), first, last, self.stop)).finished

    def _again(self, folder: RunFolder, assignment: Assignment) -> "Outcome":
        self._warn_of(folder.record.secret_file)
        with ExitStack() as stack:
            # First, so that it comes last: no process is kept up for callbacks that are still at work.
            stack.callback(self._callbacks.finish)
            self._trace(stack, "resumed" if assignment.charges else "replayed")
            # Locked before anything is opened: two drivers of one run would write the same files.
            stack.enter_context(run_lock(folder.record.run_id))
            bind = self.config.attestation.bind if assignment.charges else None
            launched = self._launch(stack, bind, assignment.recorded)
            _, key = launched.control.open_run(folder.record.secret_file, folder.record.run_id)
            return self._conduct(stack, launched, key, folder, assignment)

    def by_hand(self, stack: ExitStack) -> Order:
        """Start every process of a new run whose step loop its caller writes; ``stack`` ends it."""
        launched, key, self.folder = self._new(stack, None)
        self._span.set(run=self.folder.record.run_id)
        attach_log(self.folder.path / "run.log")
        control = launched.control.control(self.config.failure.control_deadline_s, self.config.failure.max_failures)
        return self._order(stack, launched, key, self.folder, NewRun(None, self.stop), control)

    def _new(self, stack: ExitStack, secret_file: str | None) -> tuple[Launched, SignerPublic, RunFolder]:
        """Start every process of a new run, which ``stack`` ends, and make its directory."""
        self._trace(stack, "new")
        launched = self._launch(stack, self.config.attestation.bind, None)
        run_id, key = launched.control.open_run(secret_file)
        stack.enter_context(run_lock(run_id))
        return launched, key, RunFolder.create(self.config, run_id, self.base, secret_file)

    def _order(
        self,
        stack: ExitStack,
        launched: Launched,
        key: SignerPublic,
        folder: RunFolder,
        assignment: Assignment,
        control: Control,
    ) -> Order:
        # First, so that nobody is given code that it would refuse.
        code = listed_code(launched.policy, self.config, self._callables(), self.base)
        public = partial(public_evaluation, self.config, self.model, self.base, self.metrics, self._warn)
        return Order(
            config=self.config,
            session=launched.session(folder.record.run_id, key, control),
            reporting=self._reporting(stack, launched.samplers, folder, control, assignment),
            setup=self._setup(stack, folder, assignment, launched.policy),
            code=code,
            public=public if assignment.charges else lambda: None,
            folder=folder,
            assignment=assignment,
            data=data_name(self.config.dataset, self.base),
            pace=self.pace if assignment.charges else OPEN,
            small_epsilon=self.small_epsilon,
        )

    def _trace(self, stack: ExitStack, execution: str) -> None:
        """Begin the span of an execution, which ends with ``stack``."""
        self._traces = stack.enter_context(tracing())
        self._span = stack.enter_context(self._traces.span("run", execution=execution))

    def _archive(self, folder: RunFolder) -> Archive:
        return Archive(
            self.config.checkpoint, folder.record.run_id, Path(self.base), self.notice, self._callbacks.published
        )

    def _warn_of(self, secret_file: str | None) -> None:
        if secret_file is not None and (warning := exposure(Path(secret_file))) is not None:
            self.notice(warning)

    def _launch(self, stack: ExitStack, bind: str | None, recorded: Manifest | None) -> Launched:
        """Join or start Ray, take the signals over from it, and start every process of a session."""
        # It may have the examples, and the keys of simulated platforms.
        keep_memory_private()
        with self._traces.span("connect"):
            if start_ray(self.config, self.phase):
                stack.callback(disconnect)
            require_no_secret_in_job()
            if (uploaded := job_folder()) is not None:
                require_none_in_job(uploaded)
        # After Ray, which replaces the handler of SIGTERM when it starts.
        if self.handle_signals:
            stack.enter_context(stop_on_signals(self.stop, self.notice))
        self.phase("starting workers")
        with self._traces.span("launch"):
            config = self.config
            placement = Placement(config.placement, config.num_workers, config.use_gpu, self.reserved)
            self._gpus = placement.num_gpus
            if config.use_gpu and not self._gpus:
                self.warnings.append("No worker was given a GPU: all computed on the CPU.")
            numerics = None if recorded is None else recorded.computation.numerics
            return launch(stack, config, Path(self.base), placement, bind, numerics)

    def _conduct(
        self,
        stack: ExitStack,
        launched: Launched,
        orchestrator_key: SignerPublic,
        folder: RunFolder,
        assignment: Assignment,
    ) -> "Outcome":
        """Run the coordinator; an error that ends it early carries the result so far."""
        self.folder, started = folder, launched.began
        self._demands_boundary = launched.policy.require_boundary is not None
        self.opened(folder)
        self._span.set(run=folder.record.run_id)
        attach_log(folder.path / ("run.log" if assignment.charges else "replay.log"))
        failure = self.config.failure
        control = launched.control.control(failure.control_deadline_s, failure.max_failures)
        coordinator: Coordinator | None = None
        try:
            coordinator = Coordinator(self._order(stack, launched, orchestrator_key, folder, assignment, control))
            if assignment.charges:
                folder.mark("running")
            finished = coordinator.run()
        except Exception as error:
            if assignment.charges and coordinator is not None:
                self._fail(coordinator, folder, error, started)
            elif assignment.recorded is None:
                self._void(control, folder)
            raise
        # An interrupt ends it at once and marks nothing, as a kill does: log and verdict stay those of before.
        assert finished.ending is not None, "a finished run has an ending"
        if assignment.charges:
            folder.mark("stopped" if finished.ending is Ending.STOPPED else "done")
        seconds = time.monotonic() - started
        self._callbacks.settle()
        outcome = self._outcome(finished, folder, finished.ending.value, seconds)
        if assignment.charges:
            self._keep(outcome)
            self._callbacks.ended(folder.path, outcome.ending, outcome.result()["metrics"])
        return outcome

    def _warn(self, sentence: str) -> None:
        """Tell a watcher at once, and the verdict at the end."""
        self.warnings.append(sentence)
        self.notice(f"warning: {sentence}")

    def _void(self, control: Control, folder: RunFolder) -> None:
        """End a new run that failed before it had a coordinator."""
        folder.mark("void")
        log = str(folder.path / "evidence.jsonl")
        try:
            control.orchestrator.finish(log, self.config.secret_retention == "run")
        # The error that ended the run is the one to report.
        except (ActorLost, RaycloakError) as trouble:
            self.notice(f"a generated secret was not destroyed: {trouble}")

    def _fail(self, coordinator: Coordinator, folder: RunFolder, error: Exception, started: float) -> None:
        """Save the result of a failed run so far, and attach it to the error.

        A run that was never charged has nothing to resume, so a generated secret goes at once. A resumed run stays
        resumable, whatever kept it from training.

        Guarantee: a run that was charged is marked as failed only beside its newest evidence log. Without that it
        counts as killed, and an auditor is given nothing.
        """
        begun, seconds = coordinator.begun, time.monotonic() - started
        try:
            finished = coordinator.salvage(destroy=not begun and self.config.secret_retention == "run")
        except (ActorLost, RaycloakError, OSError) as trouble:
            self.notice(f"not everything could be saved: {trouble}")
            finished = None
        if coordinator.log_is_saved or not begun:
            try:
                folder.mark("failed" if begun else "void")
                # A verdict, if there is one, is of an execution before, and charges came since.
                if finished is None and coordinator.charged_epsilon is not None:
                    folder.drop_verdict()
                    self._show(folder)
            except OSError as trouble:  # a full disk may be what ended the run; a resume takes "running" as well
                self.notice(f"the run directory was not marked as failed: {trouble.strerror}")
        if isinstance(error, RaycloakError) and begun:
            # The ledger's record, where it answered: a charge whose receipt was lost is in no receipt.
            error.spent_epsilon = finished.charged_epsilon if finished else coordinator.charged_epsilon
            error.step = coordinator.step
            if finished is not None:
                self._callbacks.settle()
                outcome = self._outcome(finished, folder, error.code, seconds)
                error.result = outcome.result()
                self._keep(outcome)
        so_far = error.result["metrics"] if isinstance(error, RaycloakError) and error.result else None
        code = error.code if isinstance(error, RaycloakError) else "unexpected"
        self._callbacks.ended(folder.path, code, so_far)

    def _keep(self, outcome: "Outcome") -> None:
        """Write the verdict into the run directory, where the weights are on disk by now."""
        result = outcome.result()
        try:
            outcome.folder.write_verdict(json_text({"run_dir": result["run_dir"], **result["metrics"]}))
        except OSError as trouble:  # a full disk: the caller gets the verdict all the same
            self.notice(f"verdict.json was not written: {trouble.strerror}")
        self._show(outcome.folder)

    def _show(self, folder: RunFolder) -> None:
        """Write the page of the run.

        Guarantee: a page that cannot be written fails no run; a warning names it.
        """
        # Here, because it draws: a second of imports that only the end of a run needs.
        from raycloak.coordinator.report.document import FILE, write_report

        try:
            write_report(folder.path)
        except Exception as trouble:  # noqa: BLE001 - the run is over and charged, whatever a page of it needs
            self._warn(f"{FILE} was not written ({trouble}); try raycloak report {folder.path}")

    def _outcome(self, finished: Finished, folder: RunFolder, ending: str, seconds: float) -> "Outcome":
        boundary: Boundary = "child_processes" if self.config.boundary is None else "vaults"
        if boundary == "vaults" and self._demands_boundary:
            boundary = "demanded_vaults"
        return Outcome(finished, folder, ending, seconds, tuple(self.warnings), self._served, boundary)

    def _callables(self) -> list[str]:
        """Return the names of the callables that were given in Python."""
        named = [self.model.name] if self.model.function is not None else []
        return [*named, *(getattr(metric, "__name__", type(metric).__name__) for metric in self.metrics)]

    def _setup(self, stack: ExitStack, folder: RunFolder, assignment: Assignment, policy: Policy) -> WorkerSetup:
        return WorkerSetup(
            model=self.model,
            loss=loss_spec(self.config.loss),
            dataset=self._descriptor(stack, folder),
            base=self.base,
            seed=self.config.seed,
            device="cuda" if self._gpus else "cpu",
            gpus=self._gpus or 1.0,
            allow_nondeterministic=self.config.allow_nondeterministic,
            micro_batch_bytes=micro_batch_bytes(self.config),
            threads=self.config.threads_per_worker,
            mode=compute_mode(self.config),
            evaluation=split_of_workers(self.config, self.metrics) if assignment.charges else None,
            code=policy.code,
        )

    def _descriptor(self, stack: ExitStack, folder: RunFolder) -> DatasetDescriptor:
        if self.config.dataset is not None:
            return descriptor(self.config.dataset)
        if len(alive_nodes()) > 1:
            raise DatasetError(
                "dataset_in_memory",
                "an in-memory dataset cannot reach the workers of other nodes.",
                "Give config.dataset, which every worker opens itself.",
            )
        self.warnings.append("The dataset was given in memory: the driver has seen the examples.")
        path = folder.path / "examples.npz"
        stack.callback(path.unlink, missing_ok=True)
        written = export_in_memory(self.in_memory, path)
        if unused := unused_keys(self.in_memory):
            self.warnings.append(f"Of each example {', '.join(unused)} are left out: no model of text takes them.")
        # The driver has seen these examples, so a key of its own state folder hides nothing more from it.
        return written.model_copy(update={"fingerprint_key": str(home.data_key_file())})

    def _reporting(
        self, stack: ExitStack, samplers: GpuSamplers, folder: RunFolder, control: Control, assignment: Assignment
    ) -> Reporting:
        exporter = Exporter()
        exporter.add(LedgerCollector(lambda: metrics_view(_asked(control.actors["ledger"], PrivacyLedger.view))))
        exporter.add(GpuReadingCollector(samplers.sample))
        if self.config.attestation.bind is not None and assignment.charges:
            exporter.add(
                ServiceCollector(lambda: _asked(control.actors["orchestrator"], EvidenceOrchestrator.service_figures))
            )
        server = MetricsServer(exporter.registry, self.config.metrics.bind)
        stack.push(partial(_close_page, server, assignment.charges))
        self.notice(f"metrics: {server.url}")
        for reason in samplers.unavailable_reasons():
            self.notice(reason)
        # Steps that a replay repeats are no part of the run's record.
        path = folder.path / "metrics.jsonl" if assignment.charges else Path(os.devnull)
        events = stack.enter_context(EventWriter(path))
        return Reporting(
            metrics=partial(self._admitted, exporter, control, folder),
            events=events,
            progress=self._stepped,
            phase=self.phase,
            begun=partial(self._outset, folder, assignment),
            evaluated=self._callbacks.evaluated,
            measured=self._released,
            changed=self._callbacks.changed,
            departure=self._departed,
            joined=lambda member_id: self.notice(f"{member_id} joined"),
            restart=self._restarted,
            warned=lambda warning: self.notice(f"warning: {warning}"),
            traces=self._traces,
        )

    def _admitted(
        self, exporter: Exporter, control: Control, folder: RunFolder, manifest: Manifest, evidence_class: str
    ) -> RunMetrics:
        if (service := announce(control, manifest, evidence_class, folder.path)) is not None:
            self._served = service.address
            self.notice(f"evidence service: {service.address} ({service.evidence} evidence)")
        metrics = RunMetrics(run_facts(manifest, evidence_class, self.config))
        exporter.add(metrics)
        return metrics

    def _outset(self, folder: RunFolder, assignment: Assignment, outset: Outset) -> None:
        self._charged = outset.charged_epsilon
        if isinstance(assignment, ResumedRun):
            steps = outset.plan.mechanism.steps
            free = outset.charged_steps > outset.finished_steps
            self.notice(
                f"resumed after step {outset.finished_steps} of {steps}"
                + (": steps that are charged already are not charged again" if free else "")
            )
        self.begun(outset)
        self._callbacks.started(folder.path, self.config, outset)

    def _released(self, released: Released, epsilon: float) -> None:
        self.measured(released, epsilon)
        self._callbacks.measured(released)

    def _stepped(self, report: StepReport) -> None:
        if report.epsilon is not None and report.epsilon < self._charged:
            # A step that is repeated has its receipt of then; the account has been charged more since.
            report = replace(report, epsilon=self._charged)
        self.progress(report)
        self._callbacks.tell(report)

    def _departed(self, departure: Departure) -> None:
        line = f"{departure.member_id} left: {departure.code}: {departure.message}"
        if not departure.asked_for:
            self.warnings.append(line)
        self.notice(line)

    def _restarted(self, restart: Restart) -> None:
        line = f"the {restart.role} was lost ({restart.cause}) and started again in {restart.seconds:.1f} s"
        self.warnings.append(line)
        self.notice(line)


@dataclass(frozen=True)
class Outcome:
    """The result of an execution, where it lies, and how it ended.

    Attributes:
        ending, evidence_service, boundary: see `raycloak.coordinator.record.verdict.Verdict`.
    """

    finished: Finished
    folder: RunFolder
    ending: str
    wall_seconds: float
    warnings: tuple[str, ...]
    evidence_service: str | None = None
    boundary: Boundary = "child_processes"

    # Four accountants compute it, which takes seconds for some plans.
    @cached_property
    def _metrics(self) -> dict[str, Any]:
        warnings = (*self.finished.plan.warnings, *self.warnings)
        verdict = verdict_of(self.finished, self.folder.path, self.wall_seconds, self.ending, warnings)
        return replace(verdict, evidence_service=self.evidence_service, boundary=self.boundary).metrics()

    def result(self) -> dict[str, Any]:
        """Return ``run_dir`` and ``metrics``, the fields of the verdict."""
        return {"run_dir": str(self.folder.path), "metrics": self._metrics}


def _close_page(
    server: MetricsServer,
    charges: bool,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Close the page; unless it was a replay or an interrupt, a Prometheus that watches may first read the end."""
    if charges and (kind is None or issubclass(kind, Exception)):
        server.await_reader()
    server.close()


def _asked(actor: Actor, method: Callable[..., T]) -> T:
    """Ask without a `Control`: a thread of the metrics server asks, and must not replace an actor."""
    return fetch(ask(actor.handle, method), deadline_s=5.0)
