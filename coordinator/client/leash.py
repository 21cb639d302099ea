"""A process that ends a command when its own standard input ends: when the caller closes it, or is killed.

``python -m raycloak.coordinator.client.leash COMMAND ...`` writes what the command writes, and ends with its exit code.
"""

import os
import signal
import subprocess
import sys
import threading

_ENDS_S = 60.0
"""For a service that finishes a step before it ends."""


def main(command: list[str]) -> int:
    """Run a command until it ends, or until standard input does; return its exit code."""
    # Ctrl-C goes to the whole group; the caller decides, by closing the pipe, when the command ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=_end_with_stdin, args=(child,), daemon=True).start()
    return child.wait()


def _end_with_stdin(child: "subprocess.Popen[bytes]") -> None:
    # No buffered read: its lock would abort the interpreter when the command ends first.
    while os.read(0, 4096):
        pass
    child.terminate()
    try:
        child.wait(_ENDS_S)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
