"""Threads that share the pieces of one computation on words.

Words are integers, and what makes or hashes them depends on a piece's place alone. So no byte depends on the number of
threads, and a run's numerics class does not state it.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Thread
from typing import Final, Self, TypeVar

from raycloak.metrics.proof_bounds import require_bound

P = TypeVar("P")

PIECE_WORDS: Final = 2**17
"""The words that are worth a thread's start, which takes a tenth of a millisecond: half a millisecond of masks."""

# More than one for each thread: one on a CPU that others use as well then leaves its pieces to the rest.
_PIECES_EACH: Final = 8


class WordThreads:
    """The threads of one process's share of CPUs.

    Guarantee: when a computation ends, in whichever way, so have its threads. The first exception ends it: no further
    piece is begun, and nothing is written any more once the exception is raised.

    A computation starts its own threads. They then have the caller's rounding and denormal modes, and none is left for
    a forked process to miss.

    Args:
        count: at least 1; the caller's own is one of them.
    """

    def __init__(self, count: int) -> None:
        require_bound(count > 0, "the caller's thread works too")
        self._count = count

    @classmethod
    def of_share(cls, cpus: int | None = None) -> Self:
        """Return as many threads as ``cpus``, at least 1 and at most the CPUs that this process may run on.

        Args:
            cpus: what was reserved for this process; None takes all that it may run on.
        """
        usable = len(os.sched_getaffinity(0))
        return cls(max(1, usable if cpus is None else min(cpus, usable)))

    @property
    def count(self) -> int:
        """The number of threads, the caller's included."""
        return self._count

    def cut(self, length: int, least: int) -> list[range]:
        """Cut [0, length) into consecutive ranges for :meth:`share`: one for one thread, else several for each.

        Args:
            least: length that is worth a thread's start; each range but the last is a multiple of it.
        """
        if self._count == 1:
            return [range(length)]
        size = -(-length // (self._count * _PIECES_EACH * least)) * least or least
        return [range(start, min(start + size, length)) for start in range(0, length, size)]

    def share(self, pieces: Sequence[P], work: Callable[[Iterator[P]], None]) -> None:
        """Have every piece done once, in any order.

        Args:
            work: is called once in each thread, and does all that its iterator yields; buffers that it makes are the
                thread's own.

        Raises:
            BaseException: the first that ``work`` raises.
        """
        # A deque's ends are safe to use from several threads.
        left, failures = deque(pieces), list[BaseException]()

        def taken() -> Iterator[P]:
            while left and not failures:
                try:
                    yield left.popleft()
                except IndexError:  # another thread was faster
                    return

        def help_along() -> None:
            try:
                work(taken())
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                failures.append(error)

        helpers = list[Thread]()
        try:
            for _ in range(min(self._count, len(pieces)) - 1):
                helper = Thread(target=help_along, name="words")
                helper.start()
                helpers.append(helper)
            work(taken())
            for helper in helpers:
                helper.join()
        except BaseException as error:  # noqa: BLE001 - raised below, after the last write
            failures.append(error)
        # Again, if the caller was interrupted.
        for helper in helpers:
            helper.join()
        if failures:
            first = failures[0]
            # Its traceback has this frame: held by it, the exception would keep clear vectors in memory.
            failures.clear()
            try:
                raise first
            finally:
                del first


def blocks_of(pieces: Iterable[range], block: int) -> Iterator[slice]:
    """Cut each piece into slices of ``block`` and a shorter last one."""
    for piece in pieces:
        for start in range(piece.start, piece.stop, block):
            yield slice(start, min(start + block, piece.stop))


ONE_THREAD: Final = WordThreads(1)
"""The caller's thread alone."""
