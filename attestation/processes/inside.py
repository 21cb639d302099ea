"""The inside of a child process, before and after its function; see `raycloak.attestation.processes.child`.

python -m raycloak.attestation.processes.inside GRACE MODULE:FUNCTION ARGUMENTS
"""

import ctypes
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Final

from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.failure import Failed
from raycloak.metrics.errors import RaycloakError

_SET_PDEATHSIG: Final = 1
"""``PR_SET_PDEATHSIG``, in the kernel's ``prctl.h``."""


def main(grace: str, target: str, *arguments: str) -> int:
    """Run the function of a child; return the exit code of the process."""
    parent = _channel()
    try:
        if grace != "-":
            _end_with(parent, float(grace))
        pkgutil.resolve_name(target)(parent, *arguments)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last resort: a defect still ends in one report
        traceback.print_exc()
        if isinstance(error, RaycloakError):
            sys.stderr.write(f"error: {error}\n")
        failed = Failed.of(error)
        with suppress(OSError):  # nobody may be left to be told
            parent.send(failed)
        return failed.exit_code
    return 0


def _channel() -> Channel:
    """Take the standard input for the channel; whatever is printed from here on goes to the log."""
    # Copies are not inherited: the channel is at its end when this process is, whatever it has started.
    end = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return Channel(end)


def _end_with(parent: Channel, grace_s: float) -> None:
    if grace_s == 0:
        # A process that is stopped sees no end of a channel; the kernel kills it all the same.
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    # A copy: the function may close the channel.
    watched = os.dup(parent.fileno())

    def watch() -> None:
        poll = select.poll()
        # Nothing but the end of the other side; a parent that has finished sending may still read.
        poll.register(watched, 0)
        poll.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
