"""Results of the commands as tables for a person."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from coordinator.ledger_entries import LedgerEntry
    from coordinator.ledger_leases import Lease
    from coordinator.ledger_view import AccountView
    from coordinator.plan import Plan
    from coordinator.replay import Replay
    from workers.measurement import Released


def fields_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns, a label and its value; values are folded, never cut."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def replay_table(replay: "Replay") -> Table:
    """The outcome of a replay."""
    title = "Replay (SIMULATED evidence)" if replay.evidence_class == "simulated" else "Replay"
    return fields_table(
        title,
        [
            ("steps", f"{replay.first} to {replay.last - 1}, every parameter digest is the logged one"),
            ("workers", str(replay.workers)),
            ("keys", f"one worker has held those of {replay.most_hosted} of {replay.virtual_workers} virtual workers"),
            ("charged", f"nothing: the run has {replay.charged_steps} charged steps, as before"),
            ("last digest", replay.digests[-1]),
            ("run directory", str(replay.run_dir)),
        ],
    )


def value_text(value: Any) -> str:
    """A figure with four significant digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def epsilon_text(value: float | None) -> str:
    """``value`` with three decimals, rounded up so that no claim is better than the truth."""
    if value is None or not math.isfinite(value):
        return "unbounded"
    return f"{math.ceil(value * 1000 - 1e-6) / 1000:.3f}"


def sealed_text(sealed: bool) -> str:
    """Who can open the examples."""
    return "sealed: workers open the slices they host" if sealed else "not sealed: who reads its storage reads it"


def evaluation_text(kept: str) -> str:
    """Who can open the examples of an evaluation split that is ``sealed`` or ``clear``, and what is shown of it."""
    if kept == "sealed":
        return "sealed: workers open the slices they host; results are exact and not private"
    return "public, in the clear"


def keys_rows(key_service: str | None) -> list[tuple[str, str]]:
    """Where keys come from, if not from the orchestrator alone."""
    return [("keys", f"two halves, key service {key_service}")] if key_service else []


def size_text(count: int) -> str:
    """A number of bytes in a decimal unit."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def released_text(released: "Released", most: int = 12) -> str:
    """Values of a measurement with one standard deviation of their noise; at most ``most`` of them."""
    shown = list(released.values.items())[:most]
    texts = [f"{name.removeprefix('count_')}: {value:.4g} ± {released.deviation[name]:.2g}" for name, value in shown]
    more = len(released.values) - len(shown)
    rest = f" and {more} more" if more else ""
    return f"{', '.join(texts)}{rest}; noised, after {released.after} steps"


def plan_table(plan: "Plan", more: Iterable[tuple[str, str]] = ()) -> Table:
    """What a run will spend and need, and ``more`` rows."""
    return fields_table("Plan (nothing is charged yet)", [*plan_rows(plan), *more])


def plan_rows(plan: "Plan") -> list[tuple[str, str]]:
    """Label and sentence of each line of a plan, in order."""
    mechanism = plan.mechanism
    rounded = f"γ = 2^{mechanism.gamma_log2}, rounding adds {plan.sensitivity_inflation:.2g} of the sensitivity"
    return [
        ("noise multiplier", f"{mechanism.noise_multiplier:.4g} on clipping norm {mechanism.max_grad_norm:g}"),
        ("sample rate", f"{mechanism.sample_rate:.4g} of {mechanism.num_examples:,} examples"),
        *_mechanism_rows(plan),
        ("steps", f"{plan.steps_within_cap} of {mechanism.steps} fit below the cap {plan.epsilon_cap:g}"),
        ("ε", f"{epsilon_text(plan.epsilon)} charged at δ = {plan.delta:g} ({mechanism.accountant} accountant)"),
        *accountant_rows(plan.epsilon_by_accountant, plan.accountants_not_computed),
        ("ε, outsiders", f"{epsilon_text(plan.epsilon_outsiders)}, the aggregator included"),
        ("ε, one worker", f"{epsilon_text(plan.epsilon_one_worker)}, it and the aggregator together"),
        ("ε by step", ", ".join(f"{step}: {epsilon_text(value)}" for step, value in _some(plan.epsilon_curve))),
        ("δ slack", f"{plan.delta_terms.total:.2g} of δ for cut batches, rounding and sampling"),
        ("ring", f"{mechanism.ring_bits} bits, {rounded}"),
        ("masked bytes", f"{size_text(plan.bytes_per_step)} a step"),
        ("data", sealed_text(plan.data_sealed)),
        *([("evaluation data", evaluation_text(plan.evaluation_data))] if plan.evaluation_data else []),
        *keys_rows(plan.key_service),
        ("object store", f"{size_text(plan.object_store_bytes)} at most"),
        *(("warning", warning) for warning in plan.warnings),
    ]


def evidence_text(classes: Sequence[str]) -> str:
    """Whose evidence a plan's run admits."""
    named = ", ".join("SIMULATED" if each == "simulated" else each for each in classes)
    return f"{named}, which proves nothing about a machine" if "simulated" in classes else named


def _some(curve: tuple[tuple[int, float], ...], points: int = 8) -> list[tuple[int, float]]:
    """At most ``points`` points of ``curve``, evenly spread, the last included."""
    count = min(points, len(curve))
    return [curve[(index + 1) * len(curve) // count - 1] for index in range(count)]


def accountant_rows(epsilon: Mapping[str, float], missing: Mapping[str, str]) -> list[tuple[str, str]]:
    """One line with what each accountant says, and why one says nothing; none where they were not asked."""
    said = [f"{name.replace('_', ' ')} {epsilon_text(value)}" for name, value in epsilon.items()]
    said += [f"{name.replace('_', ' ')} not computed: {reason}" for name, reason in missing.items()]
    return [("ε by accountant", ", ".join(said))] if said else []


def _mechanism_rows(plan: "Plan") -> list[tuple[str, str]]:
    """What is released beside the gradient and what each would cost alone; nothing where there is only training."""
    if len(plan.mechanism_costs) < 2:
        return []
    return [
        (
            each.query.replace("_", " "),
            f"{each.releases} times at noise multiplier {each.noise_multiplier:.4g}: "
            f"ε {epsilon_text(each.epsilon_alone)} if it were alone",
        )
        for each in plan.mechanism_costs
    ]


def accounts_view(accounts: Iterable["AccountView"]) -> Table:
    """Accounts with their runs below them."""
    table = Table(title="Budget", title_justify="left", title_style="bold")
    for header in ("account", "ε spent", "ε cap", "δ", "accountant", "run", "steps charged", "held by"):
        table.add_column(header, overflow="fold")
    for account in accounts:
        spent = epsilon_text(account.spent_epsilon)
        name = f"{account.name} (closed)" if account.closed else account.name
        table.add_row(Text(name), spent, f"{account.epsilon_cap:g}", f"{account.delta:g}", account.accountant)
        for run in account.runs:
            steps = f"{run.charged_steps} of {run.planned_steps}"
            steps = steps if run.private else f"{steps}, NOT PRIVATE"
            table.add_row("", "", "", "", "", run.run_id, steps, _lease_text(run.lease))
            for each in run.queries:
                if each.query != "gradient":
                    table.add_row("", "", "", "", "", "", f"{each.query}: {each.charged} of {each.planned}")
    return table


def _lease_text(lease: "Lease | None") -> Text:
    """Which instance holds a run, and when it last charged one."""
    if lease is None:
        return Text("")
    renewed = datetime.fromtimestamp(lease.renewed_at, UTC).isoformat(timespec="seconds")
    return Text(f"instance {lease.fencing}, {lease.holder}, {renewed}")


def verified_view(facts: Mapping[str, Any]) -> Table:
    """What `raycloak budget verify` found, and what it could not compare with."""
    covered, entries = facts["rollback_covered_to"], facts["entries"]
    rollback = f"would be noticed up to entry {covered}" if covered else "NOT COVERED: no head was kept elsewhere"
    rows = [
        ("chain", f"{entries} entries of {facts['accounts']} accounts and {facts['runs']} runs, all as signed"),
        ("head", facts["head"].hex()),
        ("public key", facts["public_key"].hex()),
        ("rollback", rollback),
        *((each["kind"], f"{each['heads']} heads in {each['source']}, all in the chain") for each in facts["checked"]),
        *(("not checked", f"{each['kind']} {each['source']}: {each['reason']}") for each in facts["not_checked"]),
    ]
    return fields_table("Ledger (verified)", rows)


def history_view(entries: Iterable["LedgerEntry"]) -> Table:
    """One row an entry, with the account's epsilon after each charge."""
    table = Table(title="Ledger (chain verified)", title_justify="left", title_style="bold")
    for header in ("entry", "time", "event", "run or account", "query", "step", "ε after it", "hash"):
        table.add_column(header, overflow="fold")
    for entry in entries:
        fields = entry.event.model_dump()
        charged = fields.get("charged_epsilon")
        table.add_row(
            str(entry.sequence),
            datetime.fromtimestamp(entry.event.recorded_at, UTC).isoformat(timespec="seconds"),
            entry.kind.replace("_", " "),
            Text(fields.get("run_id") or fields.get("account") or f"{fields['source']} to {fields['target']}"),
            fields.get("query", ""),
            str(fields.get("step", "")),
            "" if charged is None else epsilon_text(charged),
            entry.hash.hex()[:16],
        )
    return table
