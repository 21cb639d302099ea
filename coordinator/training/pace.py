"""The pace of a step loop: who decides when a step may be charged and computed, and when its sum may be decoded.

A request to stop it is made by any thread, or by a signal: the first ends the run after the step, the second at once.

`OPEN` is that of a run whose loop is its own. `GatedPace` is that of a run whose loop a user owns: two gates in each
step, and saves and loads between two steps.

    admit      the step may be charged      <- watermark ``computed``; until then, what is due between two steps
    charge
    computing  unless the step is held      <- ``held``
    mask, bind
    release    the aggregators may reduce   <- watermark ``released``
"""

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from raycloak.workers.terms.public_sums import PublicSums

if TYPE_CHECKING:
    # A driver starts before it imports what trains.
    from raycloak.coordinator.training.steps import Training


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


class StepLeft(Exception):
    """A stop while a step was held or waited to be released: it stays charged, and a resume repeats it."""


class Pace:
    """The gates of a step loop, all of them open: it never waits. Its methods are for the loop's own thread."""

    def admit(self, training: "Training") -> bool:
        """Do what is due between two steps, and return when the next may be charged, or the finished run may end.

        Returns:
            False if the loop is to end here, as a stop.
        """
        return True

    def ends(self, training: "Training", ending: str) -> bool:
        """Return when a run whose account has no room, or that stops early, may end; until then, do what is due.

        Returns:
            False if the execution is to end as a stop.
        """
        return True

    def batches(self, step: int) -> tuple[Path, ...]:
        """Return the files with the sent examples of an admitted step; none where the run samples registered data."""
        return ()

    def computing(self, step: int, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a block during which ``cancel`` is called, perhaps twice and by any thread, if the step is held."""
        return nullcontext()

    def is_held(self, step: int) -> bool:
        """Return whether a charged step is not to be computed now."""
        return False

    def resume(self, step: int, epsilon: float | None) -> None:
        """Return when a charged step is to be computed after all.

        Args:
            epsilon: as of :meth:`computed`.

        Raises:
            StepLeft: a stop came first.
        """

    def is_released(self, step: int) -> bool:
        """Return whether :meth:`release` would return at once."""
        return True

    def computed(self, step: int, epsilon: float | None, counted: PublicSums | None) -> None:
        """Take note that a step is charged and computed, and that the ledger has bound its vectors.

        Args:
            epsilon: of the account, as the step's receipt states it; None if the run is not private.
            counted: exact sums over the step's examples; None if the run is private.
        """

    def release(self, step: int) -> None:
        """Return when the aggregators may reduce the step.

        Raises:
            StepLeft: a stop came first.
        """


OPEN: Final = Pace()
"""The pace of ``raycloak run``."""


class GatedPace(Pace):
    """A pace that another thread sets: ``allow``, ``send``, ``ask`` and ``close`` are for any thread.

    Guarantee: before a step is admitted nothing of it is charged, and before it is released no aggregator is asked.
    A step that was told as held is neither computed nor released before it is allowed again.

    Args:
        stop: ends every wait.
        computed: told of each step that waits for its release, once; called in the loop's thread.
        held: told of each step that is held and that nobody computes any more, once for each time; with the epsilon of
            the account if the step is known to be charged. Called in the loop's thread.
        over: told why no step will follow, before the run ends for it; called in the loop's thread.
    """

    def __init__(
        self,
        stop: StopRequest,
        computed: Callable[[int, float | None, PublicSums | None], None],
        held: Callable[[int, float | None], None],
        over: Callable[[str], None],
    ) -> None:
        self._stop = stop
        self._computed = computed
        self._tell_held = held
        self._tell_over = over
        # What the loop's thread is to note: the one thing that threads share. It is reentrant, as a stop is made in a
        # signal handler: a lock could be held by the very thread that the signal interrupts.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._charged_below = self._released_below = 0
        self._files: dict[int, tuple[Path, ...]] = {}
        self._due: deque[tuple[int, Callable[[Training], None]]] = deque()
        self._closed = False
        self._told = -1
        self._held = self._held_told = False
        # Set by the loop's thread and called by others.
        self._cancel: Callable[[], None] | None = None
        stop.then(lambda: self._inbox.put(lambda: None))

    def allow(self, computed: int, released: int, held: bool = False) -> None:
        """Let steps below ``computed`` be charged, and those below ``released`` be reduced; neither ever falls.

        But a step that is told as held is released no more until it is allowed anew.

        Args:
            held: whether the next step to be computed is to wait; workers that compute it now leave it.
        """

        def note() -> None:
            self._charged_below = max(self._charged_below, computed)
            self._released_below = max(self._released_below, released)
            self._held = held
            self._held_told = self._held_told and held

        self._inbox.put(note)
        # After the put, as `computing` looks into the inbox after it has set this: one of the two finds the other.
        cancel = self._cancel
        if held and cancel is not None:
            cancel()

    def send(self, step: int, files: tuple[Path, ...]) -> None:
        """Name the files of a step's sent examples, before the step is allowed."""
        self._inbox.put(lambda: self._files.update({step: files}))

    def ask(self, after: int, act: Callable[["Training"], None]) -> None:
        """Have ``act`` called in the loop's thread once ``after`` steps are finished, in the order of the requests."""
        self._inbox.put(lambda: self._due.append((after, act)))

    def close(self) -> None:
        """End the loop: a run whose steps are all finished is complete, another one is stopped."""

        def note() -> None:
            self._closed = True

        self._inbox.put(note)

    def admit(self, training: "Training") -> bool:
        return self._admit(training, training.is_over)

    def ends(self, training: "Training", ending: str) -> bool:
        self._tell_over(ending)
        return self._admit(training, True)

    def _admit(self, training: "Training", is_over: bool) -> bool:
        finished_steps = training.finished_steps
        self._take_all()
        while not self._stop.made:
            if self._due and self._due[0][0] <= finished_steps:
                self._due.popleft()[1](training)
                self._take_all()
            elif self._closed:
                return is_over
            elif finished_steps < self._charged_below and not is_over:
                if not self._held:
                    return True
                self._leave(finished_steps, None)
                self._inbox.get()()
            else:
                self._inbox.get()()
        return False

    def batches(self, step: int) -> tuple[Path, ...]:
        return self._files.get(step, ())

    @contextmanager
    def computing(self, step: int, cancel: Callable[[], None]) -> Iterator[None]:
        self._cancel = cancel
        try:
            if self.is_held(step):
                cancel()
            yield
        finally:
            self._cancel = None

    def is_held(self, step: int) -> bool:
        self._take_all()
        return self._held

    def resume(self, step: int, epsilon: float | None) -> None:
        while self.is_held(step):
            if self._stop.made or self._closed:
                raise StepLeft
            self._leave(step, epsilon)
            self._inbox.get()()

    def _leave(self, step: int, epsilon: float | None) -> None:
        """Take a held step's release back, and tell that nobody computes it."""
        if not self._held_told:
            self._held_told = True
            self._released_below = min(self._released_below, step)
            self._tell_held(step, epsilon)

    def is_released(self, step: int) -> bool:
        self._take_all()
        return step < self._released_below

    def computed(self, step: int, epsilon: float | None, counted: PublicSums | None) -> None:
        # Another attempt of the step has it bound again.
        if step > self._told:
            self._told = step
            self._computed(step, epsilon, counted)

    def release(self, step: int) -> None:
        while not self.is_released(step):
            if self._stop.made or self._closed:
                raise StepLeft
            self._inbox.get()()

    def _take_all(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
