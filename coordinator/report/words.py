"""The words in which a run's facts are told, the same in every table and document.

Every limit of a claim stands beside the claim: which adversary an epsilon holds against, whose word the evidence is,
and whether a rollback of the ledger would be noticed.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from raycloak.coordinator.console.figures import epsilon_text, size_text
from raycloak.coordinator.ledger.view import DataStanding
from raycloak.coordinator.record.verdict import Boundary, Verdict
from raycloak.workers.terms.measurement import Released
from raycloak.workers.terms.mechanism import EXAMPLE, Mechanism

BOUNDARIES: Final[Mapping[Boundary, str]] = MappingProxyType(
    {
        "child_processes": "child processes; Ray's uid can still reach them",
        "vaults": "vaults of the machines; the driver says so, and no policy demands it",
        "demanded_vaults": "vaults of the machines, which the policy demands",
    }
)


def verdict_rows(verdict: Verdict) -> list[tuple[str, str]]:
    """Return label and text of each line, in order."""
    # The newest release of each measurement; all of them are in the JSON.
    measured = {released.query: released for released in verdict.measurements}
    sent = verdict.max_participations is not None
    masked = f"{size_text(verdict.masked_bytes)} reached the aggregator, all masked"
    unnoticed = "not covered: no witness on other storage"
    return [
        *(_budget_rows(verdict) if verdict.private else [("privacy", "NOT PRIVATE: differential privacy was off")]),
        *([] if (verdict.unit, verdict.copies) == (EXAMPLE, 1) else [("unit", unit_text(verdict))]),
        ("steps", _steps(verdict)),
        _evaluation_row(verdict),
        *((name, f"{value:.6g} on the public split") for name, value in verdict.evaluation_metrics.items()),
        *((f"private {query.replace('_', ' ')}", released_text(each)) for query, each in measured.items()),
        ("evidence", "SIMULATED: no hardware vouches for the workers" if verdict.simulated else verdict.evidence_class),
        *([("links", verdict.links + (" (SIMULATED)" if verdict.simulated else ""))] if verdict.links else []),
        ("workers", f"{verdict.num_workers}, hosting {verdict.virtual_workers} virtual workers"),
        ("masked", masked if verdict.masked_bytes else "nothing: secure aggregation was off"),
        ("data", sealed_text(verdict.data_sealed, sent)),
        *participation_rows(verdict.max_participations, verdict.planned_steps),
        *check_row(verdict.data_check, sent),
        *([("evaluation data", evaluation_text(verdict.evaluation_data))] if verdict.evaluation_data else []),
        *keys_rows(verdict.key_service),
        ("ledger rollback", "a witness would notice it" if verdict.rollback_witness else unnoticed),
        ("boundary", BOUNDARIES[verdict.boundary]),
        *([("colocated", "orchestrator and aggregator on one node")] if verdict.colocated else []),
        *([] if verdict.exact else [("exact", "NOT EXACT: a repeat may differ in last bits, which no noise covers")]),
        *(("loaded", f"parameters loaded at step {after}: those of step {step}") for after, step in verdict.loads),
        (
            "parameters",
            verdict.model_digest + (", the average of the run's weights" if verdict.averaged_weights else ""),
        ),
        ("run directory", str(verdict.run_dir)),
        ("its model", "raycloak.load(RUN_DIR) in Python, raycloak export for other libraries"),
        *(("warning", warning) for warning in verdict.warnings),
    ]


def _steps(verdict: Verdict) -> str:
    ended = {
        "complete": "",
        "cap_exceeded": ": the cap is reached",
        "early_stopped": ": ended early, since results no longer got better",
        "stopped": ": stopped, resume with --resume",
    }.get(verdict.ending, f": ended by {verdict.ending}")
    seconds = f"{verdict.wall_seconds:.1f} s with the start of the workers"
    return f"{verdict.steps} of {verdict.planned_steps}, {seconds}{ended}"


def verdict_title(verdict: Verdict) -> str:
    marks = [] if verdict.private else ["NOT PRIVATE"]
    marks += [] if verdict.exact else ["NOT EXACT"]
    marks += ["SIMULATED evidence"] if verdict.simulated else []
    return f"Verdict ({', '.join(marks)})" if marks else "Verdict"


def _budget_rows(verdict: Verdict) -> list[tuple[str, str]]:
    helper = f"its machine, with {verdict.keys_on_one_machine} of {verdict.virtual_workers} keys,"
    # The smaller figure of a run that charged less than it planned.
    blind, claimed = verdict.privacy_epsilon_if_stop_was_blind, verdict.privacy_epsilon
    charged, cap = epsilon_text(verdict.privacy_epsilon_charged), epsilon_text(verdict.epsilon_cap)
    accountant = f" ({verdict.accountant} accountant)" if verdict.accountant else ""
    account = f"{verdict.account}: " if verdict.account else ""
    return [
        ("ε", f"{epsilon_text(claimed)}, against outsiders and the aggregator, however the run ended"),
        *(
            [("ε if the stop was blind", f"{epsilon_text(blind)}, only if nothing that was released led to the end")]
            if blind != claimed
            else []
        ),
        ("ε with one worker", f"{epsilon_text(verdict.privacy_epsilon_one_worker)}, if {helper} helps the aggregator"),
        (
            "ε of the account",
            f"{account}{cap} for all its runs together, of which {charged} is charged so far{accountant}",
        ),
        *([] if verdict.data is None else data_rows(verdict.data)),
        *accountant_rows(verdict.epsilon_by_accountant, verdict.accountants_not_computed),
        ("δ", delta_text(verdict.privacy_delta)),
    ]


def delta_text(delta: float | None) -> str:
    """Return a verdict's delta."""
    return "unknown" if delta is None else f"{delta:g}"


def _evaluation_row(verdict: Verdict) -> tuple[str, str]:
    split = "sealed evaluation split" if verdict.evaluation_data == "sealed" else "public split"
    if verdict.evaluation_loss is not None:
        perplexity = verdict.evaluation_perplexity
        exponential = "" if perplexity is None else f" (perplexity {perplexity:.6g})"
        return "loss", f"{verdict.evaluation_loss:.6g}{exponential}, mean over the {split}"
    if verdict.evaluation_accuracy is None:
        why = "the run failed first" if verdict.evaluation_data else "no evaluation data"
        return "accuracy", f"not measured: {why}"
    f1 = "" if verdict.evaluation_f1 is None else f", macro F1 {verdict.evaluation_f1:.3f},"
    return "accuracy", f"{verdict.evaluation_accuracy:.1%}{f1} on the {split}"


def data_rows(data: DataStanding) -> list[tuple[str, str]]:
    """Return what all runs on one dataset have spent and claim; nothing where it is what its one run has."""
    if data.runs < 2 and len(data.accounts) < 2:
        return []
    runs = f"{data.runs} run{'' if data.runs == 1 else 's'} on {', '.join(data.accounts)}"
    charged, cap = epsilon_text(data.epsilon_charged), epsilon_text(data.epsilon_cap)
    return [("ε of the data", f"{charged} charged by {runs}; all together claim {cap} at δ = {data.delta:g}")]


def accountant_rows(epsilon: Mapping[str, float], missing: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return one line with what each accountant says, or why it says nothing; none where they were not asked."""
    said = [f"{name.replace('_', ' ')} {epsilon_text(value)}" for name, value in epsilon.items()]
    said += [f"{name.replace('_', ' ')} not computed: {reason}" for name, reason in missing.items()]
    return [("ε by accountant", ", ".join(said))] if said else []


def sealed_text(sealed: bool, sent: bool = False) -> str:
    """Return who can open the examples."""
    if sent:
        return "sent: encrypted by the client for attested workers"
    return "sealed: each worker opens only its slices" if sealed else "not sealed"


def unit_text(of: Mechanism | Verdict) -> str:
    """Return what epsilon protects as a whole, and how many of its rows a step computes."""
    rows = of.rows_per_unit // of.copies
    taken = [] if of.unit == EXAMPLE else [f"at most {rows} {'row' if rows == 1 else 'rows'} a step"]
    taken += [f"{of.copies} versions of each row"] if of.copies > 1 else []
    return f"one {of.unit} ({', '.join(taken)})" if taken else f"one {of.unit}"


def units_word(of: Mechanism) -> str:
    """Return what the many of it are called."""
    return "examples" if of.unit == EXAMPLE else "units"


def participation_rows(bound: int | None, steps: int) -> list[tuple[str, str]]:
    """Return how often one example that a client sends is used, and whose word that is; nothing for a dataset.

    Args:
        bound: as in the mechanism. steps: planned ones.
    """
    if bound is None:
        return []
    charged = min(bound, steps)
    return [
        ("amplification", "none is claimed: nothing is sampled, and every example that is sent is used"),
        (
            "participations",
            f"{charged} of {steps} steps at most, and ε pays for {charged}: by the word of the service, which counts "
            "ids, since the ledger sees none",
        ),
    ]


def check_row(digest: str | None, sent: bool) -> list[tuple[str, str]]:
    """Return whether the data's owner has checked the examples; nothing of data that a client sends."""
    if sent:
        return []
    text = "NO CHECK ON RECORD for NaN, wrong labels or duplicates" if digest is None else f"passed, {digest}"
    return [("data check", text)]


def evaluation_text(kept: str) -> str:
    """Return how public an evaluation split is that is kept ``sealed`` or ``clear``."""
    return "sealed: its results are public" if kept == "sealed" else "public, in the clear"


def keys_rows(key_service: str | None) -> list[tuple[str, str]]:
    """Return where the second half of each key comes from, if keys have halves."""
    return [("keys", f"half of each from {key_service}")] if key_service else []


def released_text(released: Released, most: int = 12) -> str:
    """Return at most ``most`` values of a measurement, each with one standard deviation of its noise."""
    shown = list(released.values.items())[:most]
    texts = [f"{name.removeprefix('count_')}: {value:.4g} ± {released.deviation[name]:.2g}" for name, value in shown]
    more = len(released.values) - len(shown)
    rest = f" and {more} more" if more else ""
    if released.f1 is not None:
        rest = f"{rest}; macro F1 {released.f1:.3f}"
    return f"{', '.join(texts)}{rest}; noised, after {released.after} steps"
