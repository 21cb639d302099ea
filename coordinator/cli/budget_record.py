"""The commands ``raycloak budget`` about the record: history, export and verification."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycloak.coordinator.cli.options import LedgerUrl, SomeAccount, Witness, hexadecimal, ledger_at
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.console.output import Output
from raycloak.coordinator.console.tables import columns_table
from raycloak.metrics.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from raycloak.coordinator.ledger.audit import AuditedChain


def history_command(output: Output, account: SomeAccount = None, ledger: LedgerUrl = None) -> None:
    """Check the ledger's whole chain, then list its entries, of one account or all."""
    with ledger_at(ledger, create=False) as books:
        known = books.verify().accounts
        entries = books.history(account)
    if account not in (None, *known):
        raise BudgetError(
            "account_unknown", f"there is no account '{account}'.", "List the accounts: raycloak budget show"
        )
    records = [
        {"sequence": entry.sequence, "kind": entry.kind, **entry.event.model_dump(mode="json"), "hash": entry.hash}
        for entry in entries
    ]
    rows = []
    for entry in entries:
        fields = entry.event.model_dump()
        charged = fields.get("charged_epsilon")
        rows.append(
            (
                str(entry.sequence),
                datetime.fromtimestamp(entry.event.recorded_at, UTC).isoformat(timespec="seconds"),
                entry.kind.replace("_", " "),
                _about(fields),
                fields.get("query", ""),
                str(fields.get("step", "")),
                "" if charged is None else epsilon_text(charged),
                entry.hash.hex()[:16],
            )
        )
    headers = ("entry", "time", "event", "run or account", "query", "step", "ε after it", "hash")
    view = columns_table("Ledger (chain verified)", headers, rows)
    output.result({"verified": True, "entries": records}, view)


def export_command(
    output: Output,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file of JSON lines.")],
    ledger: LedgerUrl = None,
) -> None:
    """Check the ledger, then write its whole chain to FILE; `verify --export` needs FILE alone."""
    with ledger_at(ledger, create=False) as books:
        head = books.export(file)
        key = books.public_key
    facts = {"file": str(file), "entries": head.sequence, "head": head.hash, "public_key": key}
    output.show("Exported ledger", facts)


def verify_command(
    output: Output,
    ledger: LedgerUrl = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Exported ledger to check in place of --ledger.")
    ] = None,
    public_key: Annotated[
        str | None, typer.Option(metavar="HEX", help="Public key that the ledger must sign with.")
    ] = None,
    packages: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of sealed packages by run; default: the one in RAYCLOAK_HOME."),
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of run directories; default: the one in RAYCLOAK_HOME.")
    ] = None,
    witness: Witness = None,
) -> None:
    """Check every entry of the ledger, and compare it with its heads in packages, evidence logs and its witness.

    Writes nothing. Exit code 3 if an entry was changed, dropped, moved or rolled back; it is named.
    """
    from raycloak.coordinator.config.home import home as state_folder
    from raycloak.coordinator.runs.rollback import check_pins, log_pins, package_pins, require_key, witness_pins

    for place in (packages, runs):
        if place is not None and not place.is_dir():
            # A mistyped folder holds no heads: nothing would be compared, and no rollback found.
            raise ConfigError("usage", f"there is no folder {place}.", "Name the folder of the packages or runs.")
    with _record(ledger, export) as (audited, hash_at):
        keys = audited.keys
        require_key(hexadecimal(public_key), keys)
        home = state_folder()
        pins = [
            *package_pins(packages or home / "packages", home / "signer", keys),
            *log_pins(runs or home / "runs", keys),
            *witness_pins(witness, keys),
        ]
        check_pins(pins, hash_at)
    used = [pin for pin in pins if not pin.unusable]
    covered = max((pin.newest for pin in used), default=0)
    facts = {
        "verified": True,
        "entries": audited.head.sequence,
        "head": audited.head.hash,
        "public_key": keys.current,
        "former_keys": [key for _, key in keys.since[:-1]],
        "accounts": len(audited.accounts),
        "runs": len(audited.runs),
        "rollback_covered_to": covered,
        "checked": [
            {"kind": pin.kind, "source": pin.source, "heads": len(pin.heads), "newest": pin.newest} for pin in used
        ],
        "not_checked": [
            {"kind": pin.kind, "source": pin.source, "reason": pin.unusable} for pin in pins if pin.unusable
        ],
    }
    held = f"{audited.head.sequence} entries of {len(audited.accounts)} accounts and {len(audited.runs)} runs"
    rows = [
        ("chain", f"{held}, all signatures valid"),
        ("head", audited.head.hash.hex()),
        *(("former key", f"{key.hex()}, from entry {since}") for since, key in keys.since[:-1]),
        ("public key", keys.current.hex()),
        ("rollback", f"noticed up to entry {covered}" if covered else "NOT COVERED: no head kept elsewhere"),
        *((pin.kind, f"{len(pin.heads)} heads in {pin.source}, all in the chain") for pin in used),
        *(("not checked", f"{pin.kind} {pin.source}: {pin.unusable}") for pin in pins if pin.unusable),
    ]
    output.show("Ledger (verified)", facts, rows)


def _about(fields: dict[str, Any]) -> str:
    """Return the run, account or accounts of an event, or the beginning of its new key."""
    if "new_key" in fields:
        return str(fields["new_key"].hex()[:16])
    return fields.get("run_id") or fields.get("account") or f"{fields['source']} to {fields['target']}"


@contextmanager
def _record(url: str | None, export: Path | None) -> Iterator[tuple["AuditedChain", Callable[[int], bytes | None]]]:
    """Return content and hashes of a ledger that was checked, or of an exported one."""
    if export is None:
        with ledger_at(url, create=False) as ledger:
            yield ledger.verify(), ledger.hash_at
        return
    if url is not None:
        raise ConfigError("usage", "give --ledger or --export, not both.", "Leave one out.")
    from raycloak.coordinator.ledger.export import check_export

    checked = check_export(export)
    yield checked.audited, checked.hash_at
