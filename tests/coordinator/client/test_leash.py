"""The leash: what it runs ends with it, and it ends with its caller's end of the pipe."""

import os
import signal
import subprocess
import sys
import time

import pytest

from raycloak.coordinator.client import leash

COMMAND = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_it_gives_the_output_and_the_exit_code_of_what_it_runs():
    command = [sys.executable, "-m", leash.__name__, sys.executable, "-c", "print('said'); raise SystemExit(7)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert (process.stdout.read(), process.wait(60)) == (b"said\n", 7)
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("killed", [False, True])
def test_guarantee_the_command_ends_with_its_caller(killed):
    """A caller in the middle, which is killed, holds the pipe's only other end."""
    held = [sys.executable, "-m", leash.__name__, sys.executable, "-c", COMMAND]
    caller = f"import subprocess, sys; subprocess.Popen({held!r}, stdin=subprocess.PIPE).wait()"
    command = [sys.executable, "-c", caller] if killed else held
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    inner = int(process.stdout.readline())
    if killed:
        process.kill()
    else:
        process.stdin.close()
    # The end of the output is that of the command: nobody else holds it any more.
    assert process.stdout.read() == b""
    process.wait(60)
    process.stdout.close()
    if killed:
        process.stdin.close()
    else:
        assert process.returncode == -signal.SIGTERM % 256
    # The leash, which may outlive its caller by a moment, takes note of the end.
    for _ in range(6000):
        try:
            os.kill(inner, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the command is still there")
