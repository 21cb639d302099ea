"""A lock that is given in the order in which it was asked for."""

import threading
from collections import deque
from typing import Self


class Turn:
    """A re-entrant lock for the threads that share one orchestrator.

    Guarantee: whoever waits has it before anybody who asks later; nobody who lets go of it and asks again overtakes.
    (`threading.RLock` promises neither: a thread in a loop can keep another one waiting for ever.)
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
        self._owner, given = self._waiting.popleft()
        self._depth = 1
        given.set()

    def _give_up(self, own: int, given: threading.Event) -> None:
        """Whoever is interrupted while it waits leaves the queue, or passes on what it was just given."""
        with self._lock:
            if given.is_set():
                self._pass_on()
            else:
                self._waiting.remove((own, given))
