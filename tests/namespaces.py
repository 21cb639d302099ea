"""A network namespace beside this one: as another machine, it has no address of this one but the end of one cable."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

DEADLINE_S = 60


class NoNamespaces(Exception):
    """This machine, or this user, cannot make one; the text says why."""


@dataclass(frozen=True)
class Network:
    """Another network namespace.

    Attributes:
        here: address of this side, which processes there reach.
        command: begins the command line of a process that is to run there.
    """

    here: str
    command: tuple[str, ...]


@contextmanager
def other_network() -> Iterator[Network]:
    """Yield a new namespace that is joined to this one by a pair of virtual devices; both go at the end.

    Raises:
        NoNamespaces: it needs Linux, iproute2 and the right to administer the network.
    """
    if shutil.which("ip") is None:
        raise NoNamespaces("needs Linux with iproute2")
    # Of this process alone, as others may do the same beside it: a network of four addresses, and names of 15 letters.
    number = os.getpid()
    name, near, far = f"raycloak-{number}", f"rc{number}a", f"rc{number}b"
    network = f"10.203.{number // 64 % 256}"
    here, there = (f"{network}.{number % 64 * 4 + end}" for end in (1, 2))
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        # The pair goes with the namespace that has one of its ends.
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("address", "add", f"{here}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "address", "add", f"{there}/30", "dev", far)
        _ip("-n", name, "link", "set", far, "up")
        yield Network(here, ("ip", "netns", "exec", name))


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments[:2])}: {done.stderr.strip()}")
