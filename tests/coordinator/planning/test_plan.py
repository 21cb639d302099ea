"""The mechanism that follows from a configuration, and the refusals of what cannot run."""

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

from raycloak.attestation.core.mask_graph import SPLIT_PROBABILITY
from raycloak.coordinator.accounting.calibration import GENEROUS, composed_epsilon, epsilon_of
from raycloak.coordinator.accounting.pld import cut_excess
from raycloak.coordinator.accounting.releases import Cut, Release, least_within, overflow_bound, physical_shape
from raycloak.coordinator.accounting.renyi import SLACK_SHARE, accountant_delta, effective_noise_multiplier
from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.ledger.entries import Head
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.ledger.view import AccountView, LedgerView
from raycloak.coordinator.planning.batches import OVERFLOW_SHARE
from raycloak.coordinator.planning.cross_check import checked
from raycloak.coordinator.planning.outlook import with_account
from raycloak.coordinator.planning.payer import PayingAccount, paying_account
from raycloak.coordinator.planning.plan import make_plan, plan_mechanism
from raycloak.metrics.errors import BudgetError, ConfigError, DatasetError, ModelError, RefusedError
from raycloak.workers.terms.mechanism import MAX_CLIP, MIN_CLIP, UnitTerms
from raycloak.workers.vectors.noise import decompose

README = Path(__file__).resolve().parents[3] / "README.md"
DIGITS = {"kind": "digits"}
MANIFEST = b"m" * 32
CLIPPED = {"noise_multiplier": 10.0, "epsilon_cap": 8.0}


def config(**changes: Any) -> RunConfig:
    """The demo's numbers, with some changed; the full batch of 1437 where no batch size is given."""
    raw: dict[str, Any] = {
        "expected_batch_size": 1437.0,
        "dataset": DIGITS,
        "steps": 50,
        "dp_config": {"noise_multiplier": 10.0, "epsilon_cap": 8.0},
    }
    return parse_config(raw | changes)


def test_the_demo_is_planned_to_its_target():
    plan = make_plan(
        config(expected_batch_size=359.0, steps=200, dp_config={"target_epsilon": 8.0}),
        num_examples=1437,
        dimension=4810,
    )
    mechanism = plan.mechanism
    assert mechanism.sample_rate == 359 / 1437
    assert 2.28 < mechanism.noise_multiplier < 2.29
    assert mechanism.accountant == "pld"
    assert 0.997 * 8 <= plan.epsilon <= 8.0
    assert plan.steps_within_cap == 200
    assert plan.epsilon_outsiders <= plan.epsilon < (plan.epsilon_one_worker or 0)
    assert mechanism.ring_bits == 32
    assert plan.bytes_per_step == 3 * 4 * 4810
    assert plan.sensitivity_inflation < 1e-4
    assert plan.delta_terms.total < SLACK_SHARE * 1e-5
    assert plan.warnings == ()


def test_the_json_has_the_promised_fields_and_is_plain():
    fields = make_plan(config(), 1437, 4810).as_json()
    promised = (
        "noise_multiplier sample_rate steps epsilon accountant ring_bits gamma sensitivity_inflation bytes_per_step "
        "rounding_cost base_draws"
    )
    assert set(promised.split()) <= set(fields)
    assert json.loads(json.dumps(fields, allow_nan=False)) == json.loads(json.dumps(fields))


def test_the_curve_ends_at_the_plans_epsilon():
    plan = make_plan(config(), 1437, 4810)
    steps, values = zip(*plan.epsilon_curve, strict=True)
    assert list(steps) == sorted(set(steps))
    assert list(values) == sorted(values)
    assert plan.epsilon_curve[-1] == (50, plan.epsilon)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_mechanism_does_not_depend_on_the_number_of_workers(workers: int):
    # Batches of one row show the capacity to the last row, and little noise what one worker could know of it.
    tight = {"noise_multiplier": 1.0, "epsilon_cap": 8.0}
    sampled = {"expected_batch_size": 359.0, "micro_batch_size": 1, "dp_config": tight}
    assert plan_mechanism(config(num_workers=workers, **sampled), 1437, 4810) == plan_mechanism(
        config(**sampled), 1437, 4810
    )


def test_units_of_examples_in_memory_are_those_of_their_descriptor():
    units = UnitTerms("visit", 6, 2)
    plan = make_plan(config(micro_batch_size=13), 1437, 4810, units=units)
    assert (plan.mechanism.unit, plan.mechanism.rows_per_unit, plan.mechanism.copies) == units
    assert plan.mechanism.micro_batch_size == 2
    with pytest.raises(ConfigError, match="unit_too_large"):
        make_plan(config(micro_batch_size=5), 1437, 4810, units=units)


def test_noise_covers_the_rounded_sensitivity_and_the_rounding_variance():
    mechanism = plan_mechanism(config(), 1437, 4810)
    needed = (mechanism.noise_multiplier * mechanism.sensitivity / mechanism.gamma) ** 2 + 4
    assert mechanism.virtual_workers * mechanism.sigma**2 >= needed


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("dimension", "bits", "draws"), [(20, 32, 2), (4810, 32, 3), (4810, 64, 3), (10**8, 64, 4)])
def test_noise_takes_the_fewest_base_draws_that_cost_below_a_thousandth_of_epsilon(accountant, dimension, bits, draws):
    """The cost is checked against what the accountant itself says of the same noise without rounding."""
    dp = {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "accountant": accountant}
    asked = config(ring={"bits": bits}, dp_config=dp)
    plan = make_plan(asked, 1437, dimension)
    assert plan.base_draws == draws == decompose(plan.mechanism.sigma).draws
    assert 0 < plan.rounding_cost < 1e-3
    release = Release(1.0, 10.0, 50)
    larger = replace(release, noise_multiplier=10.0 * (1 + plan.sensitivity_inflation))
    stated, exact = (composed_epsilon((each,), 1e-5, accountant) for each in (release, larger))
    assert plan.rounding_cost == pytest.approx(1 - exact / stated, rel=0.2, abs=1e-5)


def test_a_grid_too_costly_to_be_coarser_stays_the_finest():
    plan = make_plan(config(ring={"bits": 32}), 1437, 10**7)
    assert plan.rounding_cost > 1e-3
    assert plan.base_draws == 3


def test_public_data_needs_no_base_draws():
    plan = make_plan(config(dp_config={"enabled": False}, dataset=DIGITS | {"public": True}), 1437, 4810)
    assert (plan.base_draws, plan.rounding_cost) == (0, 0.0)


def test_colluding_workers_are_paid_for_with_more_noise():
    trusting = plan_mechanism(config(num_workers=4, min_workers=4), 1437, 4810)
    dp = {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "colluding_workers": 2}
    cautious = plan_mechanism(config(num_workers=4, min_workers=4, dp_config=dp), 1437, 4810)
    assert cautious.honest_share == 0.5
    assert cautious.noise_multiplier == trusting.noise_multiplier
    assert cautious.sigma == pytest.approx(trusting.sigma * math.sqrt(2), rel=0.01)
    assert effective_noise_multiplier(cautious, 4) >= cautious.noise_multiplier


def test_the_masks_of_a_large_run_are_planned_for_the_colluders_that_they_must_withstand():
    many = {"num_workers": 64, "min_workers": 60, "virtual_workers": 64}
    plan = make_plan(config(**many, masks={"colluding_workers": 10}), 1437, 4810)
    assert plan.masks is not None
    assert plan.masks.degree == 12
    assert plan.masks.split_log2 is None, "two runs of six are more than ten"
    told = "12 of 63 others for each worker; they withstand the aggregator with 10 workers"
    assert told in dict(plan_rows(plan))["masks"]
    more = {"num_workers": 200, "min_workers": 190, "virtual_workers": 200, "masks": {"colluding_workers": 66}}
    plan = make_plan(config(**more), 1437, 4810)
    assert plan.masks is not None
    assert plan.masks.split_log2 is not None
    assert -45 < plan.masks.split_log2 <= -40
    assert plan.mechanism.mask_split_probability == plan.delta_terms.mask_split == SPLIT_PROBABILITY
    assert ", sparse masks 9.1e-13" in dict(plan_rows(plan))["δ slack"]
    assert make_plan(config(**more | {"masks": {}}), 1437, 4810).delta_terms.mask_split == 0
    with pytest.raises(ConfigError, match=r"mask_graph: to withstand 62 .* Leave masks.colluding_workers out"):
        make_plan(config(**many | {"min_workers": 64}, masks={"colluding_workers": 62}), 1437, 4810)
    dp = {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "colluding_workers": 3}
    with pytest.raises(ConfigError, match=r"mask_graph: dp_config.colluding_workers"):
        make_plan(config(**many, masks={"colluding_workers": 2}, dp_config=dp), 1437, 4810)


def test_masks_that_fit_no_delta_are_refused_and_may_be_left_out():
    small = {"noise_multiplier": 30.0, "epsilon_cap": 8.0, "target_delta": 9e-11}
    more = {"num_workers": 64, "min_workers": 60, "virtual_workers": 64, "dp_config": small}
    with pytest.raises(ConfigError, match=r"delta_slack: .* mask_split 9\.1e-13\).*leave masks.colluding_workers out"):
        make_plan(config(**more, masks={"colluding_workers": 10}), 1437, 100)
    assert make_plan(config(**more), 1437, 100).masks is None
    fits = config(**more | {"dp_config": small | {"target_delta": 1e-10}}, masks={"colluding_workers": 10})
    assert make_plan(fits, 1437, 100).masks is not None


def test_colluders_who_may_host_everything_are_refused():
    dp = {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "colluding_workers": 3}
    changed = config(num_workers=5, min_workers=5, virtual_workers=6, dp_config=dp)
    with pytest.raises(ConfigError, match="colluding_workers: 3 colluding workers of 5 may host 6 of 6"):
        plan_mechanism(changed, 1437, 10)


def test_the_full_batch_needs_no_chance():
    mechanism = plan_mechanism(config(), 1437, 4810)
    assert mechanism.sample_rate == 1.0
    assert mechanism.overflow_probability == 0.0
    assert mechanism.micro_batch_size * mechanism.micro_batches >= math.ceil(1437 / 8)


def test_the_clamp_never_binds_by_default():
    mechanism = plan_mechanism(config(), 1437, 4810)
    largest = mechanism.max_grad_norm * mechanism.micro_batch_size * mechanism.micro_batches
    assert mechanism.clamp == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize(("n", "q"), [(180, 0.25), (7500, 0.0085), (40, 0.5), (10, 0.9), (1000, 0.0001)])
def test_the_overflow_bound_is_above_the_exact_tail(n: int, q: float):
    for capacity in range(1, n):
        exact = binom.sf(capacity, n, q)
        assert overflow_bound(n, q, 1, capacity) >= exact * (1 - 1e-6)
    assert overflow_bound(n, q, 1, n) == 0
    assert overflow_bound(n, q, 10**9, 1) == 1


@pytest.mark.parametrize("largest", [1, 7, 8, 50, 64, 512])
@pytest.mark.parametrize("capacity", [1, 3, 4, 63, 64, 65, 511, 513])
def test_the_physical_shape_holds_the_capacity_without_waste(capacity: int, largest: int):
    rows, batches = physical_shape(capacity, largest)
    assert rows <= largest
    assert rows * batches >= capacity
    assert (batches - 1) * largest < capacity
    assert (rows - 4) * batches < capacity
    assert rows % 4 == 0 or rows == largest


@pytest.mark.parametrize(("n", "q"), [(180, 0.25), (7500, 0.0085), (3, 0.5), (180, 1.0)])
def test_the_least_capacity_within_a_budget_is_found(n: int, q: float):
    capacity = least_within(1e-20, n, q, 1600)
    assert overflow_bound(n, q, 1600, capacity) <= 1e-20
    assert capacity == 1 or overflow_bound(n, q, 1600, capacity - 1) > 1e-20


def test_a_rare_batch_shrinks_its_rows():
    changed = config(expected_batch_size=16.0, micro_batch_size=512)
    mechanism = plan_mechanism(changed, 60_000, 100)
    assert mechanism.micro_batches == 1
    assert mechanism.micro_batch_size % 4 == 0
    assert mechanism.micro_batch_size <= 24


SAMPLED: dict[str, Any] = {"expected_batch_size": 512.0, "virtual_workers": 8, "steps": 1000}


def test_where_epsilon_pays_for_the_cut_it_is_at_most_half_a_percent_more():
    settings = config(**SAMPLED | {"expected_batch_size": 2048.0, "dp_config": {"target_epsilon": 3.0}})
    plan = make_plan(settings, 60_000, 1000, largest_rows=4)
    mechanism, (release,) = plan.mechanism, plan.releases
    assert mechanism.overflow_probability == 0
    assert release.cut == Cut((7500,), mechanism.micro_batch_size * mechanism.micro_batches)
    assert plan.delta_terms.batch_overflow == 0
    assert 0.99 * 3 < plan.epsilon <= 3
    assert plan.steps_within_cap == 1000
    delta = accountant_delta(1e-5)
    assert 1 <= cut_excess((release,), delta) <= 1.005
    tighter = Cut(release.cut.slice_sizes, release.cut.capacity - 8)
    assert cut_excess((replace(release, cut=tighter),), delta) > 1.005


def test_where_delta_pays_for_the_cut_its_share_is_visible_and_fits_at_the_cap():
    settings = config(**SAMPLED, dp_config={"target_epsilon": 3.0, "accountant": "rdp"})
    plan = make_plan(settings, 60_000, 1000, largest_rows=4)
    mechanism = plan.mechanism
    capacity = mechanism.micro_batch_size * mechanism.micro_batches
    assert mechanism.overflow_probability > 0
    assert plan.releases == (Release(512 / 60_000, mechanism.noise_multiplier, 1000),)
    assert 0.1 * OVERFLOW_SHARE * 1e-5 < plan.delta_terms.batch_overflow <= OVERFLOW_SHARE * 1e-5
    assert overflow_bound(7500, 512 / 60_000, 8000, capacity - 4) * (1 + math.exp(3)) > OVERFLOW_SHARE * 1e-5
    # A hundred runs share the reserve that the account has for all slack.
    assert 100 * OVERFLOW_SHARE == SLACK_SHARE


@pytest.mark.parametrize(
    ("examples", "changes", "chosen"),
    [
        (60_000, {"expected_batch_size": 4096.0}, 8),
        (60_000, {"expected_batch_size": 512.0}, 8),
        (60_000, {"expected_batch_size": 256.0}, 3),
        (60_000, {"expected_batch_size": 256.0, "num_workers": 2}, 4),
        (60_000, {"expected_batch_size": 64.0, "num_workers": 2}, 2),
        (60_000, {"expected_batch_size": 64.0, "num_workers": 5}, 5),
        (60_000, {"expected_batch_size": 64.0, "num_workers": 5, "virtual_workers": 8}, 8),
        (60_000, {"expected_batch_size": 4096.0, "num_workers": 12}, 12),
        (60_000, {"expected_batch_size": 64.0, "num_workers": 4, "min_workers": 4}, 4),
        (5, {"expected_batch_size": 5.0}, 3),
    ],
)
def test_virtual_workers_are_as_many_as_cost_little_padding(examples: int, changes: dict[str, Any], chosen: int):
    assert plan_mechanism(config(steps=100, **changes), examples, 1000).virtual_workers == chosen


def test_colluding_workers_and_sealed_data_keep_eight_virtual_workers():
    rare = {"expected_batch_size": 16.0, "num_workers": 4, "min_workers": 4}
    dp = {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "colluding_workers": 1}
    sealed = {"kind": "sealed", "path": "folder", "key_file": "key"}
    assert plan_mechanism(config(**rare), 60_000, 1000).virtual_workers == 4
    assert plan_mechanism(config(**rare, dp_config=dp), 60_000, 1000).virtual_workers == 8
    assert plan_mechanism(config(**rare, dataset=sealed), 60_000, 1000).virtual_workers == 8


def test_padding_above_a_half_is_warned_of():
    rare, usual = (make_plan(config(expected_batch_size=batch), 60_000, 1000) for batch in (16.0, 4096.0))
    assert rare.rows_per_expected_row == 48 / 16
    assert any("computes 3 rows for each" in warning for warning in rare.warnings)
    assert 1 < usual.rows_per_expected_row < 1.5
    assert usual.warnings == ()
    assert usual.as_json()["rows_per_expected_row"] == usual.rows_per_expected_row


@pytest.mark.parametrize(("virtual_workers", "remedy"), [(3, "size."), (4, "size, or lower virtual_workers.")])
def test_the_warning_of_padding_advises_nothing_that_is_refused(virtual_workers, remedy):
    """Fewer virtual workers than the three workers are."""
    plan = make_plan(config(expected_batch_size=16.0, virtual_workers=virtual_workers), 60_000, 1000)
    (warning,) = (warning for warning in plan.warnings if "rows for each" in warning)
    assert warning.endswith(f"Raise expected_batch_{remedy}")


def test_the_quick_start_computes_less_than_half_a_row_beside_each_that_it_expects():
    """The snippet of README.md."""
    snippet = README.read_text()
    assert "batch_size_per_worker=128," in snippet
    assert "torch.randn(10_000, 20," in snippet
    dp = {"target_epsilon": 8.0, "target_delta": 1e-5}
    raw = {"num_workers": 4, "batch_size_per_worker": 128, "expected_batch_size": None, "steps": 200, "dp_config": dp}
    assert make_plan(config(**raw), 10_000, 370).rows_per_expected_row < 1.5


def test_micro_batches_are_as_large_as_memory_holds_unless_the_configuration_says():
    large = config(expected_batch_size=4096.0)
    measured = plan_mechanism(large, 60_000, 1000, largest_rows=2048)
    assert measured.micro_batches == 1
    assert plan_mechanism(large, 60_000, 1000, largest_rows=128).micro_batch_size <= 128
    given = plan_mechanism(config(expected_batch_size=4096.0, micro_batch_size=32), 60_000, 1000, largest_rows=2048)
    assert given.micro_batch_size <= 32


def test_the_run_is_planned_to_end_at_its_cap():
    plan = make_plan(config(dp_config={"noise_multiplier": 10.0, "epsilon_cap": 2.0}), 1437, 4810)
    assert 0 < plan.steps_within_cap < 50
    assert plan.epsilon <= 2.0 < epsilon_of(1.0, 10.0, plan.steps_within_cap + 1, 1e-5)
    assert any("the run will end there" in warning for warning in plan.warnings)


def test_a_delta_of_one_over_n_is_warned_of():
    plan = make_plan(config(dp_config={"noise_multiplier": 10.0, "epsilon_cap": 8.0, "target_delta": 1e-3}), 1437, 10)
    assert any("1/N" in warning for warning in plan.warnings)


def test_public_data_gets_neither_noise_nor_narrow_ring():
    public = config(dataset={"kind": "digits", "public": True}, dp_config={"enabled": False}, expected_batch_size=300.0)
    plan = make_plan(public, 1437, 4810)
    mechanism = plan.mechanism
    assert (mechanism.private, mechanism.sigma, mechanism.noise_multiplier) == (False, 0.0, 0.0)
    assert mechanism.ring_bits == 64
    assert mechanism.sample_rate == 300 / 1437
    assert mechanism.clamp > 1e6
    assert (plan.epsilon, plan.delta_terms.total) == (0.0, 0.0)
    assert any("NOT PRIVATE" in warning for warning in plan.warnings)


def test_a_single_worker_leaves_no_guarantee_against_itself():
    alone = config(num_workers=1, secure_aggregation=False)
    assert make_plan(alone, 1437, 4810).epsilon_one_worker is None


def test_a_configuration_bounds_the_clip_as_a_mechanism_does():
    for clip in (MIN_CLIP, MAX_CLIP):
        assert plan_mechanism(config(dp_config=CLIPPED | {"max_grad_norm": clip}), 1437, 10).max_grad_norm == clip
    for clip in (math.nextafter(MIN_CLIP, 0), math.nextafter(MAX_CLIP, math.inf)):
        with pytest.raises(ConfigError, match="max_grad_norm"):
            config(dp_config=CLIPPED | {"max_grad_norm": clip})


def test_a_shared_accounts_cap_replaces_the_runs_own():
    plan = make_plan(config(), 1437, 4810, account=PayingAccount(3.0, "rdp"))
    assert plan.epsilon_cap == 3.0
    assert plan.epsilon <= 3.0


@pytest.mark.parametrize(
    ("changes", "examples", "dimension", "error", "said"),
    [
        ({}, 0, 10, DatasetError, "dataset_empty"),
        ({"virtual_workers": 8}, 7, 10, DatasetError, "dataset_too_small: 7 examples cannot be spread over 8"),
        ({}, 2, 10, DatasetError, "dataset_too_small: 2 examples cannot be spread over 3"),
        ({}, 1436, 10, ConfigError, "batch_too_large: an expected batch of 1437 is more than the 1436"),
        ({}, 1437, 0, ModelError, "no_parameters"),
        ({}, 1437, 2**34 + 1, ModelError, "model_too_large: the model has 17,179,869,185 trainable parameters"),
        ({"dp_config": {"noise_multiplier": 1e-3, "epsilon_cap": 8}}, 1437, 10, ConfigError, "noise_too_small"),
        ({"dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 0.5}}, 1437, 10, ConfigError, "cap_too_small.*cap 0.5"),
        ({"dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 90}}, 1437, 10**6, ConfigError, "delta_slack.*sampler"),
        ({"ring": {"bits": 32, "clamp": 1e9}}, 1437, 10, ConfigError, "ring_"),
    ],
)
def test_what_cannot_run_is_refused_with_the_numbers(
    changes: dict[str, Any], examples: int, dimension: int, error: type[ConfigError], said: str
):
    with pytest.raises(error, match=said) as refusal:
        make_plan(config(**changes), examples, dimension)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("dataset", [DIGITS, None], ids=["not declared", "none"])
def test_without_noise_only_declared_public_data_is_planned_for(dataset: Any) -> None:
    with pytest.raises(RefusedError, match="not_public") as refusal:
        make_plan(config(dp_config={"enabled": False}, dataset=dataset), 1437, 10)
    assert refusal.value.exit_code == 3


def test_a_plan_says_in_text_and_json_that_a_run_is_not_exact() -> None:
    exact, loose = (make_plan(config(allow_nondeterministic=allowed), 1437, 4810) for allowed in (False, True))
    assert (exact.as_json()["exact"], loose.as_json()["exact"]) == (True, False)
    assert not any("NOT EXACT" in line for _, line in plan_rows(exact))
    assert any("NOT EXACT" in line for _, line in plan_rows(loose))
    assert loose.mechanism == exact.mechanism


def test_a_shared_account_must_exist_and_state_the_same_delta() -> None:
    account = AccountView("patients", 3.0, 1e-7, "rdp", 0.0, 0.0, 0.0, ())
    view = LedgerView(bytes(32), 1, Head(), (account,))
    with pytest.raises(BudgetError, match=r"account_unknown.*open .* --epsilon-cap E --delta 1e-05"):
        paying_account(view, config(ledger={"account": "others"}))
    with pytest.raises(BudgetError, match="account_mismatch"):
        paying_account(view, config(ledger={"account": "patients"}))
    same = config(ledger={"account": "patients"}, dp_config={"target_epsilon": 3.0, "target_delta": 1e-7})
    assert paying_account(view, same) == PayingAccount(3.0, "rdp")


def test_a_runs_own_account_is_planned_with_pld_and_a_named_one_with_its_own_accountant() -> None:
    own = make_plan(config(), 1437, 4810)
    named = make_plan(config(ledger={"account": "a"}), 1437, 4810, account=PayingAccount(8.0, "rdp"))
    asked = make_plan(config(dp_config={**config().dp_config.model_dump(), "accountant": "rdp"}), 1437, 4810)
    assert [plan.mechanism.accountant for plan in (own, named, asked)] == ["pld", "rdp", "rdp"]
    assert own.epsilon < 0.97 * named.epsilon == pytest.approx(0.97 * asked.epsilon)
    assert "raycloak" in own.as_json()["accountant_version"]


@pytest.mark.parametrize("before", [(), ({"expected_batch_size": 1437.0, "steps": 3},)])
@pytest.mark.parametrize("cap", [1.9, 3.0, 8.0])
def test_a_plan_on_a_shared_account_says_what_the_ledger_will_charge(
    tmp_path: Path, before: tuple[dict[str, Any], ...], cap: float
) -> None:
    """On a new account, whose order the plan fixes, and on one whose order an earlier run fixed."""
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    ledger.open_account("patients", OpeningTerms(cap, 1e-5))
    held = {"noise_multiplier": 1.0, "epsilon_cap": cap, "target_delta": 1e-5}
    for earlier in before:
        first = config(ledger={"account": "patients"}, dp_config={**held, "noise_multiplier": 50.0}, **earlier)
        planned = make_plan(first, 1437, 4810, paying_account(ledger.view(), first))
        ledger.register_run(RegistrationTerms("first", "patients", (planned.mechanism,), MANIFEST))
    settings = config(ledger={"account": "patients"}, dp_config=held, expected_batch_size=28.0, steps=60)
    plan = make_plan(settings, 1437, 4810, paying_account(ledger.view(), settings))
    assert plan.orders_fixed == bool(before)
    ledger.register_run(RegistrationTerms("run", "patients", (plan.mechanism,), MANIFEST))
    ledger.bind_data("run", MANIFEST, bytes(32))
    assert ledger.view().accounts[0].orders == plan.orders
    for step in range(plan.steps_within_cap):
        ledger.charge("run", step, bytes(32), MANIFEST)
    assert ledger.view().accounts[0].spent_epsilon == pytest.approx(plan.epsilon, rel=1e-12)
    if plan.steps_within_cap < 60:
        with pytest.raises(BudgetError, match="cap_exceeded"):
            ledger.charge("run", plan.steps_within_cap, bytes(32), MANIFEST)
    ledger.verify()
    ledger.close()


@pytest.mark.parametrize("left", [0, 1, 3])
def test_guarantee_a_plan_says_which_steps_a_shared_account_has_left_and_refuses_what_the_ledger_would(
    tmp_path: Path, left: int
) -> None:
    """A first run of eight steps leaves so many on its account; a second one like it is planned."""
    held = {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "target_delta": 1e-5}
    settings = config(ledger={"account": "patients"}, dp_config=held, steps=8)
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")) as ledger:
        ledger.open_account("patients", OpeningTerms(1.0, 1e-5))
        first = make_plan(settings, 1437, 4810, paying_account(ledger.view(), settings))
        total = first.steps_within_cap
        assert total == 6
        ledger.register_run(RegistrationTerms("first", "patients", (first.mechanism,), MANIFEST))
        ledger.bind_data("first", MANIFEST, bytes(32))
        for step in range(total - left):
            ledger.charge("first", step, bytes(32), MANIFEST)
        second = make_plan(settings, 1437, 4810, paying_account(ledger.view(), settings))
        assert second.steps_within_cap == total, "a claim rests on nothing that other runs charge"
        if left == 0:
            for refused in (
                lambda: ledger.outlook(RegistrationTerms("(planned)", "patients", (second.mechanism,), b"")),
                lambda: ledger.register_run(RegistrationTerms("second", "patients", (second.mechanism,), MANIFEST)),
            ):
                with pytest.raises(BudgetError, match="cap_exceeded"):
                    refused()
            return
        seen = with_account(
            second,
            "patients",
            ledger.view(),
            ledger.outlook(RegistrationTerms("(planned)", "patients", (second.mechanism,), b"")),
        )
        entries = ledger.view().head.sequence
        ledger.register_run(RegistrationTerms("second", "patients", (second.mechanism,), MANIFEST))
        ledger.bind_data("second", MANIFEST, bytes(32))
        for step in range(left):
            ledger.charge("second", step, bytes(32), MANIFEST)
        with pytest.raises(BudgetError, match="cap_exceeded"):
            ledger.charge("second", left, bytes(32), MANIFEST)
        assert seen.account is not None
        assert (seen.account.steps, seen.account.data.runs) == (left, 1)
        assert seen.account.epsilon_after == ledger.view().accounts[0].spent_epsilon
        # It is not what the account will have spent, and the row says so.
        assert dict(plan_rows(seen))["ε charged"].endswith("if the account had paid for nothing else")
        assert seen.account.spent_epsilon + seen.account.epsilon_left == pytest.approx(1.0)
        assert entries == 3 + total - left, "an outlook writes nothing"
    rows = dict(plan_rows(seen))
    assert rows["steps"] == f"{left} of 8 fit the cap 1"
    assert rows["account"].startswith("patients: ε ")
    assert any(f"{left} of 8 steps fit" in warning for warning in seen.warnings)


def test_a_plan_is_solved_so_that_its_own_rdp_account_admits_it_whole() -> None:
    held = {"target_epsilon": 2.0, "target_delta": 1e-5, "accountant": "rdp"}
    plan = make_plan(config(dp_config=held, expected_batch_size=28.0, steps=60), 1437, 4810)
    assert plan.steps_within_cap == 60
    assert 1.998 <= plan.epsilon <= 2.0
    assert len(plan.orders) == 1


def test_an_account_held_with_another_accountant_than_configured_is_refused() -> None:
    account = AccountView("patients", 3.0, 1e-5, "rdp", 0.0, 0.0, 0.0, ())
    view = LedgerView(bytes(32), 1, Head(), (account,))
    wrong = config(ledger={"account": "patients"}, dp_config={"target_epsilon": 3.0, "accountant": "pld"})
    with pytest.raises(BudgetError, match=r"account_mismatch.*held with the rdp accountant.*says pld"):
        paying_account(view, wrong)


def test_a_checked_plan_says_what_five_accountants_say_in_json_and_table() -> None:
    plan = checked(make_plan(config(), 1437, 4810))
    found = plan.as_json()["epsilon_by_accountant"]
    assert set(found) == {"dp_accounting_pld", "dp_accounting_rdp", "opacus_prv", "opacus_rdp", "raycloak_pld"}
    assert plan.epsilon == pytest.approx(found["raycloak_pld"], rel=1e-9)
    assert "opacus prv" in dict(plan_rows(plan))["ε by accountant"]
    open_data = config(dp_config={"enabled": False}, dataset=DIGITS | {"public": True})
    assert checked(make_plan(open_data, 1437, 10)).epsilon_by_accountant == {}


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_plan_of_a_run_without_noise_can_be_read_and_claims_no_epsilon(accountant) -> None:
    terms = {"enabled": False, "accountant": accountant}
    plan = make_plan(config(dp_config=terms, dataset=DIGITS | {"public": True}), 1437, 4810)
    assert plan.as_json()["epsilon_curve"] == ()
    said = dict(plan_rows(plan))
    assert {label for label in said if label.startswith("ε")} == {"ε"}
    assert said["ε"].startswith("unbounded")


# --- generous caps


def shared(cap: float, noise: float = 1.0) -> RunConfig:
    """1,000 steps at sampling rate 0.01 on an account that others may share."""
    dp = {"noise_multiplier": noise, "epsilon_cap": cap, "accountant": "rdp"}
    return config(expected_batch_size=600.0, steps=1000, dp_config=dp)


def test_a_generous_cap_is_named_with_the_cap_at_which_the_run_states_what_it_costs():
    plan = make_plan(shared(40.0), 60_000, 100)
    least = composed_epsilon(plan.releases, plan.delta, "rdp")
    assert plan.epsilon > 4 * least
    assert plan.fitting_cap == pytest.approx(least, rel=1e-3)
    (sentence,) = (warning for warning in plan.warnings if "generous" in warning)
    assert f"the cap 40 is generous: it fixes Renyi order {plan.orders[0]:g}," in sentence
    assert f"A cap of {plan.fitting_cap:g} would hold this run alone" in sentence
    assert ("warning", sentence) in plan_rows(plan)
    assert json.loads(json.dumps(plan.as_json()))["fitting_cap"] == plan.fitting_cap
    fitted = make_plan(shared(plan.fitting_cap), 60_000, 100)
    assert fitted.steps_within_cap == 1000
    assert fitted.epsilon == pytest.approx(least, rel=1e-3)
    assert fitted.epsilon <= plan.fitting_cap
    assert fitted.fitting_cap is None
    assert not any("generous" in warning for warning in fitted.warnings)


def test_a_cap_is_generous_from_half_as_much_again_on():
    least = make_plan(shared(40.0), 60_000, 100).fitting_cap or 0.0
    for cap in (least, 1.2 * least, 2 * least, 3 * least, 8 * least):
        plan = make_plan(shared(cap), 60_000, 100)
        ratio = plan.epsilon / composed_epsilon(plan.releases, plan.delta, "rdp")
        assert (plan.fitting_cap is not None) == (ratio > GENEROUS)
    assert ratio > GENEROUS


def test_a_cap_is_not_generous_where_it_fixes_no_order_or_the_plan_is_cut_short():
    tight = {"noise_multiplier": 1.0, "epsilon_cap": 40.0, "accountant": "pld"}
    assert make_plan(config(expected_batch_size=600.0, steps=1000, dp_config=tight), 60_000, 100).fitting_cap is None
    account = PayingAccount(40.0, "rdp", (2.0,), orders_fixed=True)
    assert make_plan(shared(40.0), 60_000, 100, account).fitting_cap is None
    assert make_plan(shared(40.0), 60_000, 100, replace(account, orders_fixed=False)).fitting_cap is not None
    short = make_plan(shared(1.5), 60_000, 100)
    assert short.steps_within_cap < 1000
    assert short.fitting_cap is None
