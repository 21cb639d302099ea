"""The commands ``raycloak budget``: accounts, what they have spent, and whether the record can be believed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.commands import AsJson, Debug, execute
from coordinator.output import Output
from metrics.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from coordinator.ledger import PrivacyLedger
    from coordinator.ledger_audit import Replay

budget = typer.Typer(help="The ledger: what each account may spend and has spent.")

Account = Annotated[str, typer.Argument(help="Name of the account.", show_default=False)]
SomeAccount = Annotated[str | None, typer.Argument(help="Name of an account; all without it.")]
LedgerUrl = Annotated[str | None, typer.Option(help="URL of the ledger; the one in RAYCLOAK_HOME without it.")]


@budget.command("show")
def show_command(
    account: SomeAccount = None, ledger: LedgerUrl = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Show what each account may spend, has spent, and on which runs."""
    execute(as_json, debug, lambda output: _show(output, account, ledger))


def _show(output: Output, name: str | None, url: str | None) -> int:
    from coordinator.tables import accounts_view

    with _ledger(url, create=False) as ledger:
        view = ledger.view()
    accounts = [account for account in view.accounts if name in (None, account.name)]
    if name is not None and not accounts:
        raise BudgetError("account_unknown", f"there is no account '{name}'.", f"Open it: raycloak budget open {name}")
    output.result({**asdict(view), "accounts": [asdict(account) for account in accounts]}, accounts_view(accounts))
    return 0


@budget.command("open")
def open_command(
    account: Account,
    epsilon_cap: Annotated[float, typer.Option(help="What all runs together may spend.", show_default=False)],
    delta: Annotated[float, typer.Option(help="Delta of the cap.")] = 1e-5,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Open an account that runs may name; opening it again with the same terms changes nothing."""
    execute(as_json, debug, lambda output: _open(output, account, epsilon_cap, delta, ledger))


def _open(output: Output, name: str, epsilon_cap: float, delta: float, url: str | None) -> int:
    with _ledger(url, create=True) as ledger:
        ledger.open_account(name, epsilon_cap, delta)
        return _account(output, ledger, name)


def _account(output: Output, ledger: "PrivacyLedger", name: str) -> int:
    """Show one account as it is now."""
    from coordinator.tables import accounts_view

    (account,) = (account for account in ledger.view().accounts if account.name == name)
    output.result(asdict(account), accounts_view([account]))
    return 0


@budget.command("history")
def history_command(
    account: SomeAccount = None, ledger: LedgerUrl = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Check the ledger's whole chain, then list its entries, of one account or all."""
    execute(as_json, debug, lambda output: _history(output, account, ledger))


def _history(output: Output, account: str | None, url: str | None) -> int:
    from coordinator.tables import history_view

    with _ledger(url, create=False) as ledger:
        ledger.verify()
        entries = ledger.history(account)
    records = [
        {"sequence": entry.sequence, "kind": entry.kind, **entry.event.model_dump(mode="json"), "hash": entry.hash}
        for entry in entries
    ]
    output.result({"verified": True, "entries": records}, history_view(entries))
    return 0


@budget.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file of JSON lines.", show_default=False)],
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check the ledger, then write its whole chain to FILE, which `verify --export` checks without the ledger."""
    execute(as_json, debug, lambda output: _export(output, file, ledger))


def _export(output: Output, file: Path, url: str | None) -> int:
    from coordinator.tables import fields_table

    with _ledger(url, create=False) as ledger:
        head = ledger.export(file)
        key = ledger.public_key.hex()
    facts = {"file": str(file), "entries": head.sequence, "head": head.hash.hex(), "public_key": key}
    output.result(facts, fields_table("Exported ledger", [(name, str(value)) for name, value in facts.items()]))
    return 0


@budget.command("verify")
def verify_command(
    ledger: LedgerUrl = None,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="An exported ledger, instead of one.")] = None,
    public_key: Annotated[str | None, typer.Option(metavar="HEX", help="The key that the ledger must have.")] = None,
    packages: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Sealed packages by run; those of RAYCLOAK_HOME without it.")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directories; those of RAYCLOAK_HOME without it.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check every entry of the ledger, and that it has all that packages and evidence logs saw it have.

    Writes nothing. Exit code 3 if an entry was changed, dropped, moved or rolled back; it is named.
    """
    execute(as_json, debug, lambda output: _verify(output, ledger, export, public_key, packages, runs))


def _verify(
    output: Output,
    url: str | None,
    export: Path | None,
    public_key: str | None,
    packages: Path | None,
    runs: Path | None,
) -> int:
    from coordinator import state
    from coordinator.ledger_pins import check_pins, log_pins, package_pins, require_key
    from coordinator.tables import verified_view

    with _record(url, export) as (key, replay, hash_at):
        require_key(_hex(public_key), key)
        home = state.home()
        pins = [
            *package_pins(packages or home / "packages", home / "signer", key),
            *log_pins(runs or home / "runs", key),
        ]
        check_pins(pins, hash_at)
    used = [pin for pin in pins if not pin.unusable]
    facts = {
        "verified": True,
        "entries": replay.head.sequence,
        "head": replay.head.hash,
        "public_key": key,
        "accounts": len(replay.accounts),
        "runs": len(replay.runs),
        "rollback_covered_to": max((pin.newest for pin in used), default=0),
        "checked": [
            {"kind": pin.kind, "source": pin.source, "heads": len(pin.heads), "newest": pin.newest} for pin in used
        ],
        "not_checked": [
            {"kind": pin.kind, "source": pin.source, "reason": pin.unusable} for pin in pins if pin.unusable
        ],
    }
    output.result(facts, verified_view(facts))
    return 0


@contextmanager
def _record(url: str | None, export: Path | None) -> Iterator[tuple[bytes, "Replay", Callable[[int], bytes | None]]]:
    """Key, content and hashes of a ledger that was checked, or of an exported one."""
    if export is None:
        with _ledger(url, create=False) as ledger:
            yield ledger.public_key, ledger.verify(), ledger.hash_at
        return
    if url is not None:
        raise ConfigError("usage", "give --ledger or --export, not both.")
    from coordinator.ledger_export import check_export

    checked = check_export(export)
    yield checked.public_key, checked.replay, checked.hash_at


def _hex(text: str | None) -> bytes | None:
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError:
        raise ConfigError("usage", f"'{text}' is not hexadecimal.") from None


@contextmanager
def _ledger(url: str | None, create: bool) -> Iterator["PrivacyLedger"]:
    from coordinator.ledger import PrivacyLedger
    from coordinator.state import ledger_url

    ledger = PrivacyLedger(url or ledger_url(), create)
    try:
        yield ledger
    finally:
        ledger.close()
