"""The cost of a hyper-parameter search."""

import pytest

from raycloak.coordinator.accounting.accountants import accountant_of
from raycloak.coordinator.accounting.releases import Release
from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.cli.tables import search_rows
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.planning.search_cost import search_cost
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.coordinator.ledger.ledger_cases import DELTA, MANIFEST, PARAMETERS, mechanism

TRIAL = mechanism(steps=3)
TRAINING = Release(0.01, 1.0, 1000)


def test_trials_are_composed_and_not_added():
    """Values of the RDP accountant for this run: 2.10, 4.59, 6.71 and 17.4 for 1, 5, 10 and 50 trials."""
    for trials, expected in ((1, 2.101), (5, 4.59), (10, 6.71), (50, 17.4)):
        cost = search_cost(TRAINING, (), trials, 8.0, DELTA / 0.99, 0.0)
        assert cost.epsilon == pytest.approx(expected, rel=0.01)
        assert cost.epsilon <= trials * cost.epsilon_one


def test_the_noise_lets_exactly_these_trials_fit_and_the_count_is_the_largest():
    cost = search_cost(TRAINING, (Release(1.0, 40.0, 2),), 20, 4.0, DELTA, 0.0)
    assert 0 < cost.trials_within_cap < 20
    curve = accountant_of("rdp").curve
    noised = (Release(0.01, cost.noise_multiplier or 0, 20_000), Release(1.0, 40.0, 40))
    assert 0.995 * 4.0 <= curve([noised], accountant_delta(DELTA))[0] <= 4.0
    for trials, fits in ((cost.trials_within_cap, True), (cost.trials_within_cap + 1, False)):
        every = (Release(0.01, 1.0, 1000 * trials), Release(1.0, 40.0, 2 * trials))
        assert (curve([every], accountant_delta(DELTA))[0] <= 4.0) == fits


def test_every_trial_is_charged_by_the_ledger(tmp_path):
    """Full batches of three steps: as many trials are admitted in full as `search_cost` says."""
    cap = 8.0
    said = search_cost(Release(1.0, TRIAL.noise_multiplier, TRIAL.steps), (), 20, cap, DELTA, 0.0).trials_within_cap
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.open_account("search", cap, DELTA)
    for number in range(said):
        _trial(ledger, f"trial-{number}")
    with pytest.raises(BudgetError, match="cap_exceeded"):
        _trial(ledger, "one-more")
    ledger.close()


def _trial(ledger: PrivacyLedger, run_id: str) -> None:
    ledger.register_run(run_id, "search", (TRIAL,), MANIFEST)
    for step in range(TRIAL.steps):
        ledger.charge(run_id, step, PARAMETERS, MANIFEST)


def test_a_reserve_that_does_not_last_leaves_no_noise_that_is_enough():
    cost = search_cost(TRAINING, (), 10, 8.0, DELTA, 0.002 * DELTA)
    assert cost.slack_share == pytest.approx(2.0)
    assert cost.noise_multiplier is None
    assert "no noise multiplier" in dict(search_rows(cost))["search noise"]


def test_no_trials_are_refused():
    with pytest.raises(ConfigError, match="trials"):
        search_cost(TRAINING, (), 0, 8.0, DELTA, 0.0)
