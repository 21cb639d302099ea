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
    from raycloak.coordinator.ledger.leases import Lease
    from raycloak.coordinator.ledger.view import AccountView


def accounts_view(accounts: Iterable["AccountView"]) -> Table:
    """Return the accounts, each with its runs below it."""
    table = Table(title="Budget", title_justify="left", title_style="bold")
    for header in ("account", "ε charged so far", "ε cap", "δ", "accountant", "run", "steps charged", "held by"):
        table.add_column(header, overflow="fold")
    for account in accounts:
        spent = epsilon_text(account.spent_epsilon)
        name = f"{account.name} (closed)" if account.closed else account.name
        table.add_row(Text(name), spent, f"{account.epsilon_cap:g}", f"{account.delta:g}", account.accountant)
        for run in account.runs:
            steps = f"{run.charged_steps} of {run.planned_steps}"
            steps = f"{steps}, all prepaid" if run.prepaid else steps
            steps = steps if run.private else f"{steps}, NOT PRIVATE"
            table.add_row("", "", "", "", "", run.run_id, steps, _lease_text(run.lease))
            for each in run.queries:
                if each.query != "gradient":
                    table.add_row("", "", "", "", "", "", f"{each.query}: {each.charged} of {each.planned}")
    return table


def _lease_text(lease: "Lease | None") -> Text:
    """Return which instance holds a run, and when it last charged one."""
    if lease is None:
        return Text("")
    renewed = datetime.fromtimestamp(lease.renewed_at, UTC).isoformat(timespec="seconds")
    return Text(f"instance {lease.fencing}, {lease.holder}, {renewed}")


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
