"""The connections of a gRPC server: what gRPC bounds of them by itself, and a guard that bounds the rest.

gRPC reads headers, and up to a window of each call, for whoever connects. It bounds neither how long a connection
without an admitted call lasts nor how many one address has. The guard does that from beside it: it looks at the sockets
that this process has accepted, and shuts down those that nobody may keep. So no byte takes a detour.

Guarantee: a connection on which no call was ever admitted ends `ConnectionBounds.stranger_s` after it was opened, give
or take a look, or `ConnectionBounds.decision_s` later if a call is being decided. It ends sooner if a call on it was
refused, or if it sent more than a first call needs. Once half of all places are taken, an address has no more
than its bound.
"""

import ctypes
import logging
import math
import os
import socket
import stat
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final, Self, TypeAlias
from urllib.parse import unquote

WINDOW_BYTES: Final = 16_384
"""Of one call, that gRPC takes before anybody reads it. With its probes of the bandwidth it would be megabytes."""
CONNECTION_BYTES: Final = 65_536
"""Measured of a connection with TLS and no call: 50 to 60 KiB."""
UNCLAIMED_CALLS: Final = 128
"""Calls of all connections that no handler has looked at; gRPC refuses more. A handler is there within milliseconds."""
METADATA_BYTES: Final = 16_384
"""Of the headers of one call: a token, a version and a request id, and what proxies add."""
_LOOK_S: Final = 0.5
_TRIM_S: Final = 2.0
_TRIMS_S: Final = 5.0
"""How often, and for how long after a connection has gone, memory is given back: gRPC frees it piece by piece."""
_REFUSED_S: Final = 1.0
"""For a refusal to arrive, before the connection on which it was the only answer ends."""
_STRANGER_BYTES: Final = 2**18
"""That a connection may send before a call on it was admitted. gRPC's buffer for it grows with what comes at once."""
_TCP_INFO_RECEIVED: Final = 128
"""Place of the bytes that were received in Linux's ``struct tcp_info``."""
_FORGET_S: Final = 5.0
"""For which a call is remembered whose connection is not seen: more than it takes to see a new one."""
_FILES: Final = "/proc/self/fd"
_LOG = logging.getLogger(__name__)

Place: TypeAlias = tuple[str, int]
"""The other end of a connection: its address, in one spelling, and its port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """The bounds of a server's connections.

    Attributes:
        connections: at once; gRPC turns more away.
        per_address: of one address, or of one IPv6 /64, once half of ``connections`` are taken.
        calls: of one connection at once.
        message_bytes: of one message.
        stranger_s: for which a connection lasts on which no call was ever admitted.
        decision_s: for which it lasts longer while a call on it is decided.
        idle_s: after which a connection without a call is closed.
        age_s: after which any connection is closed; its calls get another ``grace_s``. None: never.
    """

    connections: int
    per_address: int
    calls: int
    message_bytes: int
    stranger_s: float
    idle_s: float
    decision_s: float = 0.0
    age_s: float | None = None
    grace_s: float = 0.0

    def options(self) -> tuple[tuple[str, int], ...]:
        """Return the bounds that gRPC keeps, as options of its server."""
        ages = () if self.age_s is None else (
            ("grpc.max_connection_age_ms", _ms(self.age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(self.grace_s)),
        )  # fmt: skip
        return (
            *ages,
            ("grpc.server_handshake_timeout_ms", _ms(self.stranger_s)),
            ("grpc.max_connection_idle_ms", _ms(self.idle_s)),
            ("grpc.max_allowed_incoming_connections", self.connections),
            ("grpc.max_concurrent_streams", self.calls),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_metadata_size", METADATA_BYTES),
            # The window of a call is fixed. Else it begins at 4 MiB, and grows with the speed of the network.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            # From the first number to the second it would refuse some at random.
            ("grpc.server.max_pending_requests", UNCLAIMED_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", UNCLAIMED_CALLS),
            # A dead peer is noticed, and one that only pings is closed.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
            ("grpc.http2.max_ping_strikes", 2),
            # With reuse, a second service could take the same port, and a part of the calls.
            ("grpc.so_reuseport", 0),
        )

    @property
    def most_bytes(self) -> int:
        """The memory that all connections may take together, without the calls that were admitted."""
        return self.connections * CONNECTION_BYTES + UNCLAIMED_CALLS * (WINDOW_BYTES + METADATA_BYTES)


@dataclass(slots=True)
class _Connection:
    """An accepted socket; ``number`` is its file descriptor, which may be another's by now."""

    place: Place
    number: int
    opened: float


@dataclass(slots=True)
class _Calls:
    """The calls of a connection: how many are open, when the newest began or ended, and when the newest admitted one.

    ``admitted`` is None while none was; ``refused`` is when one was first.
    """

    open: int
    newest: float
    admitted: float | None = None
    refused: float | None = None


_NONE: Final = _Calls(0, 0.0)
"""The calls of a connection that has none."""


class GuardedCall:
    """A call that a guard knows of, open inside the block. Its connection is kept meanwhile; and longer, if admitted.

    The block ends with the call's handler, and not when gRPC says that the call is over: a callback for that makes gRPC
    keep the whole call until Python looks for garbage, and strangers have many calls.
    """

    def __init__(self, calls: _Calls, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._lock = lock
        self._clock = clock
        self._is_admitted = False

    def admit(self) -> None:
        """Note that the service has to do with this caller."""
        with self._lock:
            self._is_admitted = True
            self._calls.admitted = self._clock()

    def refuse(self) -> None:
        """Note that the service has nothing to do with this caller; its connection ends, unless another call on it was
        admitted."""
        with self._lock:
            if self._calls.refused is None:
                self._calls.refused = self._clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls.open -= 1
            self._calls.newest = self._clock()
            if self._is_admitted:
                self._calls.admitted = self._calls.newest


class ConnectionGuard:
    """Ends the connections of a server that no call keeps. For any thread.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, bounds: ConnectionBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[Place, _Calls] = {}
        self._connections: dict[int, _Connection] = {}  # by the inode of the socket, which is nobody else's
        self._others: set[int] = set()  # sockets that are none of this server's connections
        self._trims_until = self._trimmed = clock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._port = 0

    def start(self, port: int) -> None:
        """Guard the connections of a TCP port that this process listens on, until :meth:`stop`."""
        self._port = port
        self._thread = threading.Thread(target=self._watch, name="connection-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the guard; the connections stay."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def connections(self) -> int:
        """The number of connections at the last look."""
        return len(self._connections)

    def call(self, peer: str) -> GuardedCall:
        """Note that a call has begun, which ends with the block of what is returned.

        Args:
            peer: as gRPC's context names it.
        """
        place, now = _place_of(peer), self._clock()
        with self._lock:
            calls = self._calls.setdefault(place, _Calls(0, now))
            calls.open += 1
            calls.newest = now
        return GuardedCall(calls, self._lock, self._clock)

    def look(self) -> None:
        """Look at all connections once, and end those that nobody may keep."""
        now = self._clock()
        found = self._found(now)
        gone = bool(self._connections.keys() - found.keys())
        self._connections = found
        with self._lock:
            ends = self._overdue(now)
            places = {each.place for each in found.values()}
            # A connection that the listing has missed, as it was opened meanwhile, is there the next time.
            self._calls = {
                place: calls
                for place, calls in self._calls.items()
                if calls.open or place in places or now - calls.newest <= _FORGET_S
            }
        for inode in ends:
            if (copy := _opened(found[inode].number, inode)) is not None:
                # For both sides; gRPC notices, and closes it.
                with copy, suppress(OSError):
                    copy.shutdown(socket.SHUT_RDWR)
        if gone:
            self._trims_until = now + _TRIMS_S
        if now < self._trims_until and now - self._trimmed >= _TRIM_S:
            self._trimmed = now
            # The allocator keeps memory of closed connections; only glibc's does, and can return it.
            with suppress(AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - what it could not do now it does at the next look
                _LOG.exception("connections could not be looked at")

    def _found(self, now: float) -> dict[int, _Connection]:
        """Return the connections that are open now, by inode."""
        found, others = dict[int, _Connection](), set[int]()
        for name in os.listdir(_FILES):  # noqa: PTH208 - a path for each would take longer than all the rest
            number = int(name)
            inode = _socket_inode(number)
            if inode is None:
                continue
            known = self._connections.get(inode)
            if known is None and inode not in self._others:
                place = _other_end(number, inode, self._port)
                known = _Connection(place, number, now) if place is not None else None
            if known is None:
                others.add(inode)
            else:
                known.number = number
                found[inode] = known
        self._others = others
        return found

    def _overdue(self, now: float) -> list[int]:
        """Return the connections that end now, by inode; the lock is held."""
        bounds = self._bounds
        ends, staying = [], defaultdict[str, list[tuple[tuple[int, float], int]]](list)
        for inode, each in self._connections.items():
            calls = self._calls.get(each.place, _NONE)
            if calls.admitted is None:
                rank, end = (0, each.opened), self._end_of_stranger(inode, each, calls)
            else:
                # gRPC closes an idle one by itself, and politely. One that calls in vain is not idle to it.
                since = max(each.opened, calls.admitted)
                end = math.inf if calls.open else since + bounds.idle_s + bounds.stranger_s
                # Of those at work the newest goes first: an older one would come back and push the next one out.
                rank = (2, -each.opened) if calls.open else (1, since)
            if now >= end:
                ends.append(inode)
            else:
                staying[network_of(each.place[0])].append((rank, inode))
        if len(self._connections) > bounds.connections // 2:
            for those in staying.values():
                ends += [inode for _, inode in sorted(those)[: max(0, len(those) - bounds.per_address)]]
        return ends

    def _end_of_stranger(self, inode: int, connection: _Connection, calls: _Calls) -> float:
        """Return when a connection ends if no call on it is admitted until then."""
        if _received(connection.number, inode) > _STRANGER_BYTES:
            return connection.opened
        is_decided = bool(calls.open and self._bounds.decision_s)
        end = connection.opened + self._bounds.stranger_s + (self._bounds.decision_s if is_decided else 0.0)
        return end if calls.refused is None or is_decided else min(end, calls.refused + _REFUSED_S)


def peer_host(peer: str) -> str:
    """Return the address in a peer's name, as gRPC's context has it: ``ipv4:192.0.2.7:443``, ``ipv6:%5B::1%5D:443``."""
    # gRPC percent-encodes the brackets of IPv6 addresses.
    return unquote(peer).rpartition(":")[0]


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """Return what an address is counted under: itself, or the /64 of an IPv6 address, which is one customer's."""
    address = _address_of(host)
    return str(IPv6Network((int(address), 64), strict=False)) if isinstance(address, IPv6Address) else str(address)


@lru_cache(maxsize=4096)
def _address_of(host: str) -> IPv4Address | IPv6Address | str:
    """Return the address that ``host`` spells, with or without the name of its family; ``host`` if it spells none."""
    text = host.removeprefix("ipv6:").removeprefix("ipv4:").strip("[]").partition("%")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return host
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def _place_of(peer: str) -> Place:
    port = peer.rpartition(":")[2]
    return str(_address_of(peer_host(peer))), int(port) if port.isdigit() else 0


def _socket_inode(number: int) -> int | None:
    try:
        found = os.fstat(number)
    except OSError:  # it was closed since the folder was read
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _opened(number: int, inode: int) -> socket.socket | None:
    """Return a copy of a socket; None if the descriptor is another's by now."""
    with suppress(OSError):
        copy = socket.socket(fileno=os.dup(number))
        # What is asked and done from here on is asked of the copy, which nobody else can close.
        if _socket_inode(copy.fileno()) == inode:
            return copy
        copy.close()
    return None


def _other_end(number: int, inode: int, port: int) -> Place | None:
    """Return the other end of a connection that this process has accepted on ``port``; None if it is none."""
    copy = _opened(number, inode)
    if copy is None:
        return None
    with copy, suppress(OSError):  # a socket that listens has no other end
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
            host, place = copy.getpeername()[:2]
            return str(_address_of(host)), place
    return None


def _received(number: int, inode: int) -> int:
    """Return how many bytes came on a connection."""
    copy = _opened(number, inode)
    if copy is not None:
        with copy, suppress(OSError):
            told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_RECEIVED + 8)
            return int.from_bytes(told[_TCP_INFO_RECEIVED:], sys.byteorder)
    return 0


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
