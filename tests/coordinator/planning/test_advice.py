"""Advice on batch and steps: as many rows for the same epsilon, and no choice of too few steps."""

import pytest

from raycloak.coordinator.accounting.calibration import composed_epsilon
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.cli.views.plan import choice_rows
from raycloak.coordinator.planning.advice import LEAST_STEPS, batch_choices
from raycloak.coordinator.planning.plan import make_plan
from raycloak.metrics.errors import ConfigError
from tests.coordinator.planning.test_plan import config


def test_choices_compute_as_many_rows_for_the_same_epsilon_and_the_advised_one_has_steps_enough():
    """The case of the module: two passes over 60,000 examples at epsilon 3."""
    asked = config(expected_batch_size=512.0, steps=234, dp_config={"target_epsilon": 3.0})
    plan = make_plan(asked, num_examples=60_000, dimension=100)
    choices = batch_choices(plan, asked)
    assert [each.expected_batch_size for each in choices] == [64, 128, 256, 512, 1024, 2048, 4096]
    for each in choices:
        assert each.steps * each.expected_batch_size == pytest.approx(512 * 234, rel=0.01)
        release = Release(each.expected_batch_size / 60_000, each.noise_multiplier, each.steps)
        spent = composed_epsilon((release,), plan.delta, "pld")
        assert 0.996 * plan.epsilon <= spent <= plan.epsilon
        assert each.noise_to_batch == each.noise_multiplier / each.expected_batch_size
    # The ratio alone prefers the largest batch.
    ratios = [each.noise_to_batch for each in choices]
    assert ratios == sorted(ratios, reverse=True)
    (advised,) = (each for each in choices if each.is_advised)
    assert (advised.expected_batch_size, advised.steps, advised.is_planned) == (512, 234, True)
    assert advised.steps >= LEAST_STEPS > 117
    said = [text for _, text in choice_rows(choices)]
    assert [text.endswith(" (this plan) (advised)") for text in said] == [each.is_advised for each in choices]


def test_nothing_is_advised_where_all_choices_have_too_few_steps():
    asked = config(expected_batch_size=359.0, steps=20, dp_config={"target_epsilon": 8.0, "accountant": "rdp"})
    choices = batch_choices(make_plan(asked, num_examples=1437, dimension=100), asked)
    assert not any(each.is_advised for each in choices)
    # No batch is larger than the data.
    assert max(each.expected_batch_size for each in choices) == 1436


def test_a_run_without_privacy_is_refused():
    public = {"kind": "digits", "public": True}
    asked = config(dataset=public, dp_config={"enabled": False})
    plan = make_plan(asked, num_examples=1437, dimension=100)
    with pytest.raises(ConfigError, match="nothing_to_advise"):
        batch_choices(plan, asked)
