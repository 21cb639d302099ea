"""The pace of a step loop: who decides when a step may be charged and computed, and when its sum may be decoded.

`OPEN` is that of a run whose loop is its own. `GatedPace` is that of a run whose loop a user owns: two gates in each
step, and saves and loads between two steps.

    admit      the step may be charged      <- watermark ``computed``; until then, what is due between two steps
    charge
    computing  unless the step is held      <- ``held``
    mask, bind
    release    the aggregators may reduce   <- watermark ``released``
"""

import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from raycloak.coordinator.training.stop_signals import StopRequest
from raycloak.workers.terms.public_sums import PublicSums

if TYPE_CHECKING:
    # A driver starts before it imports what saves and loads states.
    from raycloak.coordinator.training.state_requests import Between


class StepLeft(Exception):
    """A stop while a step was held or waited to be released: it stays charged, and a resume repeats it."""


class Pace(Protocol):
    """The gates of a step loop; its methods are for the loop's own thread."""

    def admit(self, between: "Between") -> bool:
        """Do what is due between two steps, and return when the next may be charged, or the finished run may end.

        Returns:
            False if the loop is to end here, as a stop.
        """
        ...

    def ends(self, between: "Between", ending: str) -> bool:
        """Return when a run whose account has no room, or that stops early, may end; until then, do what is due.

        Returns:
            False if the execution is to end as a stop.
        """
        ...

    def batches(self, step: int) -> tuple[Path, ...]:
        """Return the files with the sent examples of an admitted step; none where the run samples registered data."""
        ...

    def computing(self, step: int, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a block during which ``cancel`` is called, perhaps twice and by any thread, if the step is held."""
        ...

    def is_held(self, step: int) -> bool:
        """Return whether a charged step is not to be computed now."""
        ...

    def resume(self, step: int, epsilon: float | None) -> None:
        """Return when a charged step is to be computed after all.

        Args:
            epsilon: as of :meth:`computed`.

        Raises:
            StepLeft: a stop came first.
        """
        ...

    def is_released(self, step: int) -> bool:
        """Return whether :meth:`release` would return at once."""
        ...

    def computed(self, step: int, epsilon: float | None, counted: PublicSums | None) -> None:
        """Take note that a step is charged and computed, and that the ledger has bound its vectors.

        Args:
            epsilon: of the account, as the step's receipt states it; None if the run is not private.
            counted: exact sums over the step's examples; None if the run is private.
        """
        ...

    def release(self, step: int) -> None:
        """Return when the aggregators may reduce the step.

        Raises:
            StepLeft: a stop came first.
        """
        ...


class OpenPace:
    """A pace that never waits."""

    def admit(self, between: "Between") -> bool:
        return True

    def ends(self, between: "Between", ending: str) -> bool:
        return True

    def batches(self, step: int) -> tuple[Path, ...]:
        return ()

    def computing(self, step: int, cancel: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()

    def is_held(self, step: int) -> bool:
        return False

    def resume(self, step: int, epsilon: float | None) -> None:
        pass

    def is_released(self, step: int) -> bool:
        return True

    def computed(self, step: int, epsilon: float | None, counted: PublicSums | None) -> None:
        pass

    def release(self, step: int) -> None:
        pass


OPEN: Final[Pace] = OpenPace()
"""The pace of ``raycloak run``."""


class Request(Protocol):
    """A request to do something between two steps; see `raycloak.coordinator.training.state_requests`."""

    @property
    def after(self) -> int:
        """The number of finished steps at which it is due."""
        ...


R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class _Allow:
    computed: int
    released: int
    held: bool


@dataclass(frozen=True, slots=True)
class _Batches:
    step: int
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Due(Generic[R]):
    request: R


class _Close:
    """The loop's owner is done with it."""


class _Wake:
    """A stop was requested."""


class GatedPace(Generic[R]):
    """A pace that another thread sets: ``allow``, ``batches``, ``ask`` and ``close`` are for any thread.

    Guarantee: before a step is admitted nothing of it is charged, and before it is released no aggregator is asked.
    A step that was told as held is neither computed nor released before it is allowed again.

    Args:
        stop: ends every wait.
        computed: told of each step that waits for its release, once; called in the loop's thread.
        held: told of each step that is held and that nobody computes any more, once for each time; with the epsilon of
            the account if the step is known to be charged. Called in the loop's thread.
        act: does a request between two steps; called in the loop's thread, in the order they were asked.
        over: told why no step will follow, before the run ends for it; called in the loop's thread.
    """

    def __init__(
        self,
        stop: StopRequest,
        computed: Callable[[int, float | None, PublicSums | None], None],
        held: Callable[[int, float | None], None],
        act: Callable[[R, "Between"], None],
        over: Callable[[str], None],
    ) -> None:
        self._stop = stop
        self._computed = computed
        self._tell_held = held
        self._act = act
        self._tell_over = over
        # The one thing that threads share. It is reentrant, as a stop is made in a signal handler: a lock could be
        # held by the very thread that the signal interrupts.
        self._inbox: queue.SimpleQueue[_Allow | _Batches | _Due[R] | _Close | _Wake] = queue.SimpleQueue()
        self._charged_below = self._released_below = 0
        self._files: dict[int, tuple[Path, ...]] = {}
        self._due: deque[R] = deque()
        self._closed = False
        self._told = -1
        self._held = self._held_told = False
        # Set by the loop's thread and called by others.
        self._cancel: Callable[[], None] | None = None
        stop.then(lambda: self._inbox.put(_Wake()))

    def allow(self, computed: int, released: int, held: bool = False) -> None:
        """Let steps below ``computed`` be charged, and those below ``released`` be reduced; neither ever falls.

        But a step that is told as held is released no more until it is allowed anew.

        Args:
            held: whether the next step to be computed is to wait; workers that compute it now leave it.
        """
        self._inbox.put(_Allow(computed, released, held))
        # After the put, as `computing` looks into the inbox after it has set this: one of the two finds the other.
        cancel = self._cancel
        if held and cancel is not None:
            cancel()

    def send(self, step: int, files: tuple[Path, ...]) -> None:
        """Name the files of a step's sent examples, before the step is allowed."""
        self._inbox.put(_Batches(step, files))

    def ask(self, request: R) -> None:
        """Have ``request`` done when it is due."""
        self._inbox.put(_Due(request))

    def close(self) -> None:
        """End the loop: a run whose steps are all finished is complete, another one is stopped."""
        self._inbox.put(_Close())

    def admit(self, between: "Between") -> bool:
        return self._admit(between, between.is_over)

    def ends(self, between: "Between", ending: str) -> bool:
        self._tell_over(ending)
        return self._admit(between, True)

    def _admit(self, between: "Between", is_over: bool) -> bool:
        finished_steps = between.finished_steps
        self._take_all()
        while not self._stop.made:
            if self._due and self._due[0].after <= finished_steps:
                self._act(self._due.popleft(), between)
                self._take_all()
            elif self._closed:
                return is_over
            elif finished_steps < self._charged_below and not is_over:
                if not self._held:
                    return True
                self._leave(finished_steps, None)
                self._take(self._inbox.get())
            else:
                self._take(self._inbox.get())
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
            self._take(self._inbox.get())

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
            self._take(self._inbox.get())

    def _take_all(self) -> None:
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, said: _Allow | _Batches | _Due[R] | _Close | _Wake) -> None:
        match said:
            case _Allow(computed, released, held):
                self._charged_below = max(self._charged_below, computed)
                self._released_below = max(self._released_below, released)
                self._held = held
                self._held_told = self._held_told and held
            case _Batches(step, files):
                self._files[step] = files
            case _Due(request):
                self._due.append(request)
            case _Close():
                self._closed = True
            case _Wake():
                pass
