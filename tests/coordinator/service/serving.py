"""A served desk whose drivers are scripted: the real server, store and thread of turns, without a run's processes."""

import datetime as dt
from contextlib import contextmanager
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from raycloak.coordinator.client.service_pb2_grpc import TrainingStub
from raycloak.coordinator.service.databases import open_database
from raycloak.coordinator.service.desk import Desk
from raycloak.coordinator.service.server import ServiceParts, TrainingServer
from raycloak.coordinator.service.store import Store
from raycloak.coordinator.service.turns import Turns
from raycloak.version import VERSION
from tests.coordinator.service.scripted import Counted, ScriptedDrivers, ScriptedSampler, World, settings


class LiveDrivers(ScriptedDrivers):
    """Drivers that go on by themselves, in the desk's thread."""

    def start(self, client_id, begin):
        """See `DriverPort`."""
        super().start(client_id, begin)
        self._later(client_id)

    def send(self, client_id, command):
        """See `DriverPort`."""
        super().send(client_id, command)
        self._later(client_id)

    def stop(self, client_id):
        """See `DriverPort`."""
        super().stop(client_id)
        self._later(client_id)

    def _later(self, client_id):
        self.turns.tell(lambda: self._pump(client_id), lambda: self.turns.desk_of.reports.give_up(client_id))

    def _pump(self, client_id):
        driver = self.of.get(client_id)
        for report in driver.pump() if driver else ():
            self.turns.desk_of.reports.report(client_id, report)
        if driver and driver.ended:
            self.of.pop(client_id, None)


class Served:
    """A served desk.

    Attributes:
        address: ``host:port``.
    """

    def __init__(self, folder, url=None, **fields):
        self.settings = settings(**fields)
        self.store = Store(open_database(url or f"sqlite:///{folder / 'store' / 's.sqlite'}"))
        self.world, self.refused, self.folder = World(folder / "world"), [], folder / "batches"
        self.folder.mkdir(exist_ok=True)
        drivers, self.sampler = LiveDrivers(self.world), ScriptedSampler()
        self.pieces = lambda row: iter([b"one", b"two"])

        def make(watches):
            self.watches = watches
            desk = Desk(
                self.settings, folder, self.store, drivers, self.sampler, self.folder, watches.publish, Counted(),
                self.world, folder / "key.pub",
            )  # fmt: skip
            self.desk, self.turns = desk, Turns(desk, self.settings.limits.waiting_calls)
            self.turns.desk_of, drivers.turns = desk, self.turns
            self.turns.start()
            return ServiceParts(
                desk, self.turns, self.folder, lambda row: self.pieces(row), self.refused.append, "simulated"
            )

        self.server = TrainingServer(make, self.settings, folder)
        self.address = f"localhost:{self.server.port}"

    def stop(self):
        """End server, desk and store."""
        self.server.stop(0.5)
        self.turns.close()
        self.store.close()


@contextmanager
def stub(address, ca=None, certificate=None):
    """Yield a stub of the service; with TLS where ``ca`` is given."""
    if ca is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, *(certificate or (None, None))))
    with channel:
        yield TrainingStub(channel)


def metadata(token="north", version=VERSION, request_id="request-1"):
    """Return the metadata of a call."""
    authorization = (("authorization", f"Bearer {token}"),) if token is not None else ()
    return (*authorization, ("raycloak-version", version), ("raycloak-request-id", request_id))


class Authority:
    """A certificate authority."""

    def __init__(self, name="ca"):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self._signed(self._name, self._key, ca=True).public_bytes(serialization.Encoding.PEM)

    def issue(self, name, hosts=()):
        """Return (key, certificate) in PEM for a name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key, hosts=hosts)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private, certificate.public_bytes(serialization.Encoding.PEM)

    def write(self, folder: Path, name, hosts=()):
        """Write key and certificate for a name; return the settings of them."""
        key, certificate = self.issue(name, hosts)
        (folder / "key.pem").write_bytes(key)
        (folder / "certificate.pem").write_bytes(certificate)
        (folder / "ca.pem").write_bytes(self.pem)
        return {"certificate": "certificate.pem", "key": "key.pem"}

    def _signed(self, subject, key, hosts=(), ca=False):
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if hosts:
            names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())
