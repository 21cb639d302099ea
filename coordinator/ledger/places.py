"""The places that a ledger and its witness are kept at, and whether one can be put back without the other.

Hides how it is told that two names mean one machine. What cannot be told counts as the same: a verdict then claims no
protection.
"""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from raycloak.coordinator.ledger.location import is_network_file_system

HERE = "this machine"


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """A place where something is kept.

    Attributes:
        path: a file or folder; None on a server.
        host: name or address of the server, or the folder of its socket; empty without one.
    """

    path: Path | None = None
    host: str = ""

    def machines(self) -> frozenset[str]:
        """Return the addresses that its host has; `HERE` in place of each that is this machine's own."""
        if self.path is not None or not self.host or self.host.startswith(("/", "@")):
            return frozenset({HERE})
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        # Nobody knows then where it is.
        except (OSError, UnicodeError):
            return frozenset({HERE})
        return frozenset(_machine(str(address[0])) for *_, address in found)


def is_apart(witness: StoragePlace, ledger: StoragePlace) -> bool:
    """Return whether a person who puts an older ledger back does not put back the witness with it.

    Two folders are apart if their file systems are others. Anything else is if it is not on one machine: a witness that
    answers on a loopback address or another one of this machine is on no other storage than a ledger here. A folder
    that is mounted over a network is on none of this machine's.

    Not guaranteed: that an address of another machine does not lead back here, as through a tunnel.
    """
    if witness.path is not None and ledger.path is not None:
        return witness.path.stat().st_dev != ledger.path.stat().st_dev
    if any(each.path is not None and is_network_file_system(each.path) for each in (witness, ledger)):
        return True
    return not witness.machines() & ledger.machines()


def _machine(text: str) -> str:
    """Return an address in one form, or `HERE` if it is this machine's."""
    # A scope names an interface of this machine, and is no part of who is meant.
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    is_here = address.is_loopback or address.is_unspecified or _can_bind(text, address.version)
    return HERE if is_here else str(address)


def _can_bind(text: str, version: int) -> bool:
    """Return whether a socket can be bound to an address, as to this machine's own alone."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(text, 0, family, socket.SOCK_DGRAM)[0][4])
    except OSError:
        return False
    return True
