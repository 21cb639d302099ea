"""The account that pays for a planned run, as its reader sees it: what is spent, what is left, which steps fit.

`raycloak plan` shows it, and a run that begins warns of the steps that do not fit.

A plan that a run is made from knows nothing of this. What other runs charge may depend on what this one releases, so
the claim of a run may not rest on it (`raycloak.coordinator.planning.claim`).
"""

from dataclasses import dataclass, replace

from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.releases import Releases
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.view import DataStanding, LedgerView, Outlook, data_standing
from raycloak.coordinator.planning.measurements import Schedule
from raycloak.coordinator.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class AccountOutlook:
    """The account that will pay for a run, before it begins.

    Attributes:
        name: of the account.
        is_new: whether the run opens it.
        spent_epsilon: of all its runs so far.
        epsilon_left: from there to its cap.
        steps: planned steps that fit beside what other runs have charged, if they charge no more.
        epsilon_after: of the account once these are charged, measurements included.
        data: of all accounts that are bound to the same data.
        charged: what its other runs have released, as its accountant counts it.
    """

    name: str
    is_new: bool
    spent_epsilon: float
    epsilon_left: float
    steps: int
    epsilon_after: float
    data: DataStanding
    charged: Releases = ()


def with_account(plan: Plan, name: str, view: LedgerView, outlook: Outlook | None) -> Plan:
    """Return ``plan`` with the account that will pay for it.

    Args:
        outlook: what the ledger foresees; None if the run opens the account.
    """
    run, data = Schedule(plan.mechanism, plan.measurements), data_standing(view, name)
    if outlook is None:
        found = AccountOutlook(name, True, 0.0, plan.epsilon_cap, plan.steps_within_cap, plan.epsilon, data)
        return replace(plan, account=found)
    spent = next(each.spent_epsilon for each in view.accounts if each.name == name)
    cap = outlook.terms.epsilon_cap

    def epsilon(steps: int, measured: int) -> float:
        beside: dict[Query, int] = {each.query: count for each, count in run.measured(measured)}
        return outlook.epsilon_after({run.mechanism.query: steps, **beside})

    steps, measured = run.reach_by(cap, epsilon)
    warnings = plan.warnings
    if steps < plan.steps_within_cap:
        warnings += (
            f"account '{name}' has spent epsilon {epsilon_text(spent)} of {cap:g}: {steps} of {plan.mechanism.steps} "
            "steps fit, and the run will end there.",
        )
    charged = tuple(release for each in outlook.others for release in each.releases)
    left = max(cap - spent, 0.0)
    found = AccountOutlook(name, False, spent, left, steps, epsilon(steps, measured), data, charged)
    return replace(plan, account=found, warnings=warnings)
