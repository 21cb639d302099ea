"""Child process of `test_leases.py`: one live instance of the ledger at a URL, told what to do order by order.

``register RUN``, ``charge RUN STEP`` and ``stop RUN SECONDS``, which stops this process by SIGSTOP inside a transaction
that takes the run, and that a server rolls back after as many seconds. Each is answered once: by the code of the
refusal, or by what the charge returned.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from raycloak.coordinator.ledger import engine
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import RegistrationTerms
from raycloak.metrics.errors import BudgetError
from tests.coordinator.ledger.ledger_cases import DATA, MANIFEST, PARAMETERS, mechanism


def serve(parent: Connection, url: str, deadline_s: float) -> None:
    """Open the ledger and obey until this process is killed."""
    engine.LOCK_DEADLINE_S = deadline_s
    ledger = PrivacyLedger(url)
    parent.send({"fencing": ledger.fencing})
    while True:
        order = parent.recv()
        try:
            parent.send(obey(ledger, *order.split()))
        except BudgetError as refusal:
            parent.send({"refused": refusal.code})


def obey(ledger: PrivacyLedger, action: str, run_id: str, number: str = "0") -> dict[str, Any]:
    """Do one thing; a charge gives its envelope."""
    if action == "register":
        ledger.register_run(RegistrationTerms(run_id, "patients", (mechanism(),), MANIFEST))
        ledger.bind_data(run_id, MANIFEST, DATA)
    elif action == "charge":
        envelope = ledger.charge(run_id, int(number), PARAMETERS, MANIFEST)
        return {"body": envelope.body.hex(), "signature": envelope.signature.hex()}
    else:
        assert action == "stop"
        with deadline(float(number)), ledger._store.write() as rows:
            rows.own_run(run_id, ledger.fencing)
            os.kill(os.getpid(), signal.SIGSTOP)
            rows.renew_lease(ledger.fencing)
    return {}


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Give the transactions that begin in this block another deadline."""
    kept, engine.LOCK_DEADLINE_S = engine.LOCK_DEADLINE_S, seconds
    try:
        yield
    finally:
        engine.LOCK_DEADLINE_S = kept
