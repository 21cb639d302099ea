"""Rate limits: a token bucket per peer, in bounded memory. Not safe for several threads at once.

A peer that was forgotten to make room starts with a full bucket again.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Bounds the memory of the rate limits: a stranger has as many addresses and identities as it likes.
_MAX_BUCKETS: Final = 65_536


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


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
        self._buckets: OrderedDict[bytes | str, _Bucket] = OrderedDict()

    def allows(self, peer: bytes | str) -> bool:
        """Take a token of ``peer``; False if it has none left."""
        return self.wait(peer) == 0.0

    def wait(self, peer: bytes | str) -> float:
        """Take a token of ``peer`` and return 0; or take none and return the seconds until it has one.

        The peer seen longest ago is forgotten first.
        """
        now = self._clock()
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = self._buckets[peer] = _Bucket(self._size, now)
            if len(self._buckets) > _MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(peer)
        bucket.tokens = min(self._size, bucket.tokens + (now - bucket.at) * self._rate)
        bucket.at = now
        if bucket.tokens < 1.0:
            return (1.0 - bucket.tokens) / self._rate
        bucket.tokens -= 1.0
        return 0.0
