"""The verdict: what a finished run may claim, and what it may not.

Every limit of a claim stands in the same table as the claim: which adversary an epsilon holds against, whose word the
evidence is, and whether a rollback of the ledger would be noticed.
"""

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from coordinator.config_sections import Kept
from coordinator.tables import (
    accountant_rows,
    epsilon_text,
    evaluation_text,
    fields_table,
    keys_rows,
    released_text,
    sealed_text,
    size_text,
)
from workers.measurement import Released
from workers.mechanism import AccountantName

SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of a finished run; its fields are the keys of the run's JSON.

    Attributes:
        run_dir: the run directory.
        steps: finished steps, those of earlier executions included.
        planned_steps: what the run was planned for.
        ending: ``complete``, ``cap_exceeded``, ``stopped``, or the code of the error that ended the execution.
        private: False if differential privacy was off; then every epsilon is None.
        privacy_epsilon: spent, against outsiders and the aggregator alone.
        privacy_epsilon_one_worker: the same for the aggregator together with any one worker.
        privacy_epsilon_charged: what the account has been charged by all its runs; never below what this run spent.
        privacy_delta: delta of each epsilon, the design's slack terms included.
        epsilon_cap: what the account may spend.
        accountant: with which the account is held.
        epsilon_by_accountant: of what this run released, by four accountants; the noise of ``colluding_workers`` is
            not counted on. ``accountants_not_computed`` says why one is not there.
        exact: False if operations without a deterministic kernel were allowed: a repeat may give other bytes.
        evaluation_accuracy: share in [0, 1] on the evaluation split; None without one, or where the loss is measured.
        evaluation_loss: mean over the examples of the evaluation split, for a loss that has no accuracy; else None.
        measurements: what was released about the private examples, each with the deviation of its noise.
        evidence_class: ``simulated`` or the hardware class whose root verified.
        parameter_digest: hexadecimal digest of the final parameters.
        num_workers, virtual_workers: hosts and V.
        masked_bytes: bytes of masked vectors that reached the aggregators.
        wall_seconds: from the start of the run to its verdict.
        rollback_witness: whether a witness on other storage would notice an older ledger file put back.
        data_sealed: whether the examples were encrypted for the run's policy.
        evaluation_data: ``sealed`` or ``clear``, how the evaluation split was kept; None without one.
        key_service: address of the data owner's key service that gave the second half of every virtual-worker key.
        colocated: whether orchestrator and aggregator shared a node.
        evidence_service: ``host:port`` where the run's evidence was served while it went on; None if it was not.
        warnings: sentences about limits of this run.
    """

    run_dir: Path
    steps: int
    planned_steps: int
    ending: str
    private: bool
    privacy_epsilon: float | None
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
    exact: bool = True
    evaluation_loss: float | None = None
    measurements: tuple[Released, ...] = ()
    accountant: AccountantName | None = None
    epsilon_by_accountant: dict[str, float] = field(default_factory=dict)
    accountants_not_computed: dict[str, str] = field(default_factory=dict)
    rollback_witness: bool = False
    data_sealed: bool = False
    evaluation_data: Kept | None = None
    key_service: str | None = None
    colocated: bool = False
    evidence_service: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether no hardware vouches for the workers."""
        return self.evidence_class.lower() == SIMULATED

    def metrics(self) -> dict[str, Any]:
        """The JSON of the run without ``run_dir``, which `Trainer.train` returns beside it."""
        own = {key: value for key, value in asdict(self).items() if key != "run_dir"}
        return own | {"measurements": [released.model_dump(mode="json") for released in self.measurements]}

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Self:
        """The verdict in what `Trainer.train` returned: ``run_dir`` and ``metrics``; other metrics are left out."""
        known = {field.name for field in fields(cls)}
        metrics = {key: value for key, value in result["metrics"].items() if key in known}
        released = tuple(Released.model_validate(each) for each in metrics.pop("measurements", ()))
        return cls(run_dir=Path(result["run_dir"]), measurements=released, **metrics)


def verdict_table(verdict: Verdict) -> Table:
    """The verdict for a person."""
    return fields_table(_title(verdict), verdict_rows(verdict))


def verdict_text(verdict: Verdict, width: int = 120) -> str:
    """The same table as plain text of at most ``width`` columns, for the run's log."""
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(verdict_table(verdict))
    return text.getvalue()


def verdict_rows(verdict: Verdict) -> list[tuple[str, str]]:
    """Label and sentence of each line, in order."""
    return [
        *(_budget_rows(verdict) if verdict.private else [("privacy", "NOT PRIVATE: differential privacy was off")]),
        ("steps", _steps(verdict)),
        _evaluation_row(verdict),
        *_measurement_rows(verdict),
        ("evidence", _evidence(verdict)),
        ("workers", f"{verdict.num_workers}, hosting {verdict.virtual_workers} virtual workers"),
        ("masked", _masked(verdict)),
        ("data", sealed_text(verdict.data_sealed)),
        *([("evaluation data", evaluation_text(verdict.evaluation_data))] if verdict.evaluation_data else []),
        *keys_rows(verdict.key_service),
        ("rollback", _rollback(verdict)),
        *([("colocated", _COLOCATED)] if verdict.colocated else []),
        *([] if verdict.exact else [("exact", _NOT_EXACT)]),
        ("parameters", verdict.parameter_digest),
        ("run directory", str(verdict.run_dir)),
        *(("warning", warning) for warning in verdict.warnings),
    ]


def _steps(verdict: Verdict) -> str:
    text = f"{verdict.steps} of {verdict.planned_steps} in {verdict.wall_seconds:.1f} s"
    match verdict.ending:
        case "complete":
            return text
        case "cap_exceeded":
            return f"{text}: the cap is reached"
        case "stopped":
            return f"{text}: stopped; go on with --resume"
        case code:
            return f"{text}: ended by {code}"


_NOT_EXACT = (
    "NOT EXACT: operations without a deterministic kernel were allowed; a repeat may give other bytes, and a vector "
    "that a failure makes a worker compute again may differ in last bits that no noise covers"
)
_COLOCATED = "orchestrator and aggregator on one node: who reads both processes' memory sees through the noise"


def _title(verdict: Verdict) -> str:
    marks = [] if verdict.private else ["NOT PRIVATE"]
    marks += [] if verdict.exact else ["NOT EXACT"]
    marks += ["SIMULATED evidence"] if verdict.simulated else []
    return f"Verdict ({', '.join(marks)})" if marks else "Verdict"


def _budget_rows(verdict: Verdict) -> list[tuple[str, str]]:
    return [
        ("ε spent", f"{epsilon_text(verdict.privacy_epsilon)} of {epsilon_text(verdict.epsilon_cap)}, {_OUTSIDERS}"),
        ("ε with one worker", f"{epsilon_text(verdict.privacy_epsilon_one_worker)}, {_ONE_WORKER}"),
        ("ε charged", _charged(verdict)),
        *accountant_rows(verdict.epsilon_by_accountant, verdict.accountants_not_computed),
        ("δ", "unknown" if verdict.privacy_delta is None else f"{verdict.privacy_delta:g}"),
    ]


def _charged(verdict: Verdict) -> str:
    held = f"; it is held with {verdict.accountant}" if verdict.accountant else ""
    return f"{epsilon_text(verdict.privacy_epsilon_charged)} to the account, by all its runs{held}"


_OUTSIDERS = "against outsiders and the aggregator"
_ONE_WORKER = "against the aggregator together with any one worker"


def _evaluation_row(verdict: Verdict) -> tuple[str, str]:
    split = "sealed evaluation split" if verdict.evaluation_data == "sealed" else "public split"
    if verdict.evaluation_loss is not None:
        return "loss", f"{verdict.evaluation_loss:.6g}, mean over the {split}"
    if verdict.evaluation_accuracy is None:
        return "accuracy", f"not measured: {_unmeasured(verdict)}"
    return "accuracy", f"{verdict.evaluation_accuracy:.1%} on the {split}"


def _unmeasured(verdict: Verdict) -> str:
    return "the run failed before" if verdict.evaluation_data else "no public split is declared"


def _measurement_rows(verdict: Verdict) -> list[tuple[str, str]]:
    """The newest release of each measurement; all of them are in the JSON."""
    newest = {released.query: released for released in verdict.measurements}
    return [(f"private {query.replace('_', ' ')}", released_text(released)) for query, released in newest.items()]


def _evidence(verdict: Verdict) -> str:
    if verdict.simulated:
        return "SIMULATED: no hardware vouches for what the workers ran"
    return verdict.evidence_class


def _masked(verdict: Verdict) -> str:
    if verdict.masked_bytes == 0:
        return "nothing: secure aggregation was off"
    return f"{size_text(verdict.masked_bytes)} reached the aggregator, all of it masked"


def _rollback(verdict: Verdict) -> str:
    if verdict.rollback_witness:
        return "a witness on other storage would notice an older ledger"
    return "not covered: without a witness, an older ledger file put back goes unnoticed"
