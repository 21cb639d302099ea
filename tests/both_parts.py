"""Runs both parts of the suite at once: the tests on Ray, and the others with what these leave of the processors.

Tests on Ray wait for a good part of their time, and some hold the product to deadlines, so they go first. What the
others print follows when all is done.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

MAKE = os.environ.get("MAKE", "make")
LOWEST = 19


def step_back() -> None:
    """Give this process and all it starts the lowest priority, also where Linux shares processors among sessions."""
    os.nice(LOWEST)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(LOWEST))


def main() -> int:
    """The first exit code that is not 0."""
    with tempfile.TemporaryFile() as log:
        others = subprocess.Popen(
            [MAKE, "test-plain"], stdout=log, stderr=log, start_new_session=True, preexec_fn=step_back
        )
        try:
            codes = [subprocess.call([MAKE, "test-ray"]), others.wait()]
        finally:
            if others.poll() is None:
                os.killpg(others.pid, signal.SIGTERM)
                others.wait()
        log.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(log.read())
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
