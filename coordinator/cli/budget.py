"""The commands ``raycloak budget`` about accounts: opening, showing, changing and closing them."""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from raycloak.coordinator.cli.budget_record import export_command, history_command, verify_command
from raycloak.coordinator.cli.options import (
    Account,
    ConfigFile,
    LedgerUrl,
    SomeAccount,
    Witness,
    command,
    existing_ledger,
    hexadecimal,
    ledger_at,
    ledger_shown,
)
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import BudgetError, ConfigError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.terms.mechanism import AccountantName

if TYPE_CHECKING:
    from raycloak.attestation.core.data_marks import DataMarks
    from raycloak.coordinator.ledger.cap_authority import CapAuthorisation
    from raycloak.coordinator.ledger.ledger import PrivacyLedger
    from raycloak.coordinator.ledger.view import AccountView

budget = typer.Typer(help="The ledger: what each account may spend and has spent.")
command(budget, "history")(history_command)
command(budget, "export")(export_command)
command(budget, "verify")(verify_command)

_DAY_S = 86_400


@command(budget, "show")
def show_command(
    output: Output,
    account: SomeAccount = None,
    ledger: Annotated[
        str | None,
        typer.Option(help="URL of the ledger, or vault:PATH of a vault's socket; default: the one in RAYCLOAK_HOME."),
    ] = None,
) -> None:
    """Show what each account may spend, has spent, and on which runs."""
    with ledger_shown(ledger) as books:
        view = books.view()
    accounts = [each for each in view.accounts if account in (None, each.name)]
    if account is not None and not accounts:
        raise BudgetError(
            "account_unknown",
            f"there is no account '{account}'.",
            f"Open it: raycloak budget open {account} --epsilon-cap E",
        )
    shown = [_facts(each) for each in accounts]
    output.result({**asdict(view), "accounts": shown}, accounts_view(accounts))


def _facts(account: "AccountView") -> dict[str, Any]:
    """Return an account as JSON shows it: of its data, the fingerprints and the names of their keys."""
    data = [{"fingerprint": each.fingerprint, "key": each.key} for each in account.data]
    return {**asdict(account), "data": data}


@command(budget, "open")
def open_command(
    output: Output,
    account: Account,
    epsilon_cap: Annotated[float, typer.Option(help="Epsilon that all runs together may spend.")],
    delta: Annotated[float, typer.Option(help="Delta of the cap.")] = 1e-5,
    accountant: Annotated[
        AccountantName, typer.Option(help="Accountant: rdp for many runs, pld for one with a fixed plan.")
    ] = "rdp",
    authority: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Public key of the authority that may raise the cap.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Bind the account to the dataset of this configuration.")
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="HEX", help="Bind the account to the dataset of this fingerprint, from `budget fingerprint`."
        ),
    ] = None,
    also: Annotated[
        bool, typer.Option("--also", help="One more budget for people whose data another account pays for already.")
    ] = False,
    ledger: LedgerUrl = None,
    witness: Witness = None,
) -> None:
    """Open an account that runs may name; opening it again with the same terms changes nothing."""
    from raycloak.attestation.core.data_marks import DataMarks
    from raycloak.coordinator.ledger.cap_authority import load_authority
    from raycloak.coordinator.ledger.rules import OpeningTerms

    if dataset is not None and fingerprint is not None:
        raise ConfigError("usage", "give --dataset or --fingerprint, not both.", "Leave one out.")
    key = load_authority(authority).key if authority else b""
    given = hexadecimal(fingerprint) or b""
    if len(given) not in (0, 32):
        raise ConfigError("usage", "a fingerprint has 64 digits.", "Take it as `budget fingerprint` gives it.")
    data = _marks_of(dataset) if dataset else DataMarks(fingerprint=given)
    terms = OpeningTerms(epsilon_cap, delta, accountant)
    with ledger_at(ledger, create=True, witness=witness) as books:
        books.open_account(account, terms, authority=key, data=data, also=also)
        _show(output, books, account)


@command(budget, "bind")
def bind_command(
    output: Output,
    account: Account,
    dataset: Annotated[Path, typer.Option(metavar="CONFIG", help="Configuration of the data, with its new key.")],
    ledger: LedgerUrl = None,
    witness: Witness = None,
) -> None:
    """Let an account know its data also as CONFIG names it: under another fingerprint key, or after it moved."""
    data = _marks_of(dataset)
    with existing_ledger(ledger, witness) as books:
        books.add_data(account, data)
        _show(output, books, account)


def _show(output: Output, ledger: "PrivacyLedger", *names: str) -> None:
    """Show accounts as they are now; a single one is the JSON itself."""
    accounts = [account for account in ledger.view().accounts if account.name in names]
    shown = [_facts(account) for account in accounts]
    output.result(shown[0] if len(names) == 1 else {"accounts": shown}, accounts_view(accounts))


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
            others = (each for each in run.queries if each.query != "gradient")
            marks = f"{', all prepaid' if run.prepaid else ''}{'' if run.private else ', NOT PRIVATE'}"
            lines = [f"run {run.run_id}: {run.charged_steps} of {run.planned_steps}{marks}"]
            lines += [f"{each.query}: {each.charged} of {each.planned}" for each in others]
            if run.lease is not None:
                renewed = datetime.fromtimestamp(run.lease.renewed_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                lines.append(f"held by instance {run.lease.fencing}, {run.lease.holder}, {renewed}")
            table.add_row(Text("\n".join(f"  {line}" for line in lines)))
    return table


@command(budget, "key")
def key_command(output: Output, ledger: LedgerUrl = None) -> None:
    """Show the public key of the ledger, which `data seal` names; a missing ledger is made."""
    with ledger_at(ledger, create=True) as books:
        output.show("Ledger", {"key": books.public_key})


@command(budget, "rotate")
def rotate_command(output: Output, ledger: LedgerUrl = None, witness: Witness = None) -> None:
    """Give the ledger a new key: every charge stays, and runs that began before can be charged no more."""
    with existing_ledger(ledger, witness) as books:
        former, new = books.public_key, books.rotate_key()
    output.show("Rotated ledger", {"former_key": former, "key": new})


@command(budget, "fingerprint")
def fingerprint_command(output: Output, config: ConfigFile) -> None:
    """Compute the fingerprint of CONFIG's dataset: with its key, or from the header of a sealed one."""
    output.show("Dataset", {"fingerprint": _marks_of(config).fingerprint})


def _marks_of(path: Path) -> "DataMarks":
    from raycloak.coordinator.planning.references import descriptor
    from raycloak.workers.inputs.fingerprint import data_marks

    config = load_config(path)
    if config.dataset is None or (config.dataset.fingerprint_key is None and config.dataset.kind != "sealed"):
        raise ConfigError(
            "fingerprint_key",
            f"{path} names no sealed dataset, and none with a fingerprint_key.",
            "Make a key beside the data: (umask 077; openssl rand -hex 32 > FILE).",
        )
    described = descriptor(config.dataset)
    return data_marks(described, described.open_slices(path.parent), path.parent)


@command(budget, "keygen")
def keygen_command(
    output: Output, file: Annotated[Path, typer.Argument(metavar="FILE", help="New private key file.")]
) -> None:
    """Make an authority's key pair: FILE stays with its owner, FILE.pub is named when an account is opened."""
    from raycloak.coordinator.ledger.cap_authority import create_authority

    public, public_path = create_authority(file)
    facts = {"name": public.name, "key": public.key, "private": str(file), "public": str(public_path)}
    output.show("Authority", facts)


@command(budget, "authorize")
def authorize_command(
    output: Output,
    account: Account,
    epsilon_cap: Annotated[float, typer.Option(help="The higher cap.")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key of the authority.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New file with the authorisation.")],
    days: Annotated[float, typer.Option(help="Days for which the authorisation can be used.")] = 7.0,
    ledger: LedgerUrl = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Exported ledger to check and use in place of --ledger.")
    ] = None,
) -> None:
    """Sign one raise of an account's cap from its present value. With --export, no ledger is needed."""
    from raycloak.attestation.files.private import publish
    from raycloak.coordinator.ledger.cap_authority import authorise, load_authority_key

    if ledger is not None and export is not None:
        raise ConfigError("usage", "give --ledger or --export, not both.", "Leave one out.")
    own, lasts_s = load_authority_key(key), days * _DAY_S
    if not (math.isfinite(lasts_s) and math.isfinite(epsilon_cap)):
        raise ConfigError(
            "usage", f"cap and days must be finite numbers, not {epsilon_cap:g} and {days:g}.", "Write both as numbers."
        )
    change, authority = _change(account, epsilon_cap, int(time.time() + lasts_s), ledger, export)
    if not epsilon_cap > change.old_cap:
        raise ConfigError(
            "authorisation",
            f"the cap of account '{account}' is {change.old_cap:g} already.",
            "A lower one needs no signature: raycloak budget cap.",
        )
    if authority != own.public:
        raise ConfigError(
            "authority",
            f"{key} is not the key of account '{account}', which was opened with "
            f"{f'the authority {authority.hex()}' if authority else 'none, so that its cap can only be lowered'}.",
            "Sign with that key." if authority else "Open another account for another promise.",
        )
    try:
        is_new = publish(out, authorise(change, own).encode() + b"\n", mode=0o644)
    except OSError as error:
        raise file_error("authorisation", "write", out, error) from None
    if not is_new:
        raise ConfigError("out_exists", f"{out} already exists.", "Choose another name, or remove it.")
    output.show("Authorisation", {**change.model_dump(mode="json"), "out": str(out)})


def _change(
    account: str, epsilon_cap: float, expires_at: int, url: str | None, export: Path | None
) -> tuple["CapAuthorisation", bytes]:
    """Return what is to be signed and with which key, from the ledger or from a checked export."""
    from raycloak.coordinator.ledger.cap_authority import CapAuthorisation

    if export is None:
        with ledger_at(url, create=False) as ledger:
            view = ledger.view()
        now = {each.name: (each.epsilon_cap, each.terms_hash, each.authority) for each in view.accounts}
        ledger_key = view.public_key
    else:
        from raycloak.coordinator.ledger.export import check_export

        checked = check_export(export)
        found = checked.audited.accounts.items()
        now = {name: (each.terms.epsilon_cap, each.changed.hash, each.opened.authority) for name, each in found}
        ledger_key = checked.audited.keys.current
    if account not in now:
        raise BudgetError(
            "account_unknown", f"there is no account '{account}'.", "List the accounts: raycloak budget show"
        )
    old_cap, follows, authority = now[account]
    change = CapAuthorisation(
        account=account,
        ledger_key=ledger_key,
        old_cap=old_cap,
        new_cap=epsilon_cap,
        follows=follows,
        expires_at=expires_at,
    )
    return change, authority


@command(budget, "cap")
def cap_command(
    output: Output,
    account: Account,
    epsilon_cap: Annotated[float, typer.Option(help="The new cap.")],
    authorisation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="From `budget authorize`; a higher cap needs it.")
    ] = None,
    ledger: LedgerUrl = None,
    witness: Witness = None,
) -> None:
    """Lower the cap of an account, or raise it as its authority has signed."""
    from raycloak.coordinator.ledger.cap_authority import load_authorisation

    signed = load_authorisation(authorisation) if authorisation else None
    with existing_ledger(ledger, witness) as books:
        books.change_cap(account, epsilon_cap, signed)
        _show(output, books, account)


@command(budget, "transfer")
def transfer_command(
    output: Output,
    source: Annotated[str, typer.Argument(help="Account that gives.")],
    target: Annotated[str, typer.Argument(help="Account that receives.")],
    epsilon: Annotated[float, typer.Option(help="Epsilon to move.")],
    ledger: LedgerUrl = None,
    witness: Witness = None,
) -> None:
    """Move unspent epsilon between two accounts of one dataset; what both may spend together stays the same."""
    with existing_ledger(ledger, witness) as books:
        books.transfer(source, target, epsilon)
        _show(output, books, source, target)


@command(budget, "close")
def close_command(output: Output, account: Account, ledger: LedgerUrl = None, witness: Witness = None) -> None:
    """Close an account for good: nothing more is charged to it."""
    with existing_ledger(ledger, witness) as books:
        books.close_account(account)
        _show(output, books, account)
