"""The worker in a vault, a process of its own, so that the server that strangers reach holds neither adapter nor keys.

It answers one call at a time. A worker that dies is not replaced: its identity key, evidence and sessions die with it,
and every later call is refused. A worker that hangs is killed.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from raycloak.attestation.attester.attester import EvidenceSource
from raycloak.attestation.attester.guest import GuestEvidence
from raycloak.attestation.core.messages import Envelope, Message, parse
from raycloak.attestation.keys.release import KeyRelease
from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.attestation.trust.channel import ChannelEnd
from raycloak.coordinator.config import home
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.vaults.calls import ActorRefusal, Wire
from raycloak.coordinator.vaults.hosted import Hosted, Inside
from raycloak.coordinator.vaults.vault import Vault, VaultLost, child
from raycloak.metrics.errors import RefusedError, RunFailedError
from raycloak_lab.encrypted.adapter_worker import Adapter, AdapterFacts, AdapterWorker, ProjectionFacts
from raycloak_lab.encrypted.parameters import BlockShape

START_DEADLINE_S: Final = 300.0
CALL_DEADLINE_S: Final = 60.0
"""Bounds one call; a block of the widest projection takes a second."""

Octets = NDArray[np.uint8]
"""Bytes of any length: as an array they travel in shared memory."""


class AdapterOpening(Message):
    """The opening of an adapter's vault; see `raycloak_lab.adapter.serve.served_adapter`."""

    DOMAIN: ClassVar[str] = "raycloak/vault/adapter/v1"
    path: str
    trust: str | None
    key: str | None
    config: str | None
    shared: tuple[str, ...]
    tokens: int
    simulated: bool


class AdapterReport(Message):
    """The facts of an adapter's worker, but for its shared parts, and its end of the channel to clients."""

    DOMAIN: ClassVar[str] = "raycloak/adapter-report/v1"
    adapter_digest: bytes
    matrices_digest: bytes
    identity_key: bytes
    shape: BlockShape
    projections: tuple[ProjectionFacts, ...]
    certificate: bytes
    chain_pem: bytes
    key_pem: bytes


def load_adapter(
    path: str, trust: Path | None, key: Path | None, config: Path | None, shared: tuple[str, ...]
) -> Adapter:
    """Return the adapter of a run directory or a sealed package; errors as `released_model` and `lora_of`."""
    # Here, because the server imports this module: it needs no torch itself.
    from raycloak.coordinator.runs.released_model import Keys, released_model
    from raycloak_lab.adapter.lora import lora_of

    return lora_of(released_model(path, config=config, keys=Keys.of(trust, key)).module, shared)


class AdapterVault(Hosted):
    """An AdapterWorker that answers calls; arguments and errors as there."""

    OPENING: ClassVar[type[Message]] = AdapterOpening

    def __init__(self, opening: Any, inside: Inside) -> None:
        # The server awaits what is under way first, also where a signal reaches both.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._worker = AdapterWorker(self._adapter(opening), opening.tokens, self._source(opening))

    def _adapter(self, opening: Any) -> Adapter:
        trust, key, config = (Path(each) if each else None for each in (opening.trust, opening.key, opening.config))
        return load_adapter(opening.path, trust, key, config, opening.shared)

    def _source(self, opening: Any) -> EvidenceSource:
        if not opening.simulated:
            return GuestEvidence()
        # Of this home, so it proves nothing about a machine.
        return LocalPlatform(SimulatedVendor.load_or_create(home.simulator_folder()).platform())

    def report(self) -> tuple[AdapterReport, Octets]:
        """Return the worker's facts, and the shared parts."""
        facts, end = self._worker.facts, self._worker.end
        report = AdapterReport(
            adapter_digest=facts.adapter_digest,
            matrices_digest=facts.matrices_digest,
            identity_key=facts.identity_key,
            shape=facts.shape,
            projections=facts.projections,
            certificate=end.certificate,
            chain_pem=end.chain_pem,
            key_pem=end.key_pem,
        )
        return report, _octets(facts.shared)

    def present(self, session: str, contract: bytes, policy: bytes, challenge: bytes) -> Envelope:
        return self._worker.present(session, contract, policy, challenge)

    def register(self, session: str, release: KeyRelease, fingerprint: bytes, sealed: Octets) -> None:
        self._worker.register(session, release, fingerprint, sealed.tobytes())

    def apply(self, session: str, fingerprint: bytes, names: tuple[str, ...], batch: Octets) -> tuple[Octets, ...]:
        return tuple(map(_octets, self._worker.apply(session, fingerprint, batch.tobytes(), names)))

    def close(self, session: str) -> None:
        self._worker.close(session)


class WorkerProcess:
    """The server's side of a worker.

    Args:
        opening: what the vault is opened with. Only its process has the adapter.
        target: the class that it hosts.

    Raises:
        RaycloakError: whatever kept the worker from starting. RunFailedError ``worker_gone`` if it died.
    """

    def __init__(self, opening: Message, target: str = f"{__name__}:{AdapterVault.__name__}") -> None:
        self._vault = Vault(partial(child, target), opening, None, lambda _: None)
        try:
            report, shared = self._ask(START_DEADLINE_S, 2, AdapterVault.report)
        except BaseException:
            self.stop()
            raise
        about = report.adapter_digest, report.matrices_digest, report.identity_key, report.shape, report.projections
        self.facts = AdapterFacts(*about, shared.tobytes())
        self.end = ChannelEnd(report.certificate, report.chain_pem, report.key_pem)

    def present(self, session: str, contract: bytes, policy: bytes, challenge: bytes) -> Envelope:
        """See `AdapterWorker.present`."""
        asked = AdapterVault.present, session, contract, policy, challenge
        (presented,) = self._ask(CALL_DEADLINE_S, 1, *asked)
        envelope: Envelope = presented
        return envelope

    def register(self, session: str, release: KeyRelease, fingerprint: bytes, sealed: bytes) -> None:
        """See `AdapterWorker.register`."""
        self._ask(CALL_DEADLINE_S, 1, AdapterVault.register, session, release, fingerprint, _octets(sealed))

    def apply(self, session: str, fingerprint: bytes, batch: bytes, names: Sequence[str]) -> tuple[bytes, ...]:
        """See `AdapterWorker.apply`."""
        asked = AdapterVault.apply, session, fingerprint, tuple(names), _octets(batch)
        return tuple(each.tobytes() for each in self._ask(CALL_DEADLINE_S, len(names), *asked))

    def close(self, session: str) -> None:
        """See `AdapterWorker.close`."""
        self._ask(CALL_DEADLINE_S, 1, AdapterVault.close, session)

    def stop(self) -> None:
        """End the process."""
        self._vault.end()

    def _ask(self, deadline_s: float, returns: int, method: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        wire = Wire.of(method)
        # Ended, since a worker that hangs may hold everybody's turn, and never reads what is sent.
        timer = threading.Timer(deadline_s, self._vault.end)
        timer.daemon = True
        timer.start()
        try:
            answers = self._vault.call(method.__name__, returns, wire.write_call(args))
        except (VaultLost, MemoryError):
            raise RunFailedError(
                "worker_gone", "the worker of the adapter does not answer.", "Its owner must start the server again."
            ) from None
        except ActorRefusal as refusal:
            error = parse(Failed, refusal.args[0]).raised()
            if error.code == "actor_error":
                error = RefusedError("adapter_failed", "the worker failed at this call.", "See the log of the server.")
            raise error from None
        finally:
            timer.cancel()
        return tuple(wire.read_answer(index, each) for index, each in enumerate(answers))


def _octets(content: bytes) -> Octets:
    return np.frombuffer(content, np.uint8)
