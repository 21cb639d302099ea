import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.evidence import Presentation
from raycloak.attestation.orchestrator.nonces import DEFAULT_LIFETIME_S, NonceBook
from raycloak.metrics.errors import EvidenceError
from tests.attestation.conftest import MANIFEST, NOW, RUN, Member, Session

SESSION: dict[str, Any] = {"run_id": RUN, "member_id": "worker-0", "role": "worker", "manifest_digest": MANIFEST}


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "state.sqlite", isolation_level=None)) as opened:
        yield opened


@pytest.fixture
def member(session: Session) -> Member:
    return session.member()


def refusal(book: NonceBook, presentation: Presentation, now: int = NOW) -> str | None:
    """Consume a nonce as an orchestrator does, which commits whatever comes of it; return the code of the refusal."""
    db = book._connection
    if is_outermost := not db.in_transaction:
        db.execute("BEGIN IMMEDIATE")
    try:
        book.consume(presentation, now)
    except EvidenceError as error:
        return error.code
    finally:
        if is_outermost:
            db.commit()
    return None


def test_a_nonce_is_accepted_once(connection: sqlite3.Connection, member: Member) -> None:
    book = NonceBook(connection)
    challenge = book.issue(**SESSION, now=NOW)
    presentation = member.presentation(nonce=challenge.nonce)
    assert refusal(book, presentation) is None
    assert refusal(book, presentation) == "nonce_replayed"
    malleated = presentation.model_copy(update={"quote": presentation.quote + b"\0"})
    assert refusal(book, malleated) == "nonce_replayed"


def test_nonces_are_fresh(connection: sqlite3.Connection) -> None:
    book = NonceBook(connection)
    assert len({book.issue(**SESSION, now=NOW).nonce for _ in range(20)}) == 20


def test_consumption_survives_a_restart_and_a_failed_appraisal(
    connection: sqlite3.Connection, member: Member, tmp_path: Path
) -> None:
    book = NonceBook(connection)
    presentation = member.presentation(nonce=book.issue(**SESSION, now=NOW).nonce)
    assert refusal(book, presentation) is None
    connection.rollback()
    connection.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite", isolation_level=None)) as reopened:
        assert refusal(NonceBook(reopened), presentation) == "nonce_replayed"


def test_a_nonce_that_was_never_issued_is_foreign(connection: sqlite3.Connection, member: Member) -> None:
    assert refusal(NonceBook(connection), member.presentation()) == "nonce_foreign"


@pytest.mark.parametrize(
    "issued",
    [
        {"run_id": "run-2"},
        {"member_id": "worker-1"},
        {"role": "aggregator"},
        {"manifest_digest": b"M" * 32},
    ],
)
def test_a_nonce_of_another_session_is_foreign_and_used_up(
    connection: sqlite3.Connection, member: Member, issued: dict[str, Any]
) -> None:
    book = NonceBook(connection)
    presentation = member.presentation(nonce=book.issue(**(SESSION | issued), now=NOW).nonce)
    assert refusal(book, presentation) == "nonce_foreign"
    assert refusal(book, presentation) == "nonce_replayed"


def test_a_nonce_expires_at_its_second(connection: sqlite3.Connection, member: Member) -> None:
    book = NonceBook(connection)
    for now, code in ((NOW + 59, None), (NOW + 60, "nonce_foreign")):
        challenge = book.issue(**SESSION, now=NOW, lifetime_s=60)
        assert challenge.expires_at == NOW + 60
        assert refusal(book, member.presentation(nonce=challenge.nonce), now) == code


def test_only_the_announced_key_can_spend_a_nonce(
    connection: sqlite3.Connection, member: Member, session: Session
) -> None:
    book = NonceBook(connection)
    challenge = book.issue(**SESSION, now=NOW, identity_key=member.identity.public)
    stranger = session.member()
    assert refusal(book, stranger.presentation(nonce=challenge.nonce)) == "peer_not_bound"
    assert refusal(book, member.presentation(nonce=challenge.nonce)) is None


def test_forgetting_drops_expired_nonces_only(connection: sqlite3.Connection, member: Member) -> None:
    book = NonceBook(connection)
    old = member.presentation(nonce=book.issue(**SESSION, now=NOW, lifetime_s=10).nonce)
    used = member.presentation(nonce=book.issue(**SESSION, now=NOW, lifetime_s=100).nonce)
    assert refusal(book, used) is None
    book.forget_expired(NOW + 10)
    assert refusal(book, old) == "nonce_foreign"
    assert refusal(book, used) == "nonce_replayed"


def test_who_asks_later_finds_unanswered_nonces_dropped_and_used_ones_known(
    connection: sqlite3.Connection, member: Member
) -> None:
    book = NonceBook(connection)
    old, used = (member.presentation(nonce=book.issue(**SESSION, now=NOW, lifetime_s=10).nonce) for _ in range(2))
    assert refusal(book, used) is None
    book.issue(**SESSION, now=NOW + DEFAULT_LIFETIME_S)
    assert refusal(book, old) == "nonce_foreign"
    assert refusal(book, used) == "nonce_replayed"


def test_endless_requests_fill_the_book_with_two_lifetimes_at_most(connection: sqlite3.Connection) -> None:
    book = NonceBook(connection)
    most, every_s = 0, 30
    for second in range(0, 5 * DEFAULT_LIFETIME_S, every_s):
        book.issue(**SESSION, now=NOW + second)
        most = max(most, connection.execute("SELECT count(*) FROM nonces").fetchone()[0])
    assert DEFAULT_LIFETIME_S <= most * every_s <= 2 * DEFAULT_LIFETIME_S


def test_endless_attestations_fill_the_book_with_a_number_of_used_nonces(
    connection: sqlite3.Connection, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped nonce stays refused: it looks as if it was never issued."""
    monkeypatch.setattr("raycloak.attestation.orchestrator.nonces.MAX_USED", 3)
    book = NonceBook(connection)
    used = []
    for i in range(10):
        used.append(member.presentation(nonce=book.issue(**SESSION, now=NOW + i, lifetime_s=10).nonce))
        assert refusal(book, used[-1], NOW + i) is None
    book.issue(**SESSION, now=NOW + DEFAULT_LIFETIME_S)
    assert [refusal(book, each) for each in used] == ["nonce_foreign"] * 7 + ["nonce_replayed"] * 3


def test_consuming_joins_a_transaction_of_the_caller(connection: sqlite3.Connection, member: Member) -> None:
    """The decision is in the same transaction: what is rolled back has admitted nobody either."""
    book = NonceBook(connection)
    presentation = member.presentation(nonce=book.issue(**SESSION, now=NOW).nonce)
    connection.execute("BEGIN")
    assert refusal(book, presentation) is None
    assert refusal(book, presentation) == "nonce_replayed"
    connection.rollback()
    connection.execute("BEGIN")
    assert refusal(book, presentation) is None
    connection.commit()
    assert refusal(book, presentation) == "nonce_replayed"


def test_issuing_joins_a_transaction_of_the_caller(connection: sqlite3.Connection, member: Member) -> None:
    book = NonceBook(connection)
    connection.execute("BEGIN")
    challenge = book.issue(**SESSION, now=NOW)
    connection.rollback()
    assert refusal(book, member.presentation(nonce=challenge.nonce)) == "nonce_foreign"


def test_of_concurrent_presentations_one_wins(connection: sqlite3.Connection, member: Member, tmp_path: Path) -> None:
    presentation = member.presentation(nonce=NonceBook(connection).issue(**SESSION, now=NOW).nonce)
    barrier, codes = threading.Barrier(6), []

    def present() -> None:
        with closing(sqlite3.connect(tmp_path / "state.sqlite", timeout=120, isolation_level=None)) as own:
            book = NonceBook(own)
            barrier.wait(120)
            codes.append(refusal(book, presentation))

    threads = [threading.Thread(target=present) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(codes, key=str) == [None] + ["nonce_replayed"] * 5
