"""Prepaid runs: charged for their whole plan before any worker computes, and for no less if they are stopped."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.ledger.view import AccountView
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.record.outcome import Ending
from raycloak.coordinator.training.assignment import NewRun
from raycloak.coordinator.training.pace import StopRequest
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.protocol import whole_run

STEPS = 3
PREPAID = {
    "steps": STEPS,
    "expected_batch_size": 40,
    "ledger": {"account": "search", "prepaid": True},
    "dp_config": {"noise_multiplier": 5.0, "epsilon_cap": 20.0},
}


def account(home: Path) -> AccountView:
    with closing(PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", create=False)) as ledger:
        ledger.verify()
        (found,) = ledger.view().accounts
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a state folder whose account `search` has room for one such run, and not for two."""
    with closing(PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")) as ledger:
        ledger.open_account("search", OpeningTerms(2.0, 1e-5))
    return tmp_path


@pytest.mark.usefixtures("checked_once")
def test_guarantee_a_trial_that_its_account_cannot_pay_for_computes_nothing(home: Path):
    """The first is stopped after one step, and has been charged for all; so `plan` and run refuse the second."""
    stop, charged = StopRequest(), []

    def see(call: Any) -> None:
        if call.method == "step" and not stop.made:
            charged.append(account(home).spent_epsilon)
            stop.make()

    first = whole_run(home, disturb=see, assignment=NewRun(stop=stop), **PREPAID)
    assert first.train().ending is Ending.STOPPED
    spent = account(home)
    assert [(run.charged_steps, run.planned_steps) for run in spent.runs] == [(1, STEPS)]
    assert charged == [spent.spent_epsilon], "all was charged before the first worker was asked"
    assert first.finished is not None
    assert first.finished.charged_epsilon == spent.spent_epsilon
    entries = first.entries
    second = whole_run(home, secret="cd" * 32, **PREPAID)
    with pytest.raises(BudgetError, match="cap_exceeded: all that the run plans"):
        second.train()
    assert second.stage.calls("step") == []
    assert second.entries == entries
    url = second.config.ledger.model_copy(update={"url": f"sqlite:///{home / 'ledger.sqlite'}"})
    with pytest.raises(BudgetError, match="cap_exceeded: all that the run plans"):
        plan_of(second.config.model_copy(update={"ledger": url}), home / "data")


def test_a_plan_beyond_the_cap_of_an_empty_account_is_refused_when_it_is_prepaid(home: Path):
    run = whole_run(home, **PREPAID | {"steps": 40})
    with pytest.raises(ConfigError, match=r"cap_too_small: 40 steps, with what is measured, cost .*\(about \d+ fit\)"):
        run.train()
    assert account(home).runs == ()
