"""A file that somebody else locks is waited for, and no other failure is."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.files.sqlite import enter_wal

DEADLINE_S = 120.0


class Counted(sqlite3.Connection):
    asked = threading.Semaphore(0)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.asked.release()
        return super().execute(*arguments)


def opened(path: Path, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, factory=factory)


def test_a_locked_file_is_waited_for(tmp_path: Path) -> None:
    holder, waiting = opened(tmp_path / "file"), opened(tmp_path / "file", Counted)
    holder.execute("CREATE TABLE a (b)")
    holder.execute("BEGIN EXCLUSIVE")
    with ThreadPoolExecutor(1) as pool:
        mode = pool.submit(enter_wal, waiting)
        for _ in range(3):
            assert Counted.asked.acquire(timeout=DEADLINE_S)
        assert not mode.done()
        holder.execute("COMMIT")
        assert mode.result(DEADLINE_S) == "wal"


def test_what_waiting_does_not_mend_is_raised_at_once(tmp_path: Path) -> None:
    opened(tmp_path / "file").execute("CREATE TABLE a (b)")
    reader = sqlite3.connect(f"file:{tmp_path / 'file'}?mode=ro", uri=True, isolation_level=None)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        enter_wal(reader)
