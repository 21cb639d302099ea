"""Weights & Biases: a run of its service, or of its offline files, for each run of raycloak."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raycloak.coordinator.loggers.logger import Logger, settings_of, words_of
from raycloak.coordinator.training.callbacks import RunEnded, RunStarted

if TYPE_CHECKING:
    from wandb import Run


class WandbLogger(Logger):
    """Logs a run to Weights & Biases: settings, numbers, the files of the run directory, and on request the model.

    Its id is the run's own id, so after a resume it continues the same run. It collects no console output, code,
    environment or machine measurements; the tool adds the host name and library versions.

    Args:
        project: the configuration's name if absent.
        entity: team or user; the default of the API key if absent.
        mode: ``online``; or ``offline``, which writes ``wandb/`` in the run directory for ``wandb sync``. What
            ``WANDB_MODE`` says if absent.
        log_model: whether the released weights are uploaded when the run ends.

    Raises:
        ConfigError: ``logger_library`` without the library.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        log_model: bool = False,
    ) -> None:
        super().__init__("wandb")
        self._project = project
        self._entity = entity
        self._mode = mode
        self._log_model = log_model
        self._run: Run

    def _open(self, started: RunStarted) -> None:
        # Read when the library is imported: reports about its own errors would go to its maker.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=self._project or started.name,
            entity=self._entity,
            mode=self._mode,
            id=started.run_id,
            name=started.run_dir.name,
            dir=started.run_dir,
            resume="allow",
            # A run that the same process has open, a notebook's for example, is left alone.
            reinit="create_new",
            tags=started.marks,
            config={**settings_of(started), **words_of(started)},
            allow_val_change=True,
            settings=settings,
        )
        # The tool's own count only rises, so it would drop the steps that a resumed run repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _numbers(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def _word(self, name: str, value: str) -> None:
        self._run.summary[name] = value

    def _close(self, ended: RunEnded, files: Sequence[Path], weights: Path | None) -> None:
        import wandb

        failed = ended.ending not in ("complete", "cap_exceeded", "early_stopped", "stopped")
        record = wandb.Artifact(f"record-{self._run.id}", type="record")
        for path in files:
            record.add_file(str(path))
        self._run.log_artifact(record)
        if self._log_model and weights is not None:
            model = wandb.Artifact(f"model-{self._run.id}", type="model")
            model.add_file(str(weights))
            model.add_file(str(ended.run_dir / "manifest.json"))
            self._run.log_artifact(model)
        self._run.finish(exit_code=1 if failed else 0)
