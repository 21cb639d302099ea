"""Functions that children of the tests run, and their messages."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import BudgetError, ProtocolError


class Note(Message):
    """A message of any text."""

    DOMAIN: ClassVar[str] = "raycloak/test/note/v1"
    text: str


class Other(Message):
    """A message of another kind with the same field."""

    DOMAIN: ClassVar[str] = "raycloak/test/other/v1"
    text: str


def echo(parent):
    """Answer each note with itself, and each array with its double; a note that cannot be read by its code."""
    while True:
        try:
            frame = parent.receive_frame(Note)
        except ProtocolError as error:
            parent.send(Note(text=error.code))
            continue
        if frame is None:
            return
        parent.send(frame.message, [2 * array for array in frame.arrays])


def refuse(parent):
    """Fail with a refusal."""
    error = BudgetError("cap_exceeded", "the cap is reached.", "Open another account.")
    error.step, error.spent_epsilon = 7, 0.5
    raise error


def defect(parent):
    """Fail with an error whose text is data."""
    raise ValueError("patient 12")


def want_memory(parent):
    """Want more memory than there is."""
    raise MemoryError


def die(parent, number):
    """End by a signal in the middle of a frame."""
    os.write(parent.fileno(), bytes([0, 0, 1, 0]) + b"part")
    os.kill(os.getpid(), int(number))


def hang(parent):
    """Say that it is there, read nothing and hold on to life."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.send(Note(text="hangs"))
    while True:
        time.sleep(600)


def flood(parent):
    """Write 64 MiB to the log, then answer."""
    for _ in range(64):
        sys.stdout.write("flood" * (2**20 // 5) + "\n")
    sys.stdout.write("the last line\n\n")
    sys.stdout.flush()
    parent.send(Note(text="done"))


def oversized(parent):
    """Announce a frame that is too large, and send of it as much as anybody reads."""
    os.write(parent.fileno(), (2**32 - 1).to_bytes(4, "big"))
    while True:
        os.write(parent.fileno(), bytes(2**16))


def bare(parent, content):
    """Send a frame of these bytes."""
    raw = bytes.fromhex(content)
    os.write(parent.fileno(), len(raw).to_bytes(4, "big") + raw)
    parent.receive(Note)


def nested(parent):
    """Start a child that hangs and a program, tell their ids, and wait."""
    from raycloak.attestation.processes.child import Child
    from raycloak.attestation.processes.deadline import Deadline

    child = Child("tests.attestation.processes.targets:hang", grace_s=0.0)
    child.receive(Note, by=Deadline(60))
    parent.send(Note(text=str(child.pid)))
    parent.receive(Note)


def with_program(parent):
    """Start a program, tell its id, and wait without heed of the parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    parent.send(Note(text=str(program.pid)))
    time.sleep(600)


def describe(parent, *arguments):
    """Tell what it was given."""
    kind = socket.socket(fileno=os.dup(parent.fileno())).family.name
    found = [*arguments, os.environ.get("NAMED", ""), Path.cwd().name, kind, sys.stdin.read()]
    parent.send(Note(text="|".join(found)))


def go_on(parent):
    """Work on after the parent has ended, and leave a file."""
    parent.send(Note(text=str(os.getpid())))
    assert parent.receive(Note) is None
    Path("went-on").touch()


def slow_words(parent, count):
    """Say words for a time."""
    for number in range(int(count)):
        parent.send(Note(text=str(number)))
        time.sleep(0.05)


def tidy(parent, file):
    """Leave a file when it is asked to end by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: (Path(file).touch(), os._exit(0)))
    parent.send(Note(text="tidy"))
    while True:
        time.sleep(600)
