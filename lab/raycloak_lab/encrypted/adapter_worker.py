"""The worker that holds an adapter: it attests itself to each client, and answers encrypted batches.

It sees ciphertexts, times and the names of projections. It never sees a hidden state, and it never returns or logs
anything decrypted: it has no secret key.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from raycloak.attestation.attester.attester import Attester, EvidenceSource
from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.evidence import Challenge
from raycloak.attestation.core.keys import SECRET_BYTES, Secret
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import ExpectedRelease, KeyRelease, open_keys
from raycloak.attestation.log.watch import LogWatch
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.trust.channel import ChannelEnd, server_end
from raycloak.metrics.errors import EvidenceError, ProtocolError
from raycloak.metrics.proof_bounds import require_assertions
from raycloak_lab.encrypted.evaluation_keys import EvaluationKeys
from raycloak_lab.encrypted.flooding import Rerandomiser
from raycloak_lab.encrypted.parameters import BlockShape
from raycloak_lab.encrypted.projection import PackedProjection, padded_rank
from raycloak_lab.encrypted.released_keys import open_released, stated_answer

MEMBER_ID = "adapter-worker"
"""The worker's name at each client's orchestrator, which attests no other member."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The two matrices of one adapted projection.

    Attributes:
        down: A, shape [r, width_in].
        up: B times α/r, shape [width_out, r].
    """

    down: NDArray[np.float64]
    up: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as its owner serves it.

    Attributes:
        projections: matrices by the name of their projection in the base model.
        shared: trained parts that every client is given in the clear, in the safetensors format; empty for none.
    """

    projections: Mapping[str, LowRank]
    shared: bytes = b""


@dataclass(frozen=True, slots=True)
class ProjectionFacts:
    """The facts that a client needs to use a projection; see `PackedProjection`."""

    name: str
    width_in: int
    width_out: int
    gain: float


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The facts that every client is told about an adapter and its worker.

    Attributes:
        adapter_digest: SHA-256 over names, matrices and shared parts.
        matrices_digest: SHA-256 over names and matrices, which are what answers tell.
        identity_key: the worker's, which its evidence binds and which certifies the channel.
    """

    adapter_digest: bytes
    matrices_digest: bytes
    identity_key: bytes
    shape: BlockShape
    projections: tuple[ProjectionFacts, ...]
    shared: bytes


@dataclass(slots=True)
class _Session:
    """One client's session. It has a contract first, and keys after the release."""

    contract: ServiceContract
    policy: Policy
    keys: EvaluationKeys | None = None
    rerandomiser: Rerandomiser | None = None


class AdapterWorker:
    """One adapter and the sessions on it.

    Args:
        adapter: its matrices and shared parts.
        tokens: tokens of a block, a power of two.
        source: the platform that the worker runs on.

    Raises:
        ModelError: as `PackedProjection`; ``adapter_shape`` also for an adapter without matrices.
        ConfigError: ``block_shape``.

    Attributes:
        facts: of the adapter.
        end: the worker's end of channels, certified by its attested key.
    """

    def __init__(self, adapter: Adapter, tokens: int, source: EvidenceSource) -> None:
        require_assertions()
        matrices = adapter.projections
        rank = max((each.down.shape[0] for each in matrices.values()), default=1)
        shape = BlockShape(tokens, padded_rank(rank))
        self._packed = {name: PackedProjection(each.down, each.up, shape) for name, each in matrices.items()}
        self._attester = Attester(MEMBER_ID, source)
        self._sessions: dict[str, _Session] = {}
        # The worker's, not a session's: a request repeated in another session gets the same noise.
        self._secret = Secret(secrets.token_bytes(SECRET_BYTES))
        matrices_digest = _digest_of(matrices)
        self.end: ChannelEnd = server_end(self._attester.identity)
        self.facts = AdapterFacts(
            adapter_digest=digest(
                length_prefixed("raycloak/encrypted-adapter/adapter/v1", matrices_digest, digest(adapter.shared))
            ),
            matrices_digest=matrices_digest,
            identity_key=self._attester.identity.public,
            shape=shape,
            projections=tuple(
                ProjectionFacts(name, each.width_in, each.width_out, each.gain) for name, each in self._packed.items()
            ),
            shared=adapter.shared,
        )

    def present(self, session: str, contract: bytes, policy: bytes, challenge: bytes) -> Envelope:
        """Begin a session: answer the challenge of a client's orchestrator for its contract.

        Raises:
            ProtocolError: ``malformed``, ``challenge_mismatch``, or ``policy_mismatch`` if the policy is not the
                contract's.
        """
        terms, judged_by = parse(ServiceContract, contract), parse(Policy, policy)
        if judged_by.digest() != terms.policy_digest:
            raise ProtocolError("policy_mismatch", "the policy is not the contract's.", "Send the two together.")
        presented = self._attester.present(parse(Challenge, challenge), terms.digest(), terms.known_answer)
        self._sessions[session] = _Session(terms, judged_by)
        return presented

    def register(self, session: str, release: KeyRelease, fingerprint: bytes, sealed: bytes) -> None:
        """Take a client's keys, with the release that lets this worker open them.

        Guarantee: the keys are those that the contract states, for this adapter and parameter set. The client's
        orchestrator signed and logged their release to this worker.

        Raises:
            EvidenceError: as `raycloak.attestation.keys.release.open_keys`; ``key_package_mismatch``.
            ProtocolError: ``keys_of_another_session`` if the session has keys or is not there; ``malformed`` for a
                contract without keys of an orchestrator; as `EvaluationKeys`.
        """
        begun = self._sessions.get(session)
        if begun is None or begun.keys is not None:
            raise _no_session()
        contract = begun.contract
        if contract.known_answer != stated_answer(fingerprint, self.facts.adapter_digest):
            raise ProtocolError(
                "keys_of_another_session",
                "the contract states other keys, another parameter set or another adapter.",
                "Make a contract for these keys and this adapter.",
            )
        try:
            orchestrator = contract.orchestrator
        except ValidationError:
            raise ProtocolError("malformed", "the contract names no keys of an orchestrator.") from None
        expected = ExpectedRelease(
            orchestrator, contract.run_id, MEMBER_ID, contract.digest(), begun.policy, LogWatch()
        )
        _, given = open_keys(release, expected, hpke_key=self._attester.hpke, key_commitments=contract.key_commitments)
        if 0 not in given:
            raise EvidenceError("key_package_mismatch", "the key package is not for the contract's one virtual worker")
        released = open_released(given[0].stream, fingerprint, sealed)
        keys = EvaluationKeys(self.facts.shape, released)
        begun.rerandomiser = Rerandomiser(keys, self._secret)
        begun.keys = keys

    def apply(self, session: str, fingerprint: bytes, batch: bytes, names: Sequence[str]) -> tuple[bytes, ...]:
        """Answer one encrypted block for projections that share it.

        Raises:
            ProtocolError: ``keys_of_another_session``, ``projection_unknown``, or as `EvaluationKeys.read_batch`.
        """
        registered = self._sessions.get(session)
        if registered is None or registered.keys is None or registered.rerandomiser is None:
            raise _no_session()
        registered.keys.require(fingerprint)
        width = self.shared_width(names)
        activations = registered.keys.read_batch(batch, width)
        request = hashlib.sha256(batch).digest()
        return tuple(
            registered.rerandomiser.answer(request, name, self._packed[name].apply(activations, registered.keys))
            for name in names
        )

    def shared_width(self, names: Sequence[str]) -> int:
        """Return the width of the activations that projections share; ProtocolError ``projection_unknown``."""
        widths = {self._packed[name].width_in for name in names if name in self._packed}
        if len(widths) != 1 or len(set(names)) != len(names) or not set(names) <= self._packed.keys():
            raise ProtocolError(
                "projection_unknown",
                "the request names no projections of the adapter that could share one block.",
                "Name projections that the adapter's description lists, each once and of one width.",
            )
        return widths.pop()

    def close(self, session: str) -> None:
        """Drop a session with its keys; nothing happens if it is not there."""
        self._sessions.pop(session, None)


def _no_session() -> ProtocolError:
    return ProtocolError(
        "keys_of_another_session", "the session has no keys here.", "Begin a session and register its keys."
    )


def _digest_of(matrices: Mapping[str, LowRank]) -> bytes:
    parts: list[bytes | str | int] = []
    for name, each in sorted(matrices.items()):
        for matrix in (each.down, each.up):
            content = np.ascontiguousarray(matrix, "<f8")
            parts += [name, *content.shape, digest(content.tobytes())]
    return digest(length_prefixed("raycloak/encrypted-adapter/matrices/v1", *parts))
