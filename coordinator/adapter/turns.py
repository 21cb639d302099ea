"""Tasks that take turns in one thread: while one of them awaits an answer, another computes.

They are greenlets and no threads: PyTorch keeps autocast, gradient mode and device for each thread, so a task has those
of its caller. A task must not change such a setting and await before it changes it back, since the others would see it.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from greenlet import greenlet

R = TypeVar("R")


class Turns:
    """The tasks that share a thread.

    Attributes:
        idle_s: seconds in which every task awaited an answer.
    """

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._waiting: dict[greenlet, Future[Any] | None] = {}

    def run(self, tasks: Sequence[Callable[[], R]]) -> list[R]:
        """Return the results of ``tasks``, in their order; the first error ends the others where they wait.

        Each task has a copy of the caller's context variables.
        """
        # The extra's, and only a client needs it.
        from greenlet import greenlet

        begun = [greenlet(task) for task in tasks]
        results: dict[greenlet, R] = {}
        try:
            for each in begun:
                each.gr_context = copy_context()
                self._waiting[each] = None
            while self._waiting:
                turn = self._next()
                del self._waiting[turn]
                found = turn.switch()
                if turn.dead:
                    results[turn] = found
                else:
                    # At the end: a task whose answers are always there would keep the others from their turns.
                    self._waiting[turn] = found
        finally:
            self._waiting.clear()
            for each in begun:
                # An error of a task that is told to end must not take the place of the first.
                with suppress(Exception):
                    each.throw()
        return [results[each] for each in begun]

    def result(self, future: Future[R]) -> R:
        """Return a future's result, for a task of `run`; the other tasks compute meanwhile."""
        from greenlet import getcurrent

        hub = getcurrent().parent
        assert hub is not None, "only a task of `run` may await"
        hub.switch(future)
        return future.result()

    def _next(self) -> "greenlet":
        """Return the task that has waited longest of all that can go on; wait until there is one."""
        while True:
            for each, future in self._waiting.items():
                if future is None or future.done():
                    return each
            began = time.perf_counter()
            wait([each for each in self._waiting.values() if each is not None], return_when=FIRST_COMPLETED)
            self.idle_s += time.perf_counter() - began
