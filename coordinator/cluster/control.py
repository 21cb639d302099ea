"""Ledger and orchestrator, the two actors that hold a run's durable state, as typed methods.

    control.ledger.view()                  waits, and returns the answer
    control.ledger.charge(...)             returns a `Pending`, so that other calls overlap with it

This module hides that either actor may die. An actor that does not answer is stopped for good, and another incarnation
starts from the same disk. The question is asked again with the same arguments.

Guarantee: each answer comes from one incarnation, which had all that earlier answers rest on.

Assumes that every method may be repeated: a charge or a binding gives the same entry, a commit is logged once, and a
roster asked for again is that of the next attempt.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.files.whole import write_whole
from raycloak.attestation.orchestrator.documents import DOCUMENTS_FILE
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.remote import Actor, Remote
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.vaults.calls import Reference, Wire
from raycloak.coordinator.vaults.run_orchestrator import RunOrchestrator
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.terms.manifest import Manifest

P = ParamSpec("P")
T = TypeVar("T")

ControlRole = Literal["ledger", "orchestrator"]

START_AGAIN = "Fix the cause, then start the run again, with --resume if it had begun."


class ControlBackend(Protocol):
    """The part of a backend that :class:`Control` needs; see `raycloak.coordinator.cluster.backend.Backend`."""

    def call(self, actor: Actor, method: Callable[..., Any], *args: Any) -> tuple[Reference[Any], ...]:
        """Ask an actor; see `raycloak.coordinator.cluster.remote.Caller`."""
        ...

    def fetch(self, reference: Reference[T], deadline_s: float) -> T: ...

    def stop(self, actor: Actor) -> None: ...

    def node(self, actor: Actor) -> str: ...


@dataclass(frozen=True, slots=True)
class Restart:
    """The restart of the ledger or the orchestrator.

    Attributes:
        cause: why the former incarnation was given up; a cause of `raycloak.coordinator.cluster.backend.ActorLost`.
        seconds: from giving up the former incarnation until its successor has taken over.
    """

    role: ControlRole
    cause: str
    seconds: float


@dataclass(slots=True)
class Control:
    """Ledger and orchestrator of one run.

    Attributes:
        actors: the current incarnation of each role.
        restart: starts another incarnation from disk; the former one has been stopped through the backend by then.
        deadline_s: time to answer; an actor that takes longer counts as lost.
        max_restarts: restarts of both actors together before the run is given up.
        on_restart: called after each restart, when the new incarnation is ready.
        is_apart: whether the orchestrator is a vault of the machine, which writes no file of the driver's.
        ledger, orchestrator: the methods of each actor.
    """

    backend: ControlBackend
    actors: dict[ControlRole, Actor]
    restart: Callable[[ControlRole], Actor]
    deadline_s: float
    max_restarts: int
    on_restart: Callable[[Restart], None] = lambda restart: None
    is_apart: bool = False
    ledger: "LedgerFace" = field(init=False)
    orchestrator: "OrchestratorFace" = field(init=False)
    _restarts: int = 0

    def __post_init__(self) -> None:
        self.ledger = LedgerFace(self)
        self.orchestrator = OrchestratorFace(self)

    def node(self, role: ControlRole) -> str:
        """Return the id of the node that a role's actor runs on."""
        return self.backend.node(self.actors[role])

    def replace(self, lost: Actor, role: ControlRole, method: str, cause: str) -> None:
        """Replace ``lost``, which did not answer ``method``; do nothing if it has been replaced already.

        Raises:
            RunFailedError: ``unreachable`` once ``max_restarts`` are used up.
            RaycloakError: what the new incarnation found on its disk.
        """
        started = time.perf_counter()
        # Several questions may wait for one lost incarnation. Only the first that notices replaces it.
        while self.actors[role] is lost:
            # Stopped before its successor starts: one that is merely slow would still write to the same files.
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
        """Start an incarnation, and bring it to where the former one stood."""
        actor = self.restart(role)
        if role == "orchestrator" and self.orchestrator.begun is not None:
            try:
                begin = self.backend.call(actor, RunOrchestrator.begin, *self.orchestrator.begun)
                self.backend.fetch(begin[0], self.deadline_s)
            except ActorLost:
                self.backend.stop(actor)
                raise
        return actor


@dataclass(eq=False, slots=True)
class Pending(Generic[T]):
    """A question whose answer may still be on its way. It is asked again if the actor that owes the answer is lost.

    Attributes:
        reference: to pass to other calls, which start when the answer is there and fail if the question fails. It
            changes when the question is asked again; calls that wait for the former reference have then failed.
    """

    _control: Control
    _role: ControlRole
    _method: Callable[..., T]
    _arguments: tuple[Any, ...]
    _asked: Actor = field(init=False)
    reference: Reference[T] = field(init=False)

    def __post_init__(self) -> None:
        self._ask()

    def result(self) -> T:
        """Wait for the answer, and ask each new incarnation again until one gives it.

        Raises:
            RaycloakError: what the actor raised.
            RunFailedError: ``unreachable`` if the actor is lost for good.
        """
        while True:
            try:
                return self._control.backend.fetch(self.reference, self._control.deadline_s)
            except ActorLost as lost:
                self._control.replace(self._asked, self._role, self._method.__name__, lost.cause)
            self._ask()

    def _ask(self) -> None:
        self._asked = self._control.actors[self._role]
        self.reference = self._control.backend.call(self._asked, self._method, *self._arguments)[0]


class _Face:
    """The methods of the actor of one role."""

    _role: ClassVar[ControlRole]

    def __init__(self, control: Control) -> None:
        self._control = control

    def _submit(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> Pending[T]:
        return Pending(self._control, self._role, method, Wire.of(method).positional(args, keywords))

    def _ask(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        return self._submit(method, *args, **keywords).result()


class _Waits(Remote[P, T]):
    """A method that waits for its answer."""

    def __get__(self, face: _Face, _: type) -> Callable[P, T]:
        return partial(face._ask, self._method)


class _Overlaps(Remote[P, T]):
    """A method that returns a :class:`Pending` at once."""

    def __get__(self, face: _Face, _: type) -> Callable[P, Pending[T]]:
        return partial(face._submit, self._method)


class LedgerFace(_Face):
    """The ledger's methods that a run needs; see `raycloak.coordinator.ledger.ledger.PrivacyLedger`."""

    _role = "ledger"
    bind_vectors = _Overlaps(PrivacyLedger.bind_vectors)
    charge = _Overlaps(PrivacyLedger.charge)
    hash_at = _Waits(PrivacyLedger.hash_at)
    load_accountant = _Overlaps(PrivacyLedger.load_accountant)
    outlook = _Waits(PrivacyLedger.outlook)
    price = _Overlaps(PrivacyLedger.price)
    register_run = _Waits(PrivacyLedger.register_run)
    status = _Waits(PrivacyLedger.status)
    view = _Waits(PrivacyLedger.view)


class OrchestratorFace(_Face):
    """The orchestrator's methods that a run needs; see
    `raycloak.attestation.service.serving_orchestrator.EvidenceOrchestrator`.

    Attributes:
        begun: arguments of the newest :meth:`begin`, with the newest collateral. Each new incarnation is begun with
            them: it finds its members on disk under the same session, but the terms are not on disk.
    """

    _role = "orchestrator"
    begun: tuple[RunTerms[Manifest], str] | None = None
    admit = _Waits(RunOrchestrator.admit)
    challenge = _Waits(RunOrchestrator.challenge)
    commit = _Waits(RunOrchestrator.commit)
    committed = _Waits(RunOrchestrator.committed)
    expel = _Waits(RunOrchestrator.expel)
    held_by_machine = _Waits(RunOrchestrator.held_by_machine)
    key_commitments = _Waits(RunOrchestrator.key_commitments)
    load_state = _Waits(RunOrchestrator.load_state)
    loads = _Waits(RunOrchestrator.loads)
    log_position = _Waits(RunOrchestrator.log_position)
    log_root_at = _Waits(RunOrchestrator.log_root_at)
    model_standing = _Waits(RunOrchestrator.model_standing)
    most_hosted = _Waits(RunOrchestrator.most_hosted)
    newest_published = _Waits(RunOrchestrator.newest_published)
    open_package = _Waits(RunOrchestrator.open_package)
    open_step = _Overlaps(RunOrchestrator.open_step)
    order_evaluation = _Waits(RunOrchestrator.order_evaluation)
    package_recipient = _Waits(RunOrchestrator.package_recipient)
    package_signer = _Waits(RunOrchestrator.package_signer)
    present = _Waits(RunOrchestrator.present)
    record_data = _Waits(RunOrchestrator.record_data)
    record_published = _Waits(RunOrchestrator.record_published)
    release = _Waits(RunOrchestrator.release)
    revocations = _Waits(RunOrchestrator.revocations)
    review = _Waits(RunOrchestrator.review)
    service_address = _Waits(RunOrchestrator.service_address)
    sign_package = _Waits(RunOrchestrator.sign_package)
    view = _Waits(RunOrchestrator.view)

    def begin(self, terms: RunTerms[Manifest], session: str) -> None:
        """Begin a session of the run, or resume it after a restart."""
        # Kept before the question is asked: if the actor dies of it, its successor has to begin too.
        self.begun = terms, session
        self._ask(RunOrchestrator.begin, terms, session)

    def take_collateral(self, collateral: CollateralBundle) -> None:
        """Judge evidence by newer collateral from now on."""
        if self.begun is not None:
            # Kept first, as in `begin`.
            terms, session = self.begun
            self.begun = replace(terms, collateral=collateral), session
        self._ask(RunOrchestrator.take_collateral, collateral)

    def export_log(self, log_file: str) -> None:
        """Write the log so far, with its documents beside it."""
        self._ask(RunOrchestrator.export_log, log_file)
        self._fetch_log(log_file)

    def _fetch_log(self, log_file: str) -> None:
        if self._control.is_apart:
            # In the order in which the orchestrator writes them: documents that the log names are there by then.
            write_whole(Path(log_file), self._ask(RunOrchestrator.exported_log).tobytes())
            write_whole(
                Path(log_file).with_name(DOCUMENTS_FILE), self._ask(RunOrchestrator.exported_documents).tobytes()
            )

    def finish(self, log_file: str, destroy: bool) -> None:
        """Export the log and end the run; destroy a generated secret if asked."""
        try:
            self._ask(RunOrchestrator.finish, log_file, destroy)
            self._fetch_log(log_file)
        except ConfigError as error:
            # Raised by a new incarnation: its predecessor destroyed the secret, the last act of finish, and then died.
            if error.code != "secret_destroyed":
                raise
