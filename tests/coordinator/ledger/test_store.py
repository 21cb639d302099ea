"""Durability settings, what is accepted as a ledger, and where it may lie."""

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from raycloak.coordinator.ledger import location
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.location import check_file_system, mounts, network_file_system
from raycloak.coordinator.ledger.store import LedgerStore, Rows
from raycloak.metrics.errors import BudgetError, ConfigError
from tests.coordinator.ledger.ledger_cases import MANIFEST, PARAMETERS, opened

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local xfs rw 0 0
share /mnt/with\\040space cifs rw 0 0
bucket /mnt/bucket fuse.s3fs rw 0 0
overlay /mnt/over overlay rw 0 0
server:/over /mnt/over nfs rw 0 0
tmpfs /tmp tmpfs rw 0 0
share /mnt/host virtiofs rw 0 0
share /mnt/box vboxsf rw 0 0
"""


def url(path: Path) -> str:
    return f"sqlite:///{path}"


PRAGMAS = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
DURABLE = ("wal", 2, 1, 30_000)


def settings(connection: sqlite3.Connection) -> tuple[Any, ...]:
    return tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS)


def test_every_connection_is_in_wal_mode_with_full_sync(tmp_path: Path):
    store = LedgerStore(url(tmp_path / "ledger.sqlite"))
    connections = [engine.raw_connection() for engine in (store._engine, store._reader) for _ in range(3)]
    assert len({id(connection.dbapi_connection) for connection in connections}) == 6
    for connection in connections:
        assert settings(connection.driver_connection) == DURABLE
        connection.close()
    store.close()


def test_every_commit_of_a_ledger_is_in_wal_mode_with_full_sync_and_was_immediate(tmp_path: Path):
    """Whatever connections a ledger opens: each is looked at just before it commits, and what began it is noted."""
    begun: dict[int, list[str]] = {}
    seen: list[tuple[Any, ...]] = []

    def note(connection: sqlite3.Connection, _record: Any) -> None:
        statements = begun.setdefault(id(connection), [])
        connection.set_trace_callback(lambda text: statements.append(text) if text.startswith("BEGIN") else None)

    def look(connection: sa.Connection) -> None:
        raw = connection.connection.driver_connection
        seen.append((*settings(raw), begun[id(raw)][-1], "raycloak_reads" in connection.get_execution_options()))

    sa.event.listen(sa.Engine, "connect", note)
    sa.event.listen(sa.Engine, "commit", look)
    try:
        path = tmp_path / "ledger.sqlite"
        ledger, other = opened(path), opened(path, "run-b")
        threads = [
            threading.Thread(target=ledger.charge, args=("run-a", step, PARAMETERS, MANIFEST)) for step in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        other.charge("run-b", 0, PARAMETERS, MANIFEST)
        ledger.view()
        ledger.verify()
        for instance in (ledger, other):
            instance.close()
    finally:
        sa.event.remove(sa.Engine, "connect", note)
        sa.event.remove(sa.Engine, "commit", look)
    assert set(seen) == {(*DURABLE, "BEGIN IMMEDIATE", False), (*DURABLE, "BEGIN", True)}
    # Two openings, two accounts, two registrations, two runs' data and three charges.
    assert sum(not reads for *_, reads in seen) == 11


def test_what_an_error_interrupts_leaves_no_trace(tmp_path: Path):
    store = LedgerStore(url(tmp_path / "ledger.sqlite"))

    def interrupted() -> None:
        with store.write() as rows:
            rows.open_lease()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    with store.read() as rows:
        assert rows.meta("fencing") == str(store.fencing)
    store.close()


def test_threads_write_in_turn_over_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also after a write that failed, and one that was not given its turn in time."""
    store = LedgerStore(url(tmp_path / "ledger.sqlite"))
    used: list[Any] = []
    refused: list[BudgetError] = []

    def write() -> None:
        try:
            with store.write() as rows:
                used.append(rows._connection.connection.driver_connection)
                rows.open_lease()
        except BudgetError as error:
            refused.append(error)

    with pytest.raises(RuntimeError), store.write():
        raise RuntimeError
    with store.write() as rows, monkeypatch.context() as patch:
        patch.setattr("raycloak.coordinator.ledger.engine.LOCK_DEADLINE_S", 0.05)
        rows.open_lease()
        late = threading.Thread(target=write)
        late.start()
        late.join(60)
    assert [error.code for error in refused] == ["ledger_unavailable"]
    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(refused) == 1
    assert len(used) == 8
    assert len(set(map(id, used))) == 1
    with store.read() as rows:
        assert rows.meta("fencing") == str(store.fencing + 9)
    store.close()


def test_fencing_numbers_and_key_outlive_the_instance(tmp_path: Path):
    keys, numbers = [], []
    for _ in range(3):
        store = LedgerStore(url(tmp_path / "ledger.sqlite"))
        keys.append(store.key.public)
        numbers.append(store.fencing)
        store.close()
    assert numbers == [1, 2, 3]
    assert len(set(keys)) == 1


def test_file_and_folder_are_private(tmp_path: Path):
    path = tmp_path / "state" / "ledger.sqlite"
    store = LedgerStore(url(path))
    with store.write() as rows:
        rows.open_lease()
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == {"ledger.sqlite": 0o600, "ledger.sqlite-wal": 0o600, "ledger.sqlite-shm": 0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    store.close()


def test_the_name_of_a_new_file_is_as_durable_as_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Or a charge would be on a disk where nothing leads to it."""
    synced: set[Path] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    LedgerStore(url(tmp_path / "new" / "state" / "ledger.sqlite")).close()
    assert synced == {tmp_path / "new" / "state", tmp_path / "new", tmp_path}


def test_a_file_that_others_can_read_is_refused(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    LedgerStore(url(path)).close()
    path.chmod(0o640)
    with pytest.raises(BudgetError, match=r"ledger_exposed.*mode 640"):
        LedgerStore(url(path))


def test_a_file_that_is_not_a_ledger_is_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.touch(mode=0o600)
    path.write_text("not a database, but long enough to have a header of one hundred bytes" * 4)
    before = path.read_bytes()
    with pytest.raises(BudgetError, match="ledger_foreign"):
        LedgerStore(url(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "tables",
    [
        ["CREATE TABLE photos (id)"],
        ["CREATE TABLE meta (name, value)", "CREATE TABLE accounts (a)", "CREATE TABLE runs (a)"],
        [
            "PRAGMA journal_mode = WAL",
            "CREATE TABLE meta (name, value)",
            "INSERT INTO meta VALUES ('application', 'raycloak ledger v9')",
            "CREATE TABLE accounts (a)",
            "CREATE TABLE runs (a)",
            "CREATE TABLE entries (a)",
        ],
    ],
)
def test_another_programs_database_is_refused(tmp_path: Path, tables: list[str]):
    path = tmp_path / "other.sqlite"
    path.touch(mode=0o600)
    connection = sqlite3.connect(path)
    for statement in tables:
        connection.execute(statement)
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(BudgetError, match="ledger_foreign"):
        LedgerStore(url(path))
    assert path.read_bytes() == before


def test_a_ledger_of_another_format_is_never_answered_with_an_empty_one(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    LedgerStore(url(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = 'raycloak ledger v2' WHERE name = 'application'")
    connection.close()
    with pytest.raises(BudgetError, match=r"ledger_foreign.*'raycloak ledger v2'.*Use the version that wrote it"):
        LedgerStore(url(path))


def test_a_reader_creates_nothing(tmp_path: Path):
    with pytest.raises(ConfigError, match="ledger_missing"):
        LedgerStore(url(tmp_path / "ledger.sqlite"), create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ledger.sqlite").touch(mode=0o600)
    with pytest.raises(ConfigError, match="ledger_missing"):
        LedgerStore(url(tmp_path / "ledger.sqlite"), create=False)


@pytest.mark.parametrize(
    "wrong",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///ledger.sqlite",
        "sqlite:////l.sqlite?mode=ro",
        "mysql://h/d",
        "ledger",
    ],
)
def test_urls_that_cannot_keep_a_ledger_are_refused(wrong: str):
    with pytest.raises(ConfigError, match="ledger_url"):
        LedgerStore(wrong)


def test_an_unreachable_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="ledger_url: cannot create"):
        LedgerStore(url(tmp_path / "file" / "ledger.sqlite"))


def test_a_full_or_failing_storage_is_a_refusal_not_a_crash(tmp_path: Path):
    store = LedgerStore(url(tmp_path / "ledger.sqlite"))
    with store.write() as rows:
        rows._connection.exec_driver_sql("PRAGMA query_only = ON")
        with pytest.raises(sqlite3.OperationalError):
            rows.open_lease()
    with pytest.raises(BudgetError, match="ledger_unavailable"), store.write() as rows:
        rows.open_lease()
    store.close()


def test_the_database_itself_refuses_a_step_twice(tmp_path: Path):
    store = LedgerStore(url(tmp_path / "ledger.sqlite"))
    insert = "INSERT INTO entries VALUES (?, x'00', 'k', x'00', x'00', x'00', 'run', ?, 3)"
    with store.write() as rows:
        rows._connection.exec_driver_sql(insert, (1, "gradient"))
        rows._connection.exec_driver_sql(insert, (2, "evaluation"))
        with pytest.raises(sa.exc.IntegrityError):
            rows._connection.exec_driver_sql(insert, (3, "gradient"))
    store.close()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/ada/ledger.sqlite", "nfs4"),
        ("/mnt/with space/ledger.sqlite", "cifs"),
        ("/mnt/bucket/ledger.sqlite", "fuse.s3fs"),
        ("/mnt/over/ledger.sqlite", "nfs"),
        ("/mnt/host/ledger.sqlite", "virtiofs"),
        ("/mnt/box/ledger.sqlite", "vboxsf"),
    ],
)
def test_network_file_systems_are_refused(path: str, kind: str):
    with pytest.raises(ConfigError, match=f"network_file_system.*{kind}"):
        check_file_system(Path(path), MOUNTS)


@pytest.mark.parametrize("path", ["/l.sqlite", "/home/local/l.sqlite", "/tmp/x/l.sqlite", "/homework/l.sqlite"])
def test_local_file_systems_are_accepted(path: str):
    check_file_system(Path(path), MOUNTS)


def test_a_link_to_a_network_file_system_is_followed(tmp_path: Path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path / 'far'} nfs rw 0 0\n"
    with pytest.raises(ConfigError, match="network_file_system"):
        check_file_system(tmp_path / "near" / "ledger.sqlite", mounts)


def test_a_ledger_with_a_second_name_is_refused(tmp_path: Path):
    """Killed under one, it has its last charges in a log that is not found by the other."""
    first, second = tmp_path / "ledger.sqlite", tmp_path / "other.sqlite"
    opened(f"sqlite:///{first}").close()
    os.link(first, second)
    for path in (first, second):
        with pytest.raises(ConfigError, match=r"ledger_url: .* is one of 2 names"):
            LedgerStore(f"sqlite:///{path}")
    second.unlink()
    second.symlink_to(first)
    LedgerStore(f"sqlite:///{second}").close()


def test_a_mount_point_may_have_a_name_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    listed = tmp_path / "mounts"
    listed.write_bytes(b"/dev/sda1 / ext4 rw 0 0\n/dev/sdb1 /media/\xfc ext4 rw 0 0\nserver:/x /far nfs rw 0 0\n")
    monkeypatch.setattr(location, "_MOUNTS", listed)
    assert network_file_system(Path("/far/witness"), mounts()) == "nfs"
    assert network_file_system(tmp_path, mounts()) == ""


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"ledger_driver.*psycopg"):
        LedgerStore("postgresql://user@localhost/ledger")


def test_guarantee_a_process_that_only_reads_a_ledger_never_holds_the_key_that_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The driver plans with what the ledger shows, and code of others runs in its process."""
    ledger = opened(tmp_path / "ledger.sqlite")
    shown = ledger.view()
    ledger.close()
    asked: list[str] = []
    genuine = Rows.meta
    monkeypatch.setattr(Rows, "meta", lambda rows, name: asked.append(name) or genuine(rows, name))
    reader = PrivacyLedger(url(tmp_path / "ledger.sqlite"), create=False)
    assert reader.view().accounts == shown.accounts
    assert reader.public_key == ledger.public_key == shown.public_key
    reader.verify()
    reader.close()
    assert "public_key" in asked
    assert "signing_key" not in asked
