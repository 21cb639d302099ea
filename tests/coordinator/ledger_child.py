"""Child process of `test_ledger_crash.py`: ``kill FOLDER`` or ``race FOLDER``.

It never imports torch, so that forking it is safe and fast.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.ledger import PrivacyLedger
from metrics.errors import BudgetError
from tests.coordinator.ledger_cases import (
    CAP,
    DELTA,
    MANIFEST,
    PARAMETERS,
    expected_epsilon,
    mechanism,
    opened,
    receipt_of,
    spent,
)


def main(mode: str, folder: Path) -> None:
    """Run one mode and print its result as JSON."""
    result = kill_sweep(folder) if mode == "kill" else race(folder)
    print(json.dumps(result))


def kill_sweep(folder: Path) -> list[int]:
    """Kill a charging process before its k-th statement, for every k until it survives; receipts seen each time.

    Before that, it is killed between a commit and its reply.
    """
    for step in range(2):
        path = folder / f"reply-{step}.sqlite"
        receipts, killed = charge_until_killed(path, 0, mute_from=step)
        assert killed
        assert len(receipts) == step
        assert check_after_kill(path, receipts) == step + 1
    counts = []
    for k in range(1, 1000):
        path = folder / f"{k}.sqlite"
        receipts, killed = charge_until_killed(path, k)
        check_after_kill(path, receipts)
        counts.append(len(receipts))
        if not killed:
            return counts
    raise AssertionError("the child was always killed")


def charge_until_killed(path: Path, k: int, mute_from: int = 2) -> tuple[list[dict[str, Any]], bool]:
    """Receipts that a process printed before it was killed, and whether it was.

    It is killed ahead of its k-th statement, or when it holds the receipt of step ``mute_from``.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        kill_before_statement(k)
        ledger = opened(path)
        for step in range(2):
            receipt = receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST))
            if step == mute_from:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(writing, f"{receipt.model_dump_json()}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        receipts = [json.loads(line) for line in lines]
    return receipts, os.waitpid(child, 0)[1] == signal.SIGKILL


def kill_before_statement(k: int) -> None:
    """From now on this process kills itself when any connection is about to run the k-th statement."""
    seen = 0

    def count(_statement: str) -> None:
        nonlocal seen
        seen += 1
        if seen == k:
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "connect", lambda connection, _: connection.set_trace_callback(count))


def check_after_kill(path: Path, receipts: list[dict[str, Any]]) -> int:
    """Steps found charged in the reopened ledger: those with a receipt, and at most one more.

    Finishing the run then costs what it should.
    """
    ledger = opened(path)
    ledger.verify()
    charged = [step for step in range(2) if ledger.status("run-a", step).charged]
    assert charged in (list(range(len(receipts))), list(range(len(receipts) + 1))), (charged, receipts)
    for step in range(2):
        receipt = json.loads(receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST)).model_dump_json())
        if step < len(receipts):
            assert receipt | {"fencing": 0} == receipts[step] | {"fencing": 0}
    assert ledger.view().accounts[0].runs[0].charged_steps == 2
    assert math.isclose(spent(ledger), expected_epsilon(2))
    ledger.verify()
    ledger.close()
    return len(charged)


def race(folder: Path) -> list[tuple[str, int, int]]:
    """Of each of four processes: the ledger's key, its fencing number, and the steps it could charge."""
    go_reading, go_writing = os.pipe()
    readings = []
    for number in range(4):
        reading, writing = os.pipe()
        readings.append(reading)
        if os.fork() == 0:
            os.close(go_writing)
            os.read(go_reading, 1)
            os.write(writing, json.dumps(charge_all(folder / "shared.sqlite", f"run-{number}")).encode())
            os._exit(0)
        os.close(writing)
    os.close(go_writing)
    results = []
    for reading in readings:
        with os.fdopen(reading) as output:
            results.append(json.loads(output.read()))
    PrivacyLedger(f"sqlite:///{folder / 'shared.sqlite'}", create=False).verify()
    return results


def charge_all(path: Path, run_id: str) -> tuple[str, int, int]:
    """Charge a run until the account refuses."""
    ledger = PrivacyLedger(f"sqlite:///{path}")
    ledger.open_account("patients", CAP, DELTA)
    charged = 0
    try:
        ledger.register_run(run_id, "patients", (mechanism(),), MANIFEST)
        for step in range(20):
            ledger.charge(run_id, step, PARAMETERS, MANIFEST)
            charged += 1
    except BudgetError as refusal:
        if refusal.code != "cap_exceeded":
            raise
    return ledger.public_key.hex(), ledger.fencing, charged


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
