"""A lock that threads get in the order in which they asked for it."""

import threading
from collections import deque
from typing import Self


class Turn:
    """A re-entrant lock for the threads that share one orchestrator.

    Guarantee: a waiting thread gets the lock before any thread that asks later. A thread that releases it and asks
    again overtakes nobody. (`threading.RLock` promises neither: a thread in a loop can make another one wait for ever.)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        own, place = threading.get_ident(), object()
        with self._changed:
            if self._owner != own:
                self._waiting.append(place)
                try:
                    self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is place)
                    self._owner = own
                finally:
                    # After an interrupt, another may be the first now.
                    self._waiting.remove(place)
                    self._changed.notify_all()
            self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._changed.notify_all()
