"""The places of drivers: which client gets the next one, and which gives its place up.

Rules, and nothing else: no store, no process. Tenants come before clients: a free place goes to the tenant that has the
fewest, among these to the one that got none for the longest time, and there to the client that waited longest.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


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
