import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.canonical import digest, length_prefixed
from attestation.evidence_log import EvidenceLog, LogHead, verify_exported_log
from attestation.keys import IdentityKey, Secret
from attestation.messages import open_envelope
from metrics.errors import EvidenceError

KEY = IdentityKey.from_seed(Secret(bytes(32)))
RUN = "run-1"


@pytest.fixture(params=[None, "DEFERRED"], ids=["autocommit", "implicit"])
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "state.sqlite", isolation_level=request.param)) as opened:
        yield opened


@pytest.fixture
def log(connection: sqlite3.Connection) -> EvidenceLog:
    return EvidenceLog(connection, RUN, KEY)


def fill(log: EvidenceLog, count: int = 5) -> None:
    for number in range(count):
        log.append("decision", {"number": number, "verdict": "admitted", "epsilon": 0.5, "members": ["a", "b"]})


def broken(path: Path, key: bytes = KEY.public) -> str:
    with pytest.raises(EvidenceError) as refused:
        verify_exported_log(path, key)
    assert refused.value.code == "log_broken"
    return refused.value.message


def test_an_entry_s_hash_covers_place_history_kind_and_body(log: EvidenceLog) -> None:
    first, second = log.append("a", {"x": 1}), log.append("b", {"y": None})
    assert first.previous == digest(length_prefixed("raycloak/evidence-log/genesis/v1", RUN))
    assert second.previous == first.hash
    fields = (RUN, 1, first.hash, "b", b'{"y":null}')
    assert second.hash == digest(length_prefixed("raycloak/evidence-log/entry/v1", *fields))
    assert list(log.entries()) == [first, second]
    assert second.content == {"y": None}


def test_the_head_signs_length_and_last_hash(log: EvidenceLog) -> None:
    empty = open_envelope(LogHead, log.head(), KEY.public)
    assert (empty.run_id, empty.length) == (RUN, 0)
    last = log.append("a", {})
    head = open_envelope(LogHead, log.head(), KEY.public)
    assert (head.length, head.hash) == (1, last.hash)


def test_an_entry_is_part_of_the_caller_s_transaction(log: EvidenceLog, connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE attempts (number INTEGER)")
    connection.commit()
    for finish in (connection.rollback, connection.commit):
        connection.execute("BEGIN")
        connection.execute("INSERT INTO attempts VALUES (1)")
        log.append("attempt", {"number": 1})
        assert connection.in_transaction
        finish()
        rows = connection.execute("SELECT count(*) FROM attempts").fetchone()[0]
        assert len(list(log.entries())) == rows
    assert rows == 1


def test_a_restarted_log_goes_on_where_it_was(log: EvidenceLog, connection: sqlite3.Connection, tmp_path: Path) -> None:
    fill(log)
    head = log.head()
    connection.commit()
    connection.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as reopened:
        again = EvidenceLog(reopened, RUN, KEY)
        assert again.head() == head
        assert again.append("a", {}).sequence == 5


def test_logs_of_two_runs_do_not_mix(log: EvidenceLog, connection: sqlite3.Connection) -> None:
    other = EvidenceLog(connection, "run-2", KEY)
    assert log.append("a", {}).hash != other.append("a", {}).hash
    assert len(list(log.entries())) == len(list(other.entries())) == 1


def test_the_database_refuses_to_change_or_drop_entries(log: EvidenceLog, connection: sqlite3.Connection) -> None:
    fill(log)
    for statement in ("UPDATE evidence_log SET kind = 'x'", "DELETE FROM evidence_log"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)


@pytest.mark.parametrize(
    ("statement", "entry"),
    [
        ("UPDATE evidence_log SET body = '{}' WHERE sequence = 2", 2),
        ("UPDATE evidence_log SET kind = 'x' WHERE sequence = 4", 4),
        ("DELETE FROM evidence_log WHERE sequence = 1", 1),
        ("DELETE FROM evidence_log WHERE sequence = 0", 0),
    ],
)
def test_a_database_edited_behind_our_back_is_refused(
    log: EvidenceLog, connection: sqlite3.Connection, statement: str, entry: int
) -> None:
    fill(log)
    connection.execute("DROP TRIGGER evidence_log_keeps_entries")
    connection.execute("DROP TRIGGER evidence_log_keeps_all")
    connection.execute(statement)
    with pytest.raises(EvidenceError, match=f"entry {entry} ") as refused:
        EvidenceLog(connection, RUN, KEY)
    assert refused.value.code == "log_broken"


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": b"bytes"}])
def test_a_body_that_is_not_json_is_refused(log: EvidenceLog, body: dict) -> None:
    with pytest.raises((ValueError, TypeError)):
        log.append("a", body)
    assert not list(log.entries())


def test_an_exported_log_verifies(log: EvidenceLog, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for count in (0, 5):
        fill(log, count)
        log.export(path)
        assert verify_exported_log(path, KEY.public) == count
    assert json.loads(path.read_text().splitlines()[3])["body"]["number"] == 3
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".log")]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    with closing(sqlite3.connect(":memory:")) as connection:
        log = EvidenceLog(connection, RUN, KEY)
        fill(log)
        log.export(path)
    return path


def test_the_first_broken_entry_is_named(exported: Path) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    edits = {
        "entry 2 ": [
            *lines[:2],
            lines[2].replace(b"admitted", b"refused_"),
            lines[3].replace(b"0.5", b"0.7"),
            *lines[4:],
        ],
        "entry 0 ": lines[1:],
        "entry 3 ": [*lines[:3], lines[4], lines[3], lines[5]],
        "entry 4 ": [*lines[:4], lines[3], *lines[4:]],
        "entry 1 cannot be read": [lines[0], b"{}\n", *lines[2:]],
        "the head is signed over 5 entries": [*lines[:4], lines[5]],
        "the signed head cannot be read": lines[:5],
    }
    for message, changed in edits.items():
        exported.write_bytes(b"".join(changed))
        assert message in broken(exported)


def test_a_rewritten_chain_does_not_match_its_head(exported: Path, tmp_path: Path) -> None:
    """Someone without the key rewrites all entries consistently and keeps the old head."""
    head = exported.read_bytes().splitlines()[-1]
    with closing(sqlite3.connect(":memory:")) as connection:
        forged = EvidenceLog(connection, RUN, IdentityKey.generate())
        for number in range(5):
            forged.append("decision", {"number": number, "verdict": "refused"})
        forged.export(exported)
    assert "not signed by the log's owner" in broken(exported)
    lines = exported.read_bytes().splitlines()
    exported.write_bytes(b"\n".join([*lines[:-1], head]))
    assert "the head is signed over 5 entries, which are not" in broken(exported)


def test_another_key_a_missing_or_an_empty_file_is_refused(exported: Path, tmp_path: Path) -> None:
    assert "not signed" in broken(exported, IdentityKey.generate().public)
    assert "cannot be read" in broken(tmp_path / "absent")
    exported.write_bytes(b"")
    assert "cannot be read" in broken(exported)


@given(st.data())
def test_no_changed_byte_of_an_exported_log_passes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("export") / "log.jsonl"
    with closing(sqlite3.connect(":memory:")) as connection:
        log = EvidenceLog(connection, RUN, KEY)
        fill(log, 2)
        log.export(path)
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(raw) - 2))
    raw[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    broken(path)
