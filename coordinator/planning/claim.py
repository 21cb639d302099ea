"""The claim of a run: one epsilon per adversary, which holds however the run ended.

A run is one plan that is fixed before its first step. Its user may stop it because of what it released, so a stopped
run claims what its plan costs. `docs/proofs/005-what-a-run-may-claim.md` proves this, and shows what less would hide.
"""

from collections.abc import Mapping

from raycloak.attestation.core.roster import Query
from raycloak.coordinator.accounting.calibration import epsilon_against
from raycloak.coordinator.planning.measurements import Schedule
from raycloak.coordinator.planning.plan import Plan
from raycloak.workers.terms.mechanism import Mechanism

Charged = Mapping[Query, int]
"""How often each mechanism of a run was charged, by the ledger's record; what is not there was not charged."""


def covered(plan: Plan, charged: Charged) -> list[tuple[Mechanism, int]]:
    """Return the releases that the claim covers, the gradient's first: the plan, as far as the cap reaches.

    That end is fixed before the first step. If more was charged, the cap was raised later, and it is the whole plan.
    """
    run = Schedule(plan.mechanism, plan.measurements)
    within = [(plan.mechanism, plan.steps_within_cap), *run.measured(plan.measured_within_cap)]
    if all(charged.get(each.query, 0) <= count for each, count in within):
        return within
    return [(each, each.steps) for each in run.mechanisms]


def claimed_epsilon(plan: Plan, charged: Charged, known_shares: int = 0) -> float:
    """Return the epsilon that a run claims, however it ended: by its plan, the cap, a stop, a failure or never.

    Guarantee: what the run has released is (epsilon, delta) private, whatever rule ended it, if that rule saw the
    examples through releases only. It holds for an adversary who knows the noise of ``known_shares`` virtual workers.
    Infinite if that leaves no guarantee. Precondition: no cap was raised because of what the run released, or
    ``charged`` goes beyond the cap that the plan was made for.
    """
    (mechanism, steps), *beside = covered(plan, charged)
    return epsilon_against(mechanism, known_shares, plan.delta, steps, beside)


def epsilon_if_stop_was_blind(plan: Plan, charged: Charged) -> float:
    """Return the epsilon of what was charged, against outsiders; at most what the run claims.

    It holds only if nothing that the run released had a part in when it ended. So nobody can claim it who has looked.
    """
    (mechanism, steps), *beside = [(each, charged.get(each.query, 0)) for each, _ in covered(plan, charged)]
    # An accountant's grid may put the cost of a part slightly above that of the whole.
    return min(epsilon_against(mechanism, 0, plan.delta, steps, beside), claimed_epsilon(plan, charged))
