"""Plans with correlated noise: what is refused, what is chosen, and that a run that is repeated keeps its choice."""

import math
from contextlib import closing
from typing import Any

import pytest

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT, mixed_norm
from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.config.home import ledger_url
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning import correlated_noise, plan
from raycloak.coordinator.planning.correlated_noise import LARGEST_SHARE, chosen_coefficients, state_bytes, workload_of
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.factorisation import factorise
from raycloak.coordinator.planning.plan import Plan, make_plan, plan_mechanism
from raycloak.coordinator.training.assignment import ResumedRun
from raycloak.metrics.errors import ConfigError
from tests.coordinator.proof.proof_cases import packed, whole
from tests.coordinator.runs.test_resumed_runs import manifest_of
from tests.mixed import BANDS, EPOCH, FIELDS, STEPS, mixed_mechanism
from tests.protocol import Call, Fate, worker_setup
from tests.protocol import config as small_config

EXAMPLES, DIMENSION = 1437, 4810
ONE = COEFFICIENT_UNIT
OF_OWN = (
    "dp_config.noise.correlated=off",
    "dp_config.target_epsilon=null",
    "dp_config.noise_multiplier=2.0",
    "dp_config.epsilon_cap=8.0",
    "dp_config.accountant=rdp",
)
"""Overrides to noise of each step's own."""


def config(bands: int | None = 4, overrides: tuple[str, ...] = (), **changes: Any) -> RunConfig:
    """Return the demo's configuration with so many bands; None leaves them to the plan."""
    noise = {"correlated": "auto", "bands": bands}
    dp = {"noise_multiplier": 2.0, "epsilon_cap": 8.0, "accountant": "rdp"} if bands else {"target_epsilon": 8.0}
    raw: dict[str, Any] = {
        "expected_batch_size": 100.0,
        "dataset": {"kind": "digits"},
        "steps": 50,
        "dp_config": dp | {"noise": noise},
    }
    return parse_config(raw | changes, list(overrides))


def planned(bands: int | None = 4, examples: int = EXAMPLES, **changes: Any) -> Plan:
    return make_plan(config(bands, **changes), examples, DIMENSION)


# --- what is planned


def test_a_plan_of_explicit_bands_has_their_coefficients(tmp_path):
    small = small_config(**FIELDS)
    worker_setup(small, tmp_path)
    found = plan_of(small, tmp_path / "data")
    mechanism = found.mechanism
    assert mechanism.coefficients == factorise(workload_of(small), BANDS).coefficients
    assert (len(mechanism.coefficients), mechanism.bands, mechanism.coefficients[0]) == (BANDS, BANDS, ONE)
    assert mechanism.sample_rate == BANDS * 12 / 40
    assert mechanism.expected_passes() == pytest.approx(STEPS * 12 / 40)
    rows = dict(plan_rows(found))
    assert rows["correlated noise"].startswith(f"over {BANDS} steps: ")
    assert f"of one of {BANDS} parts" in rows["sample rate"]


def test_a_plan_asks_a_ledger_that_is_there_what_it_would_say_of_mixed_steps(tmp_path):
    """A ledger refuses mixed steps whose order nothing holds, and a plan has no manifest that could."""
    small = small_config(**FIELDS)
    worker_setup(small, tmp_path)
    with closing(PrivacyLedger(ledger_url())) as ledger:
        ledger.open_account("of others", OpeningTerms(8.0, 1e-5))
    found = plan_of(small, tmp_path / "data")
    assert found.mechanism.bands == BANDS
    assert found.account is not None


def test_noise_is_of_all_steps_that_a_sum_is_mixed_into():
    """Epsilon is that of one charge a round at the part's rate, and sigma pays for the whole column."""
    found, steps = planned(steps=10), 3
    mechanism = found.mechanism
    assert mechanism.participations(10) == steps == found.releases[0].count
    alone = make_plan(config(None, OF_OWN, steps=steps, expected_batch_size=400.0), EXAMPLES, DIMENSION)
    assert alone.mechanism.bands == 1
    assert found.epsilon == pytest.approx(alone.epsilon, rel=1e-4)
    norm = math.sqrt(sum((each / ONE) ** 2 for each in mechanism.coefficients))
    assert norm <= float(mixed_norm(mechanism.coefficients)) <= norm * (1 + 1e-12)
    rounding = norm * math.sqrt(DIMENSION) + math.sqrt(4 * DIMENSION)
    assert mechanism.sensitivity == pytest.approx(norm + rounding * mechanism.gamma, rel=1e-12)
    counted = mechanism.sigma * math.sqrt(mechanism.virtual_workers * mechanism.honest_share) * mechanism.gamma
    assert counted >= 2.0 * mechanism.sensitivity
    assert counted == pytest.approx(2.0 * mechanism.sensitivity, rel=1e-4)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_target_is_met_by_one_charge_a_round(accountant):
    dp = {"target_epsilon": 8.0, "accountant": accountant, "noise": {"correlated": "auto", "bands": 4}}
    # Every unit of a part, so that no series is summed.
    found = planned(examples=400, steps=10, dp_config=dp)
    assert (found.mechanism.sample_rate, found.releases[0].count) == (1.0, 3)
    assert 0.99 * 8 <= found.epsilon <= 8.0


def test_the_last_round_of_a_run_is_charged_although_it_is_cut_short():
    assert [mixed_mechanism().participations(steps) for steps in (0, 1, 3, 4, 6, 7)] == [0, 1, 1, 2, 2, 3]


# --- what is refused


@pytest.mark.parametrize(
    ("bands", "changes", "code", "named"),
    [
        (5, {"steps": 4}, "bands_too_many", "5 bands does not fit 4 steps"),
        (5, {"epoch_steps": 4}, "bands_too_many", "5 bands does not fit 4 steps"),
        (16, {"expected_batch_size": 100.0}, "batch_too_large", "more than one of 16 parts of 1437 examples"),
        (4, {"expected_batch_size": 360.0}, "batch_too_large", "more than one of 4 parts of 1437 examples"),
        (4, {"expected_batch_size": 1438.0}, "batch_too_large", "1437"),
    ],
)
def test_bands_that_an_epoch_or_the_data_have_no_room_for_are_refused(bands, changes, code, named):
    with pytest.raises(ConfigError, match=f"{code}: .*{named}"):
        planned(bands, **changes)


def test_a_batch_of_a_whole_part_is_no_larger_than_it():
    assert planned(4, examples=400, expected_batch_size=100.0).mechanism.sample_rate == 1.0


def test_bands_that_slices_have_no_units_for_are_refused():
    """Each slice has a unit in every part; else a part of it would be empty."""
    with pytest.raises(ConfigError) as refused:
        planned(8, examples=60, expected_batch_size=7.0, virtual_workers=8)
    assert (refused.value.code, refused.value.exit_code) == ("bands_too_many", 2)
    assert "bands to 7 at most" in refused.value.remedy
    assert planned(7, examples=60, expected_batch_size=8.0, virtual_workers=8).mechanism.bands == 7


# --- what is chosen


@pytest.mark.parametrize("bands", [None, 4])
def test_no_run_without_privacy_or_by_default_has_coefficients(bands):
    public = parse_config(
        {
            "dataset": {"kind": "digits", "public": True},
            "expected_batch_size": 100.0,
            "steps": 50,
            "dp_config": {"enabled": False},
        }
    )
    assert chosen_coefficients(public, EXAMPLES, DIMENSION) == ()
    off = parse_config(config(bands).model_dump() | {"dp_config": {"target_epsilon": 8.0}})
    assert chosen_coefficients(off, EXAMPLES, DIMENSION) == ()


def test_a_plan_that_chooses_takes_the_bands_of_the_least_error_and_none_where_they_gain_little(monkeypatch):
    monkeypatch.setattr(correlated_noise, "TRIED_BANDS", (4, 8))
    long = config(None, steps=200, epoch_steps=10**6, optimizer={"learning_rate": 0.5, "momentum": 0.9})
    found = chosen_coefficients(long, 60_000, DIMENSION)
    assert len(found) in correlated_noise.TRIED_BANDS
    monkeypatch.setattr(correlated_noise, "LARGEST_SHARE", 1e-3)
    assert chosen_coefficients(long, 60_000, DIMENSION) == ()
    monkeypatch.setattr(correlated_noise, "LARGEST_SHARE", LARGEST_SHARE)
    # No number that is tried fits the memory.
    monkeypatch.setattr(correlated_noise, "LARGEST_STATE", sum(state_bytes(4, DIMENSION, 3, 64)) - 1)
    assert chosen_coefficients(long, 60_000, DIMENSION) == ()


def test_a_rule_with_second_moments_is_left_with_independent_noise_unless_bands_are_given():
    adam = {"optimizer": {"name": "adam", "learning_rate": 0.01}, "steps": 200}
    assert chosen_coefficients(config(None, **adam), 60_000, DIMENSION) == ()
    assert len(chosen_coefficients(config(4, **adam), 60_000, DIMENSION)) == 4


# --- a run that is repeated


def other_choice(*arguments: Any) -> tuple[int, ...]:
    return (ONE, ONE // 2, ONE // 4)


@pytest.mark.parametrize("recorded", [(), (ONE, ONE // 3, 7), (ONE, 0)])
def test_recorded_coefficients_are_taken_whatever_would_be_chosen_now(monkeypatch, recorded):
    monkeypatch.setattr(plan, "chosen_coefficients", other_choice)
    chosen = plan_mechanism(config(), EXAMPLES, DIMENSION)
    assert chosen.coefficients == other_choice()
    kept = plan_mechanism(config(), EXAMPLES, DIMENSION, coefficients=recorded)
    assert (kept.coefficients, kept.bands) == (recorded, max(1, len(recorded)))
    assert kept.sample_rate == kept.bands * 100 / EXAMPLES


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


def test_guarantee_a_resume_keeps_the_coefficients_of_the_manifest(tmp_path, monkeypatch):
    """The choice ends with numerical libraries, and theirs may be others on the machine of the resume."""
    run = whole(tmp_path, **FIELDS)

    def disturb(call: Call) -> Fate:
        if (call.method, call.index) == ("charge", EPOCH + 1):
            run.coordinator._training.checkpoints.close(60)
            raise Killed
        return None

    run.stage.disturb = disturb
    with pytest.raises(Killed):
        run.train()
    monkeypatch.setattr(plan, "chosen_coefficients", other_choice)
    again = whole(tmp_path, assignment=ResumedRun(manifest_of(run), packed(tmp_path)), **FIELDS)
    again.train()
    assert again.digests[: len(run.digests) - EPOCH] == run.digests[EPOCH:]
    assert len(again.digests) == STEPS - EPOCH
    assert manifest_of(run).computation.mechanism.coefficients != other_choice()
