import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.hybrid_signature import HybridSigner, SignerPublic
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.messages import parse
from raycloak.attestation.log.entries import EntryProof, LogHead, check_extends
from raycloak.attestation.log.evidence_log import EvidenceLog, read_exported_log
from raycloak.attestation.log.merkle import EMPTY_ROOT, MerkleTree
from raycloak.metrics.errors import EvidenceError

KEY = HybridSigner(Secret(bytes(32)), Secret(bytes(32)))
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


def broken(path: Path, key: SignerPublic = KEY.public) -> str:
    with pytest.raises(EvidenceError) as refused:
        read_exported_log(path, key)
    assert refused.value.code == "log_broken"
    return refused.value.message


def test_an_entry_s_leaf_covers_run_place_kind_and_body(log: EvidenceLog) -> None:
    first, second = log.append("a", {"x": 1}), log.append("b", {"y": None})
    leaf = length_prefixed("raycloak/evidence-log/entry/v2", RUN, 1, "b", b'{"y":null}')
    assert second.hash == digest(b"\x00" + leaf)
    assert log.position().root == digest(b"\x01" + first.hash + second.hash)
    assert list(log.entries()) == [first, second]
    assert second.content == {"y": None}


def test_the_head_signs_length_and_root_with_both_schemes(log: EvidenceLog) -> None:
    empty = log.head().open(KEY.public)
    assert empty == LogHead(run_id=RUN, length=0, root=EMPTY_ROOT)
    last = log.append("a", {})
    signed = log.head()
    assert signed.open(KEY.public) == LogHead(run_id=RUN, length=1, root=last.hash)
    for scheme, name in (("ed25519", "Ed25519"), ("ml_dsa_65", "ML-DSA-65")):
        halved = signed.signature.model_copy(update={scheme: bytes(64)})
        with pytest.raises(EvidenceError, match=f"not signed by the log's owner \\({name}\\)"):
            signed.model_copy(update={"signature": halved}).open(KEY.public)


def test_the_log_has_the_tree_of_its_entries_at_every_length(log: EvidenceLog) -> None:
    tree, roots = MerkleTree(), {}
    for number in range(20):
        tree.append(log.append("a", {"number": number}).hash)
        roots[number + 1] = tree.root()
        assert log.position().root == tree.root()
    assert {length: log.root_at(length) for length in roots} == roots
    assert log.root_at(0) is log.root_at(21) is None


def test_every_entry_is_proved_under_the_head(log: EvidenceLog) -> None:
    fill(log, 7)
    for entry in log.entries():
        proof = parse(EntryProof, log.prove(entry).encode())
        assert proof.check(KEY.public, RUN) == (entry, log.position())
    with pytest.raises(ValueError, match="no leaf 7"):
        log.prove(replace(entry, sequence=7))
    for place in (-1, 7, 2**64):
        moved = proof.model_copy(update={"entry": proof.entry.model_copy(update={"sequence": place})})
        with pytest.raises(EvidenceError, match=f"has no entry {place}"):
            moved.check(KEY.public, RUN)


def test_proofs_share_one_signed_head_until_something_is_appended_or_undone(
    log: EvidenceLog, connection: sqlite3.Connection
) -> None:
    fill(log, 3)
    entries = list(log.entries())
    first, second = log.prove(entries[0]), log.prove(entries[2])
    assert first.head is second.head is log.head()
    connection.execute("SAVEPOINT part")
    log.append("undone", {})
    assert log.prove(entries[1]).head.open(KEY.public).length == 4
    connection.execute("ROLLBACK TO part")
    proof = log.prove(log.append("done", {}))
    assert proof.check(KEY.public, RUN)[0].kind == "done"


def test_a_later_head_extends_every_earlier_one_and_no_other(log: EvidenceLog, connection: sqlite3.Connection) -> None:
    other, heads = EvidenceLog(connection, "run-2", KEY), [log.position()]
    for number in range(9):
        log.append("a", {"number": number})
        other.append("a", {"number": number})
        heads.append(log.position())
    for head in heads:
        check_extends(head, heads[-1], log.prove_extends(head.length, 9))
        forked = head.model_copy(update={"root": bytes(32)})
        moved = head.model_copy(update={"run_id": "run-2"})
        for wrong in (forked, moved):
            with pytest.raises(EvidenceError, match="do not begin with"):
                check_extends(wrong, heads[-1], log.prove_extends(head.length, 9))
    with pytest.raises(ValueError, match="has 9 entries"):
        log.prove_extends(3, 10)


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


def test_a_restarted_log_continues_where_it_was(
    log: EvidenceLog, connection: sqlite3.Connection, tmp_path: Path
) -> None:
    fill(log)
    head = log.position()
    connection.commit()
    connection.close()
    with closing(sqlite3.connect(tmp_path / "state.sqlite")) as reopened:
        again = EvidenceLog(reopened, RUN, KEY)
        assert again.position() == head
        assert again.append("a", {}).sequence == 5


def test_logs_of_two_runs_do_not_mix(log: EvidenceLog, connection: sqlite3.Connection) -> None:
    other = EvidenceLog(connection, "run-2", KEY)
    assert log.append("a", {}).hash != other.append("a", {}).hash
    assert len(list(log.entries())) == len(list(other.entries())) == 1


def test_the_database_refuses_to_change_or_drop_entries(log: EvidenceLog, connection: sqlite3.Connection) -> None:
    fill(log)
    for statement in ("UPDATE log_entries SET kind = 'x'", "DELETE FROM log_subtrees"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)


@pytest.mark.parametrize(
    ("statement", "entry"),
    [
        ("UPDATE log_entries SET body = '{}' WHERE sequence = 2", 2),
        ("UPDATE log_entries SET kind = 'x' WHERE sequence = 4", 4),
        ("DELETE FROM log_entries WHERE sequence = 1", 1),
        ("DELETE FROM log_entries WHERE sequence = 0", 0),
    ],
)
def test_a_database_edited_behind_our_back_is_refused(
    log: EvidenceLog, connection: sqlite3.Connection, statement: str, entry: int
) -> None:
    fill(log)
    drop_triggers(connection)
    connection.execute(statement)
    with pytest.raises(EvidenceError, match=f"entry {entry} ") as refused:
        EvidenceLog(connection, RUN, KEY)
    assert refused.value.code == "log_broken"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE log_subtrees SET hash = zeroblob(32) WHERE level = 2",
        "DELETE FROM log_subtrees WHERE level = 1 AND place = 0",
        "DELETE FROM log_entries WHERE sequence >= 4",
        "DELETE FROM log_entries",
    ],
)
def test_a_stored_tree_of_other_entries_is_refused(
    log: EvidenceLog, connection: sqlite3.Connection, statement: str
) -> None:
    fill(log, 6)
    drop_triggers(connection)
    connection.execute(statement)
    with pytest.raises(EvidenceError, match=r"the stored tree does not match its [046] entries"):
        EvidenceLog(connection, RUN, KEY)


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": b"bytes"}])
def test_a_body_that_is_not_json_is_refused(log: EvidenceLog, body: dict) -> None:
    with pytest.raises((ValueError, TypeError)):
        log.append("a", body)
    assert not list(log.entries())


def drop_triggers(connection: sqlite3.Connection) -> None:
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")]
    assert len(names) == 4
    for name in names:
        connection.execute(f"DROP TRIGGER {name}")


def test_an_exported_log_verifies(log: EvidenceLog, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for count in (0, 5):
        fill(log, count)
        log.export(path)
        assert len(read_exported_log(path, KEY.public).entries) == count
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


def test_a_log_that_was_read_proves_its_entries_and_its_past(exported: Path) -> None:
    log = read_exported_log(exported, KEY.public)
    assert log.prove(3).check(KEY.public, RUN) == (log.entries[3], log.head)
    old = LogHead(run_id=RUN, length=3, root=log.tree.root(3))
    check_extends(old, log.head, log.prove_extends(3))


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


def test_a_rewritten_log_does_not_match_its_head(exported: Path, tmp_path: Path) -> None:
    """Someone without the key rewrites all entries consistently and keeps the old head."""
    head = exported.read_bytes().splitlines()[-1]
    with closing(sqlite3.connect(":memory:")) as connection:
        forged = EvidenceLog(connection, RUN, HybridSigner.generate())
        for number in range(5):
            forged.append("decision", {"number": number, "verdict": "refused"})
        forged.export(exported)
    assert "not signed by the log's owner" in broken(exported)
    lines = exported.read_bytes().splitlines()
    exported.write_bytes(b"\n".join([*lines[:-1], head]))
    assert "the head is signed over 5 entries, which are not" in broken(exported)


def test_another_key_a_missing_or_an_empty_file_is_refused(exported: Path, tmp_path: Path) -> None:
    assert "not signed" in broken(exported, HybridSigner.generate().public)
    assert "cannot be read" in broken(tmp_path / "absent")
    exported.write_bytes(b"")
    assert "cannot be read" in broken(exported)


@given(st.data())
def test_no_changed_byte_of_an_exported_log_passes(
    tmp_path_factory: pytest.TempPathFactory, honest: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("export") / "log.jsonl"
    raw = bytearray(honest)
    position = data.draw(st.integers(0, len(raw) - 2))
    raw[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    broken(path)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("honest") / "log.jsonl"
    with closing(sqlite3.connect(":memory:")) as connection:
        log = EvidenceLog(connection, RUN, KEY)
        fill(log, 2)
        log.export(path)
    return path.read_bytes()
