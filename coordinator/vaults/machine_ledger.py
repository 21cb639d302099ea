"""A ledger that a command reads: its storage, or the machine's ledger vault where the run has a boundary."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Self

from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import RegistrationTerms
from raycloak.coordinator.ledger.view import LedgerView, Outlook
from raycloak.coordinator.vaults.ledger_vault import LedgerVault
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import LedgerOpening


class MachineLedger:
    """The ledger of this machine's vault, as far as others than its owner may read it. A context manager.

    Args:
        socket: where the ledger's vaults listen.
    """

    def __init__(self, socket: str) -> None:
        self._vault = MachineVault(socket, LedgerOpening(url="", create=False, witness=None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._vault.close()

    @property
    def public_key(self) -> bytes:
        """The key that its receipts are verified with."""
        return self._vault.ask(LedgerVault.key)

    def view(self) -> LedgerView:
        """Return all accounts, as `PrivacyLedger.view`."""
        return self._vault.ask(PrivacyLedger.view)

    def outlook(self, run: RegistrationTerms) -> Outlook:
        """Return what one more run would find, as `PrivacyLedger.outlook`."""
        return self._vault.ask(PrivacyLedger.outlook, run)

    def extract(self, account: str) -> list[bytes]:
        """Return what proves an account's history, as `PrivacyLedger.extract`."""
        return self._vault.ask(PrivacyLedger.extract, account)


@contextmanager
def ledger_to_read(config: RunConfig) -> Iterator[PrivacyLedger | MachineLedger]:
    """Open a run's ledger and create nothing.

    Raises:
        ConfigError: ``ledger_missing`` and the like, as `PrivacyLedger`; ``vault_unreachable``.
    """
    if config.boundary is not None:
        with MachineLedger(config.boundary.of("ledger")) as vault:
            yield vault
        return
    url = config.ledger.url or f"sqlite:///{home.home_path() / 'ledger.sqlite'}"
    with closing(PrivacyLedger(url, create=False)) as ledger:
        yield ledger
