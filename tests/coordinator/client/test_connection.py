"""The connection: credentials, TLS, what every call carries, and the errors of a service that is not there."""

import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import raycloak
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.connection import Connection, is_loopback
from tests.coordinator.client.conftest import CONFIG
from tests.coordinator.client.memory_service import MemoryService

SOON = 120.0


def certificate(folder: Path, name: str, issuer=None):
    """Write NAME.pem and NAME.key: an authority, or a certificate of one."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0] if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    (folder / f"{name}.pem").write_bytes(built.public_bytes(encoding))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / f"{name}.key").write_bytes(key.private_bytes(encoding, *plain))
    return subject, key


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A folder with an authority ``ca``, and certificates ``server``, ``hospital`` of it and ``other`` of none."""
    folder = tmp_path_factory.mktemp("keys")
    ca = certificate(folder, "ca")
    certificate(folder, "server", ca)
    certificate(folder, "hospital", ca)
    certificate(folder, "other")
    return folder


@pytest.fixture
def tls_service(keys):
    """A service behind TLS that asks for certificates."""
    read = {name: (keys / name).read_bytes() for name in ("ca.pem", "server.key", "server.pem")}
    pair = [(read["server.key"], read["server.pem"])]
    with_clients = grpc.ssl_server_credentials(pair, root_certificates=read["ca.pem"], require_client_auth=True)
    service = MemoryService(token="t0ken").start("localhost:0", with_clients)
    yield service
    service.stop()


def test_mutual_tls_and_a_token(keys, tls_service):
    credentials = raycloak.ServiceCredentials(
        token="t0ken", ca=keys / "ca.pem", certificate=keys / "hospital.pem", key=keys / "hospital.key"
    )
    assert "t0ken" not in repr(credentials)
    with raycloak.ServiceClient(tls_service.address, credentials) as service:
        assert service.capabilities().tenant == "hospital"
        assert service.create_training_client(CONFIG).forward_backward().result(SOON).step == 0


@pytest.mark.parametrize("made", [("hospital", "other.pem"), ("other", "ca.pem")])
def test_another_authority_is_no_connection(keys, tls_service, made):
    name, ca = made
    credentials = raycloak.ServiceCredentials(
        token="t0ken", ca=keys / ca, certificate=keys / f"{name}.pem", key=keys / f"{name}.key"
    )
    with pytest.raises(raycloak.ServiceConnectionError, match="unreachable"):
        raycloak.ServiceClient(tls_service.address, credentials, patience_s=0.3)
    assert tls_service.calls == []


def test_a_token_file_may_be_replaced(tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    with (
        MemoryService(token="first") as memory,
        raycloak.ServiceClient(memory.address, raycloak.ServiceCredentials(token_file=file)) as service,
    ):
        memory.token = "second"
        with pytest.raises(raycloak.ServiceAuthenticationError, match="token_unknown"):
            service.capabilities()
        file.write_text("second\n")
        assert service.capabilities().datasets == ("digits",)
        file.unlink()
        with pytest.raises(raycloak.ServiceAuthenticationError, match="no_token"):
            service.capabilities()


def test_every_call_names_its_version_and_an_id(memory_service, training):
    training.refresh()
    assert {each["raycloak-version"] for _, each in memory_service.calls} == {raycloak.__version__}
    ids = [each["raycloak-request-id"] for _, each in memory_service.calls]
    assert len(set(ids)) == len(ids) >= 3


@pytest.mark.parametrize(
    "fields", [{"token": "a", "token_file": "b"}, {"certificate": "a"}, {"key": "a"}], ids=["tokens", "cert", "key"]
)
def test_credentials_that_contradict_each_other(fields):
    with pytest.raises(raycloak.ServiceValidationError):
        raycloak.ServiceCredentials(**fields)


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "ü"])
def test_a_token_with_strange_characters_is_not_sent(memory_service, token):
    with pytest.raises(raycloak.ServiceAuthenticationError, match="no_token"):
        raycloak.ServiceClient(memory_service.address, token)
    assert memory_service.calls == []


def test_a_missing_certificate_file_is_named(tmp_path):
    with pytest.raises(raycloak.ServiceAuthenticationError, match="absent"):
        raycloak.ServiceClient("localhost:1", raycloak.ServiceCredentials(ca=tmp_path / "absent.pem"))


def test_guarantee_a_token_leaves_over_tls_only_or_to_loopback(memory_service, monkeypatch):
    port = memory_service.address.rpartition(":")[2]
    # The same server under a name that is not one of loopback's gets a handshake, and nothing after it.
    monkeypatch.setattr("raycloak.coordinator.client.connection.is_loopback", lambda address: False)
    with pytest.raises(raycloak.ServiceConnectionError, match="unreachable"):
        raycloak.ServiceClient(f"127.0.0.1:{port}", "t0ken", patience_s=0.3)
    assert memory_service.calls == []


def test_loopback_addresses():
    assert [is_loopback(each) for each in ("localhost:1", "127.3.2.1:1", "[::1]:1")] == [True] * 3
    assert not any(is_loopback(each) for each in ("localhost.example:1", "10.0.0.1:1", "0.0.0.0:1", "[::]:1"))


@pytest.mark.parametrize("address", ["localhost", "http://localhost:1", "localhost:", ":1"])
def test_an_address_that_is_none_is_refused_at_once(address):
    with pytest.raises(raycloak.ServiceValidationError, match="write host:port"):
        raycloak.ServiceClient(address, "t0ken")


def test_a_service_that_is_not_there():
    with pytest.raises(raycloak.ServiceConnectionError, match=r"127\.0\.0\.1:1 does not answer") as caught:
        raycloak.ServiceClient("127.0.0.1:1", patience_s=0.3)
    assert caught.value.request_id


def test_a_server_of_another_protocol():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(raycloak.ServiceConnectionError, match="other_service"):
            raycloak.ServiceClient(f"127.0.0.1:{port}")
    finally:
        server.stop(0).wait(SOON)


def test_a_failure_without_a_reason_is_the_servers(memory_service, service):
    memory_service.failures["ListClients"] = [grpc.StatusCode.INTERNAL]
    with pytest.raises(raycloak.ServiceServerError, match="no_reason"):
        service.list_clients()


def test_calls_wait_for_a_service_that_restarts(memory_service, service):
    address = memory_service.address
    memory_service.stop()
    again = threading.Timer(0.5, lambda: memory_service.start(address))
    again.start()
    assert service.list_clients() == []
    again.join()


def test_an_upload_of_minutes_that_breaks_is_sent_again(memory_service, monkeypatch):
    now, sent = [0.0], []
    connection = Connection(memory_service.address, raycloak.ServiceCredentials(), 60.0)
    monkeypatch.setattr("raycloak.coordinator.client.connection.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Broken(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.UNAVAILABLE

    def send(pieces, timeout, metadata):
        sent.append(list(pieces))
        now[0] += 300.0
        if len(sent) == 1:
            raise Broken
        return "taken"

    connection._stub = SimpleNamespace(SendBatch=send)
    assert connection.call("SendBatch", lambda: iter([1, 2])) == "taken"
    assert sent == [[1, 2]] * 2
    connection.close()


def test_a_connection_that_is_closed_says_so(memory_service, service):
    service.close()
    with pytest.raises(raycloak.ServiceConnectionError, match="closed"):
        service.list_clients()


def test_closing_ends_a_call_that_is_being_repeated(memory_service):
    connection = Connection(memory_service.address, raycloak.ServiceCredentials(), 600.0)
    memory_service.failures["ListClients"] = [grpc.StatusCode.UNAVAILABLE] * 10_000
    errors = []

    def ask():
        try:
            connection.call("ListClients", wire.ListClientsRequest())
        except raycloak.ServiceConnectionError as error:
            errors.append(error.code)

    thread = threading.Thread(target=ask)
    thread.start()
    connection.close()
    thread.join(SOON)
    assert errors == ["closed"]


def test_an_artifact_comes_whole_across_a_broken_connection(memory_service, service, tmp_path):
    content = memory_service.artifacts["a"] = bytes(range(256)) * 50
    memory_service.failures["PullArtifact reply"] = [True, True]
    assert service.pull_artifact("a") == content
    memory_service.failures["PullArtifact reply"] = [True]
    service.save_artifact("a", tmp_path / "model.tssp")
    assert (tmp_path / "model.tssp").read_bytes() == content


def test_an_unknown_artifact_leaves_no_file(service, tmp_path):
    with pytest.raises(raycloak.ServiceNotFoundError) as caught:
        service.save_artifact("b", tmp_path / "model.tssp")
    assert caught.value.resource == "artifact"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_client(service):
    with pytest.raises(raycloak.ServiceNotFoundError) as caught:
        service.get_client("c9")
    assert caught.value.resource == "client"
