"""Certificates of the simulated AMD: RSA-PSS roots and CAs, and endorsement certificates with AMD's extensions.

Every subject carries ``O=SIMULATOR - NOT A TEE``. Endorsement certificates have serial number 0, like genuine ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurve, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ObjectIdentifier

from raycloak.attestation.simulators.der import integer, octets, tlv
from raycloak.attestation.simulators.tdx_pki import VALID_FROM, VALID_UNTIL, key_usage, subject
from raycloak.attestation.snp.endorsement import AMD_OID, HARDWARE_ID_OID, TcbLayout, issuer_name
from raycloak.attestation.snp.rules import Generation, KeyKind
from raycloak.attestation.trust.certificates import read_root

RSA_BITS: Final = 3072
_PADDING: Final = PSS(MGF1(SHA384()), SHA384.digest_size)
_IA5 = 0x16  # DER's tag of an IA5String
_SERIAL_AT = 9  # behind the headers of certificate body and version


@dataclass(frozen=True, slots=True, repr=False)
class AuthorityKeys:
    """The private keys of a root and of the CAs for the two kinds of endorsement keys."""

    root: RSAPrivateKey
    vcek_ca: RSAPrivateKey
    vlek_ca: RSAPrivateKey

    @classmethod
    def generate(cls) -> Self:
        """Make three new keys. They have 3,072 bits, not AMD's 4,096, because they are made often."""
        root, vcek_ca, vlek_ca = (generate_private_key(65537, RSA_BITS) for _ in range(3))
        return cls(root, vcek_ca, vlek_ca)


@dataclass(frozen=True, slots=True, repr=False)
class Authority:
    """An RSA key and the certificate of its public key."""

    key: RSAPrivateKey
    certificate: x509.Certificate

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)


@dataclass(frozen=True, slots=True)
class EndorsementVariant:
    """An endorsement certificate's content. The defaults pass, any other value is for testing refusals.

    Attributes:
        tcb: 8 bytes instead of the machine's TCB version.
        hardware_id: replaces the chip's own; empty leaves the extension out.
        wrap_hardware_id: put it into an octet string, as newer certificates do.
        without_tcb: leave out the component with this number.
        serial: 0 as in genuine ones, or another number, by which it can be revoked.
        curve: the curve of the endorsement key.
    """

    tcb: bytes | None = None
    hardware_id: bytes | None = None
    wrap_hardware_id: bool = False
    without_tcb: int | None = None
    serial: int = 0
    valid_from: datetime = VALID_FROM
    valid_until: datetime = VALID_UNTIL
    curve: EllipticCurve = field(default_factory=SECP384R1)


GENUINE_ENDORSEMENT: Final = EndorsementVariant()


def new_root(generation: Generation, key: RSAPrivateKey) -> Authority:
    """Make a self-signed root (ARK)."""
    return _authority(f"ARK-{generation}", key, None)


def new_ca(generation: Generation, kind: KeyKind, key: RSAPrivateKey, root: Authority) -> Authority:
    """Make a CA (ASK) that certifies endorsement keys of ``kind``."""
    return _authority(issuer_name(generation, kind), key, root)


def new_endorsement(
    issuer: Authority,
    public: EllipticCurvePublicKey,
    *,
    generation: Generation,
    kind: KeyKind,
    layout: TcbLayout,
    tcb: bytes,
    hardware_id: bytes,
    variant: EndorsementVariant,
) -> x509.Certificate:
    """Certify an endorsement key.

    Args:
        tcb: 8 bytes. hardware_id: as many bytes as ``layout`` says; a VLEK's certificate leaves it out.
    """
    builder = _builder(f"SEV-{kind}", issuer.certificate.subject, public)
    builder = builder.serial_number(variant.serial or 1)
    builder = builder.not_valid_before(variant.valid_from).not_valid_after(variant.valid_until)
    stated = variant.hardware_id if variant.hardware_id is not None else hardware_id
    for oid, value in _extensions(generation, kind, layout, variant.tcb or tcb, stated, variant).items():
        builder = builder.add_extension(x509.UnrecognizedExtension(ObjectIdentifier(oid), value), critical=False)
    certificate = builder.sign(issuer.key, SHA384(), rsa_padding=_PADDING)
    return certificate if variant.serial else _with_serial_zero(certificate, issuer.key)


def new_amd_crl(
    issuer: Authority, revoked: Sequence[int], window: tuple[datetime, datetime], number: int, address: str = ""
) -> bytes:
    """Return the DER of a revocation list with the serial numbers ``revoked``, which states ``address`` as its own."""
    start, end = window
    builder = x509.CertificateRevocationListBuilder().issuer_name(issuer.certificate.subject)
    builder = builder.last_update(start).next_update(end).add_extension(x509.CRLNumber(number), critical=False)
    if address:
        names = [x509.UniformResourceIdentifier(address)]
        point = x509.IssuingDistributionPoint(names, None, False, False, None, False, False)
        builder = builder.add_extension(point, critical=True)
    for serial in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(start).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(issuer.key, SHA384(), rsa_padding=_PADDING).public_bytes(Encoding.DER)


def _extensions(
    generation: Generation,
    kind: KeyKind,
    layout: TcbLayout,
    tcb: bytes,
    hardware_id: bytes,
    variant: EndorsementVariant,
) -> dict[str, bytes]:
    is_vcek = kind == "VCEK"
    values = {
        f"{AMD_OID}.1": integer(int(generation == "Turin")),
        f"{AMD_OID}.2": _text(f"{generation}-B0" if is_vcek else generation),
    }
    for number, svn in zip(layout.components, tcb, strict=True):
        if number != variant.without_tcb:
            values[f"{AMD_OID}.3.{number}"] = integer(svn)
    if is_vcek and hardware_id:
        values[HARDWARE_ID_OID] = octets(hardware_id) if variant.wrap_hardware_id else hardware_id
    if not is_vcek:
        values[f"{AMD_OID}.5"] = _text("CN=simulated provider")
    return values


def _text(value: str) -> bytes:
    return tlv(_IA5, value.encode("ascii"))


def _authority(name: str, key: RSAPrivateKey, issuer: Authority | None) -> Authority:
    issuer_subject, signer = (issuer.certificate.subject, issuer.key) if issuer else (subject(name), key)
    builder = _builder(name, issuer_subject, key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(VALID_FROM).not_valid_after(VALID_UNTIL)
    builder = builder.add_extension(x509.BasicConstraints(True, 0 if issuer else None), critical=True)
    builder = builder.add_extension(key_usage(is_ca=True), critical=True)
    return Authority(key, builder.sign(signer, SHA384(), rsa_padding=_PADDING))


def _builder(name: str, issuer: x509.Name, public: RSAPublicKey | EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return x509.CertificateBuilder().issuer_name(issuer).subject_name(subject(name)).public_key(public)


def _with_serial_zero(certificate: x509.Certificate, key: RSAPrivateKey) -> x509.Certificate:
    """Change serial number 1 to 0 and sign again, because AMD uses 0 but the library cannot make it."""
    der, body = certificate.public_bytes(Encoding.DER), certificate.tbs_certificate_bytes
    end = _SERIAL_AT + len(integer(1))
    assert body[_SERIAL_AT:end] == integer(1)
    changed = body[:_SERIAL_AT] + integer(0) + body[end:]
    signature = key.sign(changed, _PADDING, SHA384())
    return read_root(der.replace(body, changed)[: -len(signature)] + signature)
