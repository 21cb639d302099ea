"""Work beside the main thread, in order, one piece at a time."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any


class Background:
    """One daemon thread that works off its queue in order. Work in progress is lost when the process exits."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue ``work`` behind all earlier work."""
        future: Future[Any] = Future()
        self._work.put((work, future))
        return future

    def wait(self, future: Future[Any] | None, seconds: float) -> None:
        """Wait at most ``seconds`` for ``future``; without a future, sleep for ``seconds``."""
        if future is None:
            time.sleep(seconds)
        else:
            wait([future], seconds)

    def stop(self) -> None:
        """Let the thread end after its present work."""
        self._work.put(None)

    def _run(self) -> None:
        while item := self._work.get():
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the main thread raises it again
                future.set_exception(error)
