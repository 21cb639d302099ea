"""Mutual TLS on attested keys: how an Ed25519 identity key vouches for one end of a gRPC channel.

gRPC's TLS library signs no handshake with Ed25519, so the identity key cannot be the key of a leaf certificate. It can
be an issuer: each side makes a P-256 key for TLS, and its identity key certifies it. A worker trusts one root, the
orchestrator's key from the manifest. So the handshake fails unless that very key certified the other end.

The orchestrator cannot know a worker's key beforehand, and gRPC asks for no certificate that it would not verify. A
worker's chain therefore ends in an introduction root, whose private key follows from the manifest's digest. Anyone who
knows the manifest can make one, so it vouches for nobody. It makes TLS ask for the certificate and prove that its
holder is at the other end. Peers that do not know the run are turned away. The service identifies the peer
by the leaf: the identity key of the presentation must have certified it (:func:`is_channel_of`).

Guarantee: a channel on which the service accepts a presentation ends at a process that holds a TLS key certified by the
presented identity key. That identity key signed the digests of the certificates at both ends (:class:`ChannelBinding`).
A presentation relayed over another party's channel is refused. That channel has another client certificate, the relay
cannot make one of the worker's key, and a signature for another channel names other certificates. This "live channel"
proof answers relay attacks on attested TLS, such as CVE-2026-33697. Certificates replace RFC 9266's exporter value,
which gRPC does not expose. They serve as well, because each channel has a fresh client key.
Not guaranteed: that the TLS key is inside the TEE. The key that counts for secrets is the attested HPKE key.
"""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import ClassVar, Final

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    derive_private_key,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier, SignatureAlgorithmOID

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.evidence import Bytes32, Refusal, refuse
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.core.messages import Message

SERVER_NAME: Final = "orchestrator.raycloak"
MAX_LEAF_BYTES: Final = 4096
"""Bounds a leaf in PEM. A genuine one has some 700 bytes, and the leaves of many peers are remembered for a while."""
# The keys live as long as a process or a channel. A clock that is off must not end them (RFC 5280, 4.1.2.5).
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


class ChannelBinding(Message):
    """A statement, signed by an identity key, that its presentation belongs to one channel.

    Attributes:
        presentation: SHA-256 of the presentation's body.
        server_certificate, client_certificate: SHA-256 of the DER leaf certificates at both ends.
    """

    DOMAIN: ClassVar[str] = "raycloak/channel-binding/v1"

    presentation: Bytes32
    server_certificate: Bytes32
    client_certificate: Bytes32

    def signed_bytes(self) -> bytes:
        """Return ``LP(domain, body)``."""
        return length_prefixed(self.DOMAIN, self.encode())


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """A TLS key for one end of a channel, certified by an identity key.

    Attributes:
        certificate: SHA-256 of the DER leaf.
        chain_pem: the leaf, followed by the certificates up to the root that the other side trusts.
        key_pem: PKCS #8. It belongs to this process and is never stored.
    """

    certificate: bytes
    chain_pem: bytes
    key_pem: bytes = field(repr=False)


def server_end(identity: IdentityKey) -> ChannelEnd:
    """Make the service's end, with a new TLS key."""
    key = generate_private_key(SECP256R1())
    builder = _builder(_leaf_name(identity.public), _identity_name(identity.public), ca=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
    leaf = identity.certify(_leaf(builder, key, ExtendedKeyUsageOID.SERVER_AUTH))
    return _end(key, leaf, ())


def client_end(identity: IdentityKey, manifest_digest: bytes) -> ChannelEnd:
    """Make a worker's end of one channel, with a new TLS key."""
    key = generate_private_key(SECP256R1())
    builder = _builder(_leaf_name(identity.public), _identity_name(identity.public), ca=False)
    leaf = identity.certify(_leaf(builder, key, ExtendedKeyUsageOID.CLIENT_AUTH))
    introduction = _introduction_key(manifest_digest)
    issued = _builder(_identity_name(identity.public), _introduction_name(manifest_digest), ca=True)
    issued = issued.public_key(Ed25519PublicKey.from_public_bytes(identity.public))
    return _end(key, leaf, (issued.sign(introduction, SHA256()),))


def server_credentials(end: ChannelEnd, manifest_digest: bytes) -> grpc.ServerCredentials:
    """Make credentials of a server that talks only to peers who know the manifest and hold a certified TLS key."""
    introduction = _introduction_key(manifest_digest)
    name = _introduction_name(manifest_digest)
    root = _builder(name, name, ca=True).public_key(introduction.public_key()).sign(introduction, SHA256())
    pairs = [(end.key_pem, end.chain_pem)]
    return grpc.ssl_server_credentials(pairs, root.public_bytes(Encoding.PEM), require_client_auth=True)


def client_credentials(end: ChannelEnd, orchestrator_key: bytes) -> grpc.ChannelCredentials:
    """Make credentials of a client that talks only to a server whose TLS key ``orchestrator_key`` certified."""
    return grpc.ssl_channel_credentials(server_anchor(orchestrator_key), end.key_pem, end.chain_pem)


def client_channel(address: str, end: ChannelEnd, orchestrator_key: bytes, most_bytes: int) -> grpc.Channel:
    """Make a client's channel to a server whose TLS key ``orchestrator_key`` certified.

    Args:
        address: ``host:port``.
        most_bytes: of one answer.
    """
    options = (
        # The certificate names the service, wherever it listens.
        ("grpc.ssl_target_name_override", SERVER_NAME),
        # Each channel has its own certificate; a shared pool could reuse another channel's connection.
        ("grpc.use_local_subchannel_pool", 1),
        # A call that gRPC repeats by itself would be a replay: it would use up a nonce or a draw.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", most_bytes),
    )
    return grpc.secure_channel(address, client_credentials(end, orchestrator_key), options)


@lru_cache(maxsize=16)
def server_anchor(orchestrator_key: bytes) -> bytes:
    """Return the PEM root that a client trusts: it stands for ``orchestrator_key`` and no other key."""
    name = _identity_name(orchestrator_key)
    root = _builder(name, name, ca=True).public_key(Ed25519PublicKey.from_public_bytes(orchestrator_key))
    # A root is trusted for its key. No reader checks its signature, and the orchestrator's private key is elsewhere.
    return IdentityKey.generate().certify(root).public_bytes(Encoding.PEM)


@lru_cache(maxsize=1024)  # each call of a peer asks again
def is_channel_of(certificate: x509.Certificate, identity_key: bytes) -> bool:
    """Return whether the raw Ed25519 key ``identity_key`` certified the leaf ``certificate``."""
    if certificate.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
        return False
    try:
        public = Ed25519PublicKey.from_public_bytes(identity_key)
        public.verify(certificate.signature, certificate.tbs_certificate_bytes)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_leaf(pem: bytes) -> x509.Certificate:
    """Parse a peer's certificate as gRPC reports it; EvidenceError ``peer_not_bound`` if it is missing or too large."""
    if len(pem) > MAX_LEAF_BYTES:
        refuse(Refusal.PEER_NOT_BOUND, f"the peer showed a certificate of {len(pem)} bytes")
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        refuse(Refusal.PEER_NOT_BOUND, "the peer showed no certificate")


def certificate_digest(certificate: x509.Certificate) -> bytes:
    """Return SHA-256 of the certificate in DER."""
    return digest(certificate.public_bytes(Encoding.DER))


@lru_cache(maxsize=16)
def _introduction_key(manifest_digest: bytes) -> EllipticCurvePrivateKey:
    """Derive the introduction root's key. It is not a secret: it follows from data that every participant knows."""
    seed = hashlib.sha512(length_prefixed("raycloak/introduction-root/v1", manifest_digest)).digest()
    # 512 bits reduced by a 256-bit order are uniform to within 2^-256; below the order, and never zero.
    return derive_private_key(int.from_bytes(seed, "big") % (SECP256R1.group_order - 1) + 1, SECP256R1())


def _introduction_name(manifest_digest: bytes) -> x509.Name:
    return _name(f"raycloak introduction {manifest_digest.hex()[:16]}")


def _identity_name(public: bytes) -> x509.Name:
    return _name(f"raycloak identity {public.hex()[:32]}")


def _leaf_name(public: bytes) -> x509.Name:
    return _name(f"raycloak channel {public.hex()[:32]}")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, *, ca: bool) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(_FROM).not_valid_after(_UNTIL)
    return builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)


def _leaf(
    builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey, usage: ObjectIdentifier
) -> x509.CertificateBuilder:
    return builder.public_key(key.public_key()).add_extension(x509.ExtendedKeyUsage([usage]), critical=True)


def _end(key: EllipticCurvePrivateKey, leaf: x509.Certificate, above: tuple[x509.Certificate, ...]) -> ChannelEnd:
    return ChannelEnd(
        certificate=certificate_digest(leaf),
        chain_pem=b"".join(each.public_bytes(Encoding.PEM) for each in (leaf, *above)),
        key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
