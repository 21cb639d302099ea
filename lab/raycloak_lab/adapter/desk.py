"""The desk between clients and the worker: who may ask, in which session, in which order, and out of which budget.

It holds no key and no weight. It passes sealed keys and ciphertexts on.

Guarantee: a token is charged before it is computed. A request is answered once: a repeat and a request of another
client's session are refused.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.keys.release import KeyRelease
from raycloak.metrics.errors import ProtocolError, RefusedError
from raycloak_lab.adapter.budgets import TokenBudgets
from raycloak_lab.adapter.collector import ADAPTER_PHASES, AdapterFigures
from raycloak_lab.encrypted.adapter_worker import AdapterFacts
from raycloak_lab.encrypted.evaluation_keys import batch_bytes, released_bytes
from raycloak_lab.encrypted.parameters import ANSWER_BYTES
from raycloak_lab.encrypted.released_keys import SEAL_BYTES


class Worker(Protocol):
    """The worker as the desk asks it; see `raycloak_lab.encrypted.adapter_worker.AdapterWorker`."""

    @property
    def facts(self) -> AdapterFacts: ...

    def present(self, session: str, contract: bytes, policy: bytes, challenge: bytes) -> Envelope: ...

    def register(self, session: str, release: KeyRelease, fingerprint: bytes, sealed: bytes) -> None: ...

    def apply(self, session: str, fingerprint: bytes, batch: bytes, names: Sequence[str]) -> tuple[bytes, ...]: ...

    def close(self, session: str) -> None: ...


@dataclass(slots=True)
class _Session:
    client: str
    last_used_s: float
    sequence: int = 0
    is_registered: bool = False


class AdapterDesk:
    """The sessions on one adapter.

    Args:
        clients: names of clients by identity key, 32 bytes.
        sessions: most sessions at once; a client holds at most a quarter of them, and at least one.
        idle_s: seconds after which a session without a request ends.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        worker: Worker,
        budgets: TokenBudgets,
        clients: Mapping[bytes, str],
        *,
        sessions: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._budgets = budgets
        self.clients = dict(clients)
        self._most, self._idle_s, self._clock = sessions, idle_s, clock
        self._most_of_client = max(1, sessions // 4)
        self._sessions: dict[str, _Session] = {}
        # One request at a time: SEAL uses all that a core has, and a second batch in memory would be a second client's.
        self._turn = threading.Lock()
        self.facts = worker.facts
        self._tokens = 0
        self._seconds = dict.fromkeys(ADAPTER_PHASES, 0.0)

    @property
    def idle_s(self) -> float:
        """Seconds after which a session without a request ends."""
        return self._idle_s

    @property
    def sealed_bytes(self) -> int:
        """The length of a client's sealed keys."""
        return released_bytes(self.facts.shape) + SEAL_BYTES

    @property
    def request_bytes(self) -> int:
        """The length of the longest request: a client's sealed keys, or a block for the widest projection."""
        blocks = (batch_bytes(self.facts.shape, each.width_in) for each in self.facts.projections)
        return max(self.sealed_bytes, *blocks)

    def batch_bytes(self, names: Sequence[str]) -> int:
        """Return the length of a block for these projections.

        Raises:
            ProtocolError: ``projection_unknown``; ``answer_size`` for more projections than one answer holds.
        """
        widths = {each.name: each.width_in for each in self.facts.projections}
        known = len(set(names)) == len(names) and widths.keys() >= set(names)
        if not known or len({widths[name] for name in names}) != 1:
            raise ProtocolError(
                "projection_unknown",
                "the request names no projections of the adapter that could share one block.",
                "Name projections that the adapter's description lists, each once and of one width.",
            )
        shape = self.facts.shape
        answered = (shape.answer_bytes(each.width_out) for each in self.facts.projections if each.name in names)
        if sum(answered) > ANSWER_BYTES:
            raise ProtocolError(
                "answer_size",
                f"the answer for {len(names)} projections would be longer than {ANSWER_BYTES} bytes.",
                "Name fewer projections, and send the block again for the others.",
            )
        return batch_bytes(shape, widths[names[0]])

    def tokens_left(self, client: str) -> int:
        """Return the tokens of whole blocks that the projection with the least has left for ``client``."""
        with self._turn:
            return self._whole(self._budgets.left(client, [each.name for each in self.facts.projections]))

    def begin(self, client: str, contract: bytes, policy: bytes, challenge: bytes) -> tuple[str, Envelope]:
        """Open a session; return its name and the worker's presentation.

        Raises:
            RefusedError: ``busy`` if there are too many sessions. ProtocolError: as `AdapterWorker.present`.
        """
        with self._turn:
            self._drop_idle()
            own = sum(each.client == client for each in self._sessions.values())
            if len(self._sessions) >= self._most or own >= self._most_of_client:
                raise RefusedError("busy", "the adapter has no room for another session.", "Close one, or ask later.")
            name = secrets.token_hex(16)
            presented = self._worker.present(name, contract, policy, challenge)
            self._sessions[name] = _Session(client, self._clock())
            return name, presented

    def register(self, client: str, session: str, release: KeyRelease, fingerprint: bytes, sealed: bytes) -> None:
        """Give the session its keys; errors as `AdapterWorker.register`. A refusal ends the session."""
        with self._turn:
            found = self._of(client, session)
            try:
                self._worker.register(session, release, fingerprint, sealed)
            except BaseException:
                self._drop(session)
                raise
            found.is_registered = True

    def apply(
        self, client: str, session: str, sequence: int, fingerprint: bytes, batch: bytes, names: Sequence[str]
    ) -> tuple[tuple[bytes, ...], int]:
        """Charge a block and answer it; return the answers and the tokens that are left.

        Raises:
            ProtocolError: ``replayed`` unless ``sequence`` is above all before; as `batch_bytes` and
                `AdapterWorker.apply`.
            BudgetError: ``tokens_spent``.
        """
        with self._turn:
            found = self._of(client, session)
            if sequence <= found.sequence:
                raise ProtocolError(
                    "replayed",
                    f"request {sequence} came behind request {found.sequence}.",
                    "Number the requests of a session upwards from 1, and repeat none.",
                )
            # Keys and names, so that nothing is charged for what could not be answered.
            if not found.is_registered:
                raise _no_session()
            self.batch_bytes(names)
            # Before the charge: an answer that fails may have been computed in part, so its number is used up.
            found.sequence = sequence
            # The whole block: the server cannot see how much of it is in use.
            began = self._clock()
            self._budgets.charge(client, names, self.facts.shape.tokens)
            charged = self._clock()
            self._tokens += self.facts.shape.tokens
            answers = self._worker.apply(session, fingerprint, batch, names)
            self._seconds["charge"] += charged - began
            self._seconds["compute"] += self._clock() - charged
            return answers, self._whole(self._budgets.left(client, names))

    def drop_idle(self) -> None:
        """End the sessions without a request for too long, and drop their keys; the server asks this by itself."""
        with self._turn:
            self._drop_idle()

    def close(self, client: str, session: str) -> None:
        """End a session and drop its keys."""
        with self._turn:
            self._of(client, session)
            self._drop(session)

    def figures(self, calls: Mapping[tuple[str, str], int]) -> AdapterFigures:
        """Return what a scrape shows, with the calls that the server counted; it waits for a block under way."""
        with self._turn:
            return AdapterFigures(
                calls=calls,
                tokens=self._tokens,
                seconds=dict(self._seconds),
                tokens_left=self._whole(self._budgets.left_of_adapter([each.name for each in self.facts.projections])),
                sessions=len(self._sessions),
            )

    def _whole(self, tokens: int) -> int:
        """Return the tokens of whole blocks: the rest of a budget answers nothing."""
        return tokens - tokens % self.facts.shape.tokens

    def _of(self, client: str, session: str) -> _Session:
        self._drop_idle()
        found = self._sessions.get(session)
        if found is None or found.client != client:
            raise _no_session()
        found.last_used_s = self._clock()
        return found

    def _drop_idle(self) -> None:
        oldest = self._clock() - self._idle_s
        for name in [name for name, each in self._sessions.items() if each.last_used_s < oldest]:
            self._drop(name)

    def _drop(self, session: str) -> None:
        del self._sessions[session]
        self._worker.close(session)


def _no_session() -> ProtocolError:
    return ProtocolError(
        "keys_of_another_session",
        "this client has no such session with keys.",
        "Begin a session and register its keys.",
    )
