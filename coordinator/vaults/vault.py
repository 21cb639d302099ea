"""A vault from outside: what a relay has of it.

The relay passes calls on and holds nothing but what travels: headers, masked words, public parameters.
"""

import math
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
from raycloak.attestation.processes.program import Exited
from raycloak.coordinator.vaults.calls import ActorRefusal
from raycloak.coordinator.vaults.exchange import Called, Exchange, LeaveWord, VaultEnded, Word
from raycloak.coordinator.vaults.machine_socket import Seat
from raycloak.coordinator.vaults.openings import VaultStart
from raycloak.metrics.errors import ProtocolError, RaycloakError
from raycloak.workers.gradients.environment import CHOSEN

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
    """The vault of one relay, which ends with this process. Its methods are for any thread.

    Args:
        start: starts the process, or takes a seat at the machine's, in the thread that it ends with.
        opening: what it is opened with.
        source: the simulated platform that the vault asks through this process; None if it asks another one.
        on_lost: called once it has ended, before every call under way fails; gets what they fail with.

    Raises:
        OSError: whatever ``start`` raises.
    """

    def __init__(
        self,
        start: Callable[[], Child | Seat],
        opening: Message,
        source: "EvidenceSource | None",
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._source = source
        self._last: VaultEnded | None = None
        started = threading.Event()
        self._failure: OSError | None = None
        # The kernel ends a child with the thread that started it, so that one stays.
        self._keeper = threading.Thread(target=self._keep, args=(start, opening, on_lost, started), daemon=True)
        self._keeper.start()
        started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def pid(self) -> int | None:
        """The process id of a child; None of a vault of the machine."""
        return self._process.pid

    def call(
        self,
        name: str,
        returns: int,
        frames: Sequence[Any],
        *,
        beside: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
        timeout_s: float = math.inf,
    ) -> list[Any]:
        """Have it answer a call; see `raycloak.coordinator.vaults.calls.Receiver.receive`.

        The caller's deadline ends the relay, and with it the vault: only the caller knows how long a step may take.

        Args:
            beside: whether it answers while it answers another one.
            is_cancelled: is asked again and again, until it says that nobody waits any more.
            timeout_s: for the answer, where no actor system bounds the call.

        Raises:
            TimeoutError: there was no answer in time.
            ActorRefusal: it refuses.
            MemoryError: it has too little memory, or was killed for it.
            VaultLost: it has ended.
        """
        asked = self._exchange.ask(name, returns, frames, beside=beside)
        told, by = False, Deadline(timeout_s)
        while True:
            try:
                return asked.result(_LOOK_S)
            except TimeoutError:
                if by.left == 0:
                    raise
                if not told and is_cancelled():
                    asked.cancel()
                    told = True

    def end(self) -> None:
        """End it at once; every call under way fails, and all that come."""
        self._process.kill()
        self._keeper.join(_GONE_S)

    def leave(self) -> None:
        """Tell it that its machine is about to end it."""
        self._exchange.tell(LeaveWord())

    def _keep(
        self,
        start: Callable[[], Child | Seat],
        opening: Message,
        on_lost: Callable[[Exception], None],
        started: threading.Event,
    ) -> None:
        try:
            self._process = process = start()
            self._exchange = exchange = Exchange(process.channel, self._answer_evidence, self._word)
            for word in (VaultStart(variables=_numerics()), opening):
                exchange.tell(word)
        except OSError as error:
            self._failure = error
            return
        finally:
            started.set()
        exited = process.wait()
        exchange.read_until(lambda: False, Deadline(_ENDS_S))
        cause = self._cause(exited)
        on_lost(cause)
        exchange.lose(cause)
        process.channel.close()

    def _cause(self, exited: Exited | None) -> Exception:
        """Return why the vault has ended."""
        if self._last is not None and self._last.refusal is not None:
            return ActorRefusal(self._last.refusal)
        if (exited is not None and exited.out_of_memory) or (self._last is not None and self._last.out_of_memory):
            return MemoryError()
        return VaultLost(f"a vault ended with {exited.how}" if exited is not None else "a vault has closed its socket")

    def _word(self, word: Word) -> None:
        # What a vault says of itself comes first. Then its listener says that it has ended.
        if isinstance(word, VaultEnded) and self._last is None:
            self._last = word

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


def child(target: str) -> Child:
    """Start a vault as a child of this process.

    Args:
        target: ``module:name`` of the `raycloak.coordinator.vaults.hosted.Hosted` that it imports.
    """
    # Modules are found as in this process, and nothing else is, whatever the folder that it works in holds.
    found = {"PYTHONPATH": os.pathsep.join(each or str(Path.cwd()) for each in sys.path), "PYTHONSAFEPATH": "1"}
    return Child(_SERVE, target, grace_s=0.0, environment={**os.environ, **found})


def _numerics() -> dict[str, str]:
    """Return the variables of this process that the run chose, which a vault has to share."""
    return {name: value for name, value in os.environ.items() if name in CHOSEN}
