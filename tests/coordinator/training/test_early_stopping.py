"""Early stopping decides by results alone, at the same step in every execution of a run."""

import math
from collections.abc import Mapping

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.config.sections import EarlyStoppingConfig
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.training.early_stopping import EarlyStopping
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.measurement import Released
from tests.coordinator.config.test_run import GOOD

ACCURACY = EarlyStoppingConfig(metric="evaluation_accuracy", patience=2, min_delta=0.01)


class Kept(dict[int, float | None]):
    """What is on disk."""

    def keep(self, results: Mapping[int, float | None]) -> None:
        self.update(results)


def ends_after(config: EarlyStoppingConfig, values: list[float]) -> int | None:
    """Return the number of results after which the rule ends a run."""
    stopping = EarlyStopping(config, {}, Kept().keep)
    for number, value in enumerate(values, 1):
        stopping.evaluated(number, Evaluation("accuracy" if "accuracy" in config.metric else "loss", value, 8))
        if stopping.decided:
            return number
    return None


@pytest.mark.parametrize(
    ("metric", "values", "end"),
    [
        ("evaluation_accuracy", [0.1, 0.2, 0.3, 0.4], None),
        ("evaluation_accuracy", [0.5, 0.4, 0.5], 3),
        ("evaluation_accuracy", [0.5, 0.4, 0.6, 0.5, 0.6], 5),
        ("evaluation_accuracy", [0.5, 0.509, 0.505], 3),
        ("evaluation_accuracy", [0.5, math.nan, math.inf], 3),
        ("evaluation_loss", [4.0, 3.0, 2.0, 1.0], None),
        ("evaluation_loss", [1.0, 2.0, 0.995], 3),
    ],
)
def test_a_run_ends_with_the_last_of_so_many_results_that_are_not_better(metric, values, end) -> None:
    assert ends_after(EarlyStoppingConfig(metric=metric, patience=2, min_delta=0.01), values) == end


def test_a_release_counts_by_its_own_name_and_no_other() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="measured_evaluation_loss", patience=1), {}, Kept().keep)
    values = {"loss": 0.5, "accuracy": 0.25}
    for after in (5, 10):
        stopping.evaluated(after, Evaluation("loss", 9.0, 8))
        stopping.measured(Released(query="class_counts", number=0, after=after, values={"count_0": 1.0}, deviation={}))
        assert not stopping.decided
    stopping.measured(Released(query="evaluation", number=0, after=5, values=values, deviation={}))
    # A resumed run makes a release again; the values are the same, and count once.
    stopping.measured(Released(query="evaluation", number=0, after=5, values=values, deviation={}))
    assert not stopping.decided
    stopping.measured(Released(query="evaluation", number=1, after=10, values=values, deviation={}))
    assert stopping.decided


@pytest.mark.parametrize("start", range(6))
def test_guarantee_wherever_an_execution_starts_the_decision_is_the_same(start: int) -> None:
    values, kept = [0.5, 0.6, 0.6, 0.7, 0.69, 0.705], Kept()
    first = EarlyStopping(ACCURACY, {}, kept.keep)
    for number, value in enumerate(values, 1):
        first.evaluated(number, Evaluation("accuracy", value, 8))
        assert number in kept, "a result is on disk before its model is sealed"
    assert first.decided
    second = EarlyStopping(ACCURACY, kept, kept.keep)
    second.restore(start, range(1, start + 1))
    for number in range(start + 1, len(values) + 1):
        assert not second.decided
        # Another processor may round otherwise: the first record counts.
        second.evaluated(number, Evaluation("accuracy", values[number - 1] + 0.2, 8))
    assert second.decided


def test_an_execution_does_not_start_without_a_result_that_earlier_ones_saw() -> None:
    with pytest.raises(ConfigError, match="lacks the result after step 2") as caught:
        EarlyStopping(ACCURACY, {1: 0.5}, Kept().keep).restore(3, range(1, 4))
    assert caught.value.code == "early_stopping"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"early_stopping": {"metric": "evaluation_accuracy"}}, "needs evaluation"),
        ({"early_stopping": {"metric": "measured_evaluation_loss"}}, "needs measurements.evaluation"),
        (
            {"early_stopping": {"metric": "evaluation_loss"}, "evaluation": {"dataset": {"kind": "digits"}}},
            "under cross_entropy evaluation measures the accuracy",
        ),
        (
            {
                "loss": "mse",
                "early_stopping": {"metric": "measured_evaluation_accuracy"},
                "measurements": {"evaluation": {"noise_multiplier": 20}},
            },
            "has no accuracy under mse",
        ),
        ({"early_stopping": {"metric": "loss"}}, "early_stopping.metric"),
    ],
)
def test_a_rule_that_nothing_feeds_is_refused(fields, says) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({**GOOD, **fields})
