"""The claim of a run under the worst stopping rule, found by dynamic programming on the exact privacy loss.

With full batches (q = 1) the privacy loss of t steps is a Gaussian walk: a step adds N(1/2z^2, 1/z^2). So the best rule
for an adversary who states an epsilon when he stops is an optimal stopping problem in one dimension. All of it is
deterministic; proof 005 has the same numbers.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import norm

from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.claim import claimed_epsilon, covered, epsilon_if_stop_was_blind
from raycloak.coordinator.planning.plan import Plan, make_plan

DELTA = 1e-5
EXAMPLES, STEPS, NOISE = 1437, 100, 10.0
GRID_ERROR = 1.01
"""The grid overstates the hidden delta by at most one percent: halving it changes the value by less than that."""


def planned(accountant: str = "pld", steps: int = STEPS, cap: float = 20.0, **changes: object) -> Plan:
    """A run of full batches at noise multiplier 10."""
    raw = {
        "expected_batch_size": float(EXAMPLES),
        "dataset": {"kind": "digits"},
        "steps": steps,
        "dp_config": {"noise_multiplier": NOISE, "epsilon_cap": cap, "accountant": accountant},
    }
    return make_plan(parse_config(raw | changes), EXAMPLES, 100)


def hidden_delta(stated: Sequence[float], noise: float) -> float:
    """Return sup over stopping rules of E[(1 - exp(stated_tau - L_tau))+]; ``stated[t - 1]`` is stated after t steps.

    The loss is on a grid of a twentieth of a step's deviation. Interpolation of the convex value only overstates it.
    """
    drift, deviation = 1 / (2 * noise**2), 1 / noise
    spacing, steps = deviation / 20, len(stated)
    reach = 10 * math.sqrt(steps) * deviation
    loss = np.arange(-reach, reach + 2 * steps * drift, spacing)
    moves = np.arange(-180, 181) * spacing
    weights = np.diff(norm.cdf(np.append(moves - spacing / 2, moves[-1] + spacing / 2) / deviation))

    def gain(after: int) -> np.ndarray:
        return np.maximum(0.0, -np.expm1(np.minimum(stated[after - 1] - loss, 0.0)))

    value = gain(steps)
    for after in range(steps - 1, -1, -1):
        going_on = np.interp(loss + drift, loss, np.convolve(value, weights, "same"))
        value = np.maximum(gain(after), going_on) if after else going_on
    return float(np.interp(0.0, loss, value))


def at_each_stop(plan: Plan, state) -> list[float]:
    return [state(plan, {"gradient": step}) for step in range(1, STEPS + 1)]


def test_the_claim_holds_under_every_stopping_rule_and_what_was_charged_does_not():
    plan = planned()
    delta = accountant_delta(DELTA)
    stop = at_each_stop(plan, epsilon_if_stop_was_blind)
    assert all(earlier <= later for earlier, later in pairwise(stop))
    assert hidden_delta(stop, NOISE) > 5 * delta, "11 times, at the best moment to stop"
    claim = at_each_stop(plan, claimed_epsilon)
    assert set(claim) == {plan.epsilon_outsiders}
    assert delta / GRID_ERROR < hidden_delta(claim, NOISE) < GRID_ERROR * delta, "tight: stopping gains nothing"


def test_the_claim_holds_under_the_renyi_accountant_too():
    """Its least epsilon over many orders, taken at each stop, hides almost three times the delta that it states."""
    orders = np.array([1 + x / 10 for x in range(1, 100)] + list(range(12, 257)))
    steps = np.arange(1, STEPS + 1)[:, None]
    delta = accountant_delta(DELTA)
    conversion = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    curves = steps * orders / (2 * NOISE**2) + conversion
    assert hidden_delta(curves.min(axis=1).tolist(), NOISE) > 2 * delta
    one_order = int(np.argmin(curves[-1]))
    assert hidden_delta(curves[:, one_order].tolist(), NOISE) < delta, "one order is a supermartingale"
    plan = planned("rdp")
    assert hidden_delta(at_each_stop(plan, claimed_epsilon), NOISE) < delta


def test_the_claim_of_a_run_is_its_plans_before_and_after_every_step():
    plan = planned(cap=2.0)
    assert 1 < plan.steps_within_cap < STEPS
    for charged in (0, 1, plan.steps_within_cap):
        assert claimed_epsilon(plan, {"gradient": charged}) == plan.epsilon_outsiders <= 2.0
    half = {"gradient": plan.steps_within_cap // 2}
    assert epsilon_if_stop_was_blind(plan, half) < 0.9 * plan.epsilon_outsiders
    assert claimed_epsilon(plan, half, known_shares=3) > plan.epsilon_outsiders


def test_a_run_that_was_charged_beyond_its_cap_claims_its_whole_plan():
    """The cap was raised while it was under way, so where it now ends may follow from what it has released."""
    plan, whole = planned(cap=2.0), planned()
    beyond = {"gradient": plan.steps_within_cap + 1}
    assert claimed_epsilon(plan, beyond) == whole.epsilon_outsiders > 4.0
    assert [count for _, count in covered(plan, beyond)] == [STEPS]


def test_the_claim_covers_the_measurements_of_the_plan():
    measurements = {"evaluation": {"noise_multiplier": 20.0, "every": 10}}
    plan = planned(measurements=measurements)
    counts = {each.query: count for each, count in covered(plan, {"gradient": 5})}
    assert counts == {"gradient": STEPS, "evaluation": 10}
    assert claimed_epsilon(plan, {}) == plan.epsilon_outsiders > planned().epsilon_outsiders
    behind, ahead = ({"gradient": 20, "evaluation": count} for count in (1, 2))
    assert epsilon_if_stop_was_blind(plan, behind) < epsilon_if_stop_was_blind(plan, ahead)


@pytest.mark.parametrize(("finished", "charged"), [(1, 2)])
def test_a_step_that_was_charged_and_not_finished_counts(finished, charged):
    """Noise multiplier 5: 0.73 would be stated, where two sums may have been decoded."""
    plan = planned(dp_config={"noise_multiplier": 5.0, "epsilon_cap": 20.0})
    stated = [epsilon_if_stop_was_blind(plan, {"gradient": count}) for count in (finished, charged)]
    assert stated == [pytest.approx(0.73, abs=0.005), pytest.approx(1.06, abs=0.01)]
