"""An evidence service on loopback, and members that talk to it."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Envelope
from raycloak.attestation.orchestrator.hosting import StaticHosting
from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.attestation.orchestrator.peer_desk import PeerDesk
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.service.client import EvidenceClient
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.attestation.service.server import EvidenceServer
from raycloak.attestation.trust.channel import SERVER_NAME, client_end
from tests.attestation.attester.test_attester import Source
from tests.attestation.conftest import MANIFEST, MEASUREMENT, NOW, Session, StandIn
from tests.raw_http2 import connect

ANSWER = b"k" * 32
HOSTING = {"worker-0": (0, 2), "worker-1": (1, 3)}


@dataclass
class Site:
    """An orchestrator that has begun a run and serves it."""

    session: Session
    home: Path
    limits: ServiceLimits = field(default_factory=ServiceLimits)

    def __post_init__(self) -> None:
        self.run = open_run(str(self.home), lambda: NOW, None)
        self.run_id, self.log_owner = self.run.run_id, self.run.public
        self.key = self.log_owner.ed25519
        policy = simulated_policy(self.session.vendor, MEASUREMENT)
        self.terms = RunTerms(StandIn.under(policy), policy, self.session.collateral)
        self.begin("execution-1")

    def begin(self, session: str) -> None:
        """Begin a session, which the next server answers for."""
        self.begun = self.run.begin(self.terms, session)
        self.desk = PeerDesk(self.begun, StaticHosting.of(HOSTING, (), 4))

    @contextmanager
    def served(self) -> Iterator["Site"]:
        self.server = EvidenceServer(self.desk, MANIFEST, "127.0.0.1:0", self.limits)
        try:
            yield self
        finally:
            self.server.stop(0.2)
            self.run.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def attester(self, name: str = "worker-0") -> Attester:
        return Attester(name, Source(self.session.platform))

    def client(self, attester: Attester, **changes) -> EvidenceClient:
        arguments = {"manifest_digest": MANIFEST, "orchestrator_key": self.key, "attester": attester}
        return EvidenceClient(self.address, **arguments | changes)

    def admitted(self, name: str = "worker-0") -> tuple[EvidenceClient, Attester]:
        attester = self.attester(name)
        client = self.client(attester)
        client.attest(answer(client, attester))
        return client, attester

    def connect(self) -> socket.socket:
        """Open a bare TCP connection."""
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)


def tls_connection(port: int, folder: Path, source: str = "127.0.0.1", known: bytes = MANIFEST) -> ssl.SSLSocket:
    """Return a connection of a peer that knows the manifest, with TLS and nothing more.

    Args:
        folder: takes the peer's key, since `ssl` reads keys from files alone.
        known: digest that a peer must know to be let in.
    """
    end = client_end(IdentityKey.generate(), known)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    (folder / "end.pem").write_bytes(end.chain_pem + end.key_pem)
    context.load_cert_chain(folder / "end.pem")
    return context.wrap_socket(connect(port, source), server_hostname=SERVER_NAME)


def answer(client: EvidenceClient, attester: Attester) -> Envelope:
    """Return an honest presentation for a fresh challenge."""
    return attester.present(client.challenge("worker"), MANIFEST, ANSWER)


def eventually(condition: Callable[[], bool], deadline_s: float = 120.0) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)
