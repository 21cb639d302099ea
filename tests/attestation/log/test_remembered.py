"""A log that reads little again says the same as one that reads everything anew, whatever was undone."""

import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycloak.attestation.core.hybrid_signature import HybridSigner
from raycloak.attestation.files.sqlite import Transactions
from raycloak.attestation.log.evidence_log import EvidenceLog

RUN, KEY = "run-1", HybridSigner.generate()


class Undo(Exception):
    pass


def opened(path: str | Path) -> tuple[EvidenceLog, Transactions]:
    connection = sqlite3.connect(path, isolation_level=None)
    transactions = Transactions(connection)
    return EvidenceLog(connection, RUN, KEY, transactions), transactions


def fresh(log: EvidenceLog) -> EvidenceLog:
    return EvidenceLog(log._connection, RUN, KEY)


def facts(log: EvidenceLog) -> tuple[object, ...]:
    length = len(log)
    proofs = [(log.inclusion(i, length), log.prove_extends(i, length)) for i in range(length)]
    return length, log.position(), [log.root_at(i) for i in range(length + 1)], proofs


# A transaction is (entries before the part, entries in the part, part undone, entries after it, all undone).
TRANSACTIONS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 3), st.booleans()), max_size=6
)


@settings(max_examples=30)
@given(TRANSACTIONS)
def test_what_is_remembered_is_what_is_stored(steps: list[tuple[int, int, bool, int, bool]]) -> None:
    log, transactions = opened(":memory:")

    def append(count: int) -> None:
        for _ in range(count):
            entry = log.append("a", {"beside": transactions.begun, "at": len(log)})
            assert list(fresh(log).entries())[-1] == entry
        assert facts(log)[:2] == facts(fresh(log))[:2]

    def part(count: int, undone: bool) -> None:
        with transactions.transaction():
            append(count)
            if undone:
                raise Undo

    def whole(before: int, inside: int, part_undone: bool, after: int, undone: bool) -> None:
        with transactions.transaction():
            append(before)
            with suppress(Undo):
                part(inside, part_undone)
            append(after)
            if undone:
                raise Undo

    for step in steps:
        try:
            whole(*step)
        except Undo:
            assert step[-1]
        assert facts(log) == facts(fresh(log))


def test_what_another_connection_appended_counts_from_the_next_transaction_on(tmp_path: Path) -> None:
    log, transactions = opened(tmp_path / "log")
    other, beside = opened(tmp_path / "log")

    def undo() -> None:
        with transactions.transaction():
            for number in range(3):
                log.append("undone", {"number": number})
            raise Undo

    for number in range(6):
        with pytest.raises(Undo):
            undo()
        with transactions.transaction():
            log.append("own", {"number": number})
            assert len(log) == 2 * number + 1
        with beside.transaction():
            other.append("other", {"number": number})
    with transactions.transaction():
        assert facts(log) == facts(fresh(log))


def test_a_transaction_that_the_disk_does_not_confirm_is_forgotten() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
    connection.execute("CREATE TABLE children (parent REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)")
    transactions = Transactions(connection)
    log = EvidenceLog(connection, RUN, KEY, transactions)

    def decide() -> None:
        with transactions.transaction():
            log.append("a", {})
            connection.execute("INSERT INTO children VALUES (1)")

    with pytest.raises(sqlite3.IntegrityError):
        decide()
    assert not connection.in_transaction
    assert len(log) == 0
    log.append("b", {})
    assert facts(log) == facts(fresh(log))


def test_a_mark_lasts_as_long_as_nothing_read_can_have_changed() -> None:
    transactions = Transactions(connection := sqlite3.connect(":memory:", isolation_level=None))
    assert transactions.mark is None
    with transactions.transaction():
        first = transactions.mark
        with transactions.transaction():
            connection.execute("CREATE TABLE a (b)")
        assert transactions.mark == first is not None
        with pytest.raises(Undo), transactions.transaction():
            raise Undo
        assert transactions.mark not in (None, first)
    assert transactions.mark is None
    with transactions.transaction():
        assert transactions.mark not in (None, first)
