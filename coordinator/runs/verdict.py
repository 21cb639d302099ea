"""The public account of a run: metric series while it is in progress, and a verdict at its end.

The verdict says what a finished run may claim, and what it may not. The facts that limit a claim are among its fields.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from raycloak.coordinator.accounting.releases import releases_of
from raycloak.coordinator.accounting.renyi import accountant_delta
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import Kept
from raycloak.coordinator.ledger.view import DataStanding, LedgerView
from raycloak.coordinator.planning.claim import claimed_epsilon, covered, epsilon_if_stop_was_blind
from raycloak.coordinator.planning.cross_check import CrossCheck, cross_check
from raycloak.coordinator.record.outcome import Ending, Finished
from raycloak.metrics import collectors
from raycloak.version import VERSION
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.measurement import Released
from raycloak.workers.terms.mechanism import AccountantName, Mechanism

SIMULATED = "simulated"
_LARGEST_LOSS = 700.0
"""Beyond it exp overflows a float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a finished run; its fields are the keys of the run's JSON.

    Attributes:
        run_dir: the run directory.
        steps: finished steps, earlier executions included.
        planned_steps: steps that the run was planned for.
        ending: ``complete``, ``cap_exceeded``, ``early_stopped``, ``stopped``, or the code of the error that ended the
            execution.
        private: False if differential privacy was off; then every epsilon is None.
        privacy_epsilon: claimed for the run, however it ended, against outsiders and the aggregator alone: what its
            plan costs, as far as the cap reaches. See `raycloak.coordinator.planning.claim`.
        privacy_epsilon_if_stop_was_blind: of what was charged; holds only if nothing that was released had a part in
            when the run ended, so it is ``privacy_epsilon`` itself of a run that its results have ended.
        privacy_epsilon_one_worker: the same for the aggregator together with any one worker's machine; None if that
            leaves no guarantee.
        keys_on_one_machine: most virtual workers whose keys of one epoch one machine has got, in any execution of the
            run; ``privacy_epsilon_one_worker`` rests on it.
        privacy_epsilon_charged: what the account has been charged by all its runs so far. More may follow, so all its
            runs together claim ``epsilon_cap``.
        privacy_delta: delta of each epsilon, the design's slack terms included.
        epsilon_cap: what the account may spend, and what all its runs together claim, however they were chosen.
        account: the one that pays.
        data: of all accounts that are bound to the same data, the sums of their charges, caps and deltas. What all runs
            on this data claim together is the sum of the caps; None if nothing is private.
        accountant: the one that holds the account.
        epsilon_by_accountant: of the releases that the claim covers, by four accountants; the noise of
            ``colluding_workers`` is not counted on. ``accountants_not_computed`` says why one is not there.
        exact: False if operations without a deterministic kernel were allowed: a repeat may give other bytes.
        evaluation_accuracy: share in [0, 1] on the evaluation split; None without one, or where the loss is measured.
        evaluation_loss: mean over the examples of the evaluation split, for a loss that has no accuracy; else None.
        evaluation_f1: macro F1 beside the accuracy on a public split; None where the split is sealed.
        evaluation_metrics: values of the user's own metrics on a public split, by name.
        evaluation_perplexity: exp of ``evaluation_loss`` under ``next_token_cross_entropy``; else None.
        measurements: what was released about the private examples, each with the deviation of its noise.
        evidence_class: ``simulated`` or the hardware class whose root verified.
        parameter_digest: hexadecimal digest of the final parameters.
        num_workers, virtual_workers: hosts and V.
        masked_bytes: bytes of masked vectors that reached the aggregators.
        wall_seconds: from the start of the run to its verdict.
        rollback_witness: whether a witness on other storage would notice an older ledger file put back.
        data_sealed: whether the examples were encrypted for the run's policy.
        data_check: digest of the owner's check that the data passed before; None if none is recorded.
        evaluation_data: ``sealed`` or ``clear``, how the evaluation split was kept; None without one.
        key_service: address of the data owner's key service that gave the second half of every virtual-worker key.
        colocated: whether orchestrator and aggregator shared a node.
        evidence_service: ``host:port`` where the evidence was served during the run; None if it was not.
        warnings: sentences about limits of this run.
    """

    run_dir: Path
    steps: int
    planned_steps: int
    ending: str
    private: bool
    privacy_epsilon: float | None
    privacy_epsilon_if_stop_was_blind: float | None
    privacy_epsilon_one_worker: float | None
    privacy_epsilon_charged: float | None
    privacy_delta: float | None
    epsilon_cap: float | None
    evaluation_accuracy: float | None
    evidence_class: str
    parameter_digest: str
    num_workers: int
    virtual_workers: int
    masked_bytes: int
    wall_seconds: float
    keys_on_one_machine: int = 0
    exact: bool = True
    evaluation_loss: float | None = None
    evaluation_f1: float | None = None
    evaluation_perplexity: float | None = None
    evaluation_metrics: dict[str, float] = field(default_factory=dict)
    measurements: tuple[Released, ...] = ()
    account: str | None = None
    data: DataStanding | None = None
    accountant: AccountantName | None = None
    epsilon_by_accountant: dict[str, float] = field(default_factory=dict)
    accountants_not_computed: dict[str, str] = field(default_factory=dict)
    rollback_witness: bool = False
    data_sealed: bool = False
    data_check: str | None = None
    evaluation_data: Kept | None = None
    key_service: str | None = None
    colocated: bool = False
    evidence_service: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        """True if no hardware vouches for the workers."""
        return self.evidence_class.lower() == SIMULATED

    def metrics(self) -> dict[str, Any]:
        """Return the JSON of the run without ``run_dir``, which `Trainer.train` returns beside it."""
        own = {key: value for key, value in asdict(self).items() if key != "run_dir"}
        return own | {"measurements": [released.model_dump(mode="json") for released in self.measurements]}

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Self:
        """Return the verdict in a result of `Trainer.train`; metrics that are not its own are left out."""
        known = {field.name for field in fields(cls)}
        metrics = {key: value for key, value in result["metrics"].items() if key in known}
        released = tuple(Released.model_validate(each) for each in metrics.pop("measurements", ()))
        if metrics.get("data") is not None:
            # The JSON of a run has lists.
            metrics["data"] = DataStanding(**{**metrics["data"], "accounts": tuple(metrics["data"]["accounts"])})
        return cls(run_dir=Path(result["run_dir"]), measurements=released, **metrics)


def verdict_of(
    finished: Finished, folder: Path, wall_seconds: float, ending: str, warnings: tuple[str, ...]
) -> Verdict:
    """Return what a finished run may claim."""
    plan, charged = finished.plan, finished.charged
    mechanism, delta, private = plan.mechanism, plan.delta, plan.mechanism.private
    one_worker = claimed_epsilon(plan, charged, finished.most_hosted) if private else None
    claimed = claimed_epsilon(plan, charged) if private else None
    # A rule that reads what was released is not blind.
    is_blind = private and ending != Ending.EARLY.value
    check = _cross_check(covered(plan, charged), delta)
    problem = check.disagreement() if check else None
    if problem:
        warnings += (f"THE ACCOUNTANTS DISAGREE: {problem}.",)
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
        exact=finished.manifest.computation.exact,
        evaluation_accuracy=finished.evaluation.accuracy if finished.evaluation else None,
        evaluation_loss=finished.evaluation.loss if finished.evaluation else None,
        evaluation_f1=finished.evaluation.f1 if finished.evaluation else None,
        evaluation_perplexity=_perplexity(finished),
        evaluation_metrics=dict(finished.evaluation.own) if finished.evaluation else {},
        measurements=finished.released,
        evidence_class=finished.evidence_class,
        parameter_digest=finished.parameter_digest.hex(),
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


def _cross_check(counts: Sequence[tuple[Mechanism, int]], delta: float) -> CrossCheck | None:
    """Return four accountants' epsilons of a run's releases, at its planned noise; None if there are none."""
    releases = releases_of(counts)
    return cross_check(releases, accountant_delta(delta)) if releases else None


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


def _perplexity(finished: Finished) -> float | None:
    """Return the perplexity on the evaluation split; None for another loss, or one that is beyond float64."""
    loss = finished.evaluation.loss if finished.evaluation else None
    if loss is None or finished.manifest.computation.loss != "next_token_cross_entropy" or not loss < _LARGEST_LOSS:
        return None
    return math.exp(loss)


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
        exact=manifest.computation.exact,
        version=VERSION,
        ray_version=version("ray"),
        torch_version=manifest.computation.numerics.torch,
    )
