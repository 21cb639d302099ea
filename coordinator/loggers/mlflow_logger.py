"""MLflow: a run of its tracking server for each run of raycloak, and a version of a registered model for its end."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloak.attestation.files.whole import write_whole
from raycloak.coordinator.loggers.logger import Logger, settings_of, words_of
from raycloak.coordinator.training.callbacks import RunEnded, RunStarted
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_ID = "mlflow-run-id"
"""The file of a run directory that has the id of MLflow's run, so that a resumed run finds it."""

_BATCH = 100
"""MLflow takes at most 100 settings in one call."""
_LONGEST = 6000
"""The characters of the longest setting that MLflow takes."""

_STATUS = {"complete": "FINISHED", "cap_exceeded": "FINISHED", "early_stopped": "FINISHED", "stopped": "KILLED"}
"""MLflow's status of each ending that is no error. A run that was stopped may be resumed."""


class MLflowLogger(Logger):
    """Logs a run to MLflow: settings, numbers, the files of the run directory, and on request the released model.

    After a resume it continues the same run of MLflow.

    Args:
        tracking_uri: of the server, or of a database where the whole of MLflow is installed; what
            ``MLFLOW_TRACKING_URI`` says if absent. Credentials belong in MLflow's own environment variables.
        experiment: made if it is not there; the configuration's name if absent.
        log_model: whether the released weights are uploaded when the run ends.
        registered_model: name in the model registry, of which the weights become the next version; needs
            ``log_model``.

    Raises:
        ConfigError: ``logger_library`` without MLflow; ``config``.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        log_model: bool = False,
        registered_model: str | None = None,
    ) -> None:
        super().__init__("mlflow")
        if registered_model is not None and not log_model:
            raise ConfigError("config", "registered_model needs log_model: true.", "Add it, or leave out both.")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._log_model = log_model
        self._registered_model = registered_model
        self._marks: tuple[str, ...] = ()
        self._client: MlflowClient
        self._run_id = ""

    def _open(self, started: RunStarted) -> None:
        # A library that watches over private data tells nobody that it is used.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(self._tracking_uri)
        self._marks = started.marks
        known = started.run_dir / RUN_ID
        if known.exists():
            self._run_id = known.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        words = {f"raycloak.{name}": word for name, word in words_of(started).items()}
        name = self._experiment or started.name
        found = self._client.get_experiment_by_name(name)
        experiment_id = found.experiment_id if found else self._client.create_experiment(name)
        tags = {**words, **dict.fromkeys(started.marks, "true")}
        run = self._client.create_run(experiment_id, tags=tags, run_name=started.run_dir.name)
        self._run_id = run.info.run_id
        # Before anything is logged: a driver that is killed from now on continues this run.
        write_whole(known, f"{self._run_id}\n".encode())
        self._settings(settings_of(started))

    def _settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        given = [Param(name, str(value)[:_LONGEST]) for name, value in settings.items()]
        for start in range(0, len(given), _BATCH):
            self._client.log_batch(self._run_id, params=given[start : start + _BATCH])

    def _numbers(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        given = [Metric(name, value, now_ms, step) for name, value in numbers.items()]
        for start in range(0, len(given), _BATCH):
            self._client.log_batch(self._run_id, metrics=given[start : start + _BATCH])

    def _word(self, name: str, value: str) -> None:
        self._client.set_tag(self._run_id, f"raycloak.{name}", value)

    def _close(self, ended: RunEnded, files: Sequence[Path], weights: Path | None) -> None:
        for path in files:
            self._client.log_artifact(self._run_id, str(path))
        if self._log_model and weights is not None:
            self._upload(ended, weights)
        self._client.set_terminated(self._run_id, _STATUS.get(ended.ending, "FAILED"))

    def _upload(self, ended: RunEnded, weights: Path) -> None:
        for path in (weights, ended.run_dir / "manifest.json"):
            self._client.log_artifact(self._run_id, str(path), "model")
        # A model that is not finished is no version of anything.
        if self._registered_model is None or _STATUS.get(ended.ending) != "FINISHED":
            return
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_registered_model(self._registered_model)
        except MlflowException:
            self._client.create_registered_model(self._registered_model)
        verdict = ended.metrics or {}
        named = ("privacy_epsilon", "privacy_delta", "model_digest", "account")
        tags = {f"raycloak.{name}": str(verdict[name]) for name in named if verdict.get(name) is not None}
        self._client.create_model_version(
            self._registered_model,
            f"runs:/{self._run_id}/model",
            self._run_id,
            tags={**tags, **dict.fromkeys(self._marks, "true")},
        )
