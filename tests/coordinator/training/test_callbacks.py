"""Callbacks of the user's own: what they are told is declared to be public, and what could not be told is refused."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from raycloak.coordinator.training.callbacks import EVENTS, Callback, own_callbacks
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.events import FIELD_BY_NAME
from raycloak.metrics.reports import classes_of
from tests.own_code import Misnamed, TakesNothing, Told

OF_A_SPLIT = {"accuracy", "loss"}
"""Names that a line of metrics.jsonl keeps for private examples; `EvaluationReport` has them of a public split."""


@pytest.mark.parametrize("kind", EVENTS.values())
def test_guarantee_all_that_a_callback_is_told_has_a_privacy_class_that_may_be_shown(kind) -> None:
    classes = classes_of(kind)
    assert classes.keys() == set(kind.__slots__)
    assert all(each.exportable for each in classes.values())
    for name in classes.keys() & FIELD_BY_NAME.keys() - OF_A_SPLIT:
        assert classes[name] is FIELD_BY_NAME[name].privacy, name


def test_a_report_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        StepReport(1, 3, 0.1, 2.0, None, 3, "ab", 0.5).step = 2  # type: ignore[misc]


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
