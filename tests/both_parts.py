"""Runs both parts of the suite at once: the tests on Ray, and the others mostly with the time that these leave.

Tests on Ray wait for a good part of their time, and come one after the other, so they go first. What the others print
follows when all is done.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

MAKE = os.environ.get("MAKE", "make")
BEHIND = 5
"""A third of the weight of the other part. The lowest priority would starve this part beside a busy program."""
END_DEADLINE_S = 60.0


def heed() -> None:
    """Let an interrupt end this process, also where the shell that began all this ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def step_back() -> None:
    """Lower the priority of this process and all it starts, also where Linux shares processors among sessions."""
    heed()
    os.nice(BEHIND)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(BEHIND))


def end(part: subprocess.Popen[bytes]) -> None:
    """End a part that still runs, with what its fixtures started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if part.poll() is None:
            os.killpg(part.pid, number)
            with suppress(subprocess.TimeoutExpired):
                part.wait(END_DEADLINE_S)


def main() -> int:
    """Return the first exit code that is not 0. Whatever ends this early ends both parts."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryFile() as log:
        parts = []
        try:
            parts.append(subprocess.Popen([MAKE, "test-ray"], start_new_session=True, preexec_fn=heed))
            quiet = {"stdout": log, "stderr": log}
            parts.append(subprocess.Popen([MAKE, "test-plain"], **quiet, start_new_session=True, preexec_fn=step_back))
            codes = [part.wait() for part in parts]
        finally:
            for part in parts:
                end(part)
        log.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(log.read())
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
