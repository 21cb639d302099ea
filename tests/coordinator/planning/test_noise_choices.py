"""When noise is correlated, over how many steps and in which batches: the settings that were measured."""

import pytest

from raycloak.coordinator.accounting.calibration import epsilon_of, solve_noise_multiplier
from raycloak.coordinator.planning.advice import batch_choices
from raycloak.coordinator.planning.correlated_noise import (
    BATCH_TOLERANCE,
    LARGEST_SHARE,
    bands_and_share,
    chosen_coefficients,
    settled,
)
from raycloak.coordinator.planning.plan import make_plan
from raycloak.metrics.errors import ConfigError
from tests.coordinator.planning.test_plan import config

MOMENTUM = {"learning_rate": 1, "momentum": 0.9}


def asked(passes: float, epsilon: float, batch: float | None = None, **changes):
    noise = {"correlated": "auto", **changes.pop("noise", {})}
    fields = {"epochs": passes, "steps": None, "epoch_steps": 2000, "optimizer": MOMENTUM, **changes}
    dp = {"target_epsilon": epsilon, "noise": noise}
    return config(expected_batch_size=batch, dp_config=dp, **fields)


@pytest.mark.parametrize(
    ("examples", "dimension", "passes", "epsilon", "batch", "bands"),
    [
        (60_000, 2010, 2, 3, 256, 32),
        (60_000, 26_010, 13.65, 3, 512, 32),
        (60_000, 26_010, 13.65, 3, 2048, 16),
        (6_920, 770, 2, 3, 256, 8),
        (6_920, 770, 2, 8, 256, 16),
        # Little is gained at the smallest epsilon, and nothing in large batches over many passes.
        (6_920, 770, 2, 1, 256, 1),
        (60_000, 2010, 15, 1, 4096, 1),
    ],
)
def test_bands_are_those_of_the_settings_that_were_measured(examples, dimension, passes, epsilon, batch, bands):
    given = asked(passes, epsilon, batch).sized(examples)
    coefficients = chosen_coefficients(given, examples, dimension)
    assert max(1, len(coefficients)) == bands
    found, share = bands_and_share(given, examples, dimension)
    assert found == bands
    # What it takes leaves less error than noise of each step's own, by as much as makes it worth its memory.
    rate, steps = given.batch_size / examples, given.planned_steps
    noise, own = (solve_noise_multiplier(epsilon, 1e-5, count * rate, -(-steps // count)) for count in (bands, 1))
    assert (noise * share < LARGEST_SHARE * own) == (bands > 1)


def test_the_plan_says_what_independent_noise_of_the_same_error_would_cost():
    plan = make_plan(asked(13.65, 3, 512), 60_000, 26_010)
    gain, mechanism = plan.noise_gain, plan.mechanism
    assert gain is not None
    assert (gain.bands, mechanism.bands, len(mechanism.coefficients)) == (32, 32, 32)
    assert gain.share == pytest.approx(0.65, abs=0.02)
    assert gain.epsilon_independent > 2 * plan.epsilon
    assert plan.epsilon <= 3
    # Each virtual worker of a worker has the sums of all steps of a mix, the present one's too.
    hosted = -(-mechanism.virtual_workers // 3)
    assert gain.state_bytes == (gain.bands * 4 * 26_010 * hosted, (gain.bands - 1) * 8 * 26_010)
    # The rounds are charged, at the rate in a part.
    rounds = -(-mechanism.steps // 32)
    spent = epsilon_of(mechanism.sample_rate, mechanism.noise_multiplier, rounds, plan.delta, "pld")
    assert 0.98 * plan.epsilon <= spent <= plan.epsilon
    assert mechanism.sample_rate == pytest.approx(32 * 512 / 60_000)


def test_batch_steps_and_bands_are_chosen_together_for_as_many_passes():
    given = asked(2, 8)
    chosen = settled(given, 6_920, 770)
    assert (chosen.expected_batch_size, chosen.planned_steps, chosen.epochs) == (256, 55, None)
    assert settled(chosen, 6_920, 770) == chosen
    plan = make_plan(given, 6_920, 770)
    assert (plan.mechanism.expected_batch_size, plan.mechanism.steps, plan.mechanism.bands) == (256, 55, 16)
    # The advice is by the same rule.
    choices = batch_choices(plan, chosen)
    (advised,) = (each for each in choices if each.is_advised)
    assert (advised.expected_batch_size, advised.bands) == (256, 16)
    errors = {each.expected_batch_size: each.noise_to_batch / each.steps**0.5 for each in choices if each.steps >= 25}
    assert errors[256] <= BATCH_TOLERANCE * min(errors.values())


@pytest.mark.parametrize("dp", [{"target_epsilon": 8}, {"noise_multiplier": 1.5, "epsilon_cap": 20}])
def test_advice_with_bands_that_are_given_leaves_out_what_they_do_not_fit(dp):
    given = config(
        expected_batch_size=256,
        steps=54,
        epoch_steps=2000,
        optimizer=MOMENTUM,
        dp_config=dp | {"noise": {"correlated": "auto", "bands": 8}},
    )
    choices = batch_choices(make_plan(given, 6_920, 770), given)
    assert [each.expected_batch_size for each in choices] == [32, 64, 128, 256, 512]
    assert {each.bands for each in choices} == {8}
    assert all(each.steps >= 8 and 8 * each.expected_batch_size <= 6_920 for each in choices)


def test_a_batch_must_be_given_where_nothing_chooses_it():
    with pytest.raises(ConfigError, match="exactly one of batch_size_per_worker"):
        asked(2, 3, noise={"correlated": "off"})
    with pytest.raises(ConfigError, match="exactly one of batch_size_per_worker"):
        asked(2, 3, noise={"bands": 4})


@pytest.mark.parametrize("rule", ["adam", "adamw", "adafactor"])
def test_a_rule_that_squares_gradients_keeps_noise_of_each_step_s_own_unless_bands_are_given(rule):
    rules = {"optimizer": {"name": rule, "learning_rate": 0.01}}
    assert chosen_coefficients(asked(2, 8, 256, **rules).sized(6_920), 6_920, 770) == ()
    assert len(chosen_coefficients(asked(2, 8, 256, noise={"bands": 8}, **rules).sized(6_920), 6_920, 770)) == 8


def test_bands_beyond_an_epoch_or_the_data_are_refused():
    with pytest.raises(ConfigError, match="bands_too_many"):
        make_plan(asked(2, 8, 256, noise={"bands": 8}, epoch_steps=7), 6_920, 770)
    with pytest.raises(ConfigError, match="batch_too_large"):
        make_plan(asked(2, 8, 2048, noise={"bands": 4}), 6_920, 770)
