"""The drivers: which client has a place for one, since when, and what they are told.

Tenants come before clients: a free place goes to the tenant that has the fewest, among these to the one that got none
for the longest time, and there to the client that waited longest.

In memory is only which driver processes there are; they are lost with this process, as the drivers are.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.service.client_book import ClientBook
from raycloak.coordinator.service.limits import LimitsConfig
from raycloak.coordinator.service.pipe import Allow, Begin, Close, Command
from raycloak.coordinator.service.ports import DriverPort
from raycloak.coordinator.service.store import ClientRow, ClientState
from raycloak.metrics.service_errors import FutureFailedError, ServiceError

_MOST_RESTARTS: Final = 3
"""Drivers of one client that may be lost without having finished a step between them."""
_MOST_LATE: Final = 3
"""Turns of one client that may end without having computed a step between them."""
_LOCKED_RETRY_S: Final = 1.0
_LOCKED_DEADLINE_S: Final = 600.0
"""For how long a driver is started again while another process executes the run: one of a service that was killed ends
after its step."""
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class ClientPlace:
    """A place that a client has.

    Attributes:
        since: when it got the place, in seconds of a clock that never goes back.
        idle_since: since when it has no work; None while it has some.
        leaving_since: since when its driver is to end by itself; None while it is not.
        is_late: whether its driver was ended because it had not ended by itself.
    """

    tenant: str
    since: float
    idle_since: float | None = None
    leaving_since: float | None = None
    is_late: bool = False

    def leave(self, now: float) -> None:
        """Note that its driver is to end by itself from now on."""
        if self.leaving_since is None:
            self.leaving_since = now


@dataclass(slots=True)
class DriverState:
    """The known facts of a driver process."""

    place: ClientPlace
    is_ready: bool = False
    has_ended: bool = False
    told: Allow | None = None
    computed: int = -1  # the step that it computed last, and its tokens
    tokens: int | None = None
    phase: str = "waiting for the driver"


class DriverDesk:
    """The drivers of all clients, and the places that they have. For one thread at a time.

    Args:
        base: folder that relative paths of the settings start from.
        monotonic: seconds that never go back.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        base: Path,
        book: ClientBook,
        processes: DriverPort,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._base = base
        self._book, self._store = book, book.store
        self._processes = processes
        self._monotonic = monotonic
        self.of: dict[str, DriverState] = {}
        self._served: dict[str, float] = {}  # when each tenant last got a place for a driver
        self._stopping = False
        # Of clients whose driver was lost, and of those whose driver gave its place up too late: how often since a
        # step. Then when the run's lock was first taken, and is to be tried again.
        self._lost: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._locked: dict[str, tuple[float, float]] = {}

    def tell(self, client_id: str, command: Command) -> None:
        """Send a command to a client's driver."""
        self._book.later(lambda: self._processes.send(client_id, command))

    def allow(self, client: ClientRow) -> None:
        """Tell a driver that is ready how far it may go, if that has changed."""
        driver = self.of.get(client.client_id)
        if driver is not None and driver.is_ready and (due := client.steps.due(driver.told)) is not None:
            driver.told = due
            self.tell(client.client_id, due)

    def leave(self, client_id: str) -> None:
        """Have a driver give its place up after its step."""
        driver = self.of[client_id]
        driver.is_ready = False
        driver.place.leave(self._monotonic())
        self._book.later(lambda: self._processes.stop(client_id))

    def close(self, client_id: str) -> None:
        """Have a driver end its run after the step that computes."""
        self.of[client_id].place.leave(self._monotonic())
        self.tell(client_id, Close())

    def stop(self) -> None:
        """Start no driver any more, and end each after its step."""
        self._stopping = True
        for client_id in self.of:
            self.leave(client_id)

    def ended(self, driver: DriverState) -> None:
        """Take note that a driver executes nothing any more."""
        driver.has_ended, driver.is_ready = True, False
        driver.place.leave(self._monotonic())

    def moved(self, client_id: str) -> None:
        """Take note that a client's driver computed a step."""
        self._lost.pop(client_id, None)
        self._late.pop(client_id, None)

    def ready(self, client_id: str) -> None:
        """Take note that a client's driver executes its run."""
        driver = self.of[client_id]
        driver.is_ready, driver.phase = driver.place.leaving_since is None, "training"
        self._locked.pop(client_id, None)

    def waits_for_lock(self, client_id: str) -> bool:
        """Take note that another process executes a client's run; return whether a driver is to be started again."""
        now = self._monotonic()
        first, _ = self._locked.get(client_id, (now, now))
        self._locked[client_id] = (first, now + _LOCKED_RETRY_S)
        return now - first < _LOCKED_DEADLINE_S

    def gone(self, client: ClientRow, said: Exited) -> ServiceError | None:
        """Take note of the end of a driver; return a cause to end its client if too many have ended without a step."""
        client_id, driver = client.client_id, self.of.pop(client.client_id)
        if client.status == ClientState.TERMINATED:
            return None
        if driver.place.is_late and not driver.has_ended:
            self._late[client_id] += 1
            if self._late[client_id] > _MOST_LATE:
                return FutureFailedError(
                    "step_too_long",
                    f"turn after turn of {self._limits.turn_seconds + self._limits.leave_seconds:g} s ended before a "
                    "step had, while other clients waited.",
                    "Make its steps shorter, by fewer examples or a smaller model; what was charged stays charged.",
                )
        elif driver.place.leaving_since is None:
            # In the operator's log alone: a log's line may be about what is no tenant's business.
            _LOG.warning("client %s: its driver ended (%d): %s", client_id, said.code, said.last_words)
            self._lost[client_id] += 1
            if self._lost[client_id] > _MOST_RESTARTS:
                return FutureFailedError("driver_lost", "the client's driver process was lost again and again.")
        return None

    def note_work(self, client: ClientRow) -> None:
        """Take note of whether a client's driver has work."""
        driver = self.of.get(client.client_id)
        if driver is not None:
            since = driver.place.idle_since
            idle = driver.is_ready and not client.open
            driver.place.idle_since = (self._monotonic() if since is None else since) if idle else None

    def phase(self, client: ClientRow) -> str:
        """Return what a client's driver does, in words."""
        driver = self.of.get(client.client_id)
        if driver is not None:
            return driver.phase
        return "waiting for a place" if client.open or client.status == ClientState.INITIALIZING else ""

    def assign(self) -> None:
        """Give free places to clients that wait, and have places given up for the others."""
        if self._stopping:
            return
        now = self._monotonic()
        waiting = [
            each
            for each in self._store.waiting_clients()
            if each[0] not in self.of and self._locked.get(each[0], (0.0, 0.0))[1] <= now
        ]
        limits = self._limits
        while waiting and len(self.of) < limits.active_clients:
            chosen = next_client(waiting, [driver.place for driver in self.of.values()], self._served)
            waiting.remove(chosen)
            client_id, tenant = chosen
            client = self._store.client(client_id)
            assert client is not None, "a client that waits is in the store"
            run = json.loads(client.run_config)
            begin = Begin(config=run, base=self._base, run_secret=None, run_id=client.run_id or None)
            self._served[tenant] = now
            self.of[client_id] = DriverState(ClientPlace(tenant, now))
            self._book.later(partial(self._processes.start, client_id, begin))
        places = {client_id: driver.place for client_id, driver in self.of.items()}
        for client_id in leaving(waiting, places, self._served, now, limits.idle_seconds, limits.turn_seconds):
            self.leave(client_id)
        for client_id in late(places, now, limits.leave_seconds) if waiting else ():
            _LOG.warning("client %s: its driver did not give its place up in time and is ended", client_id)
            self._book.later(partial(self._processes.kill, client_id))


def next_client(
    waiting: Sequence[tuple[str, str]], places: Collection[ClientPlace], served: Mapping[str, float]
) -> tuple[str, str]:
    """Return the (client, tenant) that gets a free place.

    Args:
        waiting: at least one, first the longest wait.
        served: when each tenant last got a place, by the clock of `ClientPlace`.
    """
    return _first(waiting, Counter(place.tenant for place in places), served)


def leaving(
    waiting: Sequence[tuple[str, str]],
    places: Mapping[str, ClientPlace],
    served: Mapping[str, float],
    now: float,
    idle_s: float,
    turn_s: float,
) -> list[str]:
    """Return the clients whose places are to be given up, so that others come to work.

    An idle one leaves first. One with work leaves for a tenant that has at least two places fewer than its own, or,
    once it has had its turn, for any client that would get the place.

    Guarantee: no client waits longer because another tenant has more clients. With t tenants that always have work and
    p places, a tenant has at least p // t places while it can use them, on which its clients take turns; if t > p, it
    has a place in at least one of ceil(t / p) turns.

    Args:
        waiting: clients for which there is no free place.
        served: as in `next_client`.
        turn_s: seconds for which a client with work keeps its place while others wait.
    """
    staying = {client: place for client, place in places.items() if place.leaving_since is None}
    held, left, chosen = Counter(place.tenant for place in staying.values()), list(waiting), list[str]()

    def take() -> None:
        first = _first(left, held, served)
        left.remove(first)
        held[first[1]] += 1

    def leave(client: str) -> None:
        held[staying.pop(client).tenant] -= 1
        chosen.append(client)
        take()

    for _ in range(min(len(places) - len(staying), len(left))):
        take()
    idle = [(place.idle_since, client) for client, place in staying.items() if place.idle_since is not None]
    for since, client in sorted(idle):
        if left and now - since >= idle_s:
            leave(client)
    # Each time the numbers of two tenants come nearer to each other, so nobody leaves for long.
    while left and staying:
        most = max(held[place.tenant] for place in staying.values())
        if most - held[_first(left, held, served)[1]] < 2:
            break
        of_most = [client for client, place in staying.items() if held[place.tenant] == most]
        leave(min(of_most, key=lambda client: (staying[client].idle_since is None, staying[client].since)))
    for client, place in sorted(staying.items(), key=lambda item: item[1].since):
        if not left or now - place.since < turn_s:
            break
        # Else it would get its place back at once.
        if held[_first(left, held, served)[1]] < held[place.tenant] or place.tenant in {each for _, each in left}:
            leave(client)
    return chosen


def late(places: Mapping[str, ClientPlace], now: float, leave_s: float) -> list[str]:
    """Return the clients whose drivers have not ended by themselves in ``leave_s`` seconds, each once."""
    found = []
    for client, place in places.items():
        if place.leaving_since is not None and now - place.leaving_since >= leave_s and not place.is_late:
            place.is_late = True
            found.append(client)
    return found


def _first(waiting: Sequence[tuple[str, str]], held: Mapping[str, int], served: Mapping[str, float]) -> tuple[str, str]:
    # The first of equals, so the longest wait.
    return min(waiting, key=lambda each: (held.get(each[1], 0), served.get(each[1], float("-inf"))))
