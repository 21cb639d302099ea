"""Execution: one session of a run on the Ray cluster that is there or on a local one.

It hides how actors, platforms, metrics and logs of a session are started and how they end, so that a first execution,
one that goes on with a run, and a replay differ in their assignment only.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from attestation.hybrid_signature import SignerPublic
from attestation.run_secret import exposure
from coordinator.actors import (
    GpuSamplers,
    alive_nodes,
    cluster_gpus,
    connect,
    fetch,
)
from coordinator.archive import Archive
from coordinator.backend import Actor, ActorLost
from coordinator.config import RunConfig
from coordinator.control import Control, Restart
from coordinator.coordinator import Assignment, Coordinator
from coordinator.departures import Departure
from coordinator.evaluation import public_evaluator
from coordinator.launch import Launched, launch
from coordinator.outcome import Ending, Finished
from coordinator.output import attach_log
from coordinator.placement import Placement
from coordinator.plan_command import descriptor
from coordinator.progress import StepReport
from coordinator.reporting import Reporting
from coordinator.run_folder import RunFolder, run_lock
from coordinator.run_service import announce
from coordinator.sealed_terms import evaluation_folder
from coordinator.stopping import StopRequest, stop_on_signals
from coordinator.views import metrics_view, run_facts, verdict_of
from metrics.collectors import GpuReadingCollector, LedgerCollector, RunMetrics
from metrics.errors import DatasetError, RaycloakError
from metrics.events import EventWriter
from metrics.exporter import Exporter
from metrics.server import MetricsServer
from workers.descriptor import DatasetDescriptor, export_in_memory
from workers.manifest import Manifest
from workers.models import ModelSource
from workers.worker_messages import WorkerSetup


class Execution:
    """What is needed to execute a run, and the executing of it.

    Args:
        model: given by the configuration or by the caller.
        base: folder that relative paths and ``module:function`` names start from.
        in_memory: a map-style dataset instead of ``config.dataset``.
        progress: called after every finished step.
        notice: told, in one line each, what a watcher needs to know.
        stop: asked between two steps.
        handle_signals: whether SIGINT and SIGTERM make ``stop`` while the run goes on; main thread only.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ModelSource,
        base: str,
        *,
        in_memory: Any | None = None,
        progress: Callable[[StepReport], None] = lambda report: None,
        notice: Callable[[str], None],
        stop: StopRequest | None = None,
        handle_signals: bool = False,
    ) -> None:
        self._config = config
        self._model = model
        self._base = base
        self._in_memory = in_memory
        self._progress = progress
        self._notice = notice
        self._stop = stop or StopRequest()
        self._handle_signals = handle_signals
        self.warnings: list[str] = []
        self.folder: RunFolder | None = None
        self._served: str | None = None

    def begin(self, secret_file: str | None) -> "Outcome":
        """Execute a new run, in a directory of its own."""
        self._warn_of(secret_file)
        with ExitStack() as stack:
            launched = self._launch(stack, self._config.attestation.bind)
            run_id, key = launched.control.open_run(secret_file)
            stack.enter_context(run_lock(run_id))
            folder = RunFolder.create(self._config, run_id, self._base, secret_file)
            return self._conduct(stack, launched, key, folder, Assignment(self._archive(folder), stop=self._stop))

    def resume(self, folder: RunFolder) -> "Outcome":
        """Go on with an unfinished run, from its newest package."""
        assignment = Assignment(self._archive(folder), folder.manifest(), stop=self._stop)
        return self._again(folder, assignment)

    def repeat(self, folder: RunFolder, assignment: Assignment) -> Finished:
        """Repeat steps of a run, from a package of it; its directory stays as it is, but for ``replay.log``."""
        return self._again(folder, replace(assignment, archive=self._archive(folder))).finished

    def _again(self, folder: RunFolder, assignment: Assignment) -> "Outcome":
        self._warn_of(folder.record.secret_file)
        with ExitStack() as stack:
            stack.enter_context(run_lock(folder.record.run_id))
            launched = self._launch(stack, self._config.attestation.bind if assignment.releases else None)
            _, key = launched.control.open_run(folder.record.secret_file, folder.record.run_id)
            return self._conduct(stack, launched, key, folder, assignment)

    def _archive(self, folder: RunFolder) -> Archive:
        return Archive(self._config.checkpoint, folder.record.run_id, Path(self._base), self._notice)

    def _warn_of(self, secret_file: str | None) -> None:
        if secret_file is not None and (warning := exposure(Path(secret_file))) is not None:
            self._notice(warning)

    def _launch(self, stack: ExitStack, bind: str | None) -> Launched:
        """Join or start Ray, take the signals over from it, and start every process of a session."""
        if connect(num_cpus=self._config.num_workers + 1):
            stack.callback(ray.shutdown)
        if self._handle_signals:
            stack.enter_context(stop_on_signals(self._stop, self._notice))
        return launch(stack, self._config, Path(self._base), self._placement(), bind)

    def _conduct(
        self,
        stack: ExitStack,
        launched: Launched,
        orchestrator_key: SignerPublic,
        folder: RunFolder,
        assignment: Assignment,
    ) -> "Outcome":
        """Run the coordinator; what ends it early is raised with the result so far."""
        self.folder, started = folder, launched.began
        attach_log(folder.path / ("run.log" if assignment.releases else "replay.log"))
        failure = self._config.failure
        control = launched.control.control(failure.control_deadline_s, failure.max_failures)
        coordinator: Coordinator | None = None
        try:
            session = launched.session(folder.record.run_id, orchestrator_key, control)
            reporting = self._reporting(stack, launched.samplers, folder, control, assignment.releases)
            setup = self._setup(stack, folder, assignment.releases)
            evaluator = public_evaluator(self._config, self._model, self._base) if assignment.releases else None
            coordinator = Coordinator(self._config, session, setup, evaluator, reporting, folder, assignment)
            if assignment.releases:
                folder.mark("running")
            finished = coordinator.run()
        except Exception as error:
            if assignment.releases and coordinator is not None:
                self._fail(coordinator, folder, error, started)
            elif assignment.recorded is None:
                self._give_up(control, folder)
            raise
        except BaseException:  # Whoever interrupts wants it to end at once; a resume finds what was sealed before.
            if assignment.releases:
                folder.mark("failed")
            raise
        assert finished.ending is not None, "it has ended"
        if assignment.releases:
            folder.mark("stopped" if finished.ending is Ending.STOPPED else "done")
        return self._outcome(finished, folder, finished.ending.value, started)

    def _give_up(self, control: Control, folder: RunFolder) -> None:
        """End a new run that failed before it had a coordinator."""
        folder.mark("void")
        log = str(folder.path / "evidence.jsonl")
        try:
            control.orchestrator("finish", (), log, self._config.secret_retention == "run")
        except (ActorLost, RaycloakError) as trouble:
            self._notice(f"a generated secret was not destroyed: {trouble}")

    def _fail(self, coordinator: Coordinator, folder: RunFolder, error: Exception, started: float) -> None:
        """Save what a failed run has come to, and tell the error what that is.

        A run that was never charged has nothing to resume, so a generated secret goes at once. One that was gone on
        with stays what it was before, whatever kept it from going on.
        """
        begun = coordinator.begun
        try:
            folder.mark("failed" if begun else "void")
        except OSError as trouble:  # a full disk may be what ended the run; a resume takes "running" as well
            self._notice(f"the run directory was not marked as failed: {trouble.strerror}")
        try:
            finished = coordinator.salvage(destroy=not begun and self._config.secret_retention == "run")
        except (ActorLost, RaycloakError, OSError) as trouble:
            self._notice(f"not everything could be saved: {trouble}")
            finished = None
        if isinstance(error, RaycloakError) and begun:
            error.step, error.spent_epsilon = coordinator.step, coordinator.charged_epsilon
            if finished is not None:
                error.result = self._outcome(finished, folder, error.code, started).result()

    def _outcome(self, finished: Finished, folder: RunFolder, ending: str, started: float) -> "Outcome":
        seconds = time.monotonic() - started
        return Outcome(finished, folder, ending, seconds, tuple(self.warnings), self._served)

    def _placement(self) -> Placement:
        config = self._config
        placement = Placement(config.placement, config.num_workers, config.use_gpu)
        if config.use_gpu and not placement.num_gpus:
            self.warnings.append("use_gpu is set, but the cluster has no GPU: the workers computed on the CPU.")
        return placement

    def _setup(self, stack: ExitStack, folder: RunFolder, evaluates: bool) -> WorkerSetup:
        gpu = self._config.use_gpu and cluster_gpus() > 0
        return WorkerSetup(
            model=self._model,
            loss=self._config.loss,
            dataset=self._descriptor(stack, folder),
            base=self._base,
            seed=self._config.seed,
            device="cuda" if gpu else "cpu",
            allow_nondeterministic=self._config.allow_nondeterministic,
            evaluation=evaluation_folder(self._config) if evaluates else None,
        )

    def _descriptor(self, stack: ExitStack, folder: RunFolder) -> DatasetDescriptor:
        if self._config.dataset is not None:
            return descriptor(self._config.dataset)
        if len(alive_nodes()) > 1:
            raise DatasetError(
                "dataset_in_memory",
                "an in-memory dataset cannot reach the workers of other nodes.",
                "Give config.dataset, which every worker opens itself.",
            )
        self.warnings.append("The dataset was given in memory: the driver has seen the examples.")
        path = folder.path / "examples.npz"
        stack.callback(path.unlink, missing_ok=True)
        return export_in_memory(self._in_memory, path)

    def _reporting(
        self, stack: ExitStack, samplers: GpuSamplers, folder: RunFolder, control: Control, releases: bool
    ) -> Reporting:
        exporter = Exporter()
        exporter.add(LedgerCollector(lambda: metrics_view(_ask(control.actors["ledger"], "view", deadline_s=5.0))))
        exporter.add(GpuReadingCollector(samplers.sample))
        server = MetricsServer(exporter.registry, self._config.metrics.bind)
        stack.callback(server.close)
        self._notice(f"metrics: {server.url}")
        for reason in samplers.unavailable_reasons():
            self._notice(reason)
        # What a replay does is not part of the run's record.
        events = stack.enter_context(EventWriter(folder.path / "metrics.jsonl" if releases else Path(os.devnull)))
        return Reporting(
            metrics=partial(self._admitted, exporter, control, folder),
            events=events,
            progress=self._progress,
            departure=self._departed,
            joined=lambda member_id: self._notice(f"{member_id} joined"),
            restart=self._restarted,
            warned=lambda warning: self._notice(f"warning: {warning}"),
        )

    def _admitted(
        self, exporter: Exporter, control: Control, folder: RunFolder, manifest: Manifest, evidence_class: str
    ) -> RunMetrics:
        if (service := announce(control, manifest, evidence_class, folder.path)) is not None:
            self._served = service.address
            self._notice(f"evidence service: {service.address} ({service.evidence} evidence)")
        metrics = RunMetrics(run_facts(manifest, evidence_class, self._config.fewest_workers))
        exporter.add(metrics)
        return metrics

    def _departed(self, departure: Departure) -> None:
        line = f"{departure.member_id} left: {departure.code}: {departure.message}"
        if not departure.asked_for:
            self.warnings.append(line)
        self._notice(line)

    def _restarted(self, restart: Restart) -> None:
        line = f"the {restart.role} was lost ({restart.cause}) and started again in {restart.seconds:.1f} s"
        self.warnings.append(line)
        self._notice(line)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an execution leaves.

    Attributes:
        ending, evidence_service: see `coordinator.verdict.Verdict`.
    """

    finished: Finished
    folder: RunFolder
    ending: str
    wall_seconds: float
    warnings: tuple[str, ...]
    evidence_service: str | None = None

    def result(self) -> dict[str, Any]:
        """``run_dir`` and ``metrics``, the fields of the verdict."""
        path, warnings = self.folder.path, (*self.finished.plan.warnings, *self.warnings)
        verdict = verdict_of(self.finished, path, self.wall_seconds, self.ending, warnings)
        return {"run_dir": str(path), "metrics": replace(verdict, evidence_service=self.evidence_service).metrics()}


def _ask(target: Actor, method: str, deadline_s: float) -> Any:
    return fetch(getattr(target.handle, method).remote(), deadline_s)
