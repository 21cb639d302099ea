"""A moment until which somebody waits; every wait for a child has one."""

import math
import select
import time
from typing import Final

_LOOK_S: Final = 0.25
"""How soon a wait notices that its deadline was shortened."""


class Deadline:
    """A moment ``seconds`` from now, which another thread may bring nearer."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until then; 0 once it has passed."""
        return max(0.0, self._at - time.monotonic())

    def shorten(self, seconds: float) -> None:
        """Bring it to ``seconds`` from now, if that is earlier."""
        self._at = min(self._at, time.monotonic() + seconds)


def awaited(descriptor: int, event: int, by: Deadline | None) -> bool:
    """Wait for an event of ``poll``, or for the other side's end; return whether it came before the deadline."""
    poll = select.poll()
    poll.register(descriptor, event)
    if by is None:
        return bool(poll.poll())
    while not poll.poll(math.ceil(1000 * min(by.left, _LOOK_S))):
        if by.left == 0:
            return False
    return True
