"""Five accountants on a grid of sampling rates, noise multipliers and steps.

RDP and PLD are computed at every point except the slowest. PRV takes a second a point: it is compared at the eight
corners and at three points drawn with a fixed seed. A grid with twice as many rates and five levels of noise was
compared once, point by point, without a disagreement; where epsilon is above about 700, PRV overflows and says so.
"""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest

from raycloak.coordinator.accounting import pld as pld_module
from raycloak.coordinator.accounting import renyi
from raycloak.coordinator.accounting.accountants import accountant_of
from raycloak.coordinator.accounting.pld import STATED_ERROR
from raycloak.coordinator.accounting.releases import Cut, Release
from raycloak.coordinator.planning import cross_check as cross_check_module
from raycloak.coordinator.planning.cross_check import CrossCheck, cross_check
from raycloak.metrics.errors import RefusedError

DELTA = 1e-5
RATES = (1e-4, 1e-3, 0.05, 0.5, 1.0)
NOISES = (0.5, 1.0, 5.0)
STEPS = (1, 100, 10_000)
SLOWEST = {(1e-4, 1.0, 1)}
GRID = [point for point in itertools.product(RATES, NOISES, STEPS) if point not in SLOWEST]
CORNERS = list(itertools.product((1e-4, 1.0), (0.5, 5.0), (1, 10_000)))
DRAWN = random.Random(4).sample([point for point in GRID if point not in CORNERS and point[0] < 1], 3)


@cache
def value(accountant: str, point: tuple[float, float, int]) -> float:
    return accountant_of(accountant).curve([(Release(*point),)], DELTA)[0]  # type: ignore[arg-type]


def values(accountant: str) -> dict[tuple[float, float, int], float]:
    return {point: value(accountant, point) for point in GRID}


def neighbours(axis: int, levels: tuple) -> list[tuple[tuple, tuple]]:
    """Pairs of points of the grid that differ in one argument by one level, the smaller first."""
    pairs = []
    for point in GRID:
        above = levels.index(point[axis]) + 1
        if above < len(levels):
            other = (*point[:axis], levels[above], *point[axis + 1 :])
            pairs += [(point, other)] if other not in SLOWEST else []
    return pairs


def test_rdp_is_nowhere_below_pld():
    rdp, pld = values("rdp"), values("pld")
    assert [point for point in GRID if rdp[point] < pld[point] * (1 - STATED_ERROR)] == []
    assert len(GRID) == 44


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon_grows_with_the_sampling_rate_and_the_steps_and_falls_with_the_noise(accountant: str):
    found, error = values(accountant), STATED_ERROR if accountant == "pld" else 1e-9
    for small, large in [*neighbours(0, RATES), *neighbours(2, STEPS)]:
        assert found[small] <= found[large] * (1 + error), (small, large)
    for little, much in neighbours(1, NOISES):
        assert found[much] <= found[little] * (1 + error), (little, much)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("q", "z"), [(1e-3, 0.5), (0.01, 2.0), (0.05, 1.0), (0.2, 5.0), (0.5, 0.7), (1.0, 2.0)])
def test_a_run_that_is_split_costs_what_the_whole_costs(accountant: str, q: float, z: float):
    """The parts' noise differs in the ninth digit, so that they are composed and not added up beforehand."""
    parts = (Release(q, z, 37), Release(q, z * (1 + 1e-10), 40), Release(q, z * (1 + 2e-10), 23))
    (composed,) = accountant_of(accountant).curve([parts], DELTA)  # type: ignore[arg-type]
    assert composed == pytest.approx(value(accountant, (q, z, 100)), rel=1e-3)


@pytest.mark.parametrize("point", [*CORNERS, *DRAWN], ids=str)
def test_prv_holds_pld_and_the_two_rdps_agree(point: tuple[float, float, int]):
    found = cross_check((Release(*point),), DELTA)
    assert found.epsilon["opacus_rdp"] == pytest.approx(value("rdp", point), rel=1e-9)
    assert found.epsilon["raycloak_pld"] == value("pld", point)
    if found.prv_bounds is None:
        assert found.epsilon["opacus_rdp"] > 690
        assert "overflow" in found.not_computed["opacus_prv"]
        return
    lower, upper = found.prv_bounds
    assert lower <= found.epsilon["opacus_prv"] <= upper
    assert upper - lower <= max(2.1 * cross_check_module.PRV_ERROR_SHARE * found.epsilon["opacus_rdp"], 0.06)
    assert lower <= value("pld", point) <= upper * (1 + STATED_ERROR)


def test_a_plan_of_several_mechanisms_is_checked_as_one():
    found = cross_check((Release(0.05, 1.0, 100), Release(1.0, 20.0, 3), Release(1.0, 15.0, 1)), DELTA)
    others = {"dp_accounting_pld", "dp_accounting_rdp", "opacus_prv", "opacus_rdp"}
    assert set(found.epsilon) == others | {"raycloak_pld"}
    assert found.not_computed == {}


AGREED = CrossCheck(
    {
        "opacus_rdp": 2.1,
        "dp_accounting_rdp": 2.1,
        "raycloak_pld": 1.83,
        "dp_accounting_pld": 1.831,
        "opacus_prv": 1.828,
    },
    integer_orders=(2.2, 2.2),
    prv_bounds=(1.82, 1.84),
    tight_uncut=1.83,
    same_grid=(1.83, 1.831),
)


def test_accountants_that_agree_are_not_refused():
    assert AGREED.disagreement() is None


@pytest.mark.parametrize(
    ("epsilon", "changes", "message"),
    [
        ({}, {"integer_orders": (2.2, 2.21)}, "integer orders gives 2.2 in opacus and 2.21"),
        ({"opacus_rdp": 1.81}, {}, "opacus_rdp gives 1.81, below the 1.82"),
        ({"dp_accounting_rdp": 1.0}, {}, "dp_accounting_rdp gives 1, below"),
        ({}, {"prv_bounds": (1.84, 1.86)}, "PRV gives 1.84 to 1.86 and PLD 1.83"),
        ({}, {"prv_bounds": (1.70, 1.72)}, "PRV gives 1.7 to 1.72 and PLD 1.83"),
        ({"raycloak_pld": 1.7}, {}, "PLD gives 1.7 with cut batches, below the 1.83"),
        ({}, {"same_grid": (1.83, 1.84)}, "PLD on one grid gives 1.83 in raycloak and 1.84 in dp-accounting"),
    ],
)
def test_accountants_that_disagree_are_named(epsilon, changes, message):
    fields = {"integer_orders": AGREED.integer_orders, "prv_bounds": AGREED.prv_bounds, "tight_uncut": 1.83} | changes
    assert message in (CrossCheck(AGREED.epsilon | epsilon, **fields).disagreement() or "")


CUT = Release(256 / 7500, 2.0, 400, Cut((7500,), 290))


def test_a_plan_with_cut_batches_is_checked_by_four_accountants_and_without_them_by_five():
    found = cross_check((CUT, Release(1.0, 20.0, 1)), DELTA)
    assert set(found.epsilon) == {"dp_accounting_pld", "dp_accounting_rdp", "opacus_rdp", "raycloak_pld"}
    assert "knows no cut batches" in found.not_computed["opacus_prv"]
    assert found.disagreement() is None
    assert found.epsilon["raycloak_pld"] > 1.05 * found.tight_uncut
    lower, upper = found.prv_bounds or (0, 0)
    assert lower <= found.tight_uncut <= 1.01 * upper


def test_a_renyi_charge_that_forgets_the_cut_contradicts_pld(monkeypatch: pytest.MonkeyPatch):
    cross_check.cache_clear()
    monkeypatch.setattr(renyi, "cut_rdp", lambda rdp, *rest: rdp)
    found = cross_check((replace(CUT, cut=Cut((7500,), 262)),), DELTA)
    assert "opacus_rdp gives" in (found.disagreement() or "")


def test_a_disagreement_refuses_the_plan(monkeypatch: pytest.MonkeyPatch):
    """PLD a tenth too small stays below both RDPs; only PRV's bounds show it."""
    real = pld_module.epsilon
    monkeypatch.setattr(pld_module, "epsilon", lambda *arguments: 0.9 * real(*arguments))
    with pytest.raises(RefusedError, match=r"accountants_disagree.*PRV gives"):
        cross_check((Release(0.03, 1.0, 100),), DELTA).require_agreement()


def test_what_cannot_be_computed_is_said_and_the_rest_is_compared():
    found = cross_check((Release(0.5, 2.0, 100_000),), 1e-10)
    assert set(found.not_computed) == {"dp_accounting_pld", "opacus_prv"}
    assert all("rounding errors" in why for why in found.not_computed.values())
    assert found.disagreement() is None
    assert found.epsilon["raycloak_pld"] < found.epsilon["opacus_rdp"]
    many = cross_check((Release(0.5, 2.0, 10**12),), 1e-9)
    assert "rounding errors" in many.not_computed["raycloak_pld"]
    alone = CrossCheck({"opacus_rdp": 1.0, "dp_accounting_rdp": 1.0}, (1.0, 1.0), (1.2, 1.3))
    assert "below the 1.2" in (alone.disagreement() or "")


@pytest.mark.parametrize("release", [Release(0.01, 1.0, 1000), Release(1.0, 20.0, 1000)])
def test_no_accountant_contradicts_the_others_where_delta_is_small(release: Release):
    """PRV's rounding does not shrink with delta: at 1e-13 its lower bound would be above the true value."""
    for digits in range(6, 20):
        found = cross_check((release,), 10.0**-digits)
        assert found.disagreement() is None
        assert ("opacus_prv" in found.epsilon) == (digits < 11 or (release.sample_rate == 1 and digits < 14))


def test_a_law_that_is_wrong_contradicts_dp_accounting_on_one_grid(monkeypatch: pytest.MonkeyPatch):
    """A four-hundredth more noise than there is would be within PRV's bounds."""
    real = pld_module.sampled_gaussian
    monkeypatch.setattr(pld_module, "sampled_gaussian", lambda z, *rest: real(1.0025 * z, *rest))
    pld_module._laws.cache_clear()
    found = cross_check((Release(0.031, 1.0, 100),), DELTA)
    pld_module._laws.cache_clear()
    assert "PLD on one grid gives" in (found.disagreement() or "")
