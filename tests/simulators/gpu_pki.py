"""Certificates and OCSP answers of the simulated GPU vendor: P-384 keys, and the extensions of the genuine ones.

Every subject carries ``O=SIMULATOR - NOT A TEE``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from raycloak.attestation.simulators.der import integer, octets, tlv
from raycloak.attestation.simulators.tdx_pki import VALID_FROM, VALID_UNTIL, key_usage, subject

OCSP_LIFETIME: Final = timedelta(days=1)
_SHA384_OID: Final = bytes.fromhex("0609608648016503040202")
_SEQUENCE = 0x30


@dataclass(frozen=True, slots=True, repr=False)
class GpuCredential:
    """A P-384 private key and the certificate of its public key."""

    key: EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def sign(self, message: bytes) -> bytes:
        """Sign with ECDSA and SHA-384; r and s are 96 raw bytes."""
        r, s = decode_dss_signature(self.key.sign(message, ECDSA(SHA384())))
        return r.to_bytes(48, "big") + s.to_bytes(48, "big")


def issue(
    common_name: str,
    issuer: GpuCredential | None,
    *,
    is_ca: bool = False,
    extensions: Sequence[x509.ExtensionType] = (),
    valid_until: datetime = VALID_UNTIL,
    serial: str = "",
) -> GpuCredential:
    """Make a new key, certified by ``issuer`` or by itself. ``serial`` is the serial number of the subject."""
    key, name = generate_private_key(SECP384R1()), subject(common_name)
    if serial:
        name = x509.Name([*name, x509.NameAttribute(NameOID.SERIAL_NUMBER, serial)])
    issuer_name, issuer_key = (issuer.certificate.subject, issuer.key) if issuer else (name, key)
    builder = x509.CertificateBuilder(issuer_name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(VALID_FROM).not_valid_after(valid_until)
    if is_ca:
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
    builder = builder.add_extension(key_usage(is_ca), critical=True)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return GpuCredential(key, builder.sign(issuer_key, SHA384()))


def issue_responder(issuer: GpuCredential, *, authorised: bool = True) -> GpuCredential:
    """Make an OCSP responder for ``issuer``, or a mere leaf if it is not ``authorised``."""
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING])
    return issue("OCSP Responder", issuer, extensions=(usage,) if authorised else ())


def hopper_firmware_identity(fwid: bytes, key: EllipticCurvePrivateKey) -> x509.UnrecognizedExtension:
    """Make the extension of a Hopper leaf: version, public key, and the firmware's SHA-384 (48 bytes) at the end."""
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    content = tlv(_SEQUENCE, integer(1) + public + _digest(fwid))
    return x509.UnrecognizedExtension(ObjectIdentifier("2.23.133.5.4.1"), content)


def blackwell_firmware_identity(fwid: bytes, model: str) -> x509.UnrecognizedExtension:
    """Make a Blackwell leaf's DICE TcbInfo. The firmware's SHA-384 is the first of two; flags and type follow."""
    content = (
        tlv(0x80, b"NVIDIA")
        + tlv(0x81, model.encode())
        + tlv(0x83, b"\x01")
        + tlv(0xA6, _digest(fwid) + _digest(bytes(48)))
        + tlv(0x87, bytes(5))
        + tlv(0x89, b"\x01")
    )
    return x509.UnrecognizedExtension(ObjectIdentifier("2.23.133.5.4.1.1"), tlv(_SEQUENCE, content))


def _digest(value: bytes) -> bytes:
    return tlv(_SEQUENCE, _SHA384_OID + octets(value))


@dataclass(frozen=True, slots=True)
class OcspVariant:
    """An answer's content. The defaults pass, any other value is for testing refusals.

    Attributes:
        reason: why the certificate is revoked; None if it is good.
        unknown: the responder does not know the certificate.
        responder: signs in place of one that the issuer authorised.
        without_next_update: the answer does not say until when it holds.
    """

    reason: x509.ReasonFlags | None = None
    unknown: bool = False
    responder: GpuCredential | None = None
    without_next_update: bool = False


GOOD: Final = OcspVariant()


def ocsp_answer(certificate: x509.Certificate, issuer: GpuCredential, at: datetime, variant: OcspVariant) -> bytes:
    """Return the DER of an answer about ``certificate``, issued by ``issuer``. It holds for a day from ``at``."""
    responder = variant.responder or issue_responder(issuer)
    status = ocsp.OCSPCertStatus.UNKNOWN if variant.unknown else ocsp.OCSPCertStatus.GOOD
    if variant.reason is not None:
        status = ocsp.OCSPCertStatus.REVOKED
    builder = ocsp.OCSPResponseBuilder().add_response(
        cert=certificate,
        issuer=issuer.certificate,
        algorithm=SHA384(),
        cert_status=status,
        this_update=at,
        next_update=None if variant.without_next_update else at + OCSP_LIFETIME,
        revocation_time=at if variant.reason is not None else None,
        revocation_reason=variant.reason,
    )
    builder = builder.responder_id(ocsp.OCSPResponderEncoding.HASH, responder.certificate)
    return builder.certificates([responder.certificate]).sign(responder.key, SHA384()).public_bytes(Encoding.DER)
