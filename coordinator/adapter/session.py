"""One client session: keys, the worker's evidence under the client's policy, and encrypted blocks one after another."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.policy.policy import Policy
from raycloak.coordinator.adapter import adapter_pb2 as wire
from raycloak.coordinator.adapter.connection import AdapterAddress, AdapterConnection
from raycloak.coordinator.adapter.introduction import PIECE_BYTES
from raycloak.coordinator.adapter.registration import ClientOrchestrator
from raycloak.metrics.errors import ProtocolError, RefusedError
from raycloak.workers.encrypted.client_keys import ClientKeys
from raycloak.workers.encrypted.parameters import MAX_WIDTH, BlockShape, require_allowed


@dataclass(slots=True)
class Traffic:
    """The costs of a session so far: bytes of blocks, and seconds by phase.

    Attributes:
        wait_s: time that the client waited for the server while it had nothing else to do.
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
        given = own.release(Envelope(begun.presentation.body, begun.presentation.signature), self._keys.released)
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

    def deltas(self, tokens: NDArray[Any], names: Sequence[str]) -> Iterator[dict[str, NDArray[np.float64]]]:
        """Yield the deltas of hidden states, block by block, for projections that share them.

        The next block is encrypted while the server computes one.

        Args:
            tokens: shape [n, width].
            names: projections of that width.

        Raises:
            BudgetError: ``tokens_spent``. The server's other refusals.
        """
        size = self._keys.shape.tokens
        pending = None
        for start in range(0, len(tokens), size):
            began = time.perf_counter()
            batch, factors = self._keys.encrypt(tokens[start : start + size])
            self.traffic.encrypt_s += time.perf_counter() - began
            if pending is not None:
                yield self._finished(*pending, names)
            pending = (self._sent(batch, names), factors)
        if pending is not None:
            yield self._finished(*pending, names)

    def blocks(self, count: int) -> int:
        """Return how many blocks ``count`` tokens take."""
        return -(-count // self._keys.shape.tokens)

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

    def _sent(self, batch: bytes, names: Sequence[str]) -> Any:
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
        return self._connection.start("Apply", chain([request], pieces))

    def _finished(
        self, reply: Any, factors: NDArray[np.float64], names: Sequence[str]
    ) -> dict[str, NDArray[np.float64]]:
        began = time.perf_counter()
        answer = reply()
        answered = time.perf_counter()
        if len(answer.answers) != len(names):
            raise ProtocolError("malformed", "the server answered for another number of projections.")
        self.tokens_left = answer.tokens_left
        found = {}
        for name, each in zip(names, answer.answers, strict=True):
            described = self.projections[name]
            found[name] = self._keys.decrypt(each, described.width_out, factors, described.gain)
            self.traffic.received_bytes += len(each)
        self.traffic.tokens += len(factors)
        self.traffic.wait_s += answered - began
        self.traffic.decrypt_s += time.perf_counter() - answered
        return found


def _pieces(content: bytes) -> Iterator[bytes]:
    return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _is_sound(projection: wire.Projection) -> bool:
    widths = (projection.width_in, projection.width_out)
    return all(1 <= width <= MAX_WIDTH for width in widths) and bool(0 <= projection.gain < np.inf)
