"""Standard streams that are closed, full or read by nobody end no command in a traceback, and no run at all."""

import errno
import io
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.text import Text

from raycloak.coordinator.cli.options import _guard
from raycloak.coordinator.console.output import Output, command_output
from raycloak.coordinator.console.streams import Outlet
from raycloak.coordinator.runs.progress import ProgressDisplay
from raycloak.coordinator.training.reporting import StepReport

ROOT = Path(__file__).resolve().parents[3]
DATA = {"path": "/a", "long": "x" * 100_000}


@pytest.fixture
def stdout_to(capfd):
    """Let descriptor 1 of this process be another one for a while."""
    kept = os.dup(1)

    def divert(descriptor: int) -> None:
        sys.stdout.flush()
        os.dup2(descriptor, 1)
        os.close(descriptor)

    yield divert
    os.dup2(kept, 1)
    os.close(kept)


def _nobody_reads() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def _show(output: Output) -> int:
    output.result(DATA, Text("the view " * 20_000))
    return 0


@pytest.mark.parametrize("as_json", [False, True])
def test_a_reader_who_has_enough_is_no_error(as_json, stdout_to, capfd):
    stdout_to(_nobody_reads())
    with command_output(as_json, debug=False) as output:
        assert _guard(output, _show) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_result_that_found_no_room_is_one_line_and_exit_code_4(as_json, stdout_to, capfd):
    stdout_to(os.open("/dev/full", os.O_WRONLY))
    with command_output(as_json, debug=False) as output:
        assert _guard(output, _show) == 4
    captured = capfd.readouterr()
    assert captured.err.startswith("error: output_lost: the command's result could not be written: No space left")
    assert captured.err.count("\n") == 1


def test_progress_that_nobody_reads_any_more_ends_no_run():
    raw = io.FileIO(_nobody_reads(), "w")
    writer = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    output = Output(io.StringIO(), writer, _NoLog(), as_json=False, debug=False)
    with ProgressDisplay(output.progress, "digits") as display:
        for step in (1, 2):
            display(StepReport(step, 2, 3.75 * step, 8.0, 0.9, 3, "ab" * 32, 0.1))
        output.announce("worker-1 left")
    output.note("the end")
    output.result({}, Text("the view"))
    with suppress(OSError):
        writer.close()
    raw.close()


class _NoLog:
    def write(self, text: str) -> int:
        return len(text)


def test_what_is_lost_first_is_remembered():
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    outlet = Outlet(Full())
    assert outlet.write("one") == 3
    assert outlet.failure is not None
    assert outlet.failure.errno == errno.ENOSPC
    outlet.write("two")
    outlet.flush()


def test_a_process_without_standard_streams_has_some_that_lead_nowhere():
    program = """
import os, sys
from raycloak.coordinator.console.streams import open_missing_streams
open_missing_streams()
assert [os.fstat(number).st_rdev for number in (0, 1, 2)] == [os.stat(os.devnull).st_rdev] * 3
print("lost"); print("lost", file=sys.stderr)
assert sys.stdin.read() == "" and os.dup(1) > 2
"""
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    assert subprocess.run(shell, cwd=ROOT, timeout=300, check=False).returncode == 0


@pytest.mark.parametrize(("closed", "code"), [(">&-", 2), ("2>&-", 2), (">/dev/full", 2)])
def test_a_command_without_a_standard_stream_keeps_its_exit_code(closed, code, raycloak_home):
    shell = ["sh", "-c", f'exec "$0" -m raycloak budget show --json {closed}', sys.executable]
    done = subprocess.run(shell, cwd=ROOT, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
