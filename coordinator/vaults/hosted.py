"""The inside of a vault: hosts the plain class of a role, and answers calls to it.

The first message opens the vault: its class says which it is. One thread reads what comes, one answers calls one after
the other, and one answers those beside them.

Guarantee: the process is gone as soon as its relay is, even if it is stopped, and its keys with it.
"""

import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from raycloak.attestation.core.messages import Message
from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.failure import Failed
from raycloak.coordinator.quick_imports import quickly
from raycloak.coordinator.vaults.calls import ActorRefusal, Receiver
from raycloak.coordinator.vaults.exchange import CallCancelled, Called, Exchange, LeaveWord, as_told
from raycloak.metrics.errors import RaycloakError


class Inside:
    """A hosted object's view of its vault."""

    def __init__(self, channel: Channel) -> None:
        self._calls: queue.Queue[tuple[Called, list[Any]]] = queue.Queue()
        self._beside: queue.Queue[tuple[Called, list[Any]]] = queue.Queue()
        self._exchange = Exchange(channel, self._put, self._word)
        self._current: int | None = None
        # Of calls that were taken and not answered, so that no other word makes it grow.
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self.leaving = False

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the call under way any more."""
        return self._current in self._cancelled

    def ask_relay(self, name: str, returns: int, frames: Sequence[Any], deadline_s: float) -> list[Any]:
        """Have the relay answer a call; raises as :meth:`raycloak.coordinator.vaults.exchange.Asked.result`."""
        return self._exchange.ask(name, returns, frames).result(deadline_s)

    def host(self, receive: Callable[..., Any]) -> None:
        """Answer calls until the other end is gone."""

        def read() -> None:
            try:
                self._exchange.read()
            finally:
                os._exit(0)  # whatever is under way: nobody is left to have its answer

        threading.Thread(target=read, name="reads", daemon=True).start()
        threading.Thread(target=self._answer, args=(receive, self._beside), name="beside", daemon=True).start()
        self._answer(receive, self._calls)

    def _answer(self, receive: Callable[..., Any], calls: "queue.Queue[tuple[Called, list[Any]]]") -> None:
        while True:
            called, frames = calls.get()
            if not called.beside:
                self._current = called.call
            self._exchange.answer(called, partial(_answered, receive, called, frames))
            self._open.discard(called.call)
            self._cancelled.discard(called.call)
            # Large arrays, until the next call comes.
            del frames

    def _put(self, called: Called, frames: list[Any]) -> None:
        self._open.add(called.call)
        (self._beside if called.beside else self._calls).put((called, frames))

    def _word(self, word: CallCancelled | LeaveWord) -> None:
        if isinstance(word, LeaveWord):
            self.leaving = True
        elif word.call in self._open:
            self._cancelled.add(word.call)


class Hosted(Receiver):
    """A plain class in a vault; a subclass also derives from the class of its role.

    Attributes:
        OPENING: the type of the message that it is made of, with its view of the vault.
    """

    OPENING: ClassVar[type[Message]]

    def opened(self) -> None:
        """Do nothing: the answer says that the vault is open."""


def serve(channel: Channel, target: str) -> None:
    """Host the class ``module:name`` for the process at the other end of the channel; the function of a child."""
    keep_memory_private()
    module, _, name = target.partition(":")
    with quickly():
        cls = getattr(import_module(module), name)
    opening: Message | None = channel.receive(cls.OPENING)
    if opening is None:
        return
    inside = Inside(channel)
    try:
        receive = cls(opening, inside).receive
    except Exception as error:  # noqa: BLE001 - whoever calls is told, by a defect's type alone
        traceback.print_exc()
        receive = _refusing(as_told(error))
    inside.host(receive)


def _answered(receive: Callable[..., Any], called: Called, frames: list[Any]) -> tuple[Any, ...]:
    answer = receive(called.name, called.returns, *frames)
    return (answer,) if called.returns == 1 else answer


def _refusing(error: RaycloakError) -> Callable[..., Any]:
    """Answer every call of a vault that could not be opened with the reason."""
    refusal = Failed.of(error).encode()

    def receive(*_: Any) -> Any:
        raise ActorRefusal(refusal)

    return receive
