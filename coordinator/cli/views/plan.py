"""A plan as a table for a person.

A cell is a figure or a short phrase. What the phrase means for a claim is said in docs/operations.md.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from raycloak.coordinator.console.figures import epsilon_text, size_text
from raycloak.coordinator.console.tables import fields_table
from raycloak.coordinator.report.words import (
    accountant_rows,
    check_row,
    data_rows,
    evaluation_text,
    keys_rows,
    participation_rows,
    sealed_text,
)

if TYPE_CHECKING:
    from raycloak.coordinator.config.run import RunConfig
    from raycloak.coordinator.planning.plan import Plan
    from raycloak.coordinator.planning.search_cost import SearchCost


def plan_table(plan: "Plan", more: Iterable[tuple[str, str]] = ()) -> Table:
    """Return what a run will spend and need, and ``more`` rows below."""
    return fields_table("Plan (nothing is charged yet)", [*plan_rows(plan), *more])


def adapter_cover(config: "RunConfig", plan: "Plan") -> dict[str, float | None]:
    """Return the ε and δ that cover each example where a LoRA adapter's weights leak; nothing of other models.

    ε is None where the run adds no noise, so that nothing covers them.
    """
    if config.model is None or isinstance(config.model, str) or config.model.lora is None:
        return {}
    return {"epsilon": plan.epsilon_outsiders if plan.mechanism.private else None, "delta": plan.delta}


def adapter_rows(config: "RunConfig", plan: "Plan") -> list[tuple[str, str]]:
    """Return what a plan says of a LoRA adapter whose weights leak, as a served one's do; nothing of other models."""
    if not (cover := adapter_cover(config, plan)):
        return []
    covered = f"ε {epsilon_text(cover['epsilon'])} at δ = {cover['delta']:g} covers each example if its weights leak"
    if cover["epsilon"] is None:
        covered = "NO ε covers an example if its weights leak: the run adds no noise"
    return [("adapter", f"{covered}; served over ciphertexts, clients can reconstruct it")]


def plan_rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return label and text of each line of a plan, in order."""
    mechanism = plan.mechanism
    return [
        ("noise multiplier", f"{mechanism.noise_multiplier:.4g}, clipping norm {mechanism.max_grad_norm:g}"),
        *_use_rows(plan),
        *_mechanism_rows(plan),
        ("steps", f"{_steps_that_fit(plan)} of {mechanism.steps} fit the cap {plan.epsilon_cap:g}"),
        *_account_rows(plan),
        *_epsilon_rows(plan),
        ("batch", _batch_text(plan)),
        *_slack_rows(plan),
        ("ring", _ring_text(plan)),
        *(("parameter group", group) for group in plan.groups),
        ("masked bytes", f"{size_text(plan.bytes_per_step)} per step"),
        *([("masks", plan.masks.text)] if plan.masks else []),
        *([("features", plan.features)] if plan.features else []),
        ("data", sealed_text(plan.data_sealed, mechanism.max_participations is not None)),
        *check_row(plan.data_check, mechanism.max_participations is not None),
        *([("evaluation data", evaluation_text(plan.evaluation_data))] if plan.evaluation_data else []),
        *keys_rows(plan.key_service),
        ("object store", f"{size_text(plan.object_store_bytes)} at most"),
        *(("warning", warning) for warning in plan.warnings),
    ]


def _ring_text(plan: "Plan") -> str:
    rounded = f"rounding adds {100 * plan.sensitivity_inflation:.2g} % to the sensitivity"
    if not plan.base_draws:
        return f"{plan.mechanism.ring_bits} bits, {rounded}"
    draws = f"{plan.base_draws} base draws of noise a coordinate"
    return f"{plan.mechanism.ring_bits} bits, {draws}, {rounded}, which takes {100 * plan.rounding_cost:.2g} % of ε"


def _epsilon_rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return the ε that is charged, and how it is bounded; of a run without noise, that nothing bounds it."""
    if not plan.mechanism.private:
        return [("ε", "unbounded: the run adds no noise, and nothing is charged")]
    accountant = plan.mechanism.accountant
    is_alone = plan.account is None or plan.account.is_new or not plan.account.spent_epsilon
    beside = "" if is_alone else ", if the account had paid for nothing else"
    return [
        ("ε charged", f"{epsilon_text(plan.epsilon)} at δ = {plan.delta:g} ({accountant} accountant){beside}"),
        *accountant_rows(plan.epsilon_by_accountant, plan.accountants_not_computed),
        ("ε", f"{epsilon_text(plan.epsilon_outsiders)}, against outsiders and the aggregator, however the run ends"),
        (
            "ε with one worker",
            f"{epsilon_text(plan.epsilon_one_worker)}, if it helps the aggregator (one a machine)",
        ),
        ("ε by step", ", ".join(f"{step}: {epsilon_text(value)}" for step, value in _some(plan.epsilon_curve))),
    ]


def _use_rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return how many examples a step uses, and how they come to be used."""
    mechanism = plan.mechanism
    if mechanism.max_participations is not None:
        most = f"{mechanism.num_examples:,} at most in a step, {mechanism.expected_batch_size:g} expected"
        return [("examples", most), *participation_rows(mechanism.max_participations, mechanism.steps)]
    text = f"{mechanism.sample_rate:.4g} of {mechanism.num_examples:,} examples, {_epochs_text(plan)}"
    return [("sample rate", text)]


def _epochs_text(plan: "Plan") -> str:
    return f"{plan.mechanism.steps * plan.mechanism.sample_rate:.3g} epochs in {plan.mechanism.steps} steps"


def _steps_that_fit(plan: "Plan") -> int:
    return plan.steps_within_cap if plan.account is None else plan.account.steps


def _account_rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return what the account that pays has spent and has left; nothing where it is not known."""
    account = plan.account
    if account is None:
        return []
    if account.is_new:
        return [("account", f"{account.name}: new, opened by the run with the cap {plan.epsilon_cap:g}")]
    # Rounded down: no more is promised than there is.
    spent, left = epsilon_text(account.spent_epsilon), f"{math.floor(account.epsilon_left * 1000) / 1000:.3f}"
    after = f"{epsilon_text(account.epsilon_after)} after these steps"
    return [("account", f"{account.name}: ε {spent} spent, {left} left, {after}"), *data_rows(account.data)]


def _batch_text(plan: "Plan") -> str:
    mechanism = plan.mechanism
    shape = (
        f"{mechanism.virtual_workers} virtual workers x {mechanism.micro_batches} x {mechanism.micro_batch_size} rows"
    )
    return f"{shape}, {plan.rows_per_expected_row:.3g} computed per expected row"


def _slack_rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return the part of delta that slack takes, term by term; cut batches are named even where epsilon pays."""
    terms = plan.delta_terms
    unpaid = "0 (ε pays)" if plan.mechanism.max_participations is None else "0 (more are refused)"
    paid = f"{terms.batch_overflow:.2g}" if plan.mechanism.overflow_probability else unpaid
    others = f"sampler {terms.sampler:.2g}, rounding {terms.rounding:.2g}, ring wrap {terms.ring_wrap:.2g}"
    others += f", sparse masks {terms.mask_split:.2g}" if terms.mask_split else ""
    return [("δ slack", f"{terms.total:.2g} of δ: cut batches {paid}, {others}")]


def _mechanism_rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return each mechanism with what it would cost alone; nothing where there is only training."""
    if len(plan.mechanism_costs) < 2:
        return []
    rows = []
    for each in plan.mechanism_costs:
        times = "once" if each.releases == 1 else f"{each.releases} times"
        cost = f"ε {epsilon_text(each.epsilon_alone)} alone"
        rows.append((each.query.replace("_", " "), f"{times} at noise multiplier {each.noise_multiplier:.4g}: {cost}"))
    return rows


def _some(curve: tuple[tuple[int, float], ...], points: int = 8) -> list[tuple[int, float]]:
    """Return at most ``points`` points of ``curve``, evenly spread, the last included."""
    count = min(points, len(curve))
    return [curve[(index + 1) * len(curve) // count - 1] for index in range(count)]


def evidence_text(classes: Sequence[str]) -> str:
    """Return which classes of evidence a run admits."""
    return ", ".join("SIMULATED (proves nothing about a machine)" if each == "simulated" else each for each in classes)


def search_rows(cost: "SearchCost") -> list[tuple[str, str]]:
    """Return label and text of each line that ``plan --trials`` adds to the plan's table."""
    enough = (
        f"{cost.noise_multiplier:.6g} would let all fit the cap {cost.epsilon_cap:g}"
        if cost.noise_multiplier is not None
        else f"no noise multiplier lets all fit the cap {cost.epsilon_cap:g}"
    )
    return [
        (
            "search",
            f"{cost.trials} trials cost ε {epsilon_text(cost.epsilon)} together, one {epsilon_text(cost.epsilon_one)}",
        ),
        ("ε of the search", f"{cost.epsilon_cap:g}, the account's cap, whichever trials are run, stopped or kept"),
        (
            "trials that fit",
            f"{cost.trials_within_cap} of {cost.trials}, beside what is spent, on one shared account (rdp)",
        ),
        ("search noise", enough),
        *([("search cap", _fitting_text(cost))] if cost.fitting_cap is not None else []),
    ]


def _fitting_text(cost: "SearchCost") -> str:
    """Return which cap suits all trials, where the account's is generous."""
    return f"{cost.fitting_cap:g} would hold all {cost.trials}, and state no more; {cost.epsilon_cap:g} is generous"
