"""The epsilon that a run's plan was to cost step by step, computed again from its manifest."""

from raycloak.coordinator.accounting.accountants import AccountLimits, accountant_of
from raycloak.coordinator.accounting.calibration import composed_curve
from raycloak.coordinator.accounting.renyi import ORDERS, accountant_delta
from raycloak.coordinator.planning.measurements import Schedule
from raycloak.coordinator.record.run_reader import RunData

POINTS = 16
"""The ledger quotes an account of `pld` at as many points; more would cost seconds and show no more."""

Curve = tuple[tuple[int, float], ...]


def budget_of(run: RunData) -> tuple[float | None, float]:
    """Return the account's cap, and its delta: as the verdict has them, else as the configuration asked for them."""
    asked = run.config.dp_config
    verdict = run.verdict or {}
    cap = verdict.get("epsilon_cap")
    delta = verdict.get("privacy_delta")
    if cap is None:
        cap = asked.epsilon_cap if asked.epsilon_cap is not None else asked.target_epsilon
    return cap, asked.target_delta if delta is None else delta


def planned_epsilon(run: RunData) -> Curve:
    """Return (finished steps, epsilon) of the plan on a fresh account, measurements included; empty if not private."""
    if run.manifest is None or not run.manifest.computation.mechanism.private:
        return ()
    computation = run.manifest.computation
    mechanism, plan = computation.mechanism, Schedule(computation.mechanism, computation.measurements)
    cap, delta = budget_of(run)
    points = sorted({-(-mechanism.steps * point // POINTS) for point in range(1, POINTS + 1)})
    orders = None
    if cap is not None:
        limits = AccountLimits(cap, accountant_delta(delta), ORDERS)
        whole = plan.releases(mechanism.steps, mechanism.steps)
        # The orders that the ledger fixes when the run is registered, so that both lines are of one accountant.
        orders = accountant_of(mechanism.accountant).fixed_orders(whole, limits)
    releases = [plan.releases(point, point) for point in points]
    return tuple(zip(points, composed_curve(releases, delta, mechanism.accountant, orders), strict=True))
