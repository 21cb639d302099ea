"""The verdict of a run: what it may claim and what it may not, as it lies in ``verdict.json``.

The facts that limit a claim are among its fields.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from raycloak.attestation.core.evidence import Links
from raycloak.coordinator.config.sections import Kept
from raycloak.coordinator.ledger.view import DataStanding
from raycloak.workers.terms.measurement import Released
from raycloak.workers.terms.mechanism import EXAMPLE, AccountantName

SIMULATED = "simulated"
Boundary = Literal["child_processes", "vaults", "demanded_vaults"]


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
        epsilon_by_accountant: of the releases that the claim covers, by five accountants; the noise of
            ``colluding_workers`` is not counted on. ``accountants_not_computed`` says why one is not there.
        unit: public name of what epsilon protects as a whole: an ``example``, or the unit whose rows the examples are.
        rows_per_unit: most rows of a unit in a step, versions included.
        copies: versions of each row among them.
        max_participations: k of data that a client sent: most steps that one example took part in, by the word of the
            service that counted; None for a dataset.
        exact: False if operations without a deterministic kernel were allowed: a repeat may give other bytes.
        evaluation_accuracy: share in [0, 1] on the evaluation split; None without one, or where the loss is measured.
        evaluation_loss: mean over the examples of the evaluation split, for a loss that has no accuracy; else None.
        evaluation_f1: macro F1 beside the accuracy on a public split; None where the split is sealed.
        evaluation_metrics: values of the user's own metrics on a public split, by name.
        evaluation_perplexity: exp of ``evaluation_loss`` under ``next_token_cross_entropy``; else None.
        loads: of each load of an earlier state, the number of finished steps at which it was made, and of the package.
        measurements: what was released about the private examples, each with the deviation of its noise.
        evidence_class: ``simulated`` or the hardware class whose root verified.
        links: of a worker's GPUs with each other, ``encrypted``, ``clear over attested switches`` or ``not attested``;
            None without a GPU.
        model_digest: hexadecimal digest of the final parameters, which are exported.
        averaged_weights: whether these are the average of the run's weights, and the evaluation is of that.
        num_workers, virtual_workers: hosts and V.
        masked_bytes: bytes of masked vectors that reached the aggregators.
        wall_seconds: from the start of the workers to the verdict, of the last execution.
        rollback_witness: whether a witness on other storage would notice an older ledger file put back.
        data_sealed: whether the examples were encrypted for the run's policy.
        data_check: digest of the owner's check that the data passed before; None if none is recorded.
        evaluation_data: ``sealed`` or ``clear``, how the evaluation split was kept; None without one.
        key_service: address of the data owner's key service that gave the second half of every virtual-worker key.
        boundary: what separates secrets from Ray's processes: ``child_processes`` where each role ran in a vault that
            its actor started, under Ray's user id; ``vaults`` where they ran in vaults of the machines;
            ``demanded_vaults`` where the policy demanded that, too.
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
    model_digest: str
    num_workers: int
    virtual_workers: int
    masked_bytes: int
    wall_seconds: float
    keys_on_one_machine: int = 0
    links: Links | None = None
    unit: str = EXAMPLE
    rows_per_unit: int = 1
    copies: int = 1
    max_participations: int | None = None
    exact: bool = True
    averaged_weights: bool = False
    evaluation_loss: float | None = None
    evaluation_f1: float | None = None
    evaluation_perplexity: float | None = None
    evaluation_metrics: dict[str, float] = field(default_factory=dict)
    loads: tuple[tuple[int, int], ...] = ()
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
    boundary: Boundary = "child_processes"
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
        loads = tuple((after, step) for after, step in metrics.pop("loads", ()))
        return cls(run_dir=Path(result["run_dir"]), loads=loads, measurements=released, **metrics)
