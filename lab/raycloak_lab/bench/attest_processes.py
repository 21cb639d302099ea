"""The processes beside the workers of ``raycloak-lab bench attest``: the service, and a holder of connections."""

import asyncio
import gc
import random
import resource
import socket
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Message
from raycloak.attestation.keys.release import KeyContract
from raycloak.attestation.orchestrator.hosting import AnyHosting
from raycloak.attestation.orchestrator.orchestrator import open_run
from raycloak.attestation.orchestrator.peer_desk import PeerDesk
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.policy.policy import KeyQuotas, simulated_policy
from raycloak.attestation.processes.channel import Channel
from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.attestation.service.server import EvidenceServer
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.attestation.trust.channel import client_end
from raycloak.metrics.errors import ConfigError

MANIFEST, ANSWER = digest(b"raycloak-lab bench attest"), digest(b"known answer")
VIRTUAL_WORKERS: Final = 8
_DEADLINE_S = 120.0
_KINDS = ("idle", "half_open", "slow")

# HTTP/2 (RFC 9113) by hand: preface, empty SETTINGS with acknowledgement, and a request whose body never comes.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000" + "000000040100000000")
_HEADERS = (
    (":method", "POST"),
    (":scheme", "https"),
    (":path", "/raycloak.evidence.v1.Evidence/Attest"),
    (":authority", "orchestrator.raycloak"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


_PLACES: Final = 1024
"""For connections beside those that are held."""
_MOST_CALLS: Final = 65_536
_ROOM: Final = 2**39
"""For requests: a slow one never becomes whole, and takes its room and no memory."""


class _BenchContract(KeyContract):
    """The contract of the bench. Its clients know the digest, and know no policy."""

    DOMAIN: ClassVar[str] = "raycloak/bench-contract/v1"

    @property
    def key_owners(self) -> int:
        return VIRTUAL_WORKERS

    def digest(self) -> bytes:
        return MANIFEST


class BenchServing(Message):
    """The first answer of a process that serves, with what its clients need to know it or to be let in."""

    DOMAIN: ClassVar[str] = "raycloak/bench/serving/v1"
    address: str
    credential: str


class Question(Message):
    """A question to a process of the bench, which does what ``act`` says and answers with its figures."""

    DOMAIN: ClassVar[str] = "raycloak/bench/question/v1"
    act: str = ""


class Figures(Message):
    """The answer, by the name of each figure."""

    DOMAIN: ClassVar[str] = "raycloak/bench/figures/v1"
    values: dict[str, float]


def figures(child: Child, act: str = "") -> dict[str, float]:
    """Return the present figures of a process of the bench, after it has done ``act``."""
    return child.call(Question(act=act), Figures, by=soon()).values


def soon() -> Deadline:
    """Return until when a process of the bench has to answer."""
    return Deadline(_DEADLINE_S)


def cpu_seconds() -> float:
    """Return the processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def raise_open_files(needed: int) -> None:
    """Let this process open as many files as the system allows; ConfigError ``open_files`` if that is too few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            "open_files",
            f"this needs {needed} open files, and the system allows {hard}.",
            "Raise the limit (ulimit -Hn), or ask for fewer.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def serve(parent: Channel, folder: str, held: str) -> None:
    """Serve a run below ``folder``, beside ``held`` connections; the credential is the orchestrator's key."""
    gc.freeze()  # as `raycloak attest serve` does with its loaded modules
    raise_open_files(1024)
    vendor = SimulatedVendor.load_or_create(Path(folder) / "simulator")
    run = open_run(str(Path(folder) / "orchestrator"), time.time, None)
    # Every worker asks for the same keys.
    endless = {"key_quotas": KeyQuotas(per_run=2**30)}
    policy = simulated_policy(vendor, code_measurement()).model_copy(update=endless)
    collateral = vendor.collateral(int(time.time()))
    contract = _BenchContract(run_id=run.run_id, known_answer=ANSWER, policy_digest=policy.digest(), key_commitments=())
    terms = RunTerms(
        contract.with_keys(run.key_commitments(contract.key_context, VIRTUAL_WORKERS, 1)), policy, collateral
    )
    session = run.begin(terms, "bench")
    places = int(held) + _PLACES
    # Every worker, and every connection that is held, comes from this one address.
    limits = ServiceLimits(
        address_rate=1e6,
        address_burst=10**6,
        connections=places,
        connections_per_address=places,
        pending_calls=_MOST_CALLS,
        calls_per_address=_MOST_CALLS,
        request_bytes=_ROOM,
        request_address_bytes=_ROOM,
        memory_bytes=2 * _ROOM,
    )
    server = EvidenceServer(PeerDesk(session, AnyHosting(2)), MANIFEST, "127.0.0.1:0", limits)
    parent.send(BenchServing(address=f"127.0.0.1:{server.port}", credential=run.public.ed25519.hex()))
    _answer(parent, dict)
    server.stop()
    run.close()


def _answer(parent: Channel, own: Callable[[], dict[str, float]]) -> None:
    while parent.receive(Question) is not None:
        parent.send(Figures(values={"cpu": cpu_seconds(), "mib": _peak_mib(), **own()}))


def _peak_mib() -> float:
    """Return peak resident memory since this program began; `resource` would also count its parent's."""
    line = next(
        each for each in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if each.startswith("VmHWM:")
    )
    return int(line.split()[1]) / 1024


def hold(parent: Channel, address: str, count: str) -> None:
    """Hold ``count`` connections, a third of each kind. One that the service closes is opened again."""
    raise_open_files(int(count) + 256)
    asyncio.run(_hold(parent, address, int(count)))


async def _hold(parent: Channel, address: str, count: int) -> None:
    host, _, port = address.rpartition(":")
    holder = _Holder(host, int(port))
    tasks = [asyncio.create_task(holder.keep(_KINDS[i % len(_KINDS)])) for i in range(count)]
    end = time.monotonic() + _DEADLINE_S
    while sum(holder.open.values()) < 0.99 * count:
        if time.monotonic() > end:
            raise TimeoutError(f"only {holder.open} of {count} connections could be opened")
        await asyncio.sleep(0.05)
    await asyncio.to_thread(_answer, parent, holder.figures)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_Opened: TypeAlias = tuple[Callable[[], Awaitable[bytes]], Callable[[], None]]
"""The functions that read from a connection, and close it."""


class _Holder:
    """The held connections, by kind."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._context = _client_context()
        self._opening = asyncio.Semaphore(32)
        self.open: Counter[str] = Counter()
        self.reopened = 0

    def figures(self) -> dict[str, float]:
        """Return how many are open, and how often one was opened again."""
        return {**{kind: float(self.open[kind]) for kind in _KINDS}, "reopened": float(self.reopened)}

    async def keep(self, kind: str) -> None:
        """Open a connection, wait until the service closes it, and repeat."""
        # The service closes bare connections after this time. They were opened at once, but must not end at once.
        first = None if kind == "slow" else random.uniform(0, ServiceLimits().stranger_s)
        while True:
            try:
                async with self._opening:
                    read, close = await (self._open_slow() if kind == "slow" else self._open_bare(kind))
            except OSError:
                await asyncio.sleep(0.2)
                continue
            self.open[kind] += 1
            try:
                async with asyncio.timeout(first):
                    while await read():
                        pass
            except OSError:  # which a timeout is
                pass
            finally:
                self.open[kind] -= 1
                close()
            first = None
            self.reopened += 1

    async def _open_bare(self, kind: str) -> _Opened:
        # A bare socket: a stream would take several times as much of the processors that are being measured.
        loop, connection = asyncio.get_running_loop(), socket.socket()
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, self._place)
            if kind == "half_open":
                await loop.sock_sendall(connection, bytes.fromhex("1603010200010001fc0303"))  # a ClientHello, cut off
        except BaseException:
            connection.close()
            raise
        return partial(loop.sock_recv, connection, 4096), connection.close

    async def _open_slow(self) -> _Opened:
        reader, writer = await asyncio.open_connection(*self._place, ssl=self._context)
        writer.write(_PREFACE + _request())
        return partial(reader.read, 4096), lambda: writer.transport.abort()  # a dropped writer would close instead


def _request() -> bytes:
    """Build a HEADERS frame that ends the headers but not the stream; every field a literal (RFC 7541, 6.2.2)."""
    fields = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in _HEADERS
    )
    return len(fields).to_bytes(3, "big") + bytes([1, 4]) + (1).to_bytes(4, "big") + fields


def _client_context() -> ssl.SSLContext:
    """Make the TLS context of a worker of the run, which does not verify the server."""
    end = client_end(IdentityKey.generate(), MANIFEST)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile() as file:  # `ssl` loads keys from files only; mode 0600
        file.write(end.key_pem + end.chain_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
