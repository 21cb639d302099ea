"""Importing without collecting garbage."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quickly() -> Iterator[None]:
    """Pause garbage collection, for a process that imports thousands of modules before it does anything else.

    Their objects stay for good. Scanning them repeatedly would take a fifth of the import, and a tenth of a second in
    each full collection of a process with torch. So later collections skip them too.
    """
    paused, loaded = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > loaded:
            gc.freeze()
        if paused:
            gc.enable()
