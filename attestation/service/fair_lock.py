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
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, threading.Event]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        own = threading.get_ident()
        if self._owner == own:
            self._depth += 1
            return self
        with self._lock:
            if self._owner is None:
                self._owner, self._depth = own, 1
                return self
            given = threading.Event()
            self._waiting.append((own, given))
        try:
            given.wait()
        except BaseException:
            self._give_up(own, given)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            with self._lock:
                self._pass_on()

    def _pass_on(self) -> None:
        if not self._waiting:
            self._owner = None
            return
        # The owner is set before the event, so that no other thread can take the lock in between.
        self._owner, given = self._waiting.popleft()
        self._depth = 1
        given.set()

    def _give_up(self, own: int, given: threading.Event) -> None:
        """Leave the queue after an interrupt, or pass on the lock if it was given meanwhile."""
        with self._lock:
            # The lock may have been given between the interrupt and this call.
            if given.is_set():
                self._pass_on()
            else:
                self._waiting.remove((own, given))
