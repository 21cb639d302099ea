"""Loggers write what callbacks are told into real stores of the real tools, and continue there after a resume."""

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.config.sections import LoggersConfig, MLflowConfig, TensorBoardConfig, WandbConfig
from raycloak.coordinator.loggers.configured import configured_loggers
from raycloak.coordinator.loggers.logger import Logger
from raycloak.coordinator.loggers.mlflow_logger import MLflowLogger
from raycloak.coordinator.loggers.tensorboard_logger import TensorBoardLogger
from raycloak.coordinator.loggers.wandb_logger import WandbLogger
from raycloak.coordinator.planning import first_look
from raycloak.coordinator.training.callbacks import (
    CheckpointReport,
    EvaluationReport,
    MeasurementReport,
    RunEnded,
    RunStarted,
)
from raycloak.coordinator.training.reporting import MembershipReport, StepReport
from raycloak.metrics.errors import ConfigError
from tests.coordinator.config.test_run import GOOD

VERDICT = {
    "steps": 4,
    "privacy_epsilon": 1.5,
    "privacy_delta": 1e-5,
    "privacy_epsilon_one_worker": None,
    "model_digest": "ab" * 32,
    "account": "digits",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "digits-ab12"
    folder.mkdir()
    for name in ("config.yaml", "manifest.json", "metrics.jsonl", "verdict.json"):
        (folder / name).write_text(name)
    (folder / "parameters.safetensors").write_bytes(b"weights")
    (folder / "evidence.jsonl").write_text("not for a tracking tool")
    return folder


def begin(run_dir: Path, finished_steps: int = 0) -> RunStarted:
    return RunStarted(
        run_dir=run_dir,
        run_id="ab12cd34",
        name="digits",
        account="digits",
        steps=4,
        virtual_workers=8,
        parameters=83,
        finished_steps=finished_steps,
        private=True,
        exact=True,
        evidence_class="simulated",
        epsilon_planned=1.5,
        epsilon_cap=2.0,
        delta=1e-5,
        noise_multiplier=1.25,
        sample_rate=0.25,
        config=parse_config(dict(GOOD)).model_dump(mode="json"),
    )


def step(number: int) -> StepReport:
    return StepReport(number, 4, number / 10, 2.0, None, 3, "ab", 0.5)


def play(make: Callable[[], Logger], run_dir: Path, steps: Sequence[int], ending: str) -> None:
    """Have a logger of its own told of an execution, in another thread, as a run has it."""

    def tell() -> None:
        logger = make()
        logger.on_run_begin(begin(run_dir, steps[0] - 1))
        for number in steps:
            logger.on_evaluation(EvaluationReport(number, number / 5, None, 0.25, {"auc": 0.75}))
            logger.on_step_end(step(number))
        logger.on_measurement(MeasurementReport("evaluation", 0, steps[-1], {"loss": 0.5}, {"loss": 0.125}))
        logger.on_membership(MembershipReport("lost", "worker-1", "died", 2))
        logger.on_membership(MembershipReport("joined", "worker-3", None, 3))
        logger.on_checkpoint(CheckpointReport(steps[-1], "cd" * 32))
        logger.on_run_end(RunEnded(run_dir, ending, VERDICT if ending == "complete" else None))

    with ThreadPoolExecutor(1) as own_thread:
        own_thread.submit(tell).result(120)


def test_mlflow_has_one_run_with_numbers_files_and_a_version_of_the_model(run_dir, tmp_path, monkeypatch):
    # A store of files, since the small package lacks what a local database needs.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = f"file://{tmp_path / 'store'}"

    def make() -> Logger:
        return MLflowLogger(place, "trials", log_model=True, registered_model="digits")

    play(make, run_dir, (1, 2), "worker_lost")
    from mlflow import MlflowClient

    client = MlflowClient(place)
    (experiment,) = [each for each in client.search_experiments() if each.name == "trials"]
    (first,) = client.search_runs([experiment.experiment_id])
    assert first.info.status == "FAILED"
    assert not client.search_model_versions("name='digits'")
    play(make, run_dir, (3, 4), "complete")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == first.info.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits-ab12")
    history = client.get_metric_history(run.info.run_id, "epsilon")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    numbers = run.data.metrics
    assert numbers["evaluation_accuracy"] == 0.8
    assert (numbers["evaluation_auc"], numbers["departures"]) == (0.75, 1)
    assert (numbers["measured_evaluation_loss"], numbers["measured_evaluation_loss_noise_deviation"]) == (0.5, 0.125)
    assert numbers["privacy_epsilon"] == 1.5
    assert "privacy_epsilon_one_worker" not in numbers
    assert run.data.params["dp_config.target_epsilon"] == "8.0"
    assert run.data.params["plan.noise_multiplier"] == "1.25"
    tags = run.data.tags
    assert (tags["SIMULATED"], tags["raycloak.ending"], tags["raycloak.run_id"]) == ("true", "complete", "ab12cd34")
    assert tags["raycloak.checkpoint"] == f"step 4: {'cd' * 32}"
    assert "NOT PRIVATE" not in tags
    files = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "manifest.json", "metrics.jsonl", "model", "verdict.json"}
    (version,) = client.search_model_versions("name='digits'")
    assert (version.run_id, version.tags["raycloak.privacy_epsilon"], version.tags["SIMULATED"]) == (
        run.info.run_id,
        "1.5",
        "true",
    )
    folder = Path(version.source.removeprefix("file://"))
    model = {each.path for each in client.list_artifacts(run.info.run_id, "model")}
    assert model == {"model/manifest.json", "model/parameters.safetensors"}, folder


def test_wandb_has_one_run_with_numbers_and_nothing_of_the_machine(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")

    def make() -> Logger:
        return WandbLogger(project="digits", mode="offline", log_model=True)

    play(make, run_dir, (1, 2), "worker_lost")
    play(make, run_dir, (2, 3, 4), "complete")
    from tests.coordinator.loggers.wandb_file import finished, items

    first, second = (finished(path) for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")))
    (run,), (resumed,) = ([each.run for each in found if each.HasField("run")] for found in (first, second))
    assert (run.run_id, run.project, run.display_name, list(run.tags)) == (
        "ab12cd34",
        "digits",
        "digits-ab12",
        ["SIMULATED"],
    )
    assert resumed.run_id == run.run_id
    assert items(run.config.update)["dp_config.target_epsilon"] == 8.0
    lines = [items(each.history.item) for each in (*first, *second) if each.HasField("history")]
    assert [(line["step"], line["epsilon"]) for line in lines if "epsilon" in line] == [
        (1, 0.1),
        (2, 0.2),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]
    assert {line["step"]: line["evaluation_accuracy"] for line in lines if "evaluation_accuracy" in line}[4] == 0.8
    words: dict[str, object] = {}
    for each in second:
        words |= items(each.summary.update) if each.HasField("summary") else {}
    assert (words["ending"], words["checkpoint"], words["privacy_epsilon"]) == (
        "complete",
        f"step 4: {'cd' * 32}",
        1.5,
    )
    exits = [each.exit.exit_code for each in (*first, *second) if each.HasField("exit")]
    assert exits == [1, 0]
    kept = {item.path for each in second if each.HasField("artifact") for item in each.artifact.manifest.contents}
    assert kept == {"config.yaml", "manifest.json", "metrics.jsonl", "verdict.json", "parameters.safetensors"}
    kinds = {each.WhichOneof("record_type") for each in (*first, *second)}
    assert not kinds & {"stats", "output", "output_raw"}
    assert not list((run_dir / "wandb").rglob("requirements.txt"))
    assert not list((run_dir / "wandb").rglob("wandb-metadata.json"))


@pytest.mark.parametrize("named", [False, True])
def test_tensorboard_shows_one_run_and_each_step_once(run_dir, tmp_path, named):
    folder = tmp_path / "events" if named else None
    own = tmp_path / "events" / run_dir.name if named else run_dir / "tensorboard"
    play(lambda: TensorBoardLogger(folder), run_dir, (1, 2, 3), "worker_lost")
    play(lambda: TensorBoardLogger(folder), run_dir, (2, 3, 4), "complete")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(own)).Reload()
    assert [(each.step, round(each.value, 6)) for each in events.Scalars("epsilon")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]
    assert [each.step for each in events.Scalars("evaluation_accuracy")] == [1, 2, 3, 4]
    words = {tag: events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0] for tag in ("marks", "ending")}
    assert words == {"marks": b"SIMULATED", "ending": b"complete"}
    assert b"dp_config.target_epsilon" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_loggers_come_from_the_configuration_without_importing_their_libraries(tmp_path):
    config = LoggersConfig(
        mlflow=MLflowConfig(experiment="trials"), wandb=WandbConfig(mode="offline"), tensorboard=TensorBoardConfig()
    )
    assert config.tools == ("mlflow", "wandb", "tensorboard")
    before = set(sys.modules)
    mlflow, wandb, tensorboard = configured_loggers(config, tmp_path)
    assert (mlflow._experiment, wandb._mode, tensorboard._log_dir) == ("trials", "offline", None)
    assert not {"mlflow", "wandb", "tensorboard"} & (set(sys.modules) - before)
    (elsewhere,) = configured_loggers(LoggersConfig(tensorboard=TensorBoardConfig(log_dir="tb")), tmp_path)
    assert elsewhere._log_dir == tmp_path / "tb"
    assert configured_loggers(LoggersConfig(), tmp_path) == ()


@pytest.mark.parametrize("tool", ["mlflow", "wandb", "tensorboard"])
def test_a_missing_library_is_refused_at_first_look_by_its_extra(tool, monkeypatch):
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == tool else ModuleSpec(name, None)

    monkeypatch.setattr(first_look, "find_spec", find_spec)
    config = parse_config({**GOOD, "model": "torch.nn:Identity", "loggers": {tool: {}}})
    with pytest.raises(ConfigError, match=rf"pip install 'raycloak\[{tool}\]'") as caught:
        first_look.require_library(tool)
    assert caught.value.code == "logger_library"
    monkeypatch.setattr(first_look, "preflight", lambda *_: None)
    with pytest.raises(ConfigError, match="logger_library"):
        first_look.first_look(config, Path())


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"mlflow": {"tracking_uri": "https://me:word@host"}}, "no credentials here"),
        ({"mlflow": {"registered_model": "digits"}}, "registered_model needs log_model"),
        ({"wandb": {"mode": "disabled"}}, "loggers.wandb.mode"),
        ({"aim": {}}, "aim"),
    ],
)
def test_a_wrong_section_is_refused(section, says):
    with pytest.raises(ConfigError, match=says):
        parse_config({**GOOD, "loggers": section})


def test_settings_of_a_run_are_flat_and_are_the_configuration_and_the_plan(run_dir):
    from raycloak.coordinator.loggers.logger import settings_of

    settings = settings_of(begin(run_dir))
    assert settings["dataset.kind"] == "digits"
    assert settings["plan.epsilon"] == 1.5
    assert "policy" not in settings
    json.dumps(settings)
