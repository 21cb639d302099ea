"""What a ledger charges for batches that are cut to the capacity, and what it refuses."""

import math
from typing import Any

import pytest

from raycloak.coordinator.accounting import pld
from raycloak.coordinator.accounting.releases import Cut, Release
from raycloak.coordinator.accounting.renyi import accountant_delta, delta_slack, step_rdp
from raycloak.coordinator.ledger.accounts import opening
from raycloak.coordinator.ledger.rules import (
    OpeningTerms,
    PricedRun,
    RegistrationTerms,
    check_claims,
    epsilon_at,
    registration,
)
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.mechanism import Mechanism
from tests.coordinator.ledger.ledger_cases import CAP, DELTA, MANIFEST, mechanism


def cut(**changes: Any) -> Mechanism:
    """Slices of 100, of which 20 are drawn and 28 fit."""
    return mechanism(**{"sample_rate": 0.2, "micro_batch_size": 28, "accountant": "pld", **changes})


def test_an_own_account_pays_for_the_cut_in_every_charge_and_with_nothing_of_delta():
    terms = opening("own", OpeningTerms(CAP, DELTA, "pld"))
    run = PricedRun.of(registration(RegistrationTerms("run-a", "own", (cut(),), MANIFEST), terms, fixed=False))
    charged, poisson = (
        pld.epsilon((Release(0.2, 2.6, 20, each),), accountant_delta(DELTA)) for each in (Cut((100,), 28), None)
    )
    assert epsilon_at(terms, [run.spend({"gradient": 20})]) == pytest.approx(charged, rel=1e-6)
    assert charged > 1.01 * poisson
    assert delta_slack(cut(), CAP).batch_overflow == 0


def test_the_renyi_cost_that_is_recorded_has_the_cut():
    """An own account states the smaller of two bounds, so both must have it."""
    terms = opening("own", OpeningTerms(CAP, DELTA, "pld"))
    (cost,) = registration(
        RegistrationTerms("run-a", "own", (cut(micro_batch_size=24),), MANIFEST), terms, fixed=False
    ).step_rdp
    at_16 = terms.orders.index(16.0)
    assert cost[at_16] > 1.5 * step_rdp(0.2, 2.6, (16.0,))[0]


def test_a_cut_that_nobody_pays_for_is_refused():
    check_claims("run-a", cut())
    with pytest.raises(BudgetError, match=r"mechanism_inconsistent: .* batch is cut"):
        check_claims("run-a", cut(overflow_probability=1e-12))


def test_a_cut_that_no_accountant_computes_is_refused():
    with pytest.raises(BudgetError, match=r"mechanism_inconsistent: .* cuts batches to"):
        check_claims("run-a", cut(sample_rate=1.0))


def test_a_whole_slice_needs_no_payment():
    check_claims("run-a", cut(sample_rate=1.0, micro_batch_size=100))
    assert math.isfinite(delta_slack(cut(), CAP).total)
