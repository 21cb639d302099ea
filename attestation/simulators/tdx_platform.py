"""A simulated TDX platform: it signs quotes of genuine format with keys that its own vendor certified.

The platform proves nothing about the machine it runs on. Its quotes pass the verifier that hardware quotes pass, under
the simulator's root and no other.
"""

import hashlib
import secrets
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.core.evidence import MEASUREMENT_BYTES, REPORT_DATA_BYTES
from raycloak.attestation.core.messages import Message
from raycloak.attestation.simulators.tdx_pki import Credential, certify_platform, new_key, raw_point, sign_raw
from raycloak.attestation.tdx.quote import QE_REPORT_BYTES
from raycloak.metrics.errors import ProtocolError

FMSPC: Final = bytes.fromhex("5ca1ab1e0000")
PCE_SVN: Final = 11
COMPONENT_SVNS: Final = bytes([3] * 16)
TEE_TCB_SVN: Final = bytes([3, 1, 3]) + bytes(13)
QE_MRSIGNER: Final = hashlib.sha256(b"raycloak simulated quoting enclave").digest()
QE_ATTRIBUTES: Final = bytes.fromhex("1100000000000000e700000000000000")
QE_PRODUCT: Final = 2
QE_SVN: Final = 4
_TD15_REPORT = 3
_XFAM = bytes.fromhex("e702060000000000")


@dataclass(frozen=True, slots=True)
class QuoteVariant:
    """A quote's content about guest and quoting enclave. The defaults pass, any other value is for testing refusals.

    Attributes:
        version: 4, or 5 for a quote with the longer TD 1.5 report. mr_service_td: 48 bytes, in version 5 only.
        tee_tcb_svn, tee_tcb_svn2: 16 bytes, at launch and now. The second is in version 5 only; None repeats the first.
        rtmrs: the four run-time registers, 192 bytes. mr_config_id: 48 bytes.
        td_attributes: 8 bytes. qe_mrsigner: 32 bytes. qe_attributes: 16 bytes.
        foreign_attestation_key: sign with a key that the quoting enclave's report does not certify.
    """

    version: int = 4
    mr_service_td: bytes = bytes(48)
    td_attributes: bytes = bytes.fromhex("0000001000000000")
    tee_tcb_svn: bytes = TEE_TCB_SVN
    tee_tcb_svn2: bytes | None = None
    rtmrs: bytes = bytes(4 * 48)
    mr_config_id: bytes = bytes(48)
    qe_vendor: bytes = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
    qe_mrsigner: bytes = QE_MRSIGNER
    qe_attributes: bytes = QE_ATTRIBUTES
    qe_svn: int = QE_SVN
    foreign_attestation_key: bool = False


GENUINE: Final = QuoteVariant()


class PlatformCertificate(Message):
    """The vendor's word for a platform's key, and who the platform is. Nothing of it is secret."""

    DOMAIN: ClassVar[str] = "raycloak/simulator/platform-certificate/v1"

    certificate_der: bytes
    issuers_pem: str
    instance_id: bytes


class SimulatedPlatform:
    """One machine with a PCK certificate, a platform instance id and an attestation key.

    Attributes:
        pck: the platform's credential.
        instance_id: 16 bytes, the platform id that appraisal reports.
        chain_pem: PCK certificate, CA and root.
    """

    def __init__(self, pck: Credential, key: EllipticCurvePrivateKey, issuers_pem: str, instance_id: bytes) -> None:
        self.pck = pck
        self.instance_id = instance_id
        self._attestation_key = key
        self._issuers_pem = issuers_pem
        self._certifications: dict[QuoteVariant, bytes] = {}

    @classmethod
    def certified(cls, key: EllipticCurvePrivateKey, certificate: PlatformCertificate) -> Self:
        """Return the platform whose PCK key was certified; its attestation key is new.

        Raises:
            ProtocolError: ``malformed`` if the certificate is none, or one of another key.
        """
        try:
            own = x509.load_der_x509_certificate(certificate.certificate_der)
        except ValueError:
            own = None
        if own is None or own.public_key() != key.public_key():
            raise ProtocolError("malformed", "the certificate is not one of the simulated platform's key")
        return cls(Credential(key, own), new_key(), certificate.issuers_pem, certificate.instance_id)

    @property
    def chain_pem(self) -> str:
        return self.pck.pem + self._issuers_pem

    def quote(self, report_data: bytes, measurement: bytes, variant: QuoteVariant = GENUINE) -> bytes:
        """Make a TDX quote.

        Args:
            report_data: 64 bytes, as `raycloak.attestation.core.report_data` makes them.
            measurement: 48 bytes that become ``mr_td``.

        Raises:
            ValueError: if one of them has another length.
        """
        if len(report_data) != REPORT_DATA_BYTES or len(measurement) != MEASUREMENT_BYTES:
            raise ValueError("report data has 64 bytes and a measurement 48")
        signed = _header(variant) + _body(report_data, measurement, variant)
        signer = new_key() if variant.foreign_attestation_key else self._attestation_key
        public = raw_point(signer.public_key())
        if variant not in self._certifications:  # once, as on hardware, and not for every quote
            own = raw_point(self._attestation_key.public_key())
            self._certifications[variant] = self._certification(own, variant)
        certification = self._certifications[variant]
        signature = sign_raw(signer, signed) + public + _sized(6, certification)
        return signed + len(signature).to_bytes(4, "little") + signature

    def _certification(self, attestation_key: bytes, variant: QuoteVariant) -> bytes:
        authentication_data = bytes(range(32))
        report = _qe_report(hashlib.sha256(attestation_key + authentication_data).digest(), variant)
        length = len(authentication_data).to_bytes(2, "little")
        return report + self.pck.sign(report) + length + authentication_data + _sized(5, self.chain_pem.encode())


def certify(ca: Credential, root: Credential, key: EllipticCurvePublicKey, machine: str | None) -> PlatformCertificate:
    """Certify a platform's key; its identity follows from the name ``machine``, if it has one."""
    instance_id = secrets.token_bytes(16) if machine is None else hashlib.sha256(machine.encode()).digest()[:16]
    certificate = certify_platform(
        ca,
        key,
        ppid=secrets.token_bytes(16),
        fmspc=FMSPC,
        instance_id=instance_id,
        component_svns=COMPONENT_SVNS,
        pce_svn=PCE_SVN,
    )
    der = certificate.public_bytes(Encoding.DER)
    return PlatformCertificate(certificate_der=der, issuers_pem=ca.pem + root.pem, instance_id=instance_id)


def _header(variant: QuoteVariant) -> bytes:
    kind = variant.version.to_bytes(2, "little") + bytes.fromhex("020081000000")
    return kind + bytes(4) + variant.qe_vendor + bytes(20)


def _body(report_data: bytes, measurement: bytes, variant: QuoteVariant) -> bytes:
    seam = bytes(48 + 48 + 8)
    guest = variant.td_attributes + _XFAM + measurement + variant.mr_config_id
    owner = bytes(2 * 48)
    body = variant.tee_tcb_svn + seam + guest + owner + variant.rtmrs + report_data
    current = variant.tee_tcb_svn if variant.tee_tcb_svn2 is None else variant.tee_tcb_svn2
    return body if variant.version == 4 else _sized(_TD15_REPORT, body + current + variant.mr_service_td)


def _qe_report(binding: bytes, variant: QuoteVariant) -> bytes:
    report = bytearray(QE_REPORT_BYTES)
    report[0:16] = COMPONENT_SVNS
    report[48:64] = variant.qe_attributes
    report[64:96] = hashlib.sha256(b"raycloak simulated enclave code").digest()
    report[128:160] = variant.qe_mrsigner
    report[256:258] = QE_PRODUCT.to_bytes(2, "little")
    report[258:260] = variant.qe_svn.to_bytes(2, "little")
    report[320:352] = binding
    return bytes(report)


def _sized(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "little") + len(data).to_bytes(4, "little") + data
