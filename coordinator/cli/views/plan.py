"""A plan as a table for a person.

A cell is a figure or a short phrase. What the phrase means for a claim is said in docs/operations.md.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from raycloak.coordinator.console.figures import epsilon_text, size_text
from raycloak.coordinator.report.words import (
    accountant_rows,
    check_row,
    data_rows,
    evaluation_text,
    keys_rows,
    participation_rows,
    sealed_text,
    unit_text,
    units_word,
)
from raycloak.workers.terms.mechanism import EXAMPLE

if TYPE_CHECKING:
    from raycloak.coordinator.config.run import RunConfig
    from raycloak.coordinator.planning.advice import BatchChoice
    from raycloak.coordinator.planning.plan import Plan
    from raycloak.coordinator.planning.search_cost import SearchCost


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


def plan_rows(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Yield label and text of each line of a plan, in order."""
    mechanism = plan.mechanism
    normalised = ", normalised" if mechanism.clipping == "normalised" else ""
    yield "noise multiplier", f"{mechanism.noise_multiplier:.4g}, clipping norm {mechanism.max_grad_norm:g}{normalised}"
    if (mechanism.unit, mechanism.copies) != (EXAMPLE, 1):
        yield "unit", unit_text(mechanism)
    if mechanism.max_participations is not None:
        most = f"{mechanism.num_examples:,} at most in a step, {mechanism.expected_batch_size:g} expected"
        yield "examples", most
        yield from participation_rows(mechanism.max_participations, mechanism.steps)
    else:
        epochs = f"{mechanism.expected_passes():.3g} epochs in {mechanism.steps} steps"
        counted = f"{mechanism.num_examples:,} {units_word(mechanism)}"
        part = f" of one of {mechanism.bands} parts" if mechanism.bands > 1 else ""
        yield "sample rate", f"{mechanism.sample_rate:.4g}{part} of {counted}, {epochs}"
    if (gain := plan.noise_gain) is not None:
        same = f"own noise has so little at ε {epsilon_text(gain.epsilon_independent)}"
        error = f"{gain.share:.2f} of the error of own noise in these batches"
        yield "correlated noise", f"over {gain.bands} steps: {error}; {same}"
        sums, store = map(size_text, gain.state_bytes)
        yield "earlier steps", f"{sums} in each worker, {store} in the object store"
    # Where there is more than training: each mechanism with what it would cost alone.
    for each in plan.mechanism_costs if len(plan.mechanism_costs) > 1 else ():
        times = "once" if each.releases == 1 else f"{each.releases} times"
        cost = f"ε {epsilon_text(each.epsilon_alone)} alone"
        yield each.query.replace("_", " "), f"{times} at noise multiplier {each.noise_multiplier:.4g}: {cost}"
    fitting = plan.steps_within_cap if plan.account is None else plan.account.steps
    yield "steps", f"{fitting} of {mechanism.steps} fit the cap {plan.epsilon_cap:g}"
    if plan.account is not None and plan.account.is_new:
        yield "account", f"{plan.account.name}: new, opened by the run with the cap {plan.epsilon_cap:g}"
    elif plan.account is not None:
        account = plan.account
        # Rounded down: no more is promised than there is.
        left = f"{math.floor(account.epsilon_left * 1000) / 1000:.3f} left"
        after = f"{epsilon_text(account.epsilon_after)} after these steps"
        yield "account", f"{account.name}: ε {epsilon_text(account.spent_epsilon)} spent, {left}, {after}"
        yield from data_rows(account.data)
    yield from _epsilon_rows(plan)
    yield from _size_rows(plan)


def _epsilon_rows(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Yield the ε that is charged, and how it is bounded; of a run without noise, that nothing bounds it."""
    if not plan.mechanism.private:
        yield "ε", "unbounded: the run adds no noise, and nothing is charged"
        return
    is_alone = plan.account is None or plan.account.is_new or not plan.account.spent_epsilon
    beside = "" if is_alone else ", if the account had paid for nothing else"
    charged = f"{epsilon_text(plan.epsilon)} at δ = {plan.delta:g} ({plan.mechanism.accountant} accountant)"
    yield "ε charged", f"{charged}{beside}"
    yield from accountant_rows(plan.epsilon_by_accountant, plan.accountants_not_computed)
    yield "ε", f"{epsilon_text(plan.epsilon_outsiders)}, against outsiders and the aggregator, however the run ends"
    yield "ε with one worker", f"{epsilon_text(plan.epsilon_one_worker)}, if it helps the aggregator (one a machine)"
    # At most eight points, evenly spread, the last included.
    curve, count = plan.epsilon_curve, min(8, len(plan.epsilon_curve))
    shown = (curve[(index + 1) * len(curve) // count - 1] for index in range(count))
    yield "ε by step", ", ".join(f"{step}: {epsilon_text(value)}" for step, value in shown)


def _size_rows(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Yield what a step computes and sends, how its data is kept, and the warnings."""
    mechanism, terms = plan.mechanism, plan.delta_terms
    sent = mechanism.max_participations is not None
    rows = (
        f"{mechanism.virtual_workers} virtual workers x {mechanism.micro_batches} x {mechanism.micro_batch_rows} rows"
    )
    yield "batch", f"{rows}, {plan.rows_per_expected_row:.3g} computed per expected row"
    # Cut batches are named even where epsilon pays for them.
    unpaid = "0 (more are refused)" if sent else "0 (ε pays)"
    paid = f"{terms.batch_overflow:.2g}" if mechanism.overflow_probability else unpaid
    others = f"sampler {terms.sampler:.2g}, rounding {terms.rounding:.2g}, ring wrap {terms.ring_wrap:.2g}"
    others += f", sparse masks {terms.mask_split:.2g}" if terms.mask_split else ""
    yield "δ slack", f"{terms.total:.2g} of δ: cut batches {paid}, {others}"
    ring = f"{mechanism.ring_bits} bits, "
    ring += f"{plan.base_draws} base draws of noise a coordinate, " if plan.base_draws else ""
    ring += f"rounding adds {100 * plan.sensitivity_inflation:.2g} % to the sensitivity"
    ring += f", which takes {100 * plan.rounding_cost:.2g} % of ε" if plan.base_draws else ""
    yield "ring", ring
    yield from (("parameter group", group) for group in plan.groups)
    yield "masked bytes", f"{size_text(plan.bytes_per_step)} per step"
    if plan.masks:
        yield "masks", plan.masks.text
    if plan.features:
        yield "features", plan.features
    yield "data", sealed_text(plan.data_sealed, sent)
    yield from check_row(plan.data_check, sent)
    if plan.evaluation_data:
        yield "evaluation data", evaluation_text(plan.evaluation_data)
    yield from keys_rows(plan.key_service)
    yield "object store", f"{size_text(plan.object_store_bytes)} at most"
    if plan.gpu_bytes:
        each = ", ".join(map(size_text, plan.gpu_bytes))
        yield "GPUs of a worker", f"{each}: parameters and sums, without rows and words"
    yield from (("warning", warning) for warning in plan.warnings)


def search_rows(cost: "SearchCost") -> Iterator[tuple[str, str]]:
    """Yield label and text of each line that ``plan --trials`` adds to the plan's table."""
    one, all_trials = epsilon_text(cost.epsilon_one), epsilon_text(cost.epsilon)
    yield "search", f"{cost.trials} trials cost ε {all_trials} together, one {one}"
    yield "ε of the search", f"{cost.epsilon_cap:g}, the account's cap, whichever trials are run, stopped or kept"
    fitting = f"{cost.trials_within_cap} of {cost.trials}"
    yield "trials that fit", f"{fitting}, beside what is spent, on one shared account (rdp)"
    if cost.noise_multiplier is None:
        yield "search noise", f"no noise multiplier lets all fit the cap {cost.epsilon_cap:g}"
    else:
        yield "search noise", f"{cost.noise_multiplier:.6g} would let all fit the cap {cost.epsilon_cap:g}"
    if cost.fitting_cap is not None:
        whole = f"{cost.fitting_cap:g} would hold all {cost.trials}, and state no more"
        yield "search cap", f"{whole}; {cost.epsilon_cap:g} is generous"


def choice_rows(choices: "Iterable[BatchChoice]") -> Iterator[tuple[str, str]]:
    """Yield label and text of each line that ``plan --advise`` adds to the plan's table."""
    for each in choices:
        size = f"expected_batch_size {each.expected_batch_size:g} in {each.steps} steps"
        noise = f"noise multiplier {each.noise_multiplier:.4g}, {each.noise_to_batch:.3g} C in an average gradient"
        if each.bands > 1:
            noise += f" by {each.bands} bands"
        marks = " (this plan)" * each.is_planned + " (advised)" * each.is_advised
        yield "choice", f"{size}: {noise}{marks}"
