"""A program of Ray's user: charge some steps of a run through the ledger's vault at a socket, and print what is known.

Its arguments are the socket, the run's id and the number of steps.
"""

import json
import sys

from raycloak.coordinator.ledger.ledger import PrivacyLedger, RunStart
from raycloak.coordinator.ledger.rules import RegistrationTerms
from raycloak.coordinator.vaults.ledger_vault import LedgerVault
from raycloak.coordinator.vaults.machine_vault import MachineVault
from raycloak.coordinator.vaults.openings import LedgerOpening
from raycloak.metrics.errors import RaycloakError
from tests.coordinator.ledger.ledger_cases import DATA, MANIFEST, PARAMETERS, mechanism


def main(socket: str, run_id: str, steps: int) -> dict[str, str | int]:
    """Return the ledger's key, the steps that the account has paid for, and the code of a refusal."""
    start = RunStart(RegistrationTerms(run_id, "hospital", (mechanism(),), MANIFEST), DATA)
    with MachineVault(socket, LedgerOpening(url="", create=True, witness=None)) as ledger:
        refusal = ""
        try:
            for step in range(steps):
                ledger.ask(LedgerVault.charge, run_id, step, PARAMETERS, MANIFEST, "gradient", start)
        except RaycloakError as error:
            refusal = error.code
        (account,) = ledger.ask(PrivacyLedger.view).accounts
        charged = sum(run.charged_steps for run in account.runs)
        return {"key": ledger.ask(LedgerVault.key).hex(), "charged": charged, "refusal": refusal}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
