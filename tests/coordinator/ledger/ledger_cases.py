"""A small ledger that the ledger's tests share, and what it should say."""

import math
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from raycloak.attestation.core.data_marks import NO_MARKS, DataMarks
from raycloak.attestation.core.messages import Envelope, open_envelope
from raycloak.coordinator.accounting.renyi import (
    ORDERS,
    accountant_delta,
    filter_epsilon,
    least_share_order,
    step_rdp,
)
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.terms.receipt import Receipt

DELTA = 1e-5
CAP = 8.0
MANIFEST = b"m" * 32
PARAMETERS = b"p" * 32
DATA = b"d" * 32
IN_USE = (least_share_order(step_rdp(1.0, 1.0), CAP, accountant_delta(DELTA), ORDERS),)


def mechanism(**changes: Any) -> Mechanism:
    """Return a full-batch mechanism of 20 steps, of which the cap allows 16; its RDP needs no series."""
    values: dict[str, Any] = {
        "private": True,
        "num_examples": 800,
        "virtual_workers": 8,
        "sample_rate": 1.0,
        "steps": 20,
        "max_grad_norm": 1.0,
        "noise_multiplier": 2.6,
        "honest_share": 1.0,
        "expected_batch_size": 800.0,
        "dimension": 1000,
        "ring_bits": 32,
        "gamma_log2": -20,
        "clamp": 100.0,
        "sigma": 2.6 * 2**20 / math.sqrt(8) * 1.001,
        "micro_batch_size": 100,
        "micro_batches": 1,
        "overflow_probability": 0.0,
    }
    return Mechanism(**values | changes)


def unchecked(**changes: Any) -> Mechanism:
    """Return the same with changes that nobody has checked, as a pickle may have them."""
    return mechanism().model_copy(update=changes)


def expected_epsilon(steps: int, noise_multiplier: float = 2.6) -> float:
    """Return the epsilon that the account should state after that many steps of one run."""
    return epsilon_at_orders([steps * value for value in step_rdp(1.0, noise_multiplier, IN_USE)])


def epsilon_at_orders(rdp: list[float]) -> float:
    """Return the epsilon of releases at the order that a run of full batches fixes on an account of CAP."""
    return filter_epsilon(rdp, accountant_delta(DELTA), IN_USE)


def affordable() -> int:
    """Return the number of steps of `mechanism` that CAP allows."""
    return next(steps for steps in range(1, 100) if expected_epsilon(steps + 1) > CAP)


def opened(where: str | Path, run_id: str = "run-a", **changes: Any) -> PrivacyLedger:
    """Return a ledger with an account `patients` and one run of it, at a URL or in an SQLite file."""
    ledger = PrivacyLedger(f"sqlite:///{where}" if isinstance(where, Path) else where)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    register(ledger, run_id, mechanism(**changes))
    return ledger


def register(
    ledger: PrivacyLedger,
    run_id: str,
    *mechanisms: Mechanism,
    account: str = "patients",
    manifest: bytes = MANIFEST,
    data: DataMarks = NO_MARKS,
) -> None:
    """Register a run and bind it to its data, so that it may charge."""
    ledger.register_run(RegistrationTerms(run_id, account, mechanisms or (mechanism(),), manifest, data))
    ledger.bind_data(run_id, manifest, DATA)


def receipt_of(ledger: PrivacyLedger, envelope: Envelope) -> Receipt:
    return open_envelope(Receipt, envelope, ledger.public_key)


def spent(ledger: PrivacyLedger) -> float:
    return ledger.view().accounts[0].spent_epsilon


def tamper(url: str, statement: str, **values: Any) -> None:
    """Change the store behind the ledger's back."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        if engine.name == "postgresql":
            connection.exec_driver_sql("SET session_replication_role = replica")  # foreign keys are not checked
        connection.execute(sa.text(statement), values)
    engine.dispose()
