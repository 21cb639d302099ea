import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raycloak.attestation.orchestrator.collateral_memory import CLOCK_TOLERANCE_S, FactBook
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import NOW


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "book.sqlite"


@pytest.fixture
def book(path: Path) -> FactBook:
    return FactBook(path)


def test_floors_only_rise(book: FactBook) -> None:
    book.keep([("a", 3), ("b", 1)])
    book.keep([("a", 2), ("b", 5)])
    assert book.floors() == {"a": 3, "b": 5}


def test_floors_and_the_time_survive_a_restart(book: FactBook, path: Path) -> None:
    book.keep([("a", 3)])
    book.check_clock(NOW)
    book.close()
    again = FactBook(path)
    assert again.floors() == {"a": 3}
    with pytest.raises(EvidenceError):
        again.check_clock(NOW - CLOCK_TOLERANCE_S - 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_clock_that_jumps_back_refuses(book: FactBook) -> None:
    book.check_clock(NOW)
    book.check_clock(NOW + 10)
    book.check_clock(NOW + 10 - CLOCK_TOLERANCE_S)
    with pytest.raises(EvidenceError) as refused:
        book.check_clock(NOW + 9 - CLOCK_TOLERANCE_S)
    assert refused.value.code == "collateral_stale"
    assert book.floors() == {}


def test_an_earlier_time_of_another_process_does_not_set_the_clock_back(book: FactBook, path: Path) -> None:
    other = FactBook(path)
    book.check_clock(NOW + 100)
    other.check_clock(NOW)
    with pytest.raises(EvidenceError):
        book.check_clock(NOW + 99 - CLOCK_TOLERANCE_S)


def test_of_orchestrators_that_write_at_once_none_lowers_a_floor(path: Path) -> None:
    """Four of them, each with a connection of its own, in an order that nobody controls."""

    def write(offset: int) -> None:
        book = FactBook(path)
        for number in range(10):
            book.keep([("a", 10 * number + offset), ("b", offset)])
            assert book.floors()["a"] >= 10 * number + offset
        book.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert FactBook(path).floors() == {"a": 93, "b": 3}


def test_what_another_process_kept_since_is_not_lowered(book: FactBook, path: Path) -> None:
    """The second write begins before the first one ends, and ends after it with the lower number."""
    other = FactBook(path)
    numbers = other._numbers()
    book.keep([("a", 9)])
    other._numbers = lambda: numbers  # type: ignore[method-assign]
    other.keep([("a", 5)])
    assert book.floors() == {"a": 9}
