"""Real children: how they fail, what is told of it, and that none outlives its parent."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from raycloak.attestation.processes import program
from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Program, run
from raycloak.metrics.errors import (
    BudgetError,
    ConfigError,
    ProtocolError,
    RaycloakError,
    RunFailedError,
    SenderError,
)
from tests.attestation.processes.targets import Note, Other
from tests.process_ends import has_ended

TARGETS = "tests.attestation.processes.targets"
NOTE = Note(text="a")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a child, which is killed with the test."""
    started = []

    def make(target, *arguments, **options):
        started.append(Child(f"{TARGETS}:{target}", *arguments, **{"log": tmp_path / "log"} | options))
        return started[-1]

    yield make
    for each in started:
        each.destroy()
        each.channel.close()


def soon():
    """Return a deadline that a child on a busy machine meets."""
    return Deadline(120)


def failure(child, *kinds, by=None):
    """Return the error that its next answer is."""
    with pytest.raises(RaycloakError) as failed:
        child.receive(*(kinds or (Note,)), by=by or soon())
    return failed.value


def test_a_child_answers_until_nothing_more_is_sent(start):
    child = start("echo")
    assert child.call(NOTE, Note, by=soon()) == NOTE
    child.send(NOTE, [np.arange(3.0)], by=soon())
    frame = child.receive_frame(Note, by=soon())
    assert [array.tolist() for array in frame.arrays] == [[0.0, 2.0, 4.0]]
    assert child.call(Other(text="a"), Note, by=soon()).text == "malformed"
    child.send(NOTE, by=soon())
    exited = child.end(soon())
    assert (exited.code, exited.last_words, exited.out_of_memory) == (0, "", False)
    assert not child.alive
    assert child.channel.fileno() == -1


def test_a_child_gets_arguments_environment_and_folder_and_an_empty_input(start, tmp_path):
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    child = start("describe", "one", "", environment=os.environ | {"NAMED": "x", "PYTHONPATH": path}, folder=tmp_path)
    assert child.receive(Note, by=soon()).text == f"one||x|{tmp_path.name}|AF_UNIX|"


def test_an_error_in_a_child_is_raised_in_its_parent(start):
    error = failure(start("refuse"))
    assert (type(error), error.code, error.message, error.remedy) == (
        BudgetError, "cap_exceeded", "the cap is reached.", "Open another account.",
    )  # fmt: skip
    assert (error.step, error.spent_epsilon) == (7, 0.5)


def test_the_text_of_an_unforeseen_error_stays_in_the_log(start):
    child = start("defect")
    error = failure(child)
    assert (error.code, error.message) == ("unexpected", "ValueError.")
    exited = child.wait(soon())
    assert (exited.code, exited.last_words) == (4, "ValueError: patient 12")


def test_a_function_that_is_not_there_is_a_failure_of_the_child(start):
    assert failure(start("nothing")).message == "AttributeError."


def test_want_of_memory_is_told_as_such(start):
    assert failure(start("want_memory")).code == "out_of_memory"


def test_a_kill_by_the_kernel_is_told_as_out_of_memory(start, tmp_path, monkeypatch):
    counter = tmp_path / "vmstat"
    monkeypatch.setattr(program, "_VMSTAT", counter)
    counter.write_text("nr_free_pages 7\noom_kill 3\n")
    killed, other = start("echo"), start("echo")
    counter.write_text("nr_free_pages 7\noom_kill 4\n")
    os.kill(killed.pid, signal.SIGKILL)
    error = failure(killed)
    assert (type(error), error.code) == (RunFailedError, "out_of_memory")
    assert not other.destroy().out_of_memory, "its parent killed it"
    later = start("echo")
    os.kill(later.pid, signal.SIGKILL)
    assert failure(later).code == "child_ended"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_dies_in_the_middle_of_a_frame_is_told_by_its_end(start, number):
    child = start("die", str(int(number)))
    error = failure(child)
    assert (type(error), error.code) == (RunFailedError, "child_ended")
    assert f"signal {int(number)}" in error.message
    child.send(NOTE, by=soon())
    assert failure(child).code == "child_ended"
    child.signal(signal.SIGTERM)


@pytest.mark.parametrize("large", [False, True])
def test_guarantee_a_child_that_hangs_past_a_deadline_is_killed(start, large):
    child = start("hang")
    assert child.receive(Note, by=soon()).text == "hangs"
    with pytest.raises(RunFailedError) as failed:
        child.call(Note(text="x" * (2**23 if large else 1)), Note, by=Deadline(0.1))
    assert failed.value.code == "child_overdue"
    assert child.wait(Deadline(0)).code == -signal.SIGKILL


def test_a_child_that_does_not_end_is_killed_at_the_end(start):
    child = start("hang")
    child.receive(Note, by=soon())
    with pytest.raises(TimeoutError):
        child.wait(Deadline(0))
    assert child.end(Deadline(0.1)).code == -signal.SIGKILL


def test_a_log_that_is_flooded_holds_nobody_up_and_has_last_words(start):
    child = start("flood")
    assert child.receive(Note, by=soon()).text == "done"
    assert child.wait(soon()).last_words == "the last line"
    with child._log.open("ab") as log:
        log.write(b"x" * 2**20)
    assert len(child.last_words()) == 4096


def test_a_child_that_announces_too_large_a_frame_is_killed(start):
    child = start("oversized")
    error = failure(child)
    assert (type(error), error.code) == (ProtocolError, "frame_too_large")
    assert child.wait(Deadline(0)).code < 0


@pytest.mark.parametrize("content", ["", "00", "0000000161" + "000000027b7d", "ff" * 9])
def test_a_child_that_sends_no_message_is_killed(start, content):
    child = start("bare", content)
    assert failure(child).code == "malformed"
    assert child.wait(Deadline(0)).code == -signal.SIGKILL


@pytest.mark.parametrize("killed", [True, False])
def test_guarantee_a_child_ends_with_its_parent(start, killed):
    """Though it reads nothing, and will not hear of SIGTERM."""
    parent = start("nested")
    pid = int(parent.receive(Note, by=soon()).text)
    if killed:
        os.kill(parent.pid, signal.SIGKILL)
    else:
        parent.end(soon())
    assert has_ended(pid, 120)


def test_guarantee_what_a_child_started_ends_with_it(start):
    child = start("with_program", grace_s=0.0)
    program_of_it = int(child.receive(Note, by=soon()).text)
    child.channel.close()
    assert child.wait(soon()).code == -signal.SIGKILL
    assert has_ended(program_of_it, 120)
    child = start("with_program")
    program_of_it = int(child.receive(Note, by=soon()).text)
    child.kill()
    assert has_ended(program_of_it, 120)


def test_a_child_whose_parent_is_gone_is_first_asked_to_end(start, tmp_path):
    child = start("tidy", str(tmp_path / "tidied"))
    child.receive(Note, by=soon())
    child.channel.close()
    assert child.wait(soon()).code == 0
    assert (tmp_path / "tidied").exists()


def test_a_child_that_ends_by_itself_may_go_on_without_its_parent(start, tmp_path):
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    child = start("go_on", grace_s=None, folder=tmp_path, environment=os.environ | {"PYTHONPATH": path})
    child.receive(Note, by=soon())
    child.channel.close()
    assert child.wait(soon()).code == 0
    assert (tmp_path / "went-on").exists()


def test_the_block_of_a_child_ends_it():
    with Child(f"{TARGETS}:echo") as child:
        assert child.call(NOTE, Note, by=soon()) == NOTE
    assert child.wait(Deadline(0)).code == 0


def test_no_descriptor_is_left_of_a_child_that_ended_or_was_never_started(start, tmp_path, monkeypatch):
    before = set(Path("/proc/self/fd").iterdir())
    start("echo").end(soon())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "nothing"))
        with pytest.raises(OSError, match="nothing"):
            start("echo")
    # The look itself has one more.
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1


def test_a_refusal_of_a_message_names_its_sender():
    error = Failed.of(SenderError("digest", "it differs.", member_id="m")).raised()
    assert isinstance(error, SenderError)
    assert (error.code, error.member_id) == ("digest", "m")
    assert Failed.of(ConfigError("config", "no.")).exit_code == 2


def test_a_program_is_followed_by_its_log_until_its_end(tmp_path):
    code = "import time; print('one', flush=True); time.sleep(0.1); print('two\\nthree', end='')"
    with Program([sys.executable, "-c", code], log=tmp_path / "log") as found:
        assert list(found.lines(soon())) == ["one", "two"]
        assert found.wait(soon()).last_words == "three"
    with (
        Program([sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "log") as hangs,
        pytest.raises(TimeoutError),
    ):
        list(hangs.lines(Deadline(0.1)))
    assert hangs.wait(Deadline(0)).how == "signal 9"


def test_a_program_that_is_run_to_its_end_gives_its_output_and_ends_at_the_deadline(tmp_path):
    code = "import sys; print('said'); print('why', file=sys.stderr); sys.exit(7)"
    exited, said = run([sys.executable, "-c", code], soon(), folder=tmp_path, environment=os.environ)
    assert (exited.code, exited.how, exited.last_words, said) == (7, "exit status 7", "why", "said\n")
    file, until = tmp_path / "pid", soon()
    hangs = f"import os, time, pathlib; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(600)"

    def shorten() -> None:
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
        until.shorten(0.0)

    threading.Thread(target=shorten, daemon=True).start()
    with pytest.raises(TimeoutError):
        run([sys.executable, "-c", hangs], until)
    assert has_ended(int(file.read_text()), 120)
