"""Wrong epsilons that libraries and systems have shipped: here each comes out right, or is refused.

Values of the libraries are pinned as they are in the versions of constraints.txt, so that a fix there is noticed.
Tight values are dp-accounting's PLD on a grid of 1e-4.
"""

import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from pydantic import ValidationError

from raycloak.attestation.core.messages import parse
from raycloak.coordinator.accounting import pld
from raycloak.coordinator.accounting.accountants import accountant_of
from raycloak.coordinator.accounting.calibration import epsilon_of
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.config.sections import DPConfig
from raycloak.coordinator.planning.plan import plan_mechanism
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.ledger.ledger_cases import MANIFEST, PARAMETERS, expected_epsilon, mechanism, opened

DELTA = 1e-5
Relation = dp_accounting.NeighboringRelation


def ours(name: str, *releases: Release) -> float:
    """Epsilon with all of DELTA given to the accountant."""
    return accountant_of(name).curve([releases], DELTA)[0]  # type: ignore[arg-type]


def theirs(kind: type, event: dp_accounting.DpEvent, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> float:
    grid = {"value_discretization_interval": 1e-3} if kind is PLDAccountant else {}
    return float(kind(neighboring_relation=relation, **grid).compose(event).get_epsilon(DELTA))


# --- composition


def test_self_composed_randomized_response_is_wrong_in_the_library_and_no_event_here():
    """PLD ignores the count under REPLACE_ONE: one response's epsilon for a hundred of them."""
    event = dp_accounting.RandomizedResponseDpEvent(0.5, 2)
    repeated = theirs(PLDAccountant, dp_accounting.SelfComposedDpEvent(event, 100), Relation.REPLACE_ONE)
    listed = theirs(PLDAccountant, dp_accounting.ComposedDpEvent([event] * 100), Relation.REPLACE_ONE)
    assert repeated == pytest.approx(1.099, rel=1e-3)
    assert listed == pytest.approx(90.79, rel=1e-3)
    with pytest.raises(ProtocolError, match="malformed"):
        parse(Mechanism, mechanism().encode().replace(b'"query":"gradient"', b'"query":"randomized_response"'))


@pytest.mark.parametrize("name", ["rdp", "pld"])
@pytest.mark.parametrize(("q", "z"), [(1.0, 5.0), (0.05, 1.0)])
def test_a_count_of_n_is_n_releases_one_by_one(name: str, q: float, z: float):
    """Noise that differs in the ninth digit keeps the releases apart, so that they are really composed one by one."""
    apart = tuple(Release(q, z * (1 + index * 1e-10), 1) for index in range(8))
    assert ours(name, *apart) == pytest.approx(ours(name, Release(q, z, 8)), rel=2e-3)
    assert ours(name, Release(q, z, 3), Release(q, z, 5)) == pytest.approx(ours(name, Release(q, z, 8)), rel=1e-9)


@pytest.mark.parametrize("kind", [RdpAccountant, PLDAccountant])
@pytest.mark.parametrize("q", [0.05, 1.0])
def test_the_library_composes_the_events_that_are_used_of_it(kind: type, q: float):
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(2.0))
    relation = Relation.REPLACE_SPECIAL
    repeated = theirs(kind, dp_accounting.SelfComposedDpEvent(event, 10), relation)
    assert repeated == pytest.approx(theirs(kind, dp_accounting.ComposedDpEvent([event] * 10), relation), rel=1e-3)


# --- adjacency


def test_replace_one_gaussian_is_wrong_in_the_librarys_rdp_and_no_adjacency_here():
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    assert theirs(RdpAccountant, gaussian, Relation.REPLACE_ONE) == theirs(RdpAccountant, gaussian)
    assert theirs(PLDAccountant, gaussian, Relation.REPLACE_ONE) == pytest.approx(9.997, rel=1e-3)
    assert ours("pld", Release(1.0, 1.0, 1)) == pytest.approx(4.377, rel=1e-3)
    assert ours("pld", Release(1.0, 0.5, 1)) == pytest.approx(9.997, rel=1e-3), "twice the sensitivity"
    with pytest.raises(ValidationError):
        Mechanism(**mechanism().model_dump() | {"adjacency": "replace_one"})


@pytest.mark.parametrize(("q", "z", "steps"), [(0.01, 1.0, 1000), (1.0, 2.0, 10), (0.5, 1.0, 5)])
def test_zeroing_an_example_out_costs_what_removing_it_does(q: float, z: float, steps: int):
    """The relation of the mechanism is zero-out; dp-accounting has it as REPLACE_SPECIAL."""
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), steps
    )
    for kind in (RdpAccountant, PLDAccountant):
        assert theirs(kind, event, Relation.REPLACE_SPECIAL) == pytest.approx(theirs(kind, event), rel=1e-9)


# --- steps


def planned(num_examples: int, **changes: Any) -> Mechanism:
    raw = {
        "expected_batch_size": 1.0,
        "steps": num_examples,
        "virtual_workers": 8,
        "dataset": {"kind": "digits"},
        "dp_config": {"noise_multiplier": 2.0, "epsilon_cap": 8.0},
    }
    return plan_mechanism(parse_config(raw | changes), num_examples, dimension=10)


def test_steps_are_never_computed_from_the_sampling_rate():
    """int(1 / q) with q = 1/n loses a step for 312 of the n below 5000; a step that is made is then not charged."""
    lost = [n for n in range(1, 5000) if int(1 / (1 / n)) != n]
    assert len(lost) == 312
    assert {93, 99, 105, 117, 123} < set(lost)
    for n in (93, 99, 105, 117, 123):
        assert planned(n).steps == n == round(1 / planned(n).sample_rate)


def test_a_step_with_an_empty_draw_is_charged_like_any_other():
    """At q = 1/1000 and 50 examples 95 % of the draws are empty; counting only the others would claim too much."""
    drawn = round(1000 * (1 - (1 - 1e-3) ** 50))
    assert drawn == 49
    assert ours("rdp", Release(1e-3, 0.5, drawn)) < 0.8 * ours("rdp", Release(1e-3, 0.5, 1000))
    assert ours("pld", Release(1e-3, 0.5, drawn)) < 0.6 * ours("pld", Release(1e-3, 0.5, 1000))


def test_a_charge_knows_nothing_of_what_was_drawn(tmp_path):
    ledger = opened(tmp_path / "ledger.db")
    for step in range(3):
        ledger.charge("run-a", step, PARAMETERS, MANIFEST)
    (account,) = ledger.view().accounts
    assert account.runs[0].charged_steps == 3
    assert account.spent_epsilon == pytest.approx(expected_epsilon(3), rel=1e-9)


# --- TenSafe's table: (q, sigma, steps), tight, RDP, and what its four accountants said

TENSAFE = [
    (0.01, 1.0, 1000, 1.828, 2.101, (3.99, 1.20, 15.1, 2.54)),
    (0.01, 0.5, 1000, 13.36, 15.47, (16.9, 2.59, 30.3, 16.9)),
    (0.001, 1.0, 10000, 0.476, 0.788, (2.18, 0.341, 4.79, 1.15)),
    (0.05, 1.0, 500, 7.524, 8.302, (10.1, 4.98, 53.5, 9.39)),
    (0.2, 1.0, 100, 14.53, 16.08, (9.56, 10.0, 95.8, 18.2)),
    (0.2, 2.0, 100, 5.023, 5.499, (4.87, 4.38, 47.9, 6.18)),
    (0.5, 2.0, 50, 9.474, 10.29, (7.76, 8.60, 84.6, 11.3)),
]


@pytest.mark.parametrize(("q", "z", "steps", "tight", "rdp", "claimed"), TENSAFE)
def test_on_tensafes_table_no_value_is_below_the_tight_one(q, z, steps, tight, rdp, claimed):
    release, last_digit = Release(q, z, steps), 1e-3
    assert tight * (1 - last_digit) <= ours("pld", release) <= tight * 1.01
    assert tight < ours("rdp", release) == pytest.approx(rdp, rel=0.02)
    assert min(claimed) < tight, "each row of the table had a value that claims too much privacy"


def test_noise_divided_by_twice_the_batch_costs_what_it_costs():
    """Clipping the mean of B examples with noise for one of them: multiplier sigma / 2B, and one step is ruinous."""
    assert ours("rdp", Release(1.0, 1 / 32, 1)) == pytest.approx(669, rel=1e-3)
    assert ours("rdp", Release(1.0, 1 / 64, 1)) == pytest.approx(2365, rel=1e-3)
    assert ours("pld", Release(1.0, 1 / 32, 1)) == pytest.approx(647.5, rel=1e-3)


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_a_tiny_sampling_rate_is_not_free(name: str):
    """Below q = 1e-6 TenSafe returned zero."""
    assert ours(name, Release(5e-7, 0.5, 10**5)) > 1e-3


def test_targets_are_met_and_a_given_noise_multiplier_is_kept():
    """TenSafe never read its target, and replaced the user's sigma by a default."""
    solved = planned(1000, expected_batch_size=50.0, dp_config={"target_epsilon": 2.0})
    assert epsilon_of(solved.sample_rate, solved.noise_multiplier, solved.steps, DELTA, solved.accountant) <= 2.0
    assert planned(93).noise_multiplier == 2.0


@pytest.mark.parametrize("field", ["apply_dp_noise", "sigma", "target_eps", "noise_multipler"])
def test_a_privacy_field_that_nobody_reads_is_refused(field: str):
    with pytest.raises(ConfigError, match=field):
        parse_config({"expected_batch_size": 1.0, "dp_config": {"target_epsilon": 1.0, field: 1}})
    with pytest.raises(ConfigError, match=field):
        DPConfig(target_epsilon=1.0, **{field: False})


def test_an_infinite_or_missing_epsilon_is_never_zero():
    assert ours("rdp", Release(1.0, 1e-3, 1)) > 1e5
    assert pld.epsilon((Release(1.0, 1e-3, 1),), DELTA) > 1e5
    assert 100 < pld.epsilon((Release(0.01, 0.25, 1000),), DELTA) < math.inf
