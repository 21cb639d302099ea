"""The process table as the kernel gives it, the end of a session of processes, and the name of a machine."""

import os
import signal
import subprocess
import sys

import pytest

from raycloak.coordinator.cluster.processes import Process, descendants, process_table
from raycloak.coordinator.vaults.machine_name import machine_name
from raycloak_lab.bench.chaos.raylets import end_session

ID = "0123456789abcdef" * 2


def _entry(pid, title, *, parent=1):
    return Process(pid, parent, parent, "S", pid, title, 0.0)


def test_only_what_runs_below_the_raylets_is_found():
    table = [_entry(10, "raylet"), _entry(11, "agent", parent=10), _entry(12, "ray::LedgerActor", parent=11)]
    others = [_entry(20, "raylet"), _entry(21, "ray::LedgerActor", parent=20)]
    assert [each.pid for each in descendants([10], table + others)] == [11, 12]


def test_the_table_shows_a_child_of_this_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        children = {each.pid: each for each in descendants([os.getpid()], process_table())}
        assert sys.executable in children[child.pid].title
        child.communicate(b"\n")


def test_a_process_that_ends_meanwhile_is_left_out(tmp_path):
    (tmp_path / "7").mkdir()
    assert process_table(tmp_path) == ()


def test_end_session_ends_a_stopped_grandchild_too():
    sleep = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", sleep], **pipes, start_new_session=True) as child:
        child.stdout.readline()
        (grandchild,) = descendants([child.pid], process_table())
        assert grandchild.session == child.pid
        os.kill(grandchild.pid, signal.SIGSTOP)
        end_session(child.pid)
        assert child.wait(timeout=120) == -signal.SIGKILL
    left = {each.pid: each.state for each in process_table()}
    assert left.get(grandchild.pid, "Z") in "ZX"


@pytest.fixture
def machine_id(tmp_path, monkeypatch):
    path = tmp_path / "machine-id"
    path.write_text(f"{ID}\n")
    monkeypatch.setattr("raycloak.coordinator.vaults.machine_name._MACHINE_ID", path)
    return path


def test_a_machine_has_one_name_in_every_process_and_it_does_not_tell_the_systems_id(machine_id):
    name = machine_name(None, None)
    assert name == machine_name("another actor", None)
    assert ID not in name
    machine_id.write_text(ID[::-1])
    assert machine_name(None, None) != name


def test_the_operators_label_comes_first(machine_id):
    assert machine_name(None, "rack-1") == "label rack-1" != machine_name(None, "rack-2")
    assert machine_name(None, ID) != machine_name(None, None)


@pytest.mark.parametrize("content", ["", "uninitialized", "0123"])
def test_nodes_without_label_and_id_count_as_one_machine(machine_id, content):
    machine_id.write_text(content)
    assert machine_name(None, None) == "unnamed"
    machine_id.unlink()
    assert machine_name(None, None) == "unnamed"
