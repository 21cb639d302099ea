"""Trainer: from a configuration to a verdict and a run directory, on the Ray cluster that is there or a local one."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from raycloak.coordinator.config.run import RunConfig, require_config
from raycloak.coordinator.console.output import log_console
from raycloak.coordinator.evidence.sources import configured_policy
from raycloak.coordinator.loggers.configured import configured_loggers
from raycloak.coordinator.planning.first_look import first_look
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.plan import check_public
from raycloak.coordinator.planning.references import require_at_hand
from raycloak.coordinator.record.folder import unfinished_run
from raycloak.coordinator.record.outcome import Finished
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.runs.progress import ProgressDisplay
from raycloak.coordinator.training.callbacks import Callback, own_callbacks
from raycloak.coordinator.training.pace import StopRequest
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.in_memory import require_first
from raycloak.workers.inputs.user_code import portable_base
from raycloak.workers.models.models import ModelSource


class Trainer:
    """Trains one model.

    Args:
        config: what to train; ``model`` and ``dataset`` may be left out of it if they are given here.
        model_init_fn: callable without arguments that returns a ``torch.nn.Module``.
        train_dataset: a map-style PyTorch dataset of (features, label) pairs. It is visible to this process, and
            workers of a single-node cluster read it from a private file.
        config_dir: folder that relative paths and ``module:function`` names start from; the working directory if
            absent.
        run_secret: file of 64 hexadecimal digits; the same secret repeats the same run.
        progress: called after every committed step.
        phase: called with a few words when another phase of the run begins. Without both, standard error gets a line
            at each phase, at the first step and every few seconds.
        resume: resume the newest unfinished run of the configuration's name instead of starting one.
        handle_signals: whether SIGINT and SIGTERM end the run after the step it is in, and at once when they come
            again; for the main thread.
        notice: called with one line for each thing that a watcher needs to know: the metrics' address, members that
            left or joined.
        metrics: your own functions of outputs and labels of the public split, beside ``evaluation.metrics``.
        callbacks: your own objects that are told of the run, beside those that ``config.callbacks`` and
            ``config.loggers`` name.
        placement_group: a Ray placement group, with the caller's own bundle first and then one for each of the
            ``num_workers``; the run reserves its own group if absent.
        small_epsilon: whether an epsilon below 0.1 is meant, where the run opens the account of its data.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model_init_fn: Callable[[], Any] | None = None,
        train_dataset: Any | None = None,
        config_dir: Path | str | None = None,
        run_secret: Path | str | None = None,
        resume: bool = False,
        progress: Callable[[StepReport], None] | None = None,
        phase: Callable[[str], None] | None = None,
        notice: Callable[[str], None] | None = None,
        handle_signals: bool = False,
        metrics: Sequence[Callable[[Any, Any], Any]] = (),
        callbacks: Sequence[Callback] = (),
        placement_group: Any | None = None,
        small_epsilon: bool = False,
    ) -> None:
        require_config(config)
        for what, named, argument, given in (
            ("model", config.model, "model_init_fn", model_init_fn),
            ("dataset", config.dataset, "train_dataset", train_dataset),
        ):
            if (given is None) == (named is None):
                remedy = f"Give it once: as config.{what} or as {argument}."
                raise ConfigError("config", f"the {what} is given twice or not at all.", remedy)
        if train_dataset is not None:
            require_first(train_dataset)
        check_public(config)
        if metrics and (config.evaluation is None or config.evaluation.kept == "sealed"):
            name = getattr(metrics[0], "__name__", type(metrics[0]).__name__)
            raise ConfigError(
                "metric_private",
                f"the metric {name} has no known sensitivity, and there is no split whose examples are public.",
                "Name one: evaluation.dataset with public: true.",
            )
        base = Path(config_dir or Path.cwd())
        secret = Path(run_secret) if run_secret else None
        # Before it is charged for a step that nobody sends anything for.
        require_at_hand(config.dataset, "a run of its own")
        first_look(config, base, secret, resume)
        configured_policy(config.policy, config.collateral, base)
        model = ModelSource.of(model_init_fn) if model_init_fn is not None else model_source(config.model)
        self._config = config
        self._secret = str(secret.resolve()) if secret else None
        self._resume = resume
        self._stop = StopRequest()
        self._execution = Execution(
            config,
            model,
            portable_base(base),
            in_memory=train_dataset,
            progress=progress or self._stepped,
            phase=phase or self._entered,
            notice=notice or (lambda line: print(line, file=sys.stderr)),  # noqa: T201 - the default of a script
            stop=self._stop,
            handle_signals=handle_signals,
            metrics=metrics,
            callbacks=(*own_callbacks(config.callbacks, callbacks, base), *configured_loggers(config.loggers, base)),
            reserved=placement_group,
            small_epsilon=small_epsilon,
        )
        self.finished: Finished | None = None
        self._tells_nobody = progress is None and phase is None
        self._display: ProgressDisplay | None = None

    def train(self) -> dict[str, Any]:
        """Run to the planned steps, to the cap, or until it is asked to stop.

        Returns:
            ``run_dir`` and ``metrics``, the fields of `raycloak.coordinator.record.verdict.Verdict`.

        Raises:
            RaycloakError: ConfigError for bad input, RefusedError if a promise would be broken, RunFailedError if
                the run could not continue. Its ``result`` is the result so far. What was charged stays charged.
        """
        with ExitStack() as shown:
            if self._tells_nobody:
                # Lines and no bar: the caller's own program may print beside them.
                lines = log_console(sys.stderr)
                self._display = shown.enter_context(ProgressDisplay(lines, self._config.name))
            if self._resume:
                folder = unfinished_run(self._config.name)
                # The secret file of this call, if one was given.
                if self._secret is not None:
                    folder.record = folder.record.model_copy(update={"secret_file": self._secret})
                outcome = self._execution.recovered(lambda: self._execution.go_on(folder))
            else:
                outcome = self._execution.recovered(lambda: self._execution.begin(self._secret))
        self.finished = outcome.finished
        return outcome.result()

    def stop(self) -> None:
        """Ask the run to end after the step it is in; from any thread.

        It claims what its whole plan costs, all the same: its user may stop it because of what it released.
        """
        self._stop.make()

    def _stepped(self, report: StepReport) -> None:
        if self._display is not None:
            self._display(report)

    def _entered(self, what: str) -> None:
        if self._display is not None:
            self._display.phase(what)
