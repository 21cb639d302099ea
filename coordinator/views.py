"""From what the ledger and a finished run know to what metrics and verdict show."""

import math
from importlib.metadata import version
from pathlib import Path

from coordinator.accounting import accountant_delta
from coordinator.calibration import epsilon_against
from coordinator.crosscheck import CrossCheck, cross_check
from coordinator.ledger_view import LedgerView
from coordinator.outcome import Finished
from coordinator.releases import Release
from coordinator.verdict import Verdict
from metrics import collectors
from raycloak_layout import VERSION
from workers.manifest import Manifest


def metrics_view(view: LedgerView) -> collectors.LedgerFigures:
    """The ledger's view as the scrape shows it."""
    accounts = tuple(
        collectors.AccountFigures(
            name=account.name,
            epsilon_cap=account.epsilon_cap,
            delta=account.delta,
            epsilon_spent=account.spent_epsilon,
            budget_spent_ratio=account.spent_ratio,
            steps_charged=sum(run.charged_steps for run in account.runs),
        )
        for account in view.accounts
    )
    return collectors.LedgerFigures(accounts, view.head.sequence, view.fencing)


def run_facts(manifest: Manifest, evidence_class: str, workers_required: int) -> collectors.RunFacts:
    """What is known of a run once its members are admitted."""
    mechanism = manifest.computation.mechanism
    return collectors.RunFacts(
        run=manifest.run_id,
        account=manifest.account,
        evidence_class=evidence_class,
        steps_planned=mechanism.steps,
        virtual_workers=mechanism.virtual_workers,
        workers_required=workers_required,
        parameters=mechanism.dimension,
        noise_multiplier=mechanism.noise_multiplier if mechanism.private else None,
        exact=manifest.computation.exact,
        version=VERSION,
        ray_version=version("ray"),
        torch_version=manifest.computation.numerics.torch,
    )


def verdict_of(
    finished: Finished, folder: Path, wall_seconds: float, ending: str, warnings: tuple[str, ...]
) -> Verdict:
    """What a run may claim that ended in this way."""
    mechanism, delta = finished.plan.mechanism, finished.plan.delta
    private = mechanism.private
    beside = [(each.mechanism, finished.measured[each.query]) for each in finished.plan.measurements]
    outsiders = epsilon_against(mechanism, 0, delta, finished.steps, beside) if private else None
    one_worker = epsilon_against(mechanism, finished.most_hosted, delta, finished.steps, beside) if private else None
    check = _cross_check(finished)
    problem = check.disagreement() if check else None
    if problem:
        warnings += (f"THE ACCOUNTANTS DISAGREE: {problem}.",)
    return Verdict(
        run_dir=folder,
        steps=finished.steps,
        planned_steps=mechanism.steps,
        ending=ending,
        private=private,
        privacy_epsilon=outsiders,
        privacy_epsilon_one_worker=one_worker if one_worker is not None and math.isfinite(one_worker) else None,
        privacy_epsilon_charged=finished.charged_epsilon if private else None,
        privacy_delta=delta if private else None,
        epsilon_cap=finished.plan.epsilon_cap if private else None,
        accountant=mechanism.accountant if private else None,
        epsilon_by_accountant=check.epsilon if check else {},
        accountants_not_computed=check.not_computed if check else {},
        exact=finished.manifest.computation.exact,
        evaluation_accuracy=finished.evaluation.accuracy if finished.evaluation else None,
        evaluation_loss=finished.evaluation.loss if finished.evaluation else None,
        measurements=finished.released,
        evidence_class=finished.evidence_class,
        parameter_digest=finished.parameter_digest.hex(),
        num_workers=finished.workers,
        virtual_workers=mechanism.virtual_workers,
        masked_bytes=finished.masked_bytes,
        wall_seconds=wall_seconds,
        rollback_witness=finished.rollback_witness,
        data_sealed=finished.plan.data_sealed,
        evaluation_data=finished.plan.evaluation_data,
        key_service=finished.plan.key_service,
        colocated=finished.colocated,
        warnings=warnings,
    )


def _cross_check(finished: Finished) -> CrossCheck | None:
    """What four accountants say of all that a run released, at the noise it was planned with; None of nothing."""
    plan = finished.plan
    made = [(plan.mechanism, finished.steps)]
    made += [(each.mechanism, finished.measured[each.query]) for each in plan.measurements]
    releases = tuple(
        Release(each.sample_rate, each.noise_multiplier, count) for each, count in made if each.private and count
    )
    return cross_check(releases, accountant_delta(plan.delta)) if releases else None
