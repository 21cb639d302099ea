"""Trials of a search without Ray: their configurations, and what a scheduler is told."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from raycloak.coordinator.cluster.tuning import trainable_class
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import DatasetConfig, DPConfig, LedgerConfig, OptimizerConfig, Section
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.runs import search
from raycloak.coordinator.runs.search import FIXED, Trial, trial_config, tunable
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.protocol import config

SEARCH = {"ledger": {"account": "search"}, "name": "search"}
STEPS = 4


def raw(**changes: Any) -> dict[str, Any]:
    return config(**{**SEARCH, **changes}).model_dump(mode="json")


def test_a_trial_is_prepaid_named_after_itself_and_has_what_tune_chose():
    chosen = {"optimizer.learning_rate": 0.25, "dp_config": {"max_grad_norm": 2}, "steps": 7}
    one = trial_config(raw(), "a_00000", chosen)
    assert (one.name, one.ledger.account, one.ledger.prepaid) == ("search-a_00000", "search", True)
    assert (one.optimizer.learning_rate, one.dp_config.max_grad_norm, one.steps) == (0.25, 2.0, 7)
    assert trial_config(raw(), "a_00001", {}).optimizer.learning_rate == 0.5, "no trial changes another's"


@pytest.mark.parametrize("name", [*FIXED, "ledger.account", "ledger.prepaid", "ledger.url"])
def test_no_trial_chooses_who_is_charged_for_it(name: str):
    with pytest.raises(ConfigError, match=f"tune_param: .*{name}"):
        trial_config(raw(), "a", {name: "other"})
    section, _, last = name.rpartition(".")
    with pytest.raises(ConfigError, match="tune_param"):
        trial_config(raw(), "a", {section: {last: "other"}} if section else {name: "other"})


class Hidden:
    """A value that turns into a section once it is asked, as a scalar of NumPy turns into a number."""

    def item(self) -> Section:
        return DPConfig(enabled=False)


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ({"ledger": LedgerConfig(account="another")}, "ledger.account"),
        ({"ledger": {"url": "sqlite:////elsewhere"}}, "ledger.url"),
        ({"dp_config": DPConfig(enabled=False)}, "dp_config.enabled"),
        ({"dp_config": DPConfig(noise_multiplier=1, epsilon_cap=9, target_delta=0.1)}, "dp_config.target_delta"),
        ({"dataset": DatasetConfig(kind="digits", public=True)}, "dataset.public"),
        ({"dp_config": Hidden()}, "dp_config.enabled"),
        ({"dp_config": object()}, "dp_config is a object"),
        ({"dp_config": [DPConfig(enabled=False)]}, "dp_config is a list"),
    ],
)
def test_guarantee_no_object_hides_a_field_that_no_trial_may_choose(chosen: dict[str, Any], name: str):
    with pytest.raises(ConfigError, match=f"tune_param: .*{name}"):
        trial_config(raw(), "a", chosen)


def test_a_section_as_an_object_counts_as_the_fields_that_it_was_given():
    wanted = {"learning_rate": 0.125, "momentum": 0.5}
    one = trial_config(raw(optimizer={"weight_decay": 0.25}), "a", {"optimizer": OptimizerConfig(**wanted)})
    assert one.optimizer == OptimizerConfig(**wanted, weight_decay=0.25)
    assert trial_config(raw(), "a", {"ledger": LedgerConfig()}).ledger.account == "search"


def test_a_wrong_field_of_param_space_is_named():
    with pytest.raises(ConfigError, match=r"optimizer.learning_rat: .*did you mean optimizer.learning_rate"):
        trial_config(raw(), "a", {"optimizer.learning_rat": 0.1})
    with pytest.raises(ConfigError, match="steps is not a section"):
        trial_config(raw(), "a", {"steps.many": 1})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"ledger": {}}, "tune_account"),
        ({"dataset": None}, "config"),
        (
            {
                "dp_config": {"enabled": False},
                "dataset": {"kind": "npz", "path": "examples.npz", "features": "features", "public": True},
            },
            "not_private",
        ),
    ],
)
def test_a_search_that_no_account_pays_for_is_refused(changes: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        tunable(config(**{**SEARCH, **changes}))


def test_a_search_on_an_unknown_account_is_refused_before_any_trial(
    raycloak_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples.npz").touch()
    raycloak_home.mkdir(mode=0o700)
    PrivacyLedger(f"sqlite:///{raycloak_home / 'ledger.sqlite'}").close()
    with pytest.raises(BudgetError, match="account_unknown"):
        tunable(config(**SEARCH))


class Scripted:
    """A trainer that reports as a run with a public split every second step would."""

    def __init__(self, settings: RunConfig, *, progress: Any, resume: bool, **_: Any) -> None:
        self.progress, self.done, self.stopped, self.resume = progress, 0, threading.Event(), resume

    def train(self) -> dict[str, Any]:
        for step in range(1, STEPS + 1):
            if self.stopped.is_set():
                break
            self.done = step
            accuracy = step / 10 if step % 2 == 0 else None
            self.progress(
                StepReport(step, STEPS, 1.5, 8.0, accuracy, 2, "private?", 0.1, evaluation_loss=None, epsilon_planned=1)
            )
        return {"run_dir": "/runs/one", "metrics": self.metrics()}

    def stop(self) -> None:
        self.stopped.set()

    def metrics(self) -> dict[str, Any]:
        nothing = dict.fromkeys(
            ("privacy_epsilon_if_stop_was_blind", "privacy_epsilon_one_worker", "wall_seconds", "virtual_workers")
        )
        released = {"query": "evaluation", "number": 0, "after": 4, "values": {"loss": 0.7}, "deviation": {"loss": 0.1}}
        return nothing | {
            "steps": self.done,
            "planned_steps": STEPS,
            "ending": "complete",
            "private": True,
            "privacy_epsilon": 1.0,
            "privacy_epsilon_charged": 3.0,
            "privacy_delta": 1e-5,
            "epsilon_cap": 8.0,
            "evaluation_accuracy": 0.4,
            "evidence_class": "simulated",
            "model_digest": "digest",
            "num_workers": 2,
            "masked_bytes": 1,
            "measurements": [released],
            "account": "search",
        }


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, raycloak_home: Path) -> Trial:
    monkeypatch.setattr(search, "Trainer", Scripted)
    return Trial(config(**SEARCH), Path(), None)


def test_a_scheduler_sees_public_and_released_values_and_an_epsilon_that_counts_all_trials(trial: Trial):
    assert trial.next_result() == {
        "step": 2,
        "evaluation_accuracy": 0.2,
        "privacy_epsilon": 8.0,
        "privacy_epsilon_charged": 1.5,
    }
    assert trial.next_result() == {
        "step": 4,
        "evaluation_accuracy": 0.4,
        "measured_evaluation_loss": 0.7,
        "privacy_epsilon": 8.0,
        "privacy_epsilon_charged": 3.0,
        "privacy_delta": 1e-5,
        "account": "search",
        "ending": "complete",
        "run_dir": "/runs/one",
        "done": True,
    }
    trial.close()


def test_a_trial_computes_nothing_more_once_the_scheduler_has_stopped_it(trial: Trial):
    assert trial.next_result()["step"] == 2
    trainer = trial._trainer
    assert isinstance(trainer, Scripted)
    assert trainer.done == 2, "it waits until the scheduler asks again"
    trial.close()
    assert trainer.done == 2
    assert not trial._thread.is_alive()


def test_a_trial_that_starts_again_resumes_its_own_run(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, raycloak_home: Path
):
    assert not trial._trainer.resume
    folder = RunFolder.create(config(**SEARCH), "ab" * 8, "/", None)
    folder.mark("failed")
    assert Trial(config(**SEARCH), Path(), None)._trainer.resume
    folder.mark("done")
    assert not Trial(config(**SEARCH), Path(), None)._trainer.resume


def test_without_ray_tune_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(ray, "tune", raising=False)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(ConfigError, match=r"tune_missing: .*raycloak\[tune\]"):
        trainable_class(lambda *_: Trial, lambda chosen: config(), Path())


def test_what_ends_a_run_ends_its_trial(trial: Trial, monkeypatch: pytest.MonkeyPatch):
    def refused(_: Scripted) -> None:
        raise BudgetError("cap_exceeded", "all that the run plans would bring account 'search' over its cap.")

    monkeypatch.setattr(Scripted, "train", refused)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        trial.next_result()
    trial.close()
