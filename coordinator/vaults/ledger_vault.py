"""PrivacyLedger in a vault."""

from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.openings import LedgerOpening


class LedgerVault(Hosted, PrivacyLedger):
    """A PrivacyLedger that answers calls."""

    OPENING = LedgerOpening
    BESIDE = True

    def __init__(self, opening: LedgerOpening, inside: Inside) -> None:
        PrivacyLedger.__init__(self, opening.url, opening.create, opening.witness)
