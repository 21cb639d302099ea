"""The accounts and the entries of a ledger as tables for a person."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.console.tables import fields_table

if TYPE_CHECKING:
    from raycloak.coordinator.ledger.entries import LedgerEntry
    from raycloak.coordinator.ledger.view import AccountView, RunView


def accounts_view(accounts: Iterable["AccountView"]) -> Table:
    """Return the accounts, each with its runs below it, in a column that is wide enough for them in 80 columns."""
    table = Table(title="Budget", title_justify="left", title_style="bold")
    table.add_column("account, and its runs", overflow="fold")
    for header in ("ε charged", "ε cap", "δ", "accountant"):
        table.add_column(header, no_wrap=True)
    for account in accounts:
        spent = epsilon_text(account.spent_epsilon)
        name = f"{account.name} (closed)" if account.closed else account.name
        table.add_row(Text(name), spent, f"{account.epsilon_cap:g}", f"{account.delta:g}", account.accountant)
        for run in account.runs:
            table.add_row(Text("\n".join(f"  {line}" for line in _run_lines(run))))
    return table


def _run_lines(run: "RunView") -> list[str]:
    """Return which steps a run charged of those it planned, and which instance holds it."""
    steps = f"run {run.run_id}: {run.charged_steps} of {run.planned_steps}"
    steps = f"{steps}, all prepaid" if run.prepaid else steps
    steps = steps if run.private else f"{steps}, NOT PRIVATE"
    others = [f"{each.query}: {each.charged} of {each.planned}" for each in run.queries if each.query != "gradient"]
    if run.lease is None:
        return [steps, *others]
    renewed = datetime.fromtimestamp(run.lease.renewed_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return [steps, *others, f"held by instance {run.lease.fencing}, {run.lease.holder}, {renewed}"]


def verified_view(facts: Mapping[str, Any]) -> Table:
    """Return what `raycloak budget verify` found, and what it could not compare with."""
    covered, entries = facts["rollback_covered_to"], facts["entries"]
    rollback = f"noticed up to entry {covered}" if covered else "NOT COVERED: no head kept elsewhere"
    rows = [
        ("chain", f"{entries} entries of {facts['accounts']} accounts and {facts['runs']} runs, all signatures valid"),
        ("head", facts["head"].hex()),
        ("public key", facts["public_key"].hex()),
        ("rollback", rollback),
        *((each["kind"], f"{each['heads']} heads in {each['source']}, all in the chain") for each in facts["checked"]),
        *(("not checked", f"{each['kind']} {each['source']}: {each['reason']}") for each in facts["not_checked"]),
    ]
    return fields_table("Ledger (verified)", rows)


def history_view(entries: Iterable["LedgerEntry"]) -> Table:
    """Return one row per entry, with the account's epsilon after each charge."""
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
