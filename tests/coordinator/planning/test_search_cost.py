"""The cost of a hyper-parameter search."""

from dataclasses import replace

import pytest

from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.calibration import composed_epsilon
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta
from raycloak.coordinator.cli.views.plan import search_rows
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.planning.search_cost import search_cost
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.coordinator.ledger.ledger_cases import DATA, DELTA, MANIFEST, PARAMETERS, mechanism

TRIAL = mechanism(steps=3)
TRAINING = Release(0.01, 1.0, 1000)


def test_trials_are_composed_and_not_added():
    """Least caps of a new account for 1, 5, 10 and 50 trials, and what it states after them: `docs/privacy.md`.

    Slack leaves no room for a search of the noise, which takes longest.
    """
    for trials, least in ((1, 2.10), (5, 4.59), (10, 6.72), (50, 17.44)):
        for cap, fits in ((least * 1.002, True), (least * 0.998, False)):
            cost = search_cost(TRAINING, (), trials, cap, DELTA, DELTA)
            assert (cost.epsilon <= cap, cost.trials_within_cap == trials) == (fits, fits)
            assert cost.epsilon <= trials * cost.epsilon_one
    for cap, stated in ((4.6, (2.63, 4.59)), (8.0, (3.80, 5.13, 6.80)), (17.5, (6.78, 7.65, 8.74, 17.44))):
        for trials, expected in zip((1, 5, 10, 50), stated, strict=False):
            assert search_cost(TRAINING, (), trials, cap, DELTA, DELTA).epsilon == pytest.approx(expected, abs=0.006)


def test_trials_on_an_account_whose_order_is_fixed_cost_what_it_will_charge():
    order = accountant_of("rdp").fixed_orders(
        [Release(1.0, 5.0, 40)], AccountLimits(8.0, accountant_delta(DELTA), ORDERS)
    )
    free, held = (search_cost(TRAINING, (), 20, 8.0, DELTA, 0.0, orders) for orders in ((), order))
    assert held.epsilon_one == composed_epsilon((TRAINING,), DELTA, "rdp", order) != free.epsilon_one
    assert held.trials_within_cap <= free.trials_within_cap
    assert (held.noise_multiplier or 0) > (free.noise_multiplier or 0)
    noised = (Release(0.01, held.noise_multiplier or 0, 20_000),)
    assert 0.999 * 8.0 <= composed_epsilon(noised, DELTA, "rdp", order) <= 8.0


def test_trials_fit_beside_what_other_runs_have_charged():
    order = accountant_of("rdp").fixed_orders(
        [Release(1.0, 5.0, 40)], AccountLimits(8.0, accountant_delta(DELTA), ORDERS)
    )
    before = (Release(0.01, 1.0, 4000),)
    free, beside = (search_cost(TRAINING, (), 20, 8.0, DELTA, 0.0, order, spent) for spent in ((), before))
    assert beside.trials_within_cap == free.trials_within_cap - 4, "the others made as many steps as four trials"
    assert free.noise_multiplier is not None
    assert beside.noise_multiplier is not None
    assert beside.noise_multiplier > free.noise_multiplier
    assert beside.epsilon == free.epsilon


def test_the_noise_lets_exactly_these_trials_fit_and_the_count_is_the_largest():
    cost = search_cost(TRAINING, (Release(1.0, 40.0, 2),), 20, 4.0, DELTA, 0.0)
    assert 0 < cost.trials_within_cap < 20
    limits = AccountLimits(4.0, accountant_delta(DELTA), ORDERS)
    rdp = accountant_of("rdp")

    def spent(noise: float, trials: int) -> float:
        """What a new account states after these trials, the first of which fixes its order."""
        one = (Release(0.01, noise, 1000), Release(1.0, 40.0, 2))
        every = tuple(replace(each, count=each.count * trials) for each in one)
        return rdp.curve([every], limits.delta, rdp.fixed_orders(one, limits))[0]

    assert 0.995 * 4.0 <= spent(cost.noise_multiplier or 0, 20) <= 4.0
    told = dict(search_rows(replace(cost, noise_multiplier=1.23444)))["search noise"]
    assert told.startswith("1.23444 would"), "rounded down, it would not be enough"
    for trials, fits in ((cost.trials_within_cap, True), (cost.trials_within_cap + 1, False)):
        assert (spent(1.0, trials) <= 4.0) == fits


@pytest.mark.parametrize("trials", [1, 5])
def test_a_generous_cap_is_named_with_the_one_that_just_holds_all_trials(trials: int):
    cost = search_cost(TRAINING, (), trials, 50.0, DELTA, DELTA)
    least = {1: 2.10, 5: 4.59}[trials]
    assert cost.fitting_cap == pytest.approx(least, abs=0.006)
    assert dict(search_rows(cost))["search cap"].startswith(f"{cost.fitting_cap:g} would hold all {trials}, ")
    fitted = search_cost(TRAINING, (), trials, cost.fitting_cap or 0, DELTA, DELTA)
    assert fitted.trials_within_cap == trials
    assert fitted.epsilon == pytest.approx(least, abs=0.006)
    assert fitted.fitting_cap is None
    assert "search cap" not in dict(search_rows(fitted))
    assert search_cost(TRAINING, (), trials, 50.0, DELTA, DELTA, (2.0,)).fitting_cap is None


@pytest.mark.parametrize("prepaid", [False, True])
def test_every_trial_is_charged_by_the_ledger(tmp_path, prepaid):
    """Full batches of three steps: as many trials are admitted in full as `search_cost` says.

    Prepaid, they are admitted with that cost before any of their steps.
    """
    cap = 8.0
    one = Release(1.0, TRIAL.noise_multiplier, TRIAL.steps)
    said = search_cost(one, (), 20, cap, DELTA, 0.0).trials_within_cap
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.open_account("search", OpeningTerms(cap, DELTA))
    for number in range(said):
        _trial(ledger, f"trial-{number}", prepaid)
    assert ledger.view().accounts[0].spent_epsilon == pytest.approx(search_cost(one, (), said, cap, DELTA, 0.0).epsilon)
    with pytest.raises(BudgetError, match="cap_exceeded"):
        _trial(ledger, "one-more", prepaid)
    ledger.close()


def _trial(ledger: PrivacyLedger, run_id: str, prepaid: bool) -> None:
    ledger.register_run(RegistrationTerms(run_id, "search", (TRIAL,), MANIFEST, prepaid=prepaid))
    ledger.bind_data(run_id, MANIFEST, DATA)
    for step in range(0 if prepaid else TRIAL.steps):
        ledger.charge(run_id, step, PARAMETERS, MANIFEST)


def test_a_reserve_that_does_not_last_leaves_no_noise_that_is_enough():
    cost = search_cost(TRAINING, (), 10, 8.0, DELTA, 0.002 * DELTA)
    assert cost.slack_share == pytest.approx(2.0)
    assert cost.noise_multiplier is None
    assert "no noise multiplier" in dict(search_rows(cost))["search noise"]


def test_no_trials_are_refused():
    with pytest.raises(ConfigError, match="trials"):
        search_cost(TRAINING, (), 0, 8.0, DELTA, 0.0)
