"""What a loop by hand refuses before anything starts; `tests/coordinator/training/test_hand_loop.py` has the loop."""

from typing import Any

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs.by_hand import by_hand
from raycloak.metrics.errors import ConfigError, RefusedError
from tests.coordinator.config.test_run import GOOD

SPLIT = {"kind": "digits", "split": "public", "public": True}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dataset": None}, "no dataset is named"),
        ({}, "no model is named"),
        ({"evaluation": {"dataset": SPLIT}}, "evaluates nothing"),
        ({"callbacks": ["tests.own_code:Told"]}, "calls nobody"),
        ({"loggers": {"tensorboard": {}}}, "calls nobody"),
        ({"measurements": {"class_counts": {"classes": 3, "noise_multiplier": 20}}}, "makes no measurements"),
        (
            {"dp_config": {"target_epsilon": 3.0, "noise": {"correlated": "auto"}}},
            "correlated noise is solved where a run makes them",
        ),
    ],
)
def test_what_a_loop_by_hand_does_not_do_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), by_hand(parse_config({**GOOD, **changes})):
        pass


def test_guarantee_a_loop_by_hand_without_noise_needs_public_data() -> None:
    with (
        pytest.raises(RefusedError, match="not_public"),
        by_hand(parse_config({**GOOD, "dp_config": {"enabled": False}})),
    ):
        pass
