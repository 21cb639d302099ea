"""Callbacks of the user's own are told public values, and cost no run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.callbacks import (
    EVENTS,
    Callback,
    CallbackCaller,
    CheckpointReport,
    EvaluationReport,
    RunEnded,
    RunStarted,
    own_callbacks,
)
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError
from tests.own_code import Fails, Misnamed, TakesNothing, Told

STEP = StepReport(1, 3, 0.1, 2.0, None, 3, "ab", 0.5)


def test_callbacks_are_told_of_all_events_in_order() -> None:
    mechanism = SimpleNamespace(steps=3, virtual_workers=8, dimension=83, private=True)
    computation = SimpleNamespace(mechanism=mechanism)
    manifest: Any = SimpleNamespace(run_id="ab12", account="by-hand", computation=computation)
    callback = Told()
    caller = CallbackCaller((callback,), print)
    folder = Path("runs")
    caller.started(folder, manifest, "simulated")
    caller.evaluated(1, Evaluation("accuracy", 0.5, 8, 0.25, {"auc": 0.75}))
    caller.stepped(STEP)
    caller.published(1, b"\xab")
    caller.ended(folder, "complete", {"steps": 1})
    assert callback.told == [
        RunStarted(folder, "ab12", "by-hand", 3, 8, 83, True, "simulated"),
        EvaluationReport(1, 0.5, None, 0.25, {"auc": 0.75}),
        STEP,
        CheckpointReport(1, "ab"),
        RunEnded(folder, "complete", {"steps": 1}),
    ]


def test_guarantee_a_callback_that_fails_is_named_and_not_called_again_and_ends_no_run() -> None:
    said: list[str] = []
    failing, other = Fails(), Told()
    caller = CallbackCaller((failing, other), said.append)
    for _ in range(2):
        caller.stepped(STEP)
    assert said == ["The callback Fails is not called again: on_step_end failed with KeyError: 'row 17'."]
    assert (failing.told, other.told) == ([STEP], [STEP, STEP])


def test_an_end_without_a_start_is_not_told() -> None:
    callback = Told()
    CallbackCaller((callback,), print).ended(Path("runs"), "no_cuda", None)
    assert callback.told == []


def test_callbacks_come_from_the_configuration_and_from_python() -> None:
    given = Told()
    named, same = own_callbacks(["tests.own_code:Told"], [given], Path(__file__).parent)
    assert type(named) is Told
    assert same is given
    assert {name for name in vars(Callback) if name.startswith("on_")} == set(EVENTS)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Misnamed(), "Misnamed.on_epoch is never called"),
        (TakesNothing(), "TakesNothing.on_step_end does not take one argument"),
        (print, "is no raycloak.Callback"),
        ("tests.own_code:NeedsSomething", "NeedsSomething fails with TypeError when it is called without arguments"),
        ("tests.own_code:words", "words fails with TypeError"),
    ],
)
def test_a_callback_that_could_not_be_told_is_refused(given, says) -> None:
    named, objects = ([given], []) if isinstance(given, str) else ([], [given])
    with pytest.raises(ConfigError, match=says) as caught:
        own_callbacks(named, objects, Path(__file__).parent)
    assert caught.value.code == "callback"
