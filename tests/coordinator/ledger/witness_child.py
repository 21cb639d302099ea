"""Child process of `test_witness.py`: kills a charging ledger at each act of its or its witness's, in turn.

``FOLDER`` is empty. Acts are the ledger's SQL statements, and what the witness asks of the operating system. It never
imports torch, so that forking it is safe and fast.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from raycloak.attestation.files import whole
from raycloak.coordinator.ledger import witness
from raycloak.coordinator.ledger.entries import LedgerKeys
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from tests.coordinator.ledger.ledger_cases import CAP, DATA, DELTA, MANIFEST, PARAMETERS, mechanism, receipt_of

STEPS = 2


def main(folder: Path) -> None:
    """Print how many receipts each killed process had given, and what of the witness was asked for in all."""
    begin(folder / "begun").close()
    acts = sorted(count_acts(copy(folder, "all")))
    counts = []
    for k in range(1, 1000):
        home = copy(folder, str(k))
        given, killed = charge_until_killed(home, k)
        check(home, given)
        counts.append(len(given))
        if not killed:
            print(json.dumps({"receipts": counts, "acts": acts}))
            return
    raise AssertionError("the child was always killed")


def begin(home: Path) -> PrivacyLedger:
    """Return the ledger of a home, under its witness."""
    (home / "witness").mkdir(parents=True, exist_ok=True)
    ledger = PrivacyLedger(f"sqlite:///{home / 'ledger.sqlite'}", witness=str(home / "witness"))
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST))
    ledger.bind_data("run-a", MANIFEST, DATA)
    return ledger


def copy(folder: Path, name: str) -> Path:
    """Return another home whose run has charged nothing yet."""
    return Path(shutil.copytree(folder / "begun", folder / name))


def charge_until_killed(home: Path, k: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the receipts that a process printed before its k-th act, at which it is killed, and whether it was."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        ledger = begin(home)
        left = iter(range(k - 1))
        watch(ledger, lambda _: next(left, None) is None and os.kill(os.getpid(), signal.SIGKILL))
        for step in range(STEPS):
            receipt = receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST))
            print_to(writing, receipt.model_dump_json())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        given = [json.loads(line) for line in lines]
    return given, os.waitpid(child, 0)[1] == signal.SIGKILL


def count_acts(home: Path) -> set[str]:
    """Return the names of the operating system's calls that a witness makes, in an undisturbed process."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        names: set[str] = set()
        ledger = begin(home)
        watch(ledger, names.add)
        ledger.charge("run-a", 0, PARAMETERS, MANIFEST)
        print_to(writing, json.dumps(sorted(names - {"statement"})))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as output:
        return set(json.loads(output.read()))


_print = os.write


def print_to(descriptor: int, text: str) -> None:
    """Print a line that is no act."""
    _print(descriptor, f"{text}\n".encode())


class _WatchedSystem:
    """The module `os` as the witness sees it, also where it syncs a folder."""

    def __init__(self, told: Any) -> None:
        self._told = told

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "ftruncate", "close"):
            return real

        def watched(*arguments: Any) -> Any:
            self._told(name)
            return real(*arguments)

        return watched


def watch(ledger: PrivacyLedger, told: Any) -> None:
    """Call ``told`` before each further act of this process."""
    witness.os = whole.os = _WatchedSystem(told)
    sa.event.listen(
        ledger._store._engine,
        "checkout",
        lambda connection, *_: connection.set_trace_callback(lambda _: told("statement")),
    )


def check(home: Path, given: list[dict[str, Any]]) -> None:
    """Check that the witness has all that was acknowledged, and that the ledger opens under it with the same
    receipts."""
    ledger = begin(home)
    heads = witness.open_witness(str(home / "witness"), LedgerKeys.of((), ledger.public_key)).heads()
    newest = max((head.sequence for head in heads), default=0)
    assert all(receipt["sequence"] <= newest for receipt in given)
    assert [head.sequence for head in heads] == sorted({head.sequence for head in heads})
    assert all(ledger.hash_at(head.sequence) == head.hash for head in heads)
    for step in range(STEPS):
        receipt = json.loads(receipt_of(ledger, ledger.charge("run-a", step, PARAMETERS, MANIFEST)).model_dump_json())
        if step < len(given):
            assert receipt | {"fencing": 0} == given[step] | {"fencing": 0}
    assert ledger.view().head.sequence == 3 + STEPS
    ledger.verify()
    ledger.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
