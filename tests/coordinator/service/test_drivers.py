"""The service's side of driver processes: their reports in order, and their ends.

Whole runs are in tests/ray/test_driver.py.
"""

import math
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.service import pipe
from raycloak.coordinator.service.driver import PacedRun
from raycloak.coordinator.service.drivers import Driver, DriverProcesses
from raycloak.coordinator.service.pipe import (
    Allow,
    Batches,
    Begin,
    Close,
    Computed,
    Copy,
    Ended,
    Load,
    PhaseBegun,
    Save,
)
from raycloak.coordinator.training.pace import GatedPace, StopRequest
from raycloak.coordinator.training.reporting import StepReport
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
    found.child.destroy()


def last(heard: queue.SimpleQueue):
    """Return the last report before `Exited`, and that."""
    said = [None, heard.get(timeout=DEADLINE_S)]
    while not isinstance(said[-1], Exited):
        said.append(heard.get(timeout=DEADLINE_S))
    return said[-2:]


def test_a_refusal_is_the_last_report_before_the_exit(driver, heard, tmp_path):
    driver.start(REFUSED)
    failed, exited = last(heard)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.exit_code, failed.epsilon, failed.step) == ("config", 2, None, None)
    assert "stepz: there is no such field" in failed.message
    assert exited == Exited(code=2, last_words=(tmp_path / "driver.log").read_text().splitlines()[-1])
    assert exited.last_words.startswith("error: config: ")
    assert not driver.child.alive
    for late in (lambda: driver.send(Close()), driver.stop, driver.child.kill):
        late()


def test_a_driver_that_is_killed_has_the_number_of_the_signal(driver, heard):
    driver.start(REFUSED)
    driver.child.kill()
    _, exited = last(heard)
    assert exited.code == -signal.SIGKILL


def test_drivers_that_have_ended_are_forgotten_and_those_that_live_can_be_killed(tmp_path, heard):
    drivers = DriverProcesses(tmp_path / "logs")
    drivers.tell = lambda client_id, said: heard.put((client_id, said, list(drivers._drivers)))
    drivers.start("a", REFUSED)
    drivers.start("b", REFUSED)
    # One that hangs.
    os.kill(drivers._drivers["b"].child.pid, signal.SIGSTOP)
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
    drivers.kill("b")


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
    ours, theirs = socket.socketpair()
    ours.sendall((tmp_path / "commands").read_bytes())
    ours.close()
    arrived = Channel(theirs)
    assert [arrived.receive(*pipe.COMMANDS) for _ in range(8)] == [REFUSED, *COMMANDS]
    assert arrived.receive(*pipe.COMMANDS) is None
    arrived.close()


def test_guarantee_a_driver_that_reads_nothing_holds_nobody_up(tmp_path, heard, in_place):
    """A pipe takes 64 KiB, and a tenant's configuration may be larger: the desk would wait for the process."""
    in_place("exec sleep 1000")
    drivers = DriverProcesses(tmp_path / "logs")
    drivers.tell = lambda client_id, said: heard.put(said)
    large = REFUSED.model_copy(update={"config": {"name": "x" * 2**20}})

    def tell() -> None:
        drivers.start("a", large)
        drivers.send("a", Batches(step=0, files=(Path("/" + "f" * 2**20),)))
        drivers.stop("a")

    desk = threading.Thread(target=tell, daemon=True)
    desk.start()
    desk.join(30)
    waits = desk.is_alive()
    drivers.kill("a")
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
    assert not driver.child.alive
    # The thread raises after its last word, while this hook is still there.
    assert raised.get(timeout=DEADLINE_S) == "the store is gone"


@contextmanager
def both_ends():
    """Yield the service's end of a channel, and a driver's, which threads read from until the service's is closed."""
    service, driver = map(Channel, socket.socketpair())
    yield service, driver
    service.close()
    for thread in threading.enumerate():
        if thread.name == "commands":
            thread.join(DEADLINE_S)
    driver.close()


@pytest.fixture
def ends():
    """Return both ends."""
    with both_ends() as found:
        yield found


def test_what_json_cannot_say_arrives_as_nothing(ends):
    service, driver = ends
    driver.send(Ended(ending="complete", metrics={"epsilon_cap": math.inf, "steps": 3}))
    driver.send(Computed(step=1, epsilon=math.inf, loss=math.nan))
    assert service.receive(*pipe.REPORTS).metrics == {"epsilon_cap": None, "steps": 3}
    assert service.receive(*pipe.REPORTS) == Computed(step=1, epsilon=None, loss=None)


def test_a_driver_reports_what_was_counted_and_of_a_private_step_nothing(ends):
    service, driver = ends
    run = PacedRun(REFUSED, driver, StopRequest())
    run._computed(0, None, PublicSums(loss=6.0, examples=4, tokens=11))
    run._stepped(StepReport(1, 2, None, None, None, 3, "ab", 0.5, grad_norm=0.75))
    run._computed(1, 0.5, None)
    run._stepped(StepReport(2, 2, 0.5, 2.0, None, 3, "cd", 0.5))
    computed, released, private, done = (service.receive(*pipe.REPORTS) for _ in range(4))
    assert (computed.loss, computed.tokens) == (1.5, 11)
    assert (released.loss, released.grad_norm) == (1.5, 0.75)
    assert (private.loss, private.tokens, done.loss, done.grad_norm) == (None,) * 4


def test_a_driver_that_cannot_do_a_command_stops(ends, monkeypatch):
    """It takes no further one, so that its step would wait for ever."""

    def refuse(*_):
        raise RuntimeError("nothing can be cancelled")

    monkeypatch.setattr(GatedPace, "allow", refuse)
    stop, ended = StopRequest(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())
    service, driver = ends
    service.send(Allow(computed=1, released=0, held=True))
    PacedRun(REFUSED, driver, stop)
    assert ended.wait(DEADLINE_S)
    assert stop.made


def test_a_driver_stops_at_a_command_that_it_cannot_read_and_when_nobody_hears_it(ends):
    service, driver = ends
    stop, other = StopRequest(), StopRequest()
    service.send(PhaseBegun(words="none of the commands"))
    PacedRun(REFUSED, driver, stop)
    assert "cannot be read" in service.receive(*pipe.REPORTS, by=Deadline(DEADLINE_S)).line
    stopped = threading.Event()
    stop.then(stopped.set)
    assert stopped.wait(DEADLINE_S)
    service.close()
    PacedRun(REFUSED, driver, other)._phase("words")
    assert other.made


def test_a_driver_whose_first_command_is_another_refuses(driver, heard):
    driver.start(Close())
    failed, exited = last(heard)
    assert (failed.code, exited.code) == ("driver_protocol", 3)
