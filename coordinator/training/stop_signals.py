"""Requests to stop a run: the first signal ends it after the step, the second at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """A request that any thread or signal handler may make; the coordinator reads it between two steps."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._then: tuple[Callable[[], None], ...] = ()

    @property
    def made(self) -> bool:
        """Return whether a stop was requested."""
        return self._asked.is_set()

    def make(self) -> None:
        """Request it; another request changes nothing."""
        self._asked.set()
        for told in self._then:
            told()

    def then(self, told: Callable[[], None]) -> None:
        """Have ``told`` called when it is made, perhaps in a signal handler; at once if it was made."""
        # Before the look: a request in between calls it twice instead of never.
        self._then = (*self._then, told)
        if self.made:
            told()


@contextmanager
def stop_on_signals(request: StopRequest, notice: Callable[[str], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM make ``request`` inside the block; a second signal raises KeyboardInterrupt.

    Ray replaces the handler of SIGTERM when it starts, so this must be opened after that, in the main thread.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if request.made:
            raise KeyboardInterrupt
        request.make()
        notice(f"{signal.Signals(number).name}: the run stops after this step; a second signal stops it at once")

    # Kept, so that a caller's own handlers are back after the run.
    kept = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
