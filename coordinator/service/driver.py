"""A driver: the process that executes one run of the service, at the pace that the service sets.

Commands arrive and reports leave over the channel to its parent, as `raycloak.coordinator.service.pipe` has them. The
end of its commands ends it after the step that computes, as SIGTERM does; a step that waits for its release is left.
Either way the run can be resumed.

Its exit code is 0 after the report of an ending, and that of the error after the report of a failure.
"""

import json
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.processes.channel import Channel
from raycloak.coordinator.cluster.ray_checks import check_ray
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.console.output import Output, command_output
from raycloak.coordinator.planning.first_look import first_look
from raycloak.coordinator.quick_imports import quickly
from raycloak.coordinator.record.folder import RunFolder, is_executing, run_of
from raycloak.coordinator.record.run_reader import read_verdict
from raycloak.coordinator.service import pipe
from raycloak.coordinator.training.pace import GatedPace, StopRequest
from raycloak.metrics.errors import ConfigError, ProtocolError, RefusedError, RunFailedError

if TYPE_CHECKING:
    from raycloak.coordinator.runs.execution import Execution
    from raycloak.coordinator.training.reporting import Outset, StepReport
    from raycloak.coordinator.training.steps import Training
    from raycloak.workers.terms.measurement import Released as Measured
    from raycloak.workers.terms.public_sums import PublicSums

FORMER_S: Final = 120.0
"""How long the former driver of the run may take to end, in seconds: as long as a step. Its input ended before."""

LOOK_EVERY_S: Final = 0.1


class PacedRun:
    """One execution of a run whose steps the service allows and releases.

    Args:
        parent: brings the commands behind ``begin``.
    """

    def __init__(self, begin: pipe.Begin, parent: Channel, stop: StopRequest) -> None:
        self._begin = begin
        self._parent = parent
        self._stop = stop
        self._pace = GatedPace(stop, self._computed, self._held, lambda ending: self._tell(pipe.Over(ending=ending)))
        self._losses: dict[int, float] = {}
        # A daemon: the service may keep its end open for longer than this process lives.
        threading.Thread(target=self._listen, name="commands", daemon=True).start()

    def run(self, output: Output) -> None:
        """Execute the run and report its ending.

        Raises:
            RaycloakError: what ended it; nothing is half-written and what was charged stays charged.
        """
        begin = self._begin
        config = parse_config(begin.config)
        former = self._former(config)
        if former is not None and former.record.status == "done":
            self._opened(former)
            self._tell(_ended_before(former))
            return
        # Before the libraries of a run, which take seconds to import.
        first_look(config, begin.base, begin.run_secret, former is not None)
        check_ray()
        with quickly():
            from raycloak.coordinator.runs.ray_start import ray_ahead
        with ray_ahead(config, self._phase):
            self._phase("loading libraries")
            with quickly():
                execution = self._execution(config, output)
            secret = str(begin.run_secret) if begin.run_secret is not None else None
            try:
                outcome = execution.recovered(
                    (lambda: execution.go_on(former)) if former is not None else lambda: execution.begin(secret)
                )
            except ConfigError as error:
                # The former driver was killed after the last act of a run that is complete, before it could mark it.
                if error.code != "nothing_to_resume" or former is None:
                    raise
                self._opened(former)
                self._tell(_ended_before(former))
            except RunFailedError as error:
                if error.code != "stopped":
                    raise
                self._tell(pipe.Ended(ending="stopped", metrics=None))
            else:
                self._tell(pipe.Ended(ending=outcome.ending, metrics=outcome.result()["metrics"]))

    def _former(self, config: RunConfig) -> RunFolder | None:
        """Return the run to resume, once no other process executes it; None if there is none, or it was void.

        Raises:
            RefusedError: ``run_in_progress``.
        """
        if self._begin.run_id is None:
            return None
        found = run_of(self._begin.run_id)
        if found is None:
            return None
        end = time.monotonic() + FORMER_S
        # The driver of a service that was killed ends after its step.
        while is_executing(found.path, found.record.run_id):
            if self._stop.made or time.monotonic() > end:
                message = f"another process is executing run {found.record.run_id}."
                raise RefusedError("run_in_progress", message, "Wait for it, or stop it first.")
            time.sleep(LOOK_EVERY_S)
        # Again: it may have marked the run as done, or as void, by now.
        return run_of(self._begin.run_id)

    def _execution(self, config: RunConfig, output: Output) -> "Execution":
        from raycloak.coordinator.evidence.sources import configured_policy
        from raycloak.coordinator.loggers.configured import configured_loggers
        from raycloak.coordinator.planning.model_source import model_source
        from raycloak.coordinator.planning.plan import check_public
        from raycloak.coordinator.runs.execution import Execution
        from raycloak.coordinator.training.callbacks import own_callbacks
        from raycloak.workers.inputs.user_code import portable_base

        base = self._begin.base
        if config.dataset is None:
            raise ConfigError("config", "no dataset is named.", "Name one in the configuration.")
        check_public(config)
        configured_policy(config.policy, config.collateral, base)

        def notice(line: str) -> None:
            output.announce(line)
            self._tell(pipe.Notice(line=line))

        return Execution(
            config,
            model_source(config.model),
            portable_base(base),
            progress=self._stepped,
            phase=self._phase,
            opened=self._opened,
            begun=self._ready,
            measured=self._measured,
            notice=notice,
            stop=self._stop,
            handle_signals=True,
            callbacks=(*own_callbacks(config.callbacks, (), base), *configured_loggers(config.loggers, base)),
            pace=self._pace,
        )

    def _tell(self, report: pipe.Report) -> None:
        """Send a report, from any thread; if the service is gone, have the run stopped."""
        try:
            self._parent.send(report)
        except ConnectionError:
            self._stop.make()

    def _listen(self) -> None:
        try:
            while (command := self._parent.receive(*pipe.COMMANDS)) is not None:
                self._take(command)
        except ProtocolError:
            # From a service of another version: what it means by it is not known, so nothing goes on.
            self._tell(pipe.Notice(line="a command of the service cannot be read; the run stops"))
        finally:
            # Also where a command could not be done, such as a cancellation that Ray refused: who waits for the next
            # command would wait for ever.
            self._stop.make()

    def _take(self, command: pipe.Command) -> None:
        match command:
            case pipe.Allow():
                self._pace.allow(command.computed, command.released, command.held)
            case pipe.Batches():
                self._pace.send(command.step, command.files)
            case pipe.Save() | pipe.Copy() | pipe.Load():
                self._pace.ask(command.after, partial(self._between, command))
            case pipe.Close():
                self._pace.close()
            case pipe.Begin():
                self._tell(pipe.Notice(line="a driver begins one run; the run stops"))
                self._stop.make()

    def _between(self, command: pipe.Save | pipe.Copy | pipe.Load, training: "Training") -> None:
        from raycloak.coordinator.training import state_requests

        try:
            if isinstance(command, pipe.Save):
                saved = state_requests.save(training, command.id, command.after)
                report: pipe.Report = pipe.Saved(
                    id=command.id,
                    package=saved.package,
                    package_digest=saved.package_digest.hex(),
                    model_digest=saved.model_digest.hex(),
                    step=saved.step,
                )
            elif isinstance(command, pipe.Copy):
                digest = state_requests.copy(training, command.after, command.path)
                report = pipe.Copied(id=command.id, model_digest=digest.hex())
            else:
                loaded = state_requests.load(training, command.after, command.package)
                report = pipe.Loaded(id=command.id, model_digest=loaded.model_digest.hex(), step=loaded.step)
        except RefusedError as refusal:
            report = pipe.Refused(id=command.id, code=refusal.code, message=refusal.message, remedy=refusal.remedy)
        self._tell(report)

    def _phase(self, words: str) -> None:
        self._tell(pipe.PhaseBegun(words=words))

    def _opened(self, folder: RunFolder) -> None:
        self._tell(pipe.Opened(run_id=folder.record.run_id, run_dir=folder.path))

    def _ready(self, outset: "Outset") -> None:
        manifest, plan = outset.manifest, outset.plan
        mechanism = manifest.computation.mechanism
        private = mechanism.private
        self._tell(
            pipe.Ready(
                finished_steps=outset.finished_steps,
                steps=mechanism.steps,
                charged_steps=outset.charged_steps,
                delta=plan.delta if private else None,
                epsilon_cap=plan.epsilon_cap if private else None,
                epsilon_planned=plan.epsilon if private else None,
                epsilon=outset.charged_epsilon if private else None,
                noise_multiplier=mechanism.noise_multiplier if private else None,
                sample_rate=mechanism.sample_rate,
                max_grad_norm=mechanism.max_grad_norm,
                accountant=mechanism.accountant,
                private=private,
                virtual_workers=mechanism.virtual_workers,
                evidence_class=outset.evidence_class,
                account=manifest.account,
                manifest=json.loads(manifest.encode()),
            )
        )

    def _measured(self, measured: "Measured", epsilon: float) -> None:
        self._tell(pipe.Spent(epsilon=epsilon))
        if "loss" in measured.values:
            self._losses[measured.after] = measured.values["loss"]

    def _computed(self, step: int, epsilon: float | None, counted: "PublicSums | None") -> None:
        if counted is not None and counted.mean_loss is not None:
            self._losses[step] = counted.mean_loss
        tokens = None if counted is None else counted.tokens
        self._tell(pipe.Computed(step=step, epsilon=epsilon, loss=self._losses.get(step), tokens=tokens))

    def _held(self, step: int, epsilon: float | None) -> None:
        self._tell(pipe.HeldStep(step=step, epsilon=epsilon))

    def _stepped(self, report: "StepReport") -> None:
        step = report.step - 1
        self._tell(
            pipe.ReleasedStep(
                step=step,
                model_digest=report.model_digest,
                epsilon=report.epsilon,
                seconds=report.seconds,
                evaluation_accuracy=report.evaluation_accuracy,
                evaluation_loss=report.evaluation_loss,
                loss=self._losses.get(step),
                grad_norm=report.grad_norm,
            )
        )


def _ended_before(folder: RunFolder) -> pipe.Ended:
    """Return the ending of a run that an earlier driver has brought to its end."""
    verdict = read_verdict(folder.path)
    metrics = None if verdict is None else {name: value for name, value in verdict.items() if name != "run_dir"}
    over = ("complete", "cap_exceeded", "early_stopped")
    # An older verdict is of an execution before; a process that was killed may have written none.
    ending = metrics["ending"] if metrics is not None and metrics["ending"] in over else "complete"
    return pipe.Ended(ending=ending, metrics=metrics)


def main(parent: Channel) -> None:
    """Execute the run that the first command names.

    Raises:
        RaycloakError: what ended it; ``driver_protocol`` if the first command is no `Begin`.
    """
    keep_memory_private()
    begin = parent.receive(*pipe.COMMANDS)
    if begin is None:
        return
    if not isinstance(begin, pipe.Begin):
        raise ProtocolError("driver_protocol", "the first command is not the beginning of a run.")
    with command_output(as_json=False, debug=False) as output:
        try:
            PacedRun(begin, parent, StopRequest()).run(output)
        except BaseException as error:
            output.trace(error)
            raise
