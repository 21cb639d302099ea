"""Rate limits: a token bucket per peer, in bounded memory. Not safe for several threads at once.

A peer that was forgotten to make room starts with a full bucket again.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

# Bounds the memory of the rate limits: a stranger has as many addresses and identities as it likes.
_MAX_BUCKETS: Final = 65_536


class RateLimit:
    """A token bucket per peer.

    Args:
        rate: tokens per second.
        burst: tokens that a bucket holds.
        clock: seconds that never go back.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._size = float(burst)
        self._clock = clock
        # Of each peer: its tokens, and when it had so many.
        self._buckets: OrderedDict[bytes | str, tuple[float, float]] = OrderedDict()

    def allows(self, peer: bytes | str) -> bool:
        """Take a token of ``peer``; False if it has none left."""
        return self.wait(peer) == 0.0

    def wait(self, peer: bytes | str) -> float:
        """Take a token of ``peer`` and return 0; or take none and return the seconds until it has one.

        The peer seen longest ago is forgotten first.
        """
        now = self._clock()
        tokens, at = self._buckets.get(peer, (self._size, now))
        tokens = min(self._size, tokens + (now - at) * self._rate)
        self._buckets[peer] = tokens - (tokens >= 1.0), now
        self._buckets.move_to_end(peer)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if tokens >= 1.0 else (1.0 - tokens) / self._rate
