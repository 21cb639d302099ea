"""The options that the commands ``raycloak budget`` share, and the ledger that they name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from metrics.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.ledger import PrivacyLedger

Account = Annotated[str, typer.Argument(help="Name of the account.", show_default=False)]
SomeAccount = Annotated[str | None, typer.Argument(help="Name of an account; default: all.")]
LedgerUrl = Annotated[str | None, typer.Option(help="URL of the ledger; default: the one in RAYCLOAK_HOME.")]
Witness = Annotated[
    str | None, typer.Option(metavar="PLACE", help="The ledger's witness: absolute folder, or http(s) URL.")
]


@contextmanager
def ledger_at(url: str | None, create: bool, witness: str | None = None) -> Iterator["PrivacyLedger"]:
    """Open the ledger at ``url``, or that of the state folder, for as long as the block lasts."""
    from coordinator.ledger import PrivacyLedger
    from coordinator.state import ledger_url

    ledger = PrivacyLedger(ledger_url() if url is None else url, create, witness)
    try:
        yield ledger
    finally:
        ledger.close()


@contextmanager
def existing_ledger(url: str | None, witness: str | None) -> Iterator["PrivacyLedger"]:
    """Open a ledger as :func:`ledger_at` does, to write to it; a missing one is refused."""
    with ledger_at(url, create=False):
        pass
    with ledger_at(url, create=True, witness=witness) as ledger:
        yield ledger


def hexadecimal(text: str | None) -> bytes | None:
    """Return the bytes of hexadecimal text; ConfigError ``usage`` if it is none."""
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError:
        raise ConfigError(
            "usage", f"'{text}' is not hexadecimal.", "Copy it whole: digits and a to f, an even number."
        ) from None
