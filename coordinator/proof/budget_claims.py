"""Claims about the budget: the ledger's record of the account, and what was spent by two libraries."""

import math

from raycloak.coordinator.accounting.pld import STATED_ERROR
from raycloak.coordinator.accounting.releases import merged
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.ledger.rules import account_limits, epsilon_at
from raycloak.coordinator.planning.cross_check import dp_accounting_rdp, without_prv
from raycloak.coordinator.proof.bundle import LEDGER
from raycloak.coordinator.proof.case import ProofCase
from raycloak.coordinator.proof.claims import Broken, NotThere

TOLERANCE = 1e-6
"""Relative; between versions of the libraries that compute the same number."""

_LIBRARIES = 1e-3
"""Relative; between Opacus and dp-accounting at integer orders, as for every plan (docs/privacy.md)."""


def ledger(case: ProofCase) -> str:
    """The ledger signed each entry of the account and that these are all; each follows its rules and caps."""
    stated, known = case.extract.stated, case.extract.audited
    if stated.account != case.manifest.account:
        raise Broken(LEDGER, f"it is of account '{stated.account}', the run's is '{case.manifest.account}'")
    beside = len(stated.accounts) - 1
    moved = f", with {beside} that it exchanged epsilon with" if beside else ""
    cap = known.accounts[stated.account].terms.epsilon_cap
    extent = f"complete up to entry {stated.sequence}; cap {cap:g}"
    return f"{stated.count} entries of account '{stated.account}'{moved}, {extent}"


def epsilon(case: ProofCase) -> str:
    """The account's epsilon follows from its charges, by raycloak's accountant and by dp-accounting."""
    standing = case.extract.audited.standing(case.manifest.account)
    terms, releases = standing.account.terms, merged([one for each in standing.spent for one in each.releases])
    if not releases:
        raise NotThere("the account paid for nothing private")
    spent = epsilon_at(terms, standing.spent)
    # That each charge states what it brought the account to, at the cap of its time, is the ledger's claim.
    if spent > terms.epsilon_cap * (1 + TOLERANCE):
        raise Broken("ledger", f"epsilon {spent:.6g} is over the cap {terms.epsilon_cap:g}")
    limits = account_limits(terms)
    others = without_prv(releases, limits.delta)
    if (problem := others.disagreement()) is not None:
        raise Broken("ledger", f"the accountants contradict each other: {problem}")
    tight = others.epsilon.get("raycloak_pld", 0.0)
    if spent < tight * (1 - STATED_ERROR):
        raise Broken("ledger", f"it states epsilon {spent:.6g}; PLD gives {tight:.6g}")
    pld = others.epsilon.get("dp_accounting_pld")
    shown = [] if pld is None else [f"{epsilon_text(pld)} by PLD"]
    # The same rule on the other library's numbers: one order, fixed before the first release.
    if terms.accountant == "rdp" and len(limits.orders) == 1:
        same = dp_accounting_rdp(releases, limits.delta, limits.orders)
        # Between two integer orders dp-accounting takes a bound from above, and Opacus the value.
        whole = limits.orders[0].is_integer()
        if spent > same * (1 + _LIBRARIES) or (whole and spent < same * (1 - _LIBRARIES)):
            raise Broken("ledger", f"it states epsilon {spent:.6g}; dp-accounting gives {same:.6g} at the same order")
        # For larger sampling rates its series does not converge at such an order, and says so by infinity.
        if math.isfinite(same):
            shown.insert(0, f"{'' if whole else 'at most '}{epsilon_text(same)} at the same order")
    second = " and ".join(shown) or f"{epsilon_text(others.epsilon['dp_accounting_rdp'])} by RDP"
    stated = f"{epsilon_text(spent)} at delta {terms.delta:g} by raycloak"
    return f"{stated}; dp-accounting gives {second}{_on_whose_word(case)}"


def _on_whose_word(case: ProofCase) -> str:
    """Return the bounds on participations that the account's epsilon rests on; nothing if it rests on none."""
    registered = (run.registered for run in case.extract.audited.runs.values())
    bounds = [
        f"{each.max_participations} of {each.steps} steps"
        for run in registered
        if run.account == case.manifest.account
        for each in run.mechanisms
        if each.max_participations is not None
    ]
    if not bounds:
        return ""
    return (
        f"; no amplification is claimed for examples that a client sends, and that one takes part in at most "
        f"{', '.join(sorted(set(bounds)))} is the service's word"
    )
