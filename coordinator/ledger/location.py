"""The location of a ledger: its URL, the file of an embedded one, and whether its witness can be put back without it.

The file is private to its owner, on a file system whose locks and syncs hold. What cannot be told of two places counts
as the same machine: a verdict then claims no protection.
"""

import ipaddress
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raycloak.attestation.core.secret_urls import secret_in
from raycloak.attestation.files.whole import sync
from raycloak.metrics.errors import BudgetError, ConfigError
from raycloak.metrics.file_errors import file_error

if TYPE_CHECKING:
    import sqlalchemy as sa

_MOUNTS = Path("/proc/mounts")
_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"),
    *("nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs"),
    *("vboxsf", "virtiofs"),  # a host's folder in its guest: its locks and syncs do not hold as on a local disk
}


def mounts() -> str:
    """Return what is mounted, as the kernel lists it; empty where there is no such list."""
    # A mount point's name is bytes, as any path's.
    return os.fsdecode(_MOUNTS.read_bytes()) if _MOUNTS.exists() else ""


def prepare_file(path: Path, create: bool) -> None:
    """Create the file with mode 0600 (its folder 0700) if it is missing, and check an existing one.

    Guarantee: on return the file exists, and only its owner can read it, because it holds the signing key. It is not
    on a network file system, where SQLite's locks and syncs cannot be relied on. It has no second name: a ledger that
    was killed under one would miss charges under the other.

    Raises:
        ConfigError: ``network_file_system``, ``ledger_missing``, or ``ledger_url`` if the file cannot be made or has
            several names.
        BudgetError: ``ledger_exposed``.
    """
    check_file_system(path, mounts())
    if create and not path.exists():
        # Listed before they are made: the name of a new folder is durable once its parent is synced.
        missing = [folder for folder in path.parents if not folder.exists()]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another process was first
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            # A ledger whose folder is lost in a power cut would start again at zero.
            for folder in (path.parent, *(folder.parent for folder in missing)):
                sync(folder)
        except OSError as error:
            raise file_error("ledger_url", "create the ledger", path, error) from None
    if path.exists() and not path.is_file():
        raise ConfigError("ledger_url", f"{path} is not a file.", "Name the file of a ledger.")
    if not path.exists():
        raise ledger_missing(f"there is no ledger at {path}.")
    status = path.stat()
    if status.st_nlink > 1:
        raise ConfigError(
            "ledger_url",
            f"{path} is one of {status.st_nlink} names of a file (hard links), and SQLite keeps the last charges "
            "beside the name that it was opened by.",
            "Keep the name that the ledger was used by, and remove the others. Copies are backups, and links are none.",
        )
    mode = status.st_mode & 0o777
    if mode & 0o077:
        raise BudgetError(
            "ledger_exposed",
            f"{path} has mode {mode:03o}, but a ledger holds a signing key.",
            f"If nobody else has read or written it: chmod 600 {path}",
        )


def ledger_missing(fact: str) -> ConfigError:
    """Build the error for a missing ledger: the place is wrong, whereas no budget was refused."""
    remedy = "The first run makes it, or raycloak budget open; else check RAYCLOAK_HOME and the URL."
    return ConfigError("ledger_missing", fact, remedy)


def check_file_system(path: Path, mounts: str) -> None:
    """Refuse a path below a network or FUSE mount.

    Args:
        mounts: content of ``/proc/mounts``; empty on a system without it, and then nothing is checked.

    Raises:
        ConfigError: ``network_file_system``.
    """
    if kind := network_file_system(path, mounts):
        raise ConfigError(
            "network_file_system",
            f"{path} is on a {kind} file system, where a charge may not be durable or may be made twice.",
            "Keep the ledger on a local disk, or use a PostgreSQL URL.",
        )


def network_file_system(path: Path, mounts: str) -> str:
    """Return the type of the network or FUSE mount that a path is below; empty if there is none, or none is known."""
    # A link may lead from a local disk to a network file system.
    kind = file_system(Path(os.path.realpath(path)), mounts)
    return kind if kind in _NETWORK or kind.startswith("fuse.") else ""


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the innermost mount that holds ``path``; empty if unknown."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        folder = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point))
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(folder) and len(folder.parts) >= best:
            best, kind = len(folder.parts), found
    return kind


def usable_url(url: str) -> "sa.URL":
    """Parse a URL under which a ledger can be kept.

    Guarantee: it has no password, neither before the host nor as a parameter. The driver asks ``~/.pgpass``, or the
    file that the parameter ``passfile`` names.

    Raises:
        ConfigError: ``ledger_url`` for any other; ``url_secret`` if it has one. No error repeats a URL that cannot be
            read, or a secret.
    """
    import sqlalchemy as sa  # late: runs that keep their ledger in the state folder do not need it

    if (found := secret_in(url)) is not None:
        raise ConfigError("url_secret", "the ledger's URL holds a secret.", f"{found[0].upper()}{found[1:]}.")
    remedy = "Use sqlite:////absolute/path/ledger.sqlite or postgresql://user@host/database."
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigError("ledger_url", "the ledger URL cannot be read.", remedy) from None
    kind = parsed.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise ConfigError("ledger_url", f"a ledger cannot be kept in {kind}.", remedy)
    if kind == "sqlite" and (not parsed.database or not Path(parsed.database).is_absolute() or parsed.query):
        path = parsed.database or ""
        raise ConfigError("ledger_url", f"'{path}' is not an absolute path of a ledger.", remedy)
    return parsed


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
    if any(each.path is not None and network_file_system(each.path, mounts()) for each in (witness, ledger)):
        return True
    return not witness.machines() & ledger.machines()


def _machine(text: str) -> str:
    """Return an address in one form, or `HERE` if it is this machine's."""
    # A scope names an interface of this machine, and is no part of who is meant.
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    try:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Only to an address of this machine can a socket be bound.
            probe.bind(socket.getaddrinfo(text, 0, family, socket.SOCK_DGRAM)[0][4])
    except OSError:
        return HERE if address.is_loopback or address.is_unspecified else str(address)
    return HERE
