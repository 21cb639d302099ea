"""A vault from outside: what a relay has of it.

The relay passes calls on and holds nothing but what travels: headers, masked words, public parameters.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raycloak.attestation.core.messages import Message
from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.coordinator.vaults.exchange import SEND_S, Called, Exchange, LeaveWord
from raycloak.metrics.errors import ProtocolError, RaycloakError

if TYPE_CHECKING:
    from raycloak.attestation.attester.attester import EvidenceSource

_LOOK_S: Final = 0.02
"""How soon a vault is told that a call is cancelled: far below a micro-batch, which it finishes anyway."""
_ENDS_S: Final = 5.0
"""For what it said last: its end of the channel is closed, unless a process that it started has a copy."""
_GONE_S: Final = 60.0
"""For the kernel to end a process that was killed, and the thread that waits for it."""
_SERVE: Final = "raycloak.coordinator.vaults.hosted:serve"


class VaultLost(Exception):
    """The vault has ended, and the call with it."""


class Vault:
    """The vault of one relay, in a process that ends with this one. Its methods are for any thread.

    Args:
        target: ``module:name`` of a `raycloak.coordinator.vaults.hosted.Hosted`, which the vault imports.
        opening: what it is opened with.
        source: the simulated platform that the vault asks through this process; None if it has its guest's.
        on_lost: called once it has ended, before every call under way fails; gets whether the kernel killed it because
            memory ran out.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self, target: str, opening: Message, source: "EvidenceSource | None", on_lost: Callable[[bool], None]
    ) -> None:
        self._source = source
        started = threading.Event()
        self._failure: OSError | None = None
        # The kernel ends the vault with the thread that started it, so that one stays.
        self._keeper = threading.Thread(target=self._keep, args=(target, opening, on_lost, started), daemon=True)
        self._keeper.start()
        started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def call(
        self,
        name: str,
        returns: int,
        frames: Sequence[Any],
        *,
        beside: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """Have it answer a call; see `raycloak.coordinator.vaults.calls.Receiver.receive`.

        The caller's deadline ends the relay, and with it the vault: only the caller knows how long a step may take.

        Args:
            beside: whether it answers while it answers another one.
            is_cancelled: is asked again and again, until it says that nobody waits any more.

        Raises:
            ActorRefusal: it refuses.
            MemoryError: it has too little memory, or was killed for it.
            VaultLost: it has ended.
        """
        asked = self._exchange.ask(name, returns, frames, beside=beside)
        told = False
        while True:
            try:
                return asked.result(_LOOK_S)
            except TimeoutError:
                if not told and is_cancelled():
                    asked.cancel()
                    told = True

    def end(self) -> None:
        """End it at once; every call under way fails, and all that come."""
        self._child.kill()
        self._keeper.join(_GONE_S)

    def leave(self) -> None:
        """Tell it that its machine is about to end it."""
        self._exchange.tell(LeaveWord())

    def _keep(self, target: str, opening: Message, on_lost: Callable[[bool], None], started: threading.Event) -> None:
        try:
            # Modules are found as in this process, and nothing else is, whatever the folder that it works in holds.
            found = {"PYTHONPATH": os.pathsep.join(each or str(Path.cwd()) for each in sys.path), "PYTHONSAFEPATH": "1"}
            self._child = child = Child(_SERVE, target, grace_s=0.0, environment={**os.environ, **found})
            self._exchange = exchange = Exchange(child.channel, self._answer_evidence, lambda _: None)
            child.send(opening, by=Deadline(SEND_S))
        except OSError as error:
            self._failure = error
            return
        finally:
            started.set()
        exited = child.wait()
        exchange.read_until(lambda: False, Deadline(_ENDS_S))
        on_lost(exited.out_of_memory)
        exchange.lose(MemoryError() if exited.out_of_memory else VaultLost(f"a vault ended with {exited.how}"))
        child.channel.close()

    def _answer_evidence(self, called: Called, frames: list[Any]) -> None:
        # In a thread of its own: the platform may take its time, and answers to calls come meanwhile.
        threading.Thread(target=self._exchange.answer, args=(called, lambda: self._collect(called, frames))).start()

    def _collect(self, called: Called, frames: list[Any]) -> tuple[bytes, ...]:
        try:
            if self._source is None or called.name != "collect" or len(frames) != 1 or type(frames[0]) is not bytes:
                raise ProtocolError("malformed", "a vault asks its relay for nothing but evidence")
            return (self._source.collect(frames[0]).quote,)
        except RaycloakError as error:
            raise ActorRefusal(Failed.of(error).encode()) from None
