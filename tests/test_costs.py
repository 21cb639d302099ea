"""What a test file costs is counted with its processes, also with those that nobody waits for."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import costs
from tests.costs import Processes, merged

DEADLINE_S = 120
BUSY = "import time\nwhile time.process_time() < 0.6: pass"
RAYLET = f"""
import pathlib, signal, subprocess, sys
pathlib.Path("/proc/self/comm").write_text("raylet")
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", {BUSY!r}]).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def processes():
    processes = Processes()
    yield processes
    processes.close()


def others_s(processes):
    """Return what all but this process have spent."""
    return processes.spent_s() - time.process_time()


def test_a_child_counts_while_it_runs_and_when_it_was_waited_for(processes):
    before = others_s(processes)
    child = subprocess.Popen([sys.executable, "-c", BUSY + "\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1)
    child.stdout.readline()
    assert others_s(processes) - before > 0.5
    child.communicate(b"\n", DEADLINE_S)
    assert others_s(processes) - before > 0.5


def test_a_worker_that_its_raylet_does_not_wait_for_counts(processes):
    before = others_s(processes)
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET], stdin=-1, stdout=-1)
    worker = int(raylet.stdout.readline())
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        others_s(processes)
        time.sleep(0.02)
    raylet.communicate(timeout=DEADLINE_S)
    assert others_s(processes) - before > 0.5


def test_the_record_keeps_what_was_not_measured_and_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "ROOT", tmp_path)
    for name in ("tests/a/test_a.py", "tests/b/test_b.py", "tests/b/test_c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    record = {"tests/b/test_c.py": 9.0, "tests/a/test_a.py": 2.0, "tests/b/test_b.py": 1.0, "tests/a/gone.py": 5.0}
    found = merged(record, {"tests/b/test_b.py": 3.04}, ["tests/b"])
    assert list(found.items()) == [("tests/b/test_b.py", 3.0), ("tests/a/test_a.py", 2.0)]
