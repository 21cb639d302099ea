"""EvidenceOrchestrator: the orchestrator of one run in its own process, which is told to open the run.

It gives every question its own method and a turn, and may answer peers over gRPC during the run:

    driver (actor method)  --.                                      .-- present, view: beside everything
                              >-- Turn: first come, first served --<
    service queue (batch)  --'                                      '-- all else: one at a time

`raycloak.attestation.orchestrator.orchestrator` takes every decision. The driver of a run admits its members; the
service admits only observers. A member gets from the service only what the run has already given it. An observer gets
the log and the newest roster.

Guarantee: no two threads are inside the orchestrator at once, and they enter in the order in which they asked. Nobody
holds a turn while something travels over a network: the service reads and writes in its own thread, and the
orchestrator collects its own evidence without a turn.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isfunction
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from raycloak.attestation.attester.attester import EvidenceSource
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.files.whole import write_whole
from raycloak.attestation.keys.release import KeyContract
from raycloak.attestation.log.evidence_log import EvidenceLog
from raycloak.attestation.orchestrator.admissions import Admissions, OrchestratorView
from raycloak.attestation.orchestrator.commits import CommitBook
from raycloak.attestation.orchestrator.key_desk import KeyDesk
from raycloak.attestation.orchestrator.loads import LoadBook
from raycloak.attestation.orchestrator.orchestrator import OpenRun, RunSession, open_run
from raycloak.attestation.orchestrator.package_desk import PackageDesk
from raycloak.attestation.orchestrator.peer_desk import PeerDesk
from raycloak.attestation.orchestrator.run_terms import OBSERVER, RunTerms
from raycloak.attestation.service.fair_lock import Turn
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.metrics.collectors import ServiceFigures
from raycloak.metrics.errors import ConfigError, RunFailedError

if TYPE_CHECKING:
    from raycloak.attestation.service.server import EvidenceServer

# A run has other work: one address may ask less of it than of a service that does nothing else.
RUN_LIMITS: Final = ServiceLimits(connections=1024, pending_calls=256, address_rate=200.0, address_burst=400)
# A port may stay taken while the process of a former incarnation is about to end.
PORT_DEADLINE_S: Final = 10.0
_PAUSE_S: Final = 0.2
# Calls are short, and a caller that is cut off asks again.
_STOP_S: Final = 0.2

P = ParamSpec("P")
R = TypeVar("R")


def _in_turn(
    part: str, method: Callable[Concatenate[Any, P], R]
) -> "Callable[Concatenate[EvidenceOrchestrator, P], R]":
    """Return ``method`` of a part as a method of the orchestrator that waits for its turn."""

    @wraps(method)
    def answer(self: "EvidenceOrchestrator", /, *arguments: P.args, **keywords: P.kwargs) -> R:
        with self._turn_of_run():
            return method(attrgetter(part)(self), *arguments, **keywords)

    return answer


class EvidenceOrchestrator:
    """The orchestrator of one run, for callers in other threads and processes: an actor, and the service of the run.

    A caller in the same thread uses `raycloak.attestation.orchestrator.orchestrator.open_run` and its objects instead.

    Args:
        state_directory, clock: as `raycloak.attestation.orchestrator.orchestrator.open_run`.
        bind: ``host:port`` to serve at from :meth:`begin` to :meth:`finish`. With port 0 it takes a free port, and a
            later incarnation of the session takes the same one. None to serve nothing.
        source: the platform under it; None for one that presents no evidence.
    """

    def __init__(
        self,
        state_directory: str,
        clock: Callable[[], float],
        bind: str | None = None,
        source: EvidenceSource | None = None,
    ) -> None:
        self._directory = state_directory
        self._clock = clock
        self._bind = bind
        self._source = source
        self._turn = Turn()
        # Empty until open_run and begin: on Ray, constructor arguments stay readable in the control store, so they must
        # not name a secret; and an error of a constructor reaches the driver as text only, without its code.
        self._run: OpenRun | None = None
        self._session: RunSession | None = None
        self._server: EvidenceServer | None = None

    # --- the run

    def open_run(self, secret_file: str | None, run_id: str | None = None) -> tuple[str, SignerPublic]:
        """Open the run, as `raycloak.attestation.orchestrator.orchestrator.open_run`; returns (run id, the
        orchestrator's public keys)."""
        with self._turn_of_run():
            run = open_run(self._directory, self._clock, secret_file, run_id)
            self._run, self._session = run, None
        return run.run_id, run.public

    key_commitments = _in_turn("_open", OpenRun.key_commitments)
    most_hosted = _in_turn("_open", OpenRun.most_hosted)
    export_log = _in_turn("_open", OpenRun.export_log)
    committed = _in_turn("_open.books.commits", CommitBook.steps)
    loads = _in_turn("_open.books.loads", LoadBook.all)
    log_position = _in_turn("_open.books.log", EvidenceLog.position)
    log_root_at = _in_turn("_open.books.log", EvidenceLog.root_at)

    def begin(self, terms: RunTerms[KeyContract], session: str) -> None:
        """Begin or resume a session, as `raycloak.attestation.orchestrator.orchestrator.OpenRun.begin`, and serve.

        Raises:
            ConfigError: ``bind`` if the address cannot be listened on.
        """
        self._stop_serving()
        with self._turn:
            self._session = begun = self._open.begin(terms, session)
        if self._bind is not None:
            self._server = self._serve(begun, terms.manifest_digest, session, self._bind)

    def finish(self, log_file: str, destroy: bool) -> None:
        """Finish the run, as `raycloak.attestation.orchestrator.orchestrator.OpenRun.finish`; nothing is served or
        logged after it."""
        self._stop_serving()
        with self._turn:
            self._open.finish(log_file, destroy)

    def close(self) -> None:
        """Close the state; another instance may open the run."""
        self._stop_serving()
        self._open.close()

    # --- admission

    challenge = _in_turn("_begun.admission", Admissions.challenge)
    admit = _in_turn("_begun.admission", Admissions.admit)
    review = _in_turn("_begun.admission", Admissions.review)
    take_collateral = _in_turn("_begun.admission", Admissions.take_collateral)

    def expel(self, member_id: str, cause: str) -> None:
        """Remove a member, as `raycloak.attestation.orchestrator.admissions.Admissions.expel`.

        A worker may be lost before a session begins. Nobody is a member then, so there is nobody to remove.
        """
        with self._turn_of_run():
            if self._session is not None:
                self._session.admission.expel(member_id, cause)

    def view(self) -> OrchestratorView:
        """Return facts for metrics, without a turn; before a session, nobody is admitted."""
        # Read once, because another thread may replace it meanwhile.
        session = self._session
        return OrchestratorView({}, "", {}) if session is None else session.admission.view()

    def service_figures(self) -> ServiceFigures | None:
        """Return what a scrape shows of the service, without a turn; None while nothing is served."""
        # Read once, because another thread may end either meanwhile.
        session, server = self._session, self._server
        if session is None or server is None:
            return None
        return server.figures(session.admission.collateral_ends)

    def present(self) -> Envelope:
        """Present this orchestrator, without a turn: evidence is slow to collect, and nothing here changes it."""
        assert self._source is not None, "an orchestrator that presents itself has a platform"
        return self._begun.present(self._source)

    # --- keys

    release = _in_turn("_begun.keys", KeyDesk.release)
    held_by_machine = _in_turn("_begun.keys", KeyDesk.held_by_machine)

    # --- steps

    record_data = _in_turn("_begun", RunSession.record_data)
    open_step = _in_turn("_begun", RunSession.open_step)
    order_evaluation = _in_turn("_begun", RunSession.order_evaluation)
    commit = _in_turn("_begun", RunSession.commit)
    load_state = _in_turn("_begun", RunSession.load_state)
    model_standing = _in_turn("_begun", RunSession.model_standing)

    # --- packages

    package_signer = _in_turn("_begun.packages", PackageDesk.signer)
    package_recipient = _in_turn("_begun.packages", PackageDesk.recipient)
    sign_package = _in_turn("_begun.packages", PackageDesk.sign)
    open_package = _in_turn("_begun.packages", PackageDesk.open)
    record_published = _in_turn("_begun.packages", PackageDesk.record_published)
    newest_published = _in_turn("_begun.packages", PackageDesk.newest_published)

    # --- the service

    def service_address(self) -> str | None:
        """Return ``host:port`` of the service; None if there is none."""
        if self._bind is None or self._server is None:
            return None
        return f"{self._bind.rpartition(':')[0]}:{self._server.port}"

    @property
    def _open(self) -> OpenRun:
        assert self._run is not None, "open_run comes first"
        return self._run

    @property
    def _begun(self) -> RunSession:
        assert self._session is not None, "begin comes first"
        return self._session

    @contextmanager
    def _turn_of_run(self) -> Iterator[None]:
        with self._turn:
            if self._server is not None and self._server.failure is not None:
                # Memory and disk may differ from here on. The run resumes from the disk, once it can be written.
                raise RunFailedError(
                    "record_unwritten", "the orchestrator could not write its record.", "Free the disk, then resume."
                )
            yield

    def _stop_serving(self) -> None:
        # Not in a turn: the calls under way need theirs to end.
        server, self._server = self._server, None
        if server is not None:
            server.stop(_STOP_S)

    def _serve(self, begun: RunSession, manifest_digest: bytes, session: str, bind: str) -> "EvidenceServer":
        """Start the service, and note its port for later incarnations of the session."""
        from raycloak.attestation.service.server import EvidenceServer  # it takes a while to load; few runs need it

        desk = PeerDesk(begun, attests=(OBSERVER,), again_only=True, open_log=False)
        host, _, port = bind.rpartition(":")
        port_file = Path(self._directory) / f"{begun.run.run_id}.port"
        former = _former_port(port_file, session) if int(port) == 0 else None
        deadline = time.monotonic() + PORT_DEADLINE_S
        while True:
            try:
                server = EvidenceServer(desk, manifest_digest, f"{host}:{former or port}", RUN_LIMITS, self._turn)
                break
            except ConfigError:
                if time.monotonic() >= deadline or (int(port) == 0 and former is None):
                    raise
            time.sleep(_PAUSE_S)
        write_whole(port_file, f"{session} {server.port}\n".encode())
        return server


def _former_port(port_file: Path, session: str) -> int | None:
    """Return the port of an earlier incarnation of this session; None if none is known."""
    try:
        of, port = port_file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return int(port) if of == session else None


# A question travels under the name of its function, and a part may have another name for it.
for _name, _method in vars(EvidenceOrchestrator).items():
    if isfunction(_method):
        _method.__name__ = _name
