"""Keys and certificates of the simulated vendor: the same structure as the real one, under its own root.

Every subject carries ``O=SIMULATOR - NOT A TEE``. Certificates are valid from 2020 to 2049, so that making them needs
no clock.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_private_key,
    load_der_public_key,
)
from cryptography.x509.oid import NameOID, ObjectIdentifier
from pydantic import Field

from raycloak.attestation.core.messages import Message
from raycloak.attestation.simulators.der import SGX_EXTENSION_OID

ORGANIZATION = "SIMULATOR - NOT A TEE"
VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)
VALID_UNTIL = datetime(2049, 12, 31, tzinfo=UTC)


class StoredCredential(Message):
    """The serialized form of a :class:`Credential`. The key does not appear in its repr."""

    DOMAIN: ClassVar[str] = "raycloak/simulator/credential/v1"

    key_pkcs8: bytes = Field(repr=False)
    certificate_der: bytes


@dataclass(frozen=True, slots=True, repr=False)
class Credential:
    """A P-256 private key and the certificate of its public key."""

    key: EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> str:
        """The certificate alone, without its issuers."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def sign(self, message: bytes) -> bytes:
        """Sign with ECDSA and SHA-256; r and s are 64 raw bytes."""
        return sign_raw(self.key, message)

    def store(self) -> StoredCredential:
        return StoredCredential(
            key_pkcs8=store_key(self.key), certificate_der=self.certificate.public_bytes(Encoding.DER)
        )

    @classmethod
    def load(cls, stored: StoredCredential) -> Self:
        """Rebuild a stored credential; ValueError, TypeError or UnsupportedAlgorithm if the bytes are damaged."""
        key = load_key(stored.key_pkcs8)
        certificate = x509.load_der_x509_certificate(stored.certificate_der)
        if key.public_key() != certificate.public_key():
            raise ValueError("key and certificate do not belong together")
        return cls(key, certificate)


def store_key(key: EllipticCurvePrivateKey) -> bytes:
    """Encode a key as PKCS #8 DER, unencrypted."""
    return key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


def load_key(pkcs8: bytes) -> EllipticCurvePrivateKey:
    """Decode a key of :func:`store_key`; ValueError, TypeError or UnsupportedAlgorithm if the bytes are damaged."""
    key = load_der_private_key(pkcs8, None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key


def sign_raw(key: EllipticCurvePrivateKey, message: bytes) -> bytes:
    """Sign with ECDSA and SHA-256; r and s are 64 raw bytes."""
    r, s = decode_dss_signature(key.sign(message, ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def raw_point(key: EllipticCurvePublicKey) -> bytes:
    """Return x and y of a public key, 64 bytes."""
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]


def new_root() -> Credential:
    """Make a self-signed root."""
    return _issue("Intel SGX Root CA", None, is_ca=True, path_length=1)


def new_platform_ca(root: Credential) -> Credential:
    """Make the CA that certifies platforms."""
    return _issue("Intel SGX PCK Platform CA", root, is_ca=True, path_length=0)


def new_tcb_signer(root: Credential) -> Credential:
    """Make the signer of TCB info and QE identity."""
    return _issue("Intel SGX TCB Signing", root)


def certify_platform(ca: Credential, key: EllipticCurvePublicKey, extension: bytes) -> x509.Certificate:
    """Make the PCK certificate of one platform for its ``key``, with the ``extension`` that describes it."""
    described = x509.UnrecognizedExtension(ObjectIdentifier(SGX_EXTENSION_OID), extension)
    return _certify("Intel SGX PCK Certificate", key, ca.certificate.subject, ca.key, extension=described)


def public_bytes(key: EllipticCurvePrivateKey) -> bytes:
    """Return the public half of a key, in DER."""
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def read_public(der: bytes) -> EllipticCurvePublicKey:
    """Read a key of :func:`public_bytes`; ValueError if it is none."""
    key = load_der_public_key(der)
    if not isinstance(key, EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve key")
    return key


def new_key() -> EllipticCurvePrivateKey:
    """Make a P-256 key."""
    return generate_private_key(SECP256R1())


def empty_crl(issuer: Credential, start: datetime, end: datetime, number: int) -> bytes:
    """Return the DER of a revocation list that revokes nothing."""
    builder = x509.CertificateRevocationListBuilder().issuer_name(issuer.certificate.subject)
    builder = builder.last_update(start).next_update(end).add_extension(x509.CRLNumber(number), critical=False)
    public = issuer.key.public_key()
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    return builder.sign(issuer.key, SHA256()).public_bytes(Encoding.DER)


def _issue(
    common_name: str, issuer: Credential | None, *, is_ca: bool = False, path_length: int | None = None
) -> Credential:
    """Make a key and its certificate, which it signs itself without an ``issuer``."""
    key = new_key()
    by, signer = (issuer.certificate.subject, issuer.key) if issuer else (subject(common_name), key)
    return Credential(key, _certify(common_name, key.public_key(), by, signer, is_ca=is_ca, path_length=path_length))


def _certify(
    common_name: str,
    key: EllipticCurvePublicKey,
    issuer_name: x509.Name,
    issuer_key: EllipticCurvePrivateKey,
    *,
    is_ca: bool = False,
    path_length: int | None = None,
    extension: x509.UnrecognizedExtension | None = None,
) -> x509.Certificate:
    builder = x509.CertificateBuilder(issuer_name, subject(common_name), key, x509.random_serial_number())
    builder = builder.not_valid_before(VALID_FROM).not_valid_after(VALID_UNTIL)
    builder = builder.add_extension(x509.BasicConstraints(is_ca, path_length), critical=True)
    builder = builder.add_extension(key_usage(is_ca), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(authority, critical=False)
    if extension is not None:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, SHA256())


def subject(common_name: str) -> x509.Name:
    """Make a name that says that it is a simulator's."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANIZATION),
        ]
    )


def key_usage(is_ca: bool) -> x509.KeyUsage:
    """Return the usage of a CA, which signs certificates and revocation lists, or of a leaf."""
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=not is_ca,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
