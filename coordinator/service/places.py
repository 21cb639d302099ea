"""The places of drivers: which client gets the next one, and which gives its place up.

Rules, and nothing else: no store, no process. The client that waited longest comes first, and no tenant gets a second
place while another tenant waits for its first.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Place:
    """A place that a client has.

    Attributes:
        since: when it got the place, in seconds of a clock that never goes back.
        idle_since: since when it has no work; None while it has some.
        is_leaving: whether its driver was told to stop.
    """

    tenant: str
    since: float
    idle_since: float | None = None
    is_leaving: bool = False


def next_client(waiting: Sequence[tuple[str, str]], places: Collection[Place]) -> tuple[str, str]:
    """Return the (client, tenant) that gets a free place.

    Args:
        waiting: at least one, first the longest wait.
    """
    held = Counter(place.tenant for place in places)
    return min(waiting, key=lambda each: held[each[1]])  # the first of equals, so the longest wait


def leaving(
    waiting: Sequence[tuple[str, str]], places: Mapping[str, Place], now: float, idle_s: float, turn_s: float
) -> list[str]:
    """Return the clients whose places are to be given up, so that others come to work.

    An idle one leaves first. One with work leaves for a tenant without any place, if its own has several, or once it
    has had its turn.

    Guarantee: with n clients that always have work and p places, each waits for at most n / p turns.

    Args:
        waiting: clients for which there is no free place.
        turn_s: seconds for which a client with work keeps its place while others wait.
    """
    held = Counter(place.tenant for place in places.values() if not place.is_leaving)
    wanted = len(waiting) - sum(place.is_leaving for place in places.values())
    idle = [
        client
        for client, place in sorted(places.items(), key=lambda item: item[1].idle_since or now)
        if not place.is_leaving and place.idle_since is not None and now - place.idle_since >= idle_s
    ]
    chosen = idle[: max(wanted, 0)]
    held.subtract(places[client].tenant for client in chosen)
    without = {tenant for _, tenant in waiting if not any(place.tenant == tenant for place in places.values())}
    for _ in range(min(wanted - len(chosen), len(without))):
        tenant, most = max(held.items(), key=lambda item: item[1], default=("", 0))
        if most < 2:
            break
        of_it = {
            client: place
            for client, place in places.items()
            if place.tenant == tenant and not place.is_leaving and client not in chosen
        }
        chosen.append(min(of_it, key=lambda client: of_it[client].since))
        held[tenant] -= 1
    over = [
        client
        for client, place in sorted(places.items(), key=lambda item: item[1].since)
        if not place.is_leaving and client not in chosen and now - place.since >= turn_s
    ]
    return chosen + over[: max(wanted - len(chosen), 0)]
