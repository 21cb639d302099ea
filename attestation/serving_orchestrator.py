"""An orchestrator that answers over gRPC while its run goes on, beside whoever drives the run.

    driver (actor method)  --.                                      .-- present, view: beside everything
                              >-- Turn: first come, first served --<
    service queue (batch)  --'                                      '-- all else: one at a time

What the run decides, it decides alone: its members are admitted by its driver, and over the service only observers are.
A member of the run gets there what the run gave it already, an observer the log and the newest roster.

Guarantee: no two threads are inside the orchestrator at once; whoever waits for it is next after those who waited
before. Nobody holds it while something travels over a network: the service reads and writes in a thread of its own, and
evidence of the orchestrator's is collected without it.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attestation.orchestrator import EvidenceOrchestrator
from attestation.run_terms import OBSERVER, RunTerms
from attestation.service_limits import ServiceLimits
from attestation.turns import Turn
from attestation.whole_file import write_whole
from metrics.errors import ConfigError, RunFailedError

if TYPE_CHECKING:
    from attestation.service import EvidenceServer

RUN_LIMITS: Final = ServiceLimits(connections=1024, pending_calls=256, address_rate=200.0, address_burst=400)
"""A run has other things to do: what one address may ask is less than of a service that does nothing else."""
PORT_DEADLINE_S: Final = 10.0
"""For which a port that is taken is asked for again: the process of a former incarnation may be about to end."""
_PAUSE_S: Final = 0.2
_STOP_S: Final = 0.2


class ServingOrchestrator(EvidenceOrchestrator):
    """`EvidenceOrchestrator` of a run that serves itself from :meth:`begin` to :meth:`finish`.

    Args:
        state_directory, clock: as `EvidenceOrchestrator`.
        bind: ``host:port`` to listen on; with port 0, a free one, which a later incarnation of the session takes again.
            None to serve nothing.
    """

    def __init__(self, state_directory: str, clock: Callable[[], float], bind: str | None = None) -> None:
        super().__init__(state_directory, clock)
        self._bind = bind
        self._turn = Turn()
        self._server: EvidenceServer | None = None

    def begin(self, terms: RunTerms, session: str) -> None:
        """As `EvidenceOrchestrator.begin`, and serve.

        Raises:
            ConfigError: ``bind`` if the address cannot be listened on.
        """
        self._stop_serving()
        with self._turn:
            super().begin(terms, session)
            desk = replace(super().evidence_desk(), attests=(OBSERVER,), again_only=True, open_log=False)
        if self._bind is not None:
            from attestation.service import EvidenceServer  # it takes a while to load; few runs need it

            digest = terms.manifest_digest
            self._server = self._listen(
                session, self._bind, lambda at: EvidenceServer.start(desk, digest, at, RUN_LIMITS, self._turn)
            )

    def service_address(self) -> str | None:
        """``host:port`` where it serves; None if it does not."""
        if self._bind is None or self._server is None:
            return None
        return f"{self._bind.rpartition(':')[0]}:{self._server.port}"

    def finish(self, *arguments: Any) -> None:
        """As `EvidenceOrchestrator.finish`; what would be logged after it is not answered any more."""
        self._stop_serving()
        with self._turn:
            super().finish(*arguments)

    def close(self) -> None:
        """As `EvidenceOrchestrator.close`."""
        self._stop_serving()
        super().close()

    def _stop_serving(self) -> None:
        """Not in a turn of its own: the calls under way need theirs."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(_STOP_S)

    def _listen(self, session: str, bind: str, start: "Callable[[str], EvidenceServer]") -> "EvidenceServer":
        host, _, port = bind.rpartition(":")
        former = self._former_port(session) if int(port) == 0 else None
        deadline = time.monotonic() + PORT_DEADLINE_S
        while True:
            try:
                server = start(f"{host}:{former or port}")
                break
            except ConfigError:
                if time.monotonic() >= deadline or (int(port) == 0 and former is None):
                    raise
            time.sleep(_PAUSE_S)
        write_whole(self._port_file, f"{session} {server.port}\n".encode())
        return server

    def _former_port(self, session: str) -> int | None:
        """Where an earlier incarnation of this session has served."""
        try:
            of, port = self._port_file.read_text().split()
        except (OSError, ValueError):
            return None
        return int(port) if of == session else None

    @property
    def _port_file(self) -> Path:
        return self._directory / f"{self._run_id}.port"


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def answer(self: ServingOrchestrator, *arguments: Any, **keywords: Any) -> Any:
        with self._turn:
            if self._server is not None and self._server.failure is not None:
                # Memory and disk may differ from here on; the run goes on from the disk, once it can be written.
                raise RunFailedError(
                    "record_unwritten", "the orchestrator could not write its record.", "Free the disk, then resume."
                )
            return method(self, *arguments, **keywords)

    return answer


BESIDE: Final = frozenset({"present", "view"})
"""Methods that need no turn: they read what never changes in a session, or one value at a time."""

for _name, _method in vars(EvidenceOrchestrator).items():
    if (
        inspect.isfunction(_method)
        and not _name.startswith("_")
        and _name not in BESIDE | set(vars(ServingOrchestrator))
    ):
        setattr(ServingOrchestrator, _name, _in_turn(_method))
