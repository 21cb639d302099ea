"""Control: the two actors that hold a run's durable state, and how they are asked.

It hides that ledger and orchestrator may die: one that does not answer is stopped for good, another incarnation starts
from its disk, and the question is asked again with the same arguments.

Guarantee: an answer is that of one incarnation which had all that earlier answers rest on. Every method of both may be
repeated: a charge gives the same entry, a commit is logged once, a roster is that of the next attempt.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from coordinator.backend import Actor, ActorLost
from metrics.errors import ConfigError, RunFailedError

ControlRole = Literal["ledger", "orchestrator"]

START_AGAIN = "Mend the cause, then start it again; a run that had begun goes on with --resume."


class ControlBackend(Protocol):
    """What :class:`Control` needs of an actor system; see `coordinator.backend.Backend`."""

    def call(self, actor: Actor, method: str, *args: Any) -> tuple[Any, ...]: ...

    def fetch(self, reference: Any, deadline_s: float) -> Any: ...

    def stop(self, actor: Actor) -> None: ...

    def node(self, actor: Actor) -> str: ...


@dataclass(frozen=True, slots=True)
class Restart:
    """One of the two was started again.

    Attributes:
        cause: why the former incarnation was given up: ``died``, ``unreachable``, ``deadline`` ...
        seconds: from giving it up until its successor had taken over.
    """

    role: ControlRole
    cause: str
    seconds: float


@dataclass(slots=True)
class Control:
    """Ledger and orchestrator of one run.

    Attributes:
        actors: the current incarnation of each.
        restart: starts another incarnation from disk; the old one was stopped through the backend before.
        deadline_s: after which one that does not answer counts as lost.
        max_restarts: of both together, before the run is given up.
        on_restart: told of each restart when the new incarnation is ready.
    """

    backend: ControlBackend
    actors: dict[ControlRole, Actor]
    restart: Callable[[ControlRole], Actor]
    deadline_s: float
    max_restarts: int
    on_restart: Callable[[Restart], None] = lambda restart: None
    _restarts: int = 0
    _begin: tuple[Any, ...] | None = None

    def ledger(self, method: str, *arguments: Any) -> Any:
        """Ask the ledger and wait for the answer."""
        return self.submit("ledger", method, *arguments).result()

    def orchestrator(self, method: str, *arguments: Any) -> Any:
        """Ask the orchestrator and wait for the answer."""
        return self.submit("orchestrator", method, *arguments).result()

    def submit(self, role: ControlRole, method: str, *arguments: Any) -> "Pending":
        """Ask without waiting."""
        if method == "begin":
            self._begin = arguments
        elif method == "take_collateral" and self._begin is not None:
            terms, *rest = self._begin
            self._begin = (replace(terms, collateral=arguments[0]), *rest)
        return Pending(self, role, method, arguments)

    def node(self, role: ControlRole) -> str:
        """Id of the node that a role runs on."""
        return self.backend.node(self.actors[role])

    def replace(self, lost: Actor, role: ControlRole, method: str, cause: str) -> None:
        """Have another incarnation in the place of ``lost``, which did not answer ``method``; none if there is one.

        Raises:
            RunFailedError: ``unreachable`` once ``max_restarts`` are used up.
            RaycloakError: what the new incarnation found on its disk.
        """
        started = time.perf_counter()
        while self.actors[role] is lost:
            self.backend.stop(lost)
            if self._restarts >= self.max_restarts:
                raise RunFailedError(
                    "unreachable",
                    f"the {role} did not answer {method} ({cause}), after {self._restarts} restarts in this run",
                    "Look for the cause in the log of the run, then resume it.",
                )
            self._restarts += 1
            try:
                self.actors[role] = lost = self._started(role)
            except ActorLost as failure:
                cause = failure.cause
                continue
            self.on_restart(Restart(role, cause, time.perf_counter() - started))
            return

    def _started(self, role: ControlRole) -> Actor:
        """A new incarnation that stands where the former one stood."""
        actor = self.restart(role)
        if role == "orchestrator" and self._begin is not None:
            try:
                self.backend.fetch(self.backend.call(actor, "begin", *self._begin)[0], self.deadline_s)
            except ActorLost:
                self.backend.stop(actor)
                raise
        return actor


class Pending:
    """A question that was asked."""

    __slots__ = ("_arguments", "_asked", "_control", "_method", "_reference", "_role")

    def __init__(self, control: Control, role: ControlRole, method: str, arguments: tuple[Any, ...]) -> None:
        self._control = control
        self._role = role
        self._method = method
        self._arguments = arguments
        self._ask()

    @property
    def reference(self) -> Any:
        """What stands for the answer in other calls, until it is asked again: they fail if this answer does."""
        return self._reference

    def result(self) -> Any:
        """The answer; asked again of every new incarnation until one gives it.

        Raises:
            RaycloakError: what the actor raised; RunFailedError ``unreachable`` if it is lost for good.
        """
        while True:
            try:
                return self._control.backend.fetch(self._reference, self._control.deadline_s)
            except ActorLost as lost:
                try:
                    self._control.replace(self._asked, self._role, self._method, lost.cause)
                except ConfigError as error:
                    # To destroy the secret is the last thing that finish does: where it is gone, finish is done.
                    if (self._method, error.code) == ("finish", "secret_destroyed"):
                        return None
                    raise
            self._ask()

    def _ask(self) -> None:
        self._asked = self._control.actors[self._role]
        self._reference = self._control.backend.call(self._asked, self._method, *self._arguments)[0]
