"""The service's side of driver processes: their reports in order, and their ends.

Whole runs are in tests/ray/test_driver.py.
"""

import math
import os
import queue
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from raycloak.coordinator.service.driver import PacedRun, Reports
from raycloak.coordinator.service.drivers import Driver, Exited
from raycloak.coordinator.service.pipe import (
    Allow,
    Batches,
    Begin,
    Close,
    Copy,
    Ended,
    Failed,
    Load,
    Opened,
    Save,
    command_line,
    parse_command,
    parse_report,
    report_line,
)
from raycloak.coordinator.service.service import DriverProcesses
from raycloak.coordinator.training.pace import GatedPace
from raycloak.coordinator.training.reporting import StepReport
from raycloak.coordinator.training.stop_signals import StopRequest
from raycloak.workers.terms.public_sums import PublicSums

DEADLINE_S = 600
REFUSED = Begin(config={"stepz": 3}, base=Path("/nowhere"), run_secret=None, run_id=None)
"""A run that is refused before a library is loaded for it."""


@pytest.fixture
def heard() -> queue.SimpleQueue:
    """Return what a driver reports."""
    return queue.SimpleQueue()


@pytest.fixture
def driver(tmp_path, heard):
    found = Driver(tmp_path / "driver.log", heard.put)
    yield found
    found.kill()
    if found._process is not None:
        found._process.wait(DEADLINE_S)


def last(heard: queue.SimpleQueue):
    """Return the last report before `Exited`, and that."""
    said = [None, heard.get(timeout=DEADLINE_S)]
    while not isinstance(said[-1], Exited):
        said.append(heard.get(timeout=DEADLINE_S))
    return said[-2:]


def test_a_refusal_is_the_last_report_before_the_exit(driver, heard, tmp_path):
    assert not driver.alive
    driver.start(REFUSED)
    failed, exited = last(heard)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.exit_code, failed.epsilon, failed.step) == ("config", 2, None, None)
    assert "stepz: there is no such field" in failed.message
    assert exited == Exited(code=2, last_words=(tmp_path / "driver.log").read_text().splitlines()[-1])
    assert exited.last_words.startswith("error: config: ")
    assert not driver.alive
    for late in (lambda: driver.send(Close()), driver.stop, driver.kill):
        late()


def test_a_driver_that_is_killed_has_the_number_of_the_signal(driver, heard):
    driver.start(REFUSED)
    driver.kill()
    _, exited = last(heard)
    assert exited.code == -signal.SIGKILL


def test_drivers_that_have_ended_are_forgotten_and_those_that_live_can_be_killed(tmp_path, heard):
    drivers = DriverProcesses(tmp_path / "logs")
    drivers.tell = lambda client_id, said: heard.put((client_id, said, list(drivers._drivers)))
    drivers.start("a", REFUSED)
    drivers.start("b", REFUSED)
    # One that hangs.
    os.kill(drivers._drivers["b"].pid, signal.SIGSTOP)
    try:
        said = heard.get(timeout=DEADLINE_S)
        while not isinstance(said[1], Exited):
            said = heard.get(timeout=DEADLINE_S)
        assert (said[0], said[2]) == ("a", ["b"]), "the next driver of the client may start by now"
        drivers.stop("a")
        drivers.send("a", Close())
        drivers.kill("a")
    finally:
        drivers.kill("b")
    client_id, exited, left = heard.get(timeout=DEADLINE_S)
    assert (client_id, exited.code, left) == ("b", -signal.SIGKILL, [])
    assert drivers.kill_all() == []


COMMANDS = [
    Allow(computed=2, released=1),
    Allow(computed=2, released=2, held=True),
    Batches(step=3, files=(Path("/a"), Path("/b"))),
    Save(id="s", after=3),
    Copy(id="c", after=3, path=Path("/copies/x")),
    Load(id="l", after=3, package="/packages/x"),
    Close(),
]


@pytest.fixture
def in_place(tmp_path, monkeypatch):
    """Return a function that has a shell script run in the place of the driver's program."""

    def use(script: str) -> None:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))

    return use


def test_every_command_of_the_desk_arrives_whole_and_in_order(tmp_path, heard, in_place):
    in_place(f"exec cat > {tmp_path / 'commands'}")
    drivers = DriverProcesses(tmp_path / "logs")
    drivers.tell = lambda client_id, said: heard.put(said)
    drivers.start("a", REFUSED)
    for command in COMMANDS:
        drivers.send("a", command)
    drivers.stop("a")
    assert heard.get(timeout=DEADLINE_S).code == 0
    lines = (tmp_path / "commands").read_bytes().splitlines()
    assert [parse_command(line) for line in lines] == [REFUSED, *COMMANDS]


def test_guarantee_a_driver_that_reads_nothing_holds_nobody_up(tmp_path, heard, in_place):
    """A pipe takes 64 KiB, and a tenant's configuration may be larger: the desk would wait for the process."""
    in_place("exec sleep 1000")
    drivers = DriverProcesses(tmp_path / "logs")
    drivers.tell = lambda client_id, said: heard.put(said)
    large = replace(REFUSED, config={"name": "x" * 2**20})

    def tell() -> None:
        drivers.start("a", large)
        drivers.send("a", Batches(step=0, files=(Path("/" + "f" * 2**20),)))
        drivers.stop("a")

    desk = threading.Thread(target=tell, daemon=True)
    desk.start()
    desk.join(30)
    waits = desk.is_alive()
    assert drivers.kill_all() == ["a"]
    assert heard.get(timeout=DEADLINE_S).code == -signal.SIGKILL
    assert not waits


def test_what_cannot_be_told_ends_the_process(tmp_path, monkeypatch):
    """Its reports would be lost, as when the store has gone."""
    raised: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda failure: raised.put(str(failure.exc_value)))
    exits: queue.SimpleQueue = queue.SimpleQueue()

    def told(report) -> None:
        if isinstance(report, Exited):
            exits.put(report)
        else:
            raise OSError("the store is gone")

    driver = Driver(tmp_path / "driver.log", told)
    driver.start(REFUSED)
    assert exits.get(timeout=DEADLINE_S).code in (2, -signal.SIGKILL)
    assert not driver.alive
    # The thread raises after its last word, while this hook is still there.
    assert raised.get(timeout=DEADLINE_S) == "the store is gone"


@pytest.mark.parametrize(
    "command",
    [REFUSED, *COMMANDS],
    ids=lambda command: command.kind,
)
def test_a_command_arrives_as_it_was_sent(command):
    line = command_line(command)
    assert line.count(b"\n") == 1
    assert parse_command(line) == command


@pytest.mark.parametrize("line", [b"", b"null", b'{"kind": "bogus"}', b'{"kind": "allow", "computed": "x"}'])
def test_a_line_that_is_no_command_is_refused(line):
    with pytest.raises(ValueError, match="validation error"):
        parse_command(line)


def test_a_report_arrives_as_it_was_sent_and_what_json_cannot_say_as_null(tmp_path):
    opened = Opened(run_id="ab", run_dir=tmp_path)
    assert parse_report(report_line(opened)) == opened
    ended = parse_report(report_line(Ended(ending="complete", metrics={"epsilon_cap": math.inf, "steps": 3})))
    assert ended.metrics == {"epsilon_cap": None, "steps": 3}


def test_a_driver_reports_what_was_counted_and_of_a_private_step_nothing(tmp_path):
    stop = StopRequest()
    with (tmp_path / "reports").open("wb") as file:
        run = PacedRun(REFUSED, iter(()), Reports(file.fileno(), stop), stop)
        run._computed(0, None, PublicSums(loss=6.0, examples=4, tokens=11))
        run._stepped(StepReport(1, 2, None, None, None, 3, "ab", 0.5, grad_norm=0.75))
        run._computed(1, 0.5, None)
        run._stepped(StepReport(2, 2, 0.5, 2.0, None, 3, "cd", 0.5))
    computed, released, private, done = map(parse_report, (tmp_path / "reports").read_bytes().splitlines())
    assert (computed.loss, computed.tokens) == (1.5, 11)
    assert (released.loss, released.grad_norm) == (1.5, 0.75)
    assert (private.loss, private.tokens, done.loss, done.grad_norm) == (None,) * 4


def test_a_driver_that_cannot_do_a_command_stops(tmp_path, monkeypatch):
    """It takes no further one, so that its step would wait for ever."""

    def refuse(*_):
        raise RuntimeError("nothing can be cancelled")

    monkeypatch.setattr(GatedPace, "allow", refuse)
    command = command_line(Allow(computed=1, released=0, held=True))
    stop, ended = StopRequest(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())

    with (tmp_path / "reports").open("wb") as file:
        PacedRun(REFUSED, iter([command]), Reports(file.fileno(), stop), stop)
        assert ended.wait(DEADLINE_S)
    assert stop.made
