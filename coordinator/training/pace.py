"""The pace of a step loop: who decides when a step may be charged, and when its sum may be decoded.

`OPEN` is that of a run whose loop is its own. `GatedPace` is that of a run whose loop a user owns: two gates in each
step, and saves and loads between two steps.

    admit      the step may be charged      <- watermark ``computed``; until then, what is due between two steps
    charge, compute, mask, bind
    release    the aggregators may reduce   <- watermark ``released``
"""

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from raycloak.coordinator.training.stop_signals import StopRequest
from raycloak.workers.terms.public_sums import PublicSums

if TYPE_CHECKING:
    from raycloak.coordinator.training.steps import Training


class StepLeft(Exception):
    """A stop while a step waited to be released: it stays charged and bound, and a resume repeats it."""


class Pace(Protocol):
    """The gates of a step loop; its methods are for the loop's own thread."""

    def admit(self, finished_steps: int, training: "Training") -> bool:
        """Do what is due after so many steps, and return when the next may be charged, or the finished run may end.

        Returns:
            False if the loop is to end here, as a stop.
        """
        ...

    def batches(self, step: int) -> tuple[Path, ...]:
        """Return the files with the sent examples of an admitted step; none where the run samples registered data."""
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


class _OpenPace:
    """A pace that never waits."""

    def admit(self, finished_steps: int, training: "Training") -> bool:
        return True

    def batches(self, step: int) -> tuple[Path, ...]:
        return ()

    def is_released(self, step: int) -> bool:
        return True

    def computed(self, step: int, epsilon: float | None, counted: PublicSums | None) -> None:
        pass

    def release(self, step: int) -> None:
        pass


OPEN: Final[Pace] = _OpenPace()
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

    Args:
        stop: ends every wait.
        computed: told of each step that waits for its release, once; called in the loop's thread.
        between: does a request between two steps; called in the loop's thread, in the order they were asked.
    """

    def __init__(
        self,
        stop: StopRequest,
        computed: Callable[[int, float | None, PublicSums | None], None],
        between: Callable[[R, "Training"], None],
    ) -> None:
        self._stop = stop
        self._computed = computed
        self._between = between
        # The one thing that threads share. It is reentrant, as a stop is made in a signal handler: a lock could be
        # held by the very thread that the signal interrupts.
        self._inbox: queue.SimpleQueue[_Allow | _Batches | _Due[R] | _Close | _Wake] = queue.SimpleQueue()
        self._charged_below = self._released_below = 0
        self._files: dict[int, tuple[Path, ...]] = {}
        self._due: deque[R] = deque()
        self._closed = False
        self._told = -1
        stop.then(lambda: self._inbox.put(_Wake()))

    def allow(self, computed: int, released: int) -> None:
        """Let steps below ``computed`` be charged, and those below ``released`` be reduced; neither ever falls."""
        self._inbox.put(_Allow(computed, released))

    def send(self, step: int, files: tuple[Path, ...]) -> None:
        """Name the files of a step's sent examples, before the step is allowed."""
        self._inbox.put(_Batches(step, files))

    def ask(self, request: R) -> None:
        """Have ``request`` done when it is due."""
        self._inbox.put(_Due(request))

    def close(self) -> None:
        """End the loop: a run whose steps are all finished is complete, another one is stopped."""
        self._inbox.put(_Close())

    def admit(self, finished_steps: int, training: "Training") -> bool:
        is_over = finished_steps == training.course.last_step
        self._take_all()
        while not self._stop.made:
            if self._due and self._due[0].after <= finished_steps:
                self._between(self._due.popleft(), training)
                self._take_all()
            elif self._closed:
                return is_over
            elif finished_steps < self._charged_below and not is_over:
                return True
            else:
                self._take(self._inbox.get())
        return False

    def batches(self, step: int) -> tuple[Path, ...]:
        return self._files.get(step, ())

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
            case _Allow(computed, released):
                self._charged_below = max(self._charged_below, computed)
                self._released_below = max(self._released_below, released)
            case _Batches(step, files):
                self._files[step] = files
            case _Due(request):
                self._due.append(request)
            case _Close():
                self._closed = True
            case _Wake():
                pass
