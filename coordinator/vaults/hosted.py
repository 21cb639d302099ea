"""The inside of a vault: hosts the plain class of a role, and answers calls to it.

The first message opens the vault: its class says which it is. The main thread answers calls one after the other. In a
vault that has calls beside them, another thread answers those.

Guarantee: the process is gone as soon as its relay is, even if it is stopped, and its keys with it. It has no grace
(`raycloak.attestation.processes.inside`).
"""

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.quick_imports import quickly
from raycloak.coordinator.vaults.calls import ActorRefusal, Receiver
from raycloak.coordinator.vaults.exchange import CallCancelled, Called, Exchange, LeaveWord, VaultEnded, Word, as_told
from raycloak.coordinator.vaults.openings import VaultStart
from raycloak.coordinator.vaults.settings import ROLES, VaultSettings, read_settings
from raycloak.metrics.errors import ConfigError, ProtocolError, RaycloakError
from raycloak.workers.gradients.environment import CHOSEN, FIXED, own_flags, require_instructions

START_S: Final = 60.0
"""For each of a relay's first two words, which it sends as it connects: silence must not hold a seat for ever."""
_LAST_S: Final = 5.0
"""For the relay of a vault that ends by itself: it goes with the vault, and hands the last answer on before."""
_LOOK_S: Final = 0.02
"""How soon a call beside another one is noticed: a view of the metrics, which may come later than that."""
M = TypeVar("M", bound=Message)
_Calls = deque[tuple[Called, list[Any]]]


class Inside:
    """A hosted object's view of its vault.

    Attributes:
        settings: of a vault of the machine, which decide what it serves; None in a child.
        peer: the process at the other end.
    """

    def __init__(self, channel: Channel, settings: VaultSettings | None = None) -> None:
        self.settings = settings
        self.peer = channel.peer
        self._calls, self._beside = _Calls(), _Calls()
        self._has_beside = threading.Event()
        self._channel = channel
        self._exchange = Exchange(channel, self._put, self._word)
        self._current: int | None = None
        # Of calls that were taken and not answered, so that no other word makes it grow.
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._leaving = False

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the call under way any more."""
        self._look()
        return self._current in self._cancelled

    def is_leaving(self) -> bool:
        """Return whether the machine is about to end this process."""
        self._look()
        return self._leaving

    def leave(self) -> None:
        """Have it leave, as if the relay had said so."""
        self._leaving = True

    def ask_relay(self, name: str, returns: int, frames: Sequence[Any], deadline_s: float) -> list[Any]:
        """Have the relay answer a call; raises as :meth:`raycloak.coordinator.vaults.exchange.Asked.result`."""
        return self._exchange.ask(name, returns, frames).result(deadline_s)

    def host(self, receive: Callable[..., Any], beside: bool, is_over: Callable[[], bool] = lambda: False) -> None:
        """Answer calls until the other end is gone; ``beside``: some while others run.

        Args:
            is_over: asked after each answer; True ends the process, within seconds or as another call comes.
        """
        if beside:
            threading.Thread(target=self._answer_beside, args=(receive,), name="beside", daemon=True).start()
        while self._exchange.read_until(lambda: bool(self._calls)):
            self._answer(receive, self._calls)
            if is_over():
                self._exchange.read_until(lambda: bool(self._calls), Deadline(_LAST_S))
                break
        # Nothing else runs: a library that ends in order may print what it was at.
        os._exit(0)

    def _look(self) -> None:
        """Take what has come, without a wait: a call that computes does not read."""
        self._exchange.read_until(lambda: False, Deadline(0.0))

    def _answer_beside(self, receive: Callable[..., Any]) -> None:
        while True:
            # The main thread reads as long as it answers nothing. To wake this one at each call would delay that.
            self._has_beside.wait(_LOOK_S)
            self._has_beside.clear()
            self._look()
            while self._beside:
                self._answer(receive, self._beside)

    def _answer(self, receive: Callable[..., Any], calls: _Calls) -> None:
        called, frames = calls.popleft()
        if not called.beside:
            self._current = called.call
        self._exchange.answer(called, partial(_answered, receive, called, frames))
        self._open.discard(called.call)
        self._cancelled.discard(called.call)

    def _put(self, called: Called, frames: list[Any]) -> None:
        self._open.add(called.call)
        (self._beside if called.beside else self._calls).append((called, frames))
        if called.beside:
            self._has_beside.set()

    def _word(self, word: Word) -> None:
        if isinstance(word, LeaveWord):
            self._leaving = True
        elif isinstance(word, CallCancelled) and word.call in self._open:
            self._cancelled.add(word.call)


class Hosted(Receiver):
    """A plain class in a vault; a subclass also derives from the class of its role.

    Attributes:
        OPENING: the type of the message that it is made of, with its view of the vault.
        BESIDE: whether some calls are answered while another one runs.
    """

    OPENING: ClassVar[type[Message]]
    BESIDE: ClassVar[bool] = False

    def opened(self) -> None:
        """Do nothing: the answer says that the vault is open."""

    def is_over(self) -> bool:
        """Return whether this vault can answer no further call."""
        return False


def serve(channel: Channel, target: str, settings: VaultSettings | None = None) -> None:
    """Host the class ``module:name`` for the process at the other end of the channel; the function of a child.

    Args:
        settings: of a vault of the machine.

    Raises:
        ProtocolError: ``malformed`` if the first words are not a start and an opening; ``vault_silent`` if they do not
            come.
    """
    keep_memory_private()
    start = _first_word(channel, VaultStart)
    if start is None:
        return
    if not start.variables.keys() <= CHOSEN:
        raise ProtocolError("malformed", "variables that no run chooses")
    # Before anything loads a library of a CPU or GPU, which reads its own once.
    os.environ.update({**start.variables, **FIXED})
    try:
        require_instructions(os.environ, own_flags())
    except ConfigError as refusal:
        channel.send(VaultEnded(refusal=Failed.of(refusal).encode()))
        return
    module, _, name = target.partition(":")
    with quickly():
        cls = getattr(import_module(module), name)
    opening: Message | None = _first_word(channel, cls.OPENING)
    if opening is None:
        return
    inside = Inside(channel, settings)
    try:
        made: Hosted = cls(opening, inside)
    except Exception as error:  # noqa: BLE001 - whoever calls is told, by a defect's type alone
        traceback.print_exc()
        inside.host(_refusing(as_told(error)), cls.BESIDE)
    else:
        inside.host(made.receive, cls.BESIDE, made.is_over)


def serve_machine(channel: Channel, role: str, settings: str) -> None:
    """Host the class of a role for a relay that has connected to the machine's socket; the function of a vault.

    Args:
        settings: file of the vault's settings.
    """
    try:
        serve(channel, ROLES[role][1], read_settings(role, Path(settings)))
    except RaycloakError as error:
        channel.send(VaultEnded(refusal=Failed.of(error).encode()))


def _first_word(channel: Channel, kind: type[M]) -> M | None:
    try:
        return channel.receive(kind, by=Deadline(START_S))
    except TimeoutError:
        raise ProtocolError("vault_silent", f"no {kind.__name__} came in {START_S:g} seconds.") from None


def _answered(receive: Callable[..., Any], called: Called, frames: list[Any]) -> tuple[Any, ...]:
    answer = receive(called.name, called.returns, *frames)
    return (answer,) if called.returns == 1 else answer


def _refusing(error: RaycloakError) -> Callable[..., Any]:
    """Answer every call of a vault that could not be opened with the reason."""
    refusal = Failed.of(error).encode()

    def receive(*_: Any) -> Any:
        raise ActorRefusal(refusal)

    return receive
