"""Importing without collecting garbage."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quickly() -> Iterator[None]:
    """Pause garbage collection, for a process that imports thousands of modules before it does anything else.

    What they are made of stays for good: looking through it again and again would take a fifth of the time of the
    import, and a tenth of a second in each full collection of a process with torch, so none looks at it later either.
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
