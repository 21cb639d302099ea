"""PrivacyLedger in a vault."""

from dataclasses import replace
from typing import Any, Final

from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.ledger.accounts import Account
from raycloak.coordinator.ledger.cap_authority import SignedCap
from raycloak.coordinator.ledger.entries import RunRegistered
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import RegistrationTerms
from raycloak.coordinator.ledger.store import Rows
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.openings import LedgerOpening
from raycloak.coordinator.vaults.settings import LedgerSettings
from raycloak.metrics.errors import RefusedError

_OWNERS: Final = frozenset({"open_account", "add_data", "transfer", "close_account", "rotate_key", "export", "close"})
"""The methods that change what may be spent, rotate the key or write files: those of the ledger's owner."""


class LedgerVault(Hosted, PrivacyLedger):
    """A PrivacyLedger that answers calls.

    Guarantee: in a vault of the machine no call opens, raises or closes an account, but for a cap that its authority
    has signed, and none rotates the key. Its storage and witness are those of its settings, whatever the relay names.
    """

    OPENING = LedgerOpening
    BESIDE = True

    def __init__(self, opening: LedgerOpening, inside: Inside) -> None:
        self._is_machines = isinstance(inside.settings, LedgerSettings)
        if isinstance(inside.settings, LedgerSettings):
            # One that is not there is its owner's to make.
            PrivacyLedger(inside.settings.url, create=False).close()
            # One that only reads takes no fencing number.
            PrivacyLedger.__init__(self, inside.settings.url, opening.create, inside.settings.witness)
        else:
            PrivacyLedger.__init__(self, opening.url, opening.create, opening.witness)

    def receive(self, name: str, returns: int, *frames: Any) -> Any:
        if self._is_machines and name in _OWNERS:
            raise ActorRefusal(Failed.of(_of_its_owner(name)).encode())
        return super().receive(name, returns, *frames)

    def key(self) -> bytes:
        """Return the key that receipts are verified with."""
        return self.public_key

    def change_cap(self, account: str, epsilon_cap: float, authorisation: SignedCap | None = None) -> None:
        if self._is_machines and authorisation is None:
            raise _of_its_owner("change_cap")
        super().change_cap(account, epsilon_cap, authorisation)

    def _register(self, rows: Rows, run: RegistrationTerms, priced: tuple[Account, RunRegistered] | None) -> None:
        # As a run that opens no account.
        super()._register(rows, replace(run, opens=None) if self._is_machines else run, priced)


def _of_its_owner(name: str) -> RefusedError:
    return RefusedError(
        "account_of_its_owner",
        f"{name} is for the ledger's user alone, and no relay may ask for it.",
        "Give the command raycloak budget as that user.",
    )
