"""By what the service tells peers apart, and what it remembers of them."""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.service.connections import ConnectionGuard
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.attestation.service.server import _EvidenceServicer
from raycloak.attestation.trust.channel import client_end
from raycloak.metrics.errors import RefusedError
from tests.attestation.conftest import MANIFEST
from tests.attestation.serving import Site

GUARD = ConnectionGuard(ServiceLimits().bounds())
SINCE = datetime(2027, 1, 1, tzinfo=UTC)


def code_of(call, *arguments) -> str:
    """Return the code of the refusal; empty if it is none."""
    try:
        call(*arguments)
    except RefusedError as error:
        return error.code
    return ""


def test_the_calls_of_one_ipv6_network_are_limited_together(session, tmp_path):
    end = client_end(IdentityKey.generate(), MANIFEST)
    site = Site(session, tmp_path / "orchestrator")
    servicer = _EvidenceServicer(site.desk, None, ServiceLimits(address_rate=0.001, address_burst=3), GUARD)
    hosts = [f"ipv6:[2001:db8::{i:x}]" for i in range(4)] + ["ipv6:[2001:db8:0:1::1]"]
    codes = [code_of(servicer._peer, _Context(f"{host}:443", end.chain_pem)) for host in hosts]
    assert codes == ["", "", "", "rate_limited", ""]
    site.run.close()


def test_what_is_remembered_of_a_peer_has_a_size_whatever_its_certificate_says(session, tmp_path):
    """TLS takes certificates of 100 KB, and 65,536 peers are told apart by what theirs say."""
    site = Site(session, tmp_path / "orchestrator")
    servicer = _EvidenceServicer(site.desk, None, ServiceLimits(), GUARD)
    for parts, code in ((1, ""), (900, "peer_not_bound")):
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x" * 64)] * parts)
        builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(name).serial_number(1)
        builder = builder.not_valid_before(SINCE).not_valid_after(SINCE + timedelta(days=1))
        key = generate_private_key(SECP256R1())
        leaf = IdentityKey.generate().certify(builder.public_key(key.public_key()))
        context = _Context("ipv4:192.0.2.7:443", leaf.public_bytes(Encoding.PEM))
        assert code_of(servicer._peer, context) == code
    assert [len(identity) for identity in servicer._by_identity._buckets] == [32]
    site.run.close()


class _Context:
    """The part of gRPC's context that the service reads about a peer."""

    def __init__(self, peer, pem):
        self.peer = lambda: peer
        self.auth_context = lambda: {"x509_pem_cert": [pem]}
