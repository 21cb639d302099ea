import sqlite3
from pathlib import Path

import pytest

from attestation.fact_book import CLOCK_TOLERANCE_S, FactBook
from metrics.errors import EvidenceError
from tests.attestation.conftest import NOW


@pytest.fixture
def book(tmp_path: Path) -> FactBook:
    return FactBook(sqlite3.connect(tmp_path / "book.sqlite"))


def test_floors_only_rise(book: FactBook) -> None:
    book.keep([("a", 3), ("b", 1)])
    book.keep([("a", 2), ("b", 5)])
    assert book.floors() == {"a": 3, "b": 5}


def test_floors_and_the_time_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "book.sqlite"
    first = sqlite3.connect(path)
    FactBook(first).keep([("a", 3)])
    FactBook(first).check_clock(NOW)
    first.close()
    again = FactBook(sqlite3.connect(path))
    assert again.floors() == {"a": 3}
    with pytest.raises(EvidenceError):
        again.check_clock(NOW - CLOCK_TOLERANCE_S - 1)


def test_a_clock_that_jumps_back_refuses(book: FactBook) -> None:
    book.check_clock(NOW)
    book.check_clock(NOW + 10)
    book.check_clock(NOW + 10 - CLOCK_TOLERANCE_S)
    with pytest.raises(EvidenceError) as refused:
        book.check_clock(NOW + 9 - CLOCK_TOLERANCE_S)
    assert refused.value.code == "collateral_stale"
    assert book.floors() == {}


def test_a_transaction_of_the_owner_decides(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "book.sqlite", isolation_level=None)
    book = FactBook(connection)
    connection.execute("BEGIN IMMEDIATE")
    book.keep([("a", 3)])
    connection.execute("ROLLBACK")
    assert book.floors() == {}
