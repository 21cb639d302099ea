"""The public account of a run: metric series while it is in progress, and a verdict at its end."""

import math
from importlib.metadata import version
from pathlib import Path

from raycloak.attestation.core.evidence import Refusal
from raycloak.coordinator.accounting.releases import releases_of
from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.view import LedgerView
from raycloak.coordinator.planning.claim import claimed_epsilon, covered, epsilon_if_stop_was_blind
from raycloak.coordinator.planning.cross_check import cross_check
from raycloak.coordinator.record.outcome import Ending, Finished
from raycloak.coordinator.record.verdict import Verdict
from raycloak.metrics import collectors
from raycloak.version import VERSION
from raycloak.workers.terms.manifest import Manifest

_LARGEST_LOSS = 700.0
"""Beyond it exp overflows a float64."""


def verdict_of(
    finished: Finished, folder: Path, wall_seconds: float, ending: str, warnings: tuple[str, ...]
) -> Verdict:
    """Return what a finished run may claim."""
    plan, charged = finished.plan, finished.charged
    mechanism, delta, private = plan.mechanism, plan.delta, plan.mechanism.private
    one_worker = claimed_epsilon(plan, charged, finished.most_hosted) if private else None
    if plan.masks is not None and finished.most_hosted > plan.masks.colluding_workers:
        # Each of its virtual workers may have been hosted by a worker of its own: more than the masks withstand.
        one_worker = None
    claimed = claimed_epsilon(plan, charged) if private else None
    # A rule that reads what was released is not blind.
    is_blind = private and ending != Ending.EARLY.value
    # At the planned noise; None of a run that released nothing.
    releases = releases_of(covered(plan, charged))
    check = cross_check(releases, accountant_delta(delta)) if releases else None
    problem = check.disagreement() if check else None
    if problem:
        warnings += (f"THE ACCOUNTANTS DISAGREE: {problem}.",)
    loss, perplexity = finished.evaluation.loss if finished.evaluation else None, None
    is_of_tokens = finished.manifest.computation.loss.name == "next_token_cross_entropy"
    if loss is not None and is_of_tokens and loss < _LARGEST_LOSS:
        perplexity = math.exp(loss)
    return Verdict(
        run_dir=folder,
        steps=finished.steps,
        planned_steps=mechanism.steps,
        ending=ending,
        private=private,
        privacy_epsilon=claimed,
        privacy_epsilon_if_stop_was_blind=epsilon_if_stop_was_blind(plan, charged) if is_blind else claimed,
        privacy_epsilon_one_worker=one_worker if one_worker is not None and math.isfinite(one_worker) else None,
        privacy_epsilon_charged=finished.charged_epsilon if private else None,
        privacy_delta=delta if private else None,
        epsilon_cap=finished.plan.epsilon_cap if private else None,
        account=finished.account,
        data=finished.data if private else None,
        accountant=mechanism.accountant if private else None,
        epsilon_by_accountant=check.epsilon if check else {},
        accountants_not_computed=check.not_computed if check else {},
        unit=mechanism.unit,
        rows_per_unit=mechanism.rows_per_unit,
        copies=mechanism.copies,
        max_participations=mechanism.max_participations,
        exact=finished.manifest.computation.exact,
        evaluation_accuracy=finished.evaluation.accuracy if finished.evaluation else None,
        evaluation_loss=loss,
        evaluation_f1=finished.evaluation.f1 if finished.evaluation else None,
        evaluation_perplexity=perplexity,
        evaluation_metrics=dict(finished.evaluation.own) if finished.evaluation else {},
        loads=finished.loads,
        measurements=finished.released,
        evidence_class=finished.evidence_class,
        links=finished.links,
        model_digest=finished.model_digest.hex(),
        averaged_weights=finished.manifest.computation.optimizer.averaged_weights,
        num_workers=finished.workers,
        virtual_workers=mechanism.virtual_workers,
        keys_on_one_machine=finished.most_hosted,
        masked_bytes=finished.masked_bytes,
        wall_seconds=wall_seconds,
        rollback_witness=finished.rollback_witness,
        data_sealed=finished.plan.data_sealed,
        data_check=finished.plan.data_check,
        evaluation_data=finished.plan.evaluation_data,
        key_service=finished.plan.key_service,
        colocated=finished.colocated,
        warnings=warnings,
    )


def metrics_view(view: LedgerView) -> collectors.LedgerFigures:
    """Return the facts of the ledger that a scrape shows."""
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
    witness = collectors.WitnessFigures(view.witness.answers, view.witness.entries) if view.witness else None
    return collectors.LedgerFigures(accounts, view.head.sequence, view.fencing, witness)


def run_facts(manifest: Manifest, evidence_class: str, config: RunConfig) -> collectors.RunFacts:
    """Return the public facts of a run once its members are admitted."""
    mechanism = manifest.computation.mechanism
    return collectors.RunFacts(
        run=manifest.run_id,
        account=manifest.account,
        evidence_class=evidence_class,
        steps_planned=mechanism.steps,
        virtual_workers=mechanism.virtual_workers,
        workers_required=config.fewest_workers,
        workers_planned=config.num_workers,
        prepaid=config.ledger.prepaid,
        parameters=mechanism.dimension,
        noise_multiplier=mechanism.noise_multiplier if mechanism.private else None,
        refusals=tuple(Refusal),
        exact=manifest.computation.exact,
        version=VERSION,
        ray_version=version("ray"),
        torch_version=manifest.computation.numerics.torch,
    )
