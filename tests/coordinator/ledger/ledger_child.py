"""Child process of `test_crash.py` and `test_key_rotation.py`: ``kill URL``, ``race URL`` or ``rotate URL``.

The URL is of a ledger that does not exist yet.

It never imports torch, so that forking it is safe and fast.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from raycloak.attestation.core.data_marks import DataMarks
from raycloak.attestation.core.messages import Envelope, open_envelope
from raycloak.coordinator.ledger.ledger import PrivacyLedger, RunStart
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.metrics.errors import BudgetError
from raycloak.workers.terms.binding import Binding
from raycloak.workers.terms.receipt import Receipt
from tests.coordinator.ledger.ledger_cases import (
    CAP,
    DATA,
    DELTA,
    MANIFEST,
    PARAMETERS,
    expected_epsilon,
    mechanism,
)

PEOPLE = DataMarks(fingerprint=b"f" * 32)
MOVED = DataMarks(fingerprint=b"f" * 32, places=b"p" * 16)
STRANGERS = DataMarks(fingerprint=b"s" * 32)


def main(mode: str, url: str) -> None:
    """Run one mode and print its result as JSON."""
    print(json.dumps({"kill": kill_sweep, "race": race, "rotate": rotation_sweep}[mode](url)))


def open_account(name: str) -> Callable[[PrivacyLedger], None]:
    return lambda ledger: ledger.open_account(name, OpeningTerms(CAP, DELTA), data=PEOPLE, also=name == "reserve")


def charge(step: int) -> Callable[[PrivacyLedger], Envelope]:
    return lambda ledger: ledger.charge("run-a", step, PARAMETERS, MANIFEST)


def start() -> Callable[[PrivacyLedger], Envelope]:
    run = RegistrationTerms("run-b", "strangers", (mechanism(),), MANIFEST, STRANGERS, opens=OpeningTerms(CAP, DELTA))
    return lambda ledger: ledger.charge("run-b", 0, PARAMETERS, MANIFEST, start=RunStart(run, DATA))


def bind(step: int) -> Callable[[PrivacyLedger], Envelope]:
    return lambda ledger: ledger.bind_vectors("run-a", "gradient", step, MANIFEST, bytes([step]) * 32)


BEGUN = ("account_opened", "run_registered", "data_bound", "step_charged")
"""The entries of a run that opens its account, all of its first charge."""

ACTS: tuple[tuple[str, Callable[[PrivacyLedger], Envelope | None]], ...] = (
    ("account_opened", open_account("patients")),
    ("account_opened", open_account("reserve")),
    (
        "run_registered",
        lambda ledger: ledger.register_run(RegistrationTerms("run-a", "patients", (mechanism(),), MANIFEST, PEOPLE)),
    ),
    ("data_bound", lambda ledger: ledger.bind_data("run-a", MANIFEST, DATA)),
    ("step_charged", charge(0)),
    ("vectors_bound", bind(0)),
    ("cap_changed", lambda ledger: ledger.change_cap("reserve", CAP - 1)),
    ("step_charged", charge(1)),
    ("vectors_bound", bind(1)),
    ("cap_transferred", lambda ledger: ledger.transfer("reserve", "patients", 1.0)),
    ("account_closed", lambda ledger: ledger.close_account("reserve")),
    ("data_known", lambda ledger: ledger.add_data("patients", MOVED)),
    ("begun", start()),
)
"""Everything that writes to a ledger, in this order; with the kind of its entry, or ``begun`` for those of BEGUN."""

CHARGES = [act for kind, act in ACTS if kind == "step_charged"]
SIGNED = {"step_charged": Receipt, "vectors_bound": Binding, "begun": Receipt}
"""What the ledger signs for an act, by its kind."""


def kinds_of(acts: int) -> list[str]:
    """Return the kinds of the entries that the first ``acts`` acts write."""
    return [kind for name, _ in ACTS[:acts] for kind in (BEGUN if name == "begun" else (name,))]


def kill_sweep(url: str) -> list[int]:
    """Kill a process before its k-th statement, for every k until it survives; acts acknowledged each time.

    Before that, it is killed between the commit of each act and its reply. A server rolls back whatever its client was
    at, so every third k is enough there.
    """
    seen: set[str] = set()
    for number in range(len(ACTS)):
        acknowledged, killed = act_until_killed(empty(url, f"reply{number}"), 0, mute_from=number)
        assert killed
        assert len(acknowledged) == number
        assert check_after_kill(empty(url, f"reply{number}", new=False), acknowledged, seen) == number + 1
    counts = []
    for k in range(1, 1000, 1 if url.startswith("sqlite:") else 3):
        where = empty(url, str(k))
        acknowledged, killed = act_until_killed(where, k)
        check_after_kill(where, acknowledged, seen)
        counts.append(len(acknowledged))
        if not killed:
            return counts
    raise AssertionError("the child was always killed")


def empty(url: str, name: str, new: bool = True) -> str:
    """Return the URL of a ledger beside the one at ``url``: a file, or a schema that is created if it is ``new``."""
    if url.startswith("sqlite:"):
        return url.replace("ledger.sqlite", f"{name}.sqlite")
    if new:
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {url.rpartition('%3D')[2]}_{name}")
        engine.dispose()
    return f"{url}_{name}"


def act_until_killed(url: str, k: int, mute_from: int = len(ACTS)) -> tuple[list[dict[str, Any] | None], bool]:
    """Return what a process printed of each act (receipt, binding or None), and whether it was killed.

    It is killed ahead of its k-th statement, or when act ``mute_from`` has returned.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        kill_before_statement(k)
        ledger = PrivacyLedger(url)
        for number, (_, act) in enumerate(ACTS):
            envelope = act(ledger)
            if number == mute_from:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(writing, f"{signed_by(ledger, number, envelope)}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        acknowledged = [json.loads(line) for line in lines]
    return acknowledged, os.waitpid(child, 0)[1] == signal.SIGKILL


def rotation_sweep(url: str) -> list[bool]:
    """Kill a process that rotates a key before its k-th statement, for every k until it survives.

    Return of each whether the key was rotated.
    """
    found = []
    for k in range(1, 1000, 1 if url.startswith("sqlite:") else 3):
        where = empty(url, str(k))
        ledger = PrivacyLedger(where)
        former = ledger.public_key
        for _, act in ACTS[:6]:
            act(ledger)
        entries = ledger.history()
        ledger.close()
        child = os.fork()
        if child == 0:
            kill_before_statement(k)
            PrivacyLedger(where).rotate_key()
            os._exit(0)
        killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        ledger = PrivacyLedger(where)
        done = ledger.public_key != former
        assert [key for _, key in ledger.verify().keys.since] == [former, ledger.public_key][not done :]
        assert ledger.history()[: len(entries)] == entries
        assert len(ledger.history()) == len(entries) + done
        # The next run pays beside what was charged before.
        envelope = ledger.charge("run-b", 0, PARAMETERS, MANIFEST, start=RunStart(next_run(), DATA))
        assert open_envelope(Receipt, envelope, ledger.public_key).run_id == "run-b"
        assert math.isclose(ledger.view().accounts[0].spent_epsilon, expected_epsilon(2))
        ledger.close()
        found.append(done)
        if not killed:
            return found
    raise AssertionError("the child was always killed")


def next_run() -> RegistrationTerms:
    return RegistrationTerms("run-b", "patients", (mechanism(),), MANIFEST, PEOPLE)


def signed_by(ledger: PrivacyLedger, number: int, envelope: Envelope | None) -> str:
    """Return the body of the envelope that act ``number`` gave, once its signature was checked, or ``null``."""
    if envelope is None:
        return "null"
    return open_envelope(SIGNED[ACTS[number][0]], envelope, ledger.public_key).model_dump_json()


def kill_before_statement(k: int) -> None:
    """Have this process kill itself when any connection is about to run the k-th statement.

    SQLite tells of each, also of those that SQLAlchemy does not know of. PostgreSQL's driver sends a commit by itself.
    """
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == k:
            os.kill(os.getpid(), signal.SIGKILL)

    def connected(connection: Any, _record: Any) -> None:
        if hasattr(connection, "set_trace_callback"):
            connection.set_trace_callback(count)
        else:
            sa.event.listen(sa.Engine, "before_cursor_execute", count)
            sa.event.listen(sa.Engine, "commit", count)

    sa.event.listen(sa.Engine, "connect", connected)


def check_after_kill(url: str, acknowledged: list[dict[str, Any] | None], seen: set[str]) -> int:
    """Count the acts in the reopened ledger: all that were acknowledged, and at most one more.

    If the charges continue from there, nothing is charged twice and nothing is missing. They continue once from each
    state, of those that were ``seen`` by now.
    """
    ledger = PrivacyLedger(url)
    ledger.verify()
    state = state_of(url)
    kinds = [entry.kind for entry in ledger.history()]
    least = len(acknowledged)
    done = next((acts for acts in (least, least + 1) if kinds_of(acts) == kinds), None)
    assert done is not None, (kinds, acknowledged)
    asked = ACTS[:least]
    if state not in seen:
        seen.add(state)
        for _, act in ACTS[done:]:
            act(ledger)
        assert [entry.kind for entry in ledger.history()] == kinds_of(len(ACTS))
        account, reserve, _ = ledger.view().accounts
        assert account.runs[0].charged_steps == len(CHARGES)
        assert math.isclose(account.spent_epsilon, expected_epsilon(len(CHARGES)))
        assert (account.epsilon_cap, reserve.epsilon_cap, reserve.closed) == (CAP + 1, CAP - 2, True)
        asked = ACTS
    entries = len(ledger.history())
    again = [json.loads(signed_by(ledger, n, act(ledger))) for n, (kind, act) in enumerate(asked) if kind in SIGNED]
    assert len(ledger.history()) == entries
    for before, after in zip(filter(None, acknowledged), again, strict=False):
        assert after | {"fencing": 0} == before | {"fencing": 0}
    ledger.close()
    return done


STATE = {
    "meta": "name",
    "accounts": "name, sequence, changed",
    "runs": "run_id, account, sequence, fencing, data",
    "known": "sequence, account",
    "charged": "run_id, query, charges",
    "leases": "fencing",
    "entries": "sequence, kind, run_id, query, step",
}
"""Each table of a ledger, and its columns but for times, keys and what was signed by them."""


def state_of(url: str) -> str:
    """Return all of a ledger that is the same in another with the same acts."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert set(sa.inspect(connection).get_table_names()) == set(STATE)
        read = [connection.exec_driver_sql(f"SELECT {columns} FROM {table}") for table, columns in STATE.items()]
        state = repr([sorted(map(repr, rows)) for rows in read])
    engine.dispose()
    return state


def race(url: str) -> list[tuple[str, int, int]]:
    """Return the ledger's key, the fencing number and the charged steps of each of four processes."""
    go_reading, go_writing = os.pipe()
    readings = []
    for number in range(4):
        reading, writing = os.pipe()
        readings.append(reading)
        if os.fork() == 0:
            os.close(go_writing)
            os.read(go_reading, 1)
            os.write(writing, json.dumps(charge_all(url, f"run-{number}")).encode())
            os._exit(0)
        os.close(writing)
    os.close(go_writing)
    results = []
    for reading in readings:
        with os.fdopen(reading) as output:
            results.append(json.loads(output.read()))
    PrivacyLedger(url, create=False).verify()
    return results


def charge_all(url: str, run_id: str) -> tuple[str, int, int]:
    """Charge a run until the account refuses."""
    ledger = PrivacyLedger(url)
    ledger.open_account("patients", OpeningTerms(CAP, DELTA))
    charged = 0
    try:
        ledger.register_run(RegistrationTerms(run_id, "patients", (mechanism(),), MANIFEST))
        ledger.bind_data(run_id, MANIFEST, DATA)
        for step in range(20):
            ledger.charge(run_id, step, PARAMETERS, MANIFEST)
            charged += 1
    except BudgetError as refusal:
        if refusal.code != "cap_exceeded":
            raise
    return ledger.public_key.hex(), ledger.fencing, charged


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
