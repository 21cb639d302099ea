"""One client session: keys, the worker's evidence under the client's policy, and encrypted blocks one after another."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.policy.policy import Policy
from raycloak.metrics.errors import ModelError, ProtocolError, RefusedError
from raycloak_lab.adapter import adapter_pb2 as wire
from raycloak_lab.adapter.connection import AdapterAddress, AdapterConnection
from raycloak_lab.adapter.introduction import PIECE_BYTES
from raycloak_lab.adapter.registration import ClientOrchestrator
from raycloak_lab.encrypted.client_keys import ClientKeys
from raycloak_lab.encrypted.parameters import ANSWER_BYTES, MAX_WIDTH, BlockShape, require_allowed

# Blocks under way: the server computes one while the next is encrypted. More would only take memory.
_AHEAD: Final = 2


@dataclass(slots=True)
class Traffic:
    """The costs of a session so far: bytes of blocks, and seconds by phase.

    Attributes:
        blocks: requests, each of which sent one block.
        wait_s: time that the client waited for the server.
    """

    blocks: int = 0
    tokens: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    encrypt_s: float = 0.0
    wait_s: float = 0.0
    decrypt_s: float = 0.0


class AdapterSession:
    """A session with the worker of one adapter.

    Guarantee: the secret key stays in this object. The released keys leave it only sealed for a worker whose evidence
    the policy accepted, over a channel that its attested key certifies, after the log has their fingerprint.

    Args:
        folder: of the client's logs.
        policy, collateral: that the worker is judged by.

    Raises:
        EvidenceError: why the worker's evidence is refused.
        ProtocolError: ``encryption_set``, ``projection_width`` or ``malformed`` for a server that serves something
            else; the server's refusals.

    Attributes:
        projections: the server's description by name.
        evidence_class: of the worker; ``simulated`` proves nothing about a machine.
        shared: trained parts that the owner gives away, as a safetensors file; empty for none.
        tokens_left: for the projection that had the least left, when the server last said so.
    """

    def __init__(
        self,
        address: AdapterAddress,
        identity: IdentityKey,
        folder: Path,
        policy: Policy,
        collateral: CollateralBundle,
    ) -> None:
        self.traffic = Traffic()
        self._connection = AdapterConnection(address, identity)
        self._sequence = 0
        self._name = ""
        self._orchestrator: ClientOrchestrator | None = None
        try:
            self._open(address, folder, policy, collateral)
        except BaseException:
            self.close()
            raise

    def _open(self, address: AdapterAddress, folder: Path, policy: Policy, collateral: CollateralBundle) -> None:
        described = self._connection.call("Describe", wire.DescribeRequest())
        require_allowed(described.parameter_set)
        self.projections = {each.name: each for each in described.projections}
        if not self.projections or not all(_is_sound(each) for each in described.projections):
            raise ProtocolError("malformed", "the server describes no adapter that could be used.")
        self.tokens_left: int = described.tokens_left
        self.shared: bytes = described.shared
        self._keys = ClientKeys(BlockShape(described.tokens, described.rank))
        self._orchestrator = own = ClientOrchestrator(
            folder,
            policy,
            collateral,
            fingerprint=self._keys.fingerprint,
            adapter_digest=described.adapter_digest,
            worker_key=address.worker_key,
        )
        request = wire.BeginRequest(contract=own.contract, policy=own.policy, challenge=own.challenge())
        begun = self._connection.call("Begin", request)
        self._name = begun.session
        given = own.release(
            Envelope(body=begun.presentation.body, signature=begun.presentation.signature), self._keys.released
        )
        self.evidence_class = given.evidence_class
        package = wire.SignedMessage(body=given.release.package.body, signature=given.release.package.signature)
        registration = wire.RegisterRequest(
            session=self._name,
            fingerprint=self._keys.fingerprint,
            package=package,
            proof=given.release.proof,
            extends=given.release.extends,
        )
        pieces = (wire.RegisterRequest(sealed_keys=piece) for piece in _pieces(given.sealed))
        self._connection.call("Register", chain([registration], pieces))

    def deltas(
        self, tokens: NDArray[Any], names: Sequence[str], tell: Callable[[], None] = lambda: None
    ) -> dict[str, NDArray[np.float64]]:
        """Return the deltas of hidden states for projections that share them; the next block is encrypted meanwhile.

        Behind a block that was refused nothing is sent. A block that is under way when ``tell`` fails is awaited, and
        it is charged.

        Args:
            tokens: shape [n, width].
            names: projections of that width.
            tell: called after each block.

        Returns:
            Deltas by projection, shape [n, its width].

        Raises:
            BudgetError: ``tokens_spent``. The server's other refusals.
            ModelError: ``states_not_finite``; nothing is sent then.
            RefusedError: ``adapter_closed`` behind `close`.
        """
        if self._orchestrator is None:
            raise RefusedError("adapter_closed", "the session was closed.", "Make another encrypted adapter.")
        if not np.isfinite(tokens).all():
            raise ModelError(
                "states_not_finite",
                f"an input of '{names[0]}' has numbers that are not finite, and nothing can encrypt them.",
                "Look at the model's inputs and its precision.",
            )
        found = {name: np.zeros((len(tokens), self.projections[name].width_out)) for name in names}
        starts = range(0, len(tokens), self.block_tokens)
        asked: deque[_Asked] = deque()
        with _Line() as line:
            for start in starts:
                if len(asked) == _AHEAD:
                    self._finish(asked.popleft(), found, tell)
                asked.append(self._asked(line, tokens, slice(start, start + self.block_tokens), names))
            while asked:
                self._finish(asked.popleft(), found, tell)
        return found

    @property
    def block_tokens(self) -> int:
        """The tokens of a block, which is charged as a whole."""
        return self._keys.shape.tokens

    def close(self) -> None:
        """End the session: the worker drops the keys, and the log is complete on disk."""
        try:
            # A server that has dropped the session, or has gone, has nothing left to end.
            with suppress(RefusedError):
                if self._name:
                    name, self._name = self._name, ""
                    self._connection.call("Close", wire.CloseRequest(session=name))
        finally:
            self._connection.close()
            if self._orchestrator is not None:
                own, self._orchestrator = self._orchestrator, None
                own.finish()

    def _asked(self, line: "_Line", tokens: NDArray[Any], rows: slice, names: Sequence[str]) -> "_Asked":
        began = time.perf_counter()
        batch, factors = self._keys.encrypt(tokens[rows])
        self.traffic.encrypt_s += time.perf_counter() - began
        answers = [(each, line.ask(partial(self._answer, batch, each))) for each in self._requests(names)]
        return _Asked(rows, answers, factors)

    def _requests(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Yield projections that share a block, request by request: as many as one answer holds."""
        request: list[str] = []
        room = ANSWER_BYTES
        for name in names:
            needed = self._keys.shape.answer_bytes(self.projections[name].width_out)
            if needed > room:
                yield request
                request, room = [], ANSWER_BYTES
            request.append(name)
            room -= needed
        yield request

    def _answer(self, batch: bytes, names: Sequence[str]) -> wire.ApplyReply:
        """Return the server's answer to a block; in the line's thread, so that requests have the order of numbers."""
        self._sequence += 1
        request = wire.ApplyRequest(
            session=self._name,
            sequence=self._sequence,
            fingerprint=self._keys.fingerprint,
            projections=names,
        )
        pieces = (wire.ApplyRequest(batch=piece) for piece in _pieces(batch))
        self.traffic.blocks += 1
        self.traffic.sent_bytes += len(batch)
        answer: wire.ApplyReply = self._connection.call("Apply", chain([request], pieces))
        return answer

    def _finish(self, asked: "_Asked", found: dict[str, NDArray[np.float64]], tell: Callable[[], None]) -> None:
        for names, future in asked.answers:
            began = time.perf_counter()
            answer = future.result()
            answered = time.perf_counter()
            self.traffic.wait_s += answered - began
            if len(answer.answers) != len(names):
                raise ProtocolError("malformed", "the server answered for another number of projections.")
            self.tokens_left = answer.tokens_left
            for name, each in zip(names, answer.answers, strict=True):
                described = self.projections[name]
                found[name][asked.rows] = self._keys.decrypt(each, described.width_out, asked.factors, described.gain)
                self.traffic.received_bytes += len(each)
            self.traffic.decrypt_s += time.perf_counter() - answered
        self.traffic.tokens += len(asked.factors)
        tell()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A block under way: its rows, its requests' projections and answers, and what the answers are multiplied by."""

    rows: slice
    answers: "Sequence[tuple[list[str], Future[wire.ApplyReply]]]"
    factors: NDArray[np.float64]


class _Line:
    """Calls in a thread of their own, one at a time and in order; after one that failed, none is made.

    At the end of its block, the call under way is awaited and those behind it are dropped.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "adapter calls")
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def ask(self, call: Callable[[], wire.ApplyReply]) -> "Future[wire.ApplyReply]":
        """Return a call's result as a future; behind a call that failed, that call's error."""
        return self._thread.submit(self._made, call)

    def _made(self, call: Callable[[], wire.ApplyReply]) -> wire.ApplyReply:
        # A server charges for each block that it answers, and nobody would read this answer.
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except BaseException as failure:
            self._failure = failure
            raise


def _pieces(content: bytes) -> Iterator[bytes]:
    return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _is_sound(projection: wire.Projection) -> bool:
    widths = (projection.width_in, projection.width_out)
    return all(1 <= width <= MAX_WIDTH for width in widths) and bool(0 <= projection.gain < np.inf)
