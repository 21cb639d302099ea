"""Work beside the main thread, in order, one piece at a time."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any


class Background:
    """One daemon thread that does one thing after the other; what it is at when the process ends is lost."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Do ``work`` after all before."""
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def wait(self, future: Future[Any] | None, seconds: float) -> None:
        """Wait for ``future``, or just ``seconds``."""
        if future is None:
            time.sleep(seconds)
        else:
            wait([future], seconds)

    def stop(self) -> None:
        """Let the thread end after what it is at."""
        self._work.put(None)

    def _run(self) -> None:
        while item := self._work.get():
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised again in the main thread
                future.set_exception(error)
