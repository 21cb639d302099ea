"""The time that membership measures and spends, and the pause after a newcomer that failed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

# A machine that breaks every newcomer must not cost a process start at each step; a node that comes back is used within
# a minute.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

# Enough doublings for the longest pause; beyond them 2**n would only grow without effect.
_MOST_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class Timer:
    """A clock and its pauses, in seconds; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class Backoff:
    """The pause before another newcomer is started: 1 s after a failure, then twice as long each time, up to 60 s."""

    timer: Timer
    _failed: int = 0
    _not_before: float = 0.0

    @property
    def pauses(self) -> bool:
        """Return whether a newcomer that failed still holds back the next one."""
        return self._failed > 0 and self.timer.now() < self._not_before

    def failed(self) -> None:
        """Begin a pause: a newcomer was lost or refused before it finished a step."""
        self._not_before = self.timer.now() + min(FIRST_PAUSE_S * 2**self._failed, LONGEST_PAUSE_S)
        self._failed = min(self._failed + 1, _MOST_DOUBLINGS)

    def succeeded(self) -> None:
        """End the pauses: a newcomer has finished a step."""
        self._failed = 0
