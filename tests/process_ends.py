"""The end of a process that is nobody's child here."""

import os
import select


def has_ended(pid: int, deadline_s: float) -> bool:
    """Return whether process ``pid`` has ended by then."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], deadline_s)[0])
    finally:
        os.close(handle)
