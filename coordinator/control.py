"""Control: the two actors that hold a run's durable state, and how they are asked.

It hides that ledger and orchestrator may die: one that does not answer is stopped for good, another incarnation starts
from its disk, and the question is asked again with the same arguments.

Guarantee: an answer is that of one incarnation which had all that earlier answers rest on. Every method of both may be
repeated: a charge gives the same entry, a commit is logged once, a roster is that of the next attempt.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

from attestation.commit_book import StepCommit
from attestation.evidence import CollateralBundle
from attestation.run_terms import RunTerms
from attestation.serving_orchestrator import ServingOrchestrator
from coordinator.backend import ActorLost
from coordinator.ledger import PrivacyLedger
from coordinator.remote import Actor, Reference, positional
from metrics.errors import ConfigError, RunFailedError

P = ParamSpec("P")
T = TypeVar("T")

ControlRole = Literal["ledger", "orchestrator"]

START_AGAIN = "Mend the cause, then start it again; resume a run that had begun with --resume."


class ControlBackend(Protocol):
    """The part of a backend that :class:`Control` needs; see `coordinator.backend.Backend`."""

    def call(self, actor: Actor, method: Callable[..., Any], *args: Any) -> tuple[Reference[Any], ...]:
        """Ask an actor; see `coordinator.remote.Caller`."""
        ...

    def fetch(self, reference: Reference[T], deadline_s: float) -> T: ...

    def stop(self, actor: Actor) -> None: ...

    def node(self, actor: Actor) -> str: ...


@dataclass(frozen=True, slots=True)
class Restart:
    """The restart of one of the two.

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
        ledger, orchestrator: their methods.
    """

    backend: ControlBackend
    actors: dict[ControlRole, Actor]
    restart: Callable[[ControlRole], Actor]
    deadline_s: float
    max_restarts: int
    on_restart: Callable[[Restart], None] = lambda restart: None
    ledger: "LedgerFace" = field(init=False)
    orchestrator: "OrchestratorFace" = field(init=False)
    _restarts: int = 0

    def __post_init__(self) -> None:
        self.ledger = LedgerFace(self)
        self.orchestrator = OrchestratorFace(self)

    def node(self, role: ControlRole) -> str:
        """Return the id of the node that a role runs on."""
        return self.backend.node(self.actors[role])

    def replace(self, lost: Actor, role: ControlRole, method: str, cause: str) -> None:
        """Put another incarnation in the place of ``lost``, which did not answer ``method``, unless there is one.

        Raises:
            RunFailedError: ``unreachable`` once ``max_restarts`` are used up.
            RaycloakError: what the new incarnation found on its disk.
        """
        started = time.perf_counter()
        # Several questions may wait for one lost incarnation: only the first to notice replaces it.
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
        """Start an incarnation that stands where the former one stood."""
        actor = self.restart(role)
        if role == "orchestrator" and self.orchestrator.begun is not None:
            try:
                begin = self.backend.call(actor, ServingOrchestrator.begin, *self.orchestrator.begun)
                self.backend.fetch(begin[0], self.deadline_s)
            except ActorLost:
                self.backend.stop(actor)
                raise
        return actor


class Pending(Generic[T]):
    """A question that was asked, and is asked again when the actor that owes the answer is lost."""

    __slots__ = ("_arguments", "_asked", "_control", "_method", "_reference", "_role")

    def __init__(
        self, control: Control, role: ControlRole, method: Callable[..., T], arguments: tuple[Any, ...]
    ) -> None:
        self._control = control
        self._role = role
        self._method = method
        self._arguments = arguments
        self._ask()

    @property
    def reference(self) -> Reference[T]:
        """The reference that stands for the answer in other calls, until it is asked again: they fail as it does."""
        return self._reference

    def result(self) -> T:
        """Return the answer; every new incarnation is asked again until one gives it.

        Raises:
            RaycloakError: what the actor raised; RunFailedError ``unreachable`` if it is lost for good.
        """
        while True:
            try:
                return self._control.backend.fetch(self._reference, self._control.deadline_s)
            except ActorLost as lost:
                self._control.replace(self._asked, self._role, self._method.__name__, lost.cause)
            self._ask()

    def _ask(self) -> None:
        self._asked = self._control.actors[self._role]
        self._reference: Reference[T] = self._control.backend.call(self._asked, self._method, *self._arguments)[0]


class _Face:
    """The methods of one of the two."""

    def __init__(self, control: Control, role: ControlRole) -> None:
        self._control = control
        self._role = role

    def _submit(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> Pending[T]:
        return Pending(self._control, self._role, method, positional(method, args, keywords))

    def _ask(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        return self._submit(method, *args, **keywords).result()


class _Waits(Generic[P, T]):
    """A method whose answer is waited for."""

    def __init__(self, method: Callable[Concatenate[Any, P], T]) -> None:
        self._method = method

    def __get__(self, face: _Face, _: type) -> Callable[P, T]:
        return partial(face._ask, self._method)


class _Overlaps(Generic[P, T]):
    """A method that is asked without waiting, beside other calls."""

    def __init__(self, method: Callable[Concatenate[Any, P], T]) -> None:
        self._method = method

    def __get__(self, face: _Face, _: type) -> Callable[P, Pending[T]]:
        return partial(face._submit, self._method)


class LedgerFace(_Face):
    """The ledger's methods that a run needs; see `coordinator.ledger.PrivacyLedger`."""

    charge = _Overlaps(PrivacyLedger.charge)
    hash_at = _Waits(PrivacyLedger.hash_at)
    open_account = _Waits(PrivacyLedger.open_account)
    register_run = _Waits(PrivacyLedger.register_run)
    status = _Waits(PrivacyLedger.status)
    view = _Waits(PrivacyLedger.view)

    def __init__(self, control: Control) -> None:
        super().__init__(control, "ledger")


class OrchestratorFace(_Face):
    """The orchestrator's methods that a run needs; see `attestation.orchestrator.EvidenceOrchestrator`.

    Attributes:
        begun: arguments of the newest :meth:`begin`, with the newest collateral; a new incarnation begins with them.
    """

    admit = _Waits(ServingOrchestrator.admit)
    bind_vectors = _Overlaps(ServingOrchestrator.bind_vectors)
    challenge = _Waits(ServingOrchestrator.challenge)
    commit = _Waits(ServingOrchestrator.commit)
    committed = _Waits(ServingOrchestrator.committed)
    expel = _Waits(ServingOrchestrator.expel)
    export_log = _Waits(ServingOrchestrator.export_log)
    key_commitments = _Waits(ServingOrchestrator.key_commitments)
    log_position = _Waits(ServingOrchestrator.log_position)
    log_root_at = _Waits(ServingOrchestrator.log_root_at)
    most_hosted = _Waits(ServingOrchestrator.most_hosted)
    newest_published = _Waits(ServingOrchestrator.newest_published)
    open_package = _Waits(ServingOrchestrator.open_package)
    open_step = _Overlaps(ServingOrchestrator.open_step)
    order_evaluation = _Waits(ServingOrchestrator.order_evaluation)
    package_recipient = _Waits(ServingOrchestrator.package_recipient)
    package_signer = _Waits(ServingOrchestrator.package_signer)
    present = _Waits(ServingOrchestrator.present)
    record_data = _Waits(ServingOrchestrator.record_data)
    record_published = _Waits(ServingOrchestrator.record_published)
    release = _Waits(ServingOrchestrator.release)
    review = _Waits(ServingOrchestrator.review)
    service_address = _Waits(ServingOrchestrator.service_address)
    sign_package = _Waits(ServingOrchestrator.sign_package)
    view = _Waits(ServingOrchestrator.view)

    def __init__(self, control: Control) -> None:
        super().__init__(control, "orchestrator")
        self.begun: tuple[RunTerms, str] | None = None

    def begin(self, terms: RunTerms, session: str) -> None:
        """Begin the session of a run."""
        # Kept before it is asked: an incarnation that dies of it is followed by one that begins.
        self.begun = terms, session
        self._ask(ServingOrchestrator.begin, terms, session)

    def take_collateral(self, collateral: CollateralBundle) -> None:
        """Judge evidence by newer collateral from now on."""
        if self.begun is not None:
            terms, session = self.begun
            self.begun = replace(terms, collateral=collateral), session
        self._ask(ServingOrchestrator.take_collateral, collateral)

    def finish(self, commits: tuple[StepCommit, ...], log_file: str, destroy: bool) -> None:
        """Commit, export the log and end the run; destroy a generated secret if asked."""
        try:
            self._ask(ServingOrchestrator.finish, commits, log_file, destroy)
        except ConfigError as error:
            # A new incarnation finds the secret gone. Destroying it is the last thing finish does, so finish is done.
            if error.code != "secret_destroyed":
                raise
