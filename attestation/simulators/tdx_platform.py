"""A simulated TDX platform: it signs quotes of genuine format with keys that its own vendor certified.

The platform proves nothing about the machine it runs on. Its quotes pass the verifier that hardware quotes pass, under
the simulator's root and no other.
"""

import hashlib
import secrets
from functools import cached_property
from typing import ClassVar, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.core.evidence import MEASUREMENT_BYTES, REPORT_DATA_BYTES
from raycloak.attestation.core.messages import Message
from raycloak.attestation.simulators.der import sgx_extension
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
_QE_VENDOR: Final = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
# Of version 4, and of a guest without debug attributes on a TDX module of Intel's.
_HEADER: Final = bytes.fromhex("040002008100000000000000") + _QE_VENDOR + bytes(20)
_TEE_TCB: Final = TEE_TCB_SVN + bytes(104) + bytes.fromhex("0000001000000000e702060000000000")


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

    def quote(self, report_data: bytes, measurement: bytes) -> bytes:
        """Make a TDX quote.

        Args:
            report_data: 64 bytes, as `raycloak.attestation.core.report_data` makes them.
            measurement: 48 bytes that become ``mr_td``.

        Raises:
            ValueError: if one of them has another length.
        """
        if len(report_data) != REPORT_DATA_BYTES or len(measurement) != MEASUREMENT_BYTES:
            raise ValueError("report data has 64 bytes and a measurement 48")
        signed = _HEADER + _TEE_TCB + measurement + bytes(7 * 48) + report_data
        certification = raw_point(self._attestation_key.public_key()) + _sized(6, self._certification)
        signature = sign_raw(self._attestation_key, signed) + certification
        return signed + len(signature).to_bytes(4, "little") + signature

    @cached_property
    def _certification(self) -> bytes:
        """The quoting enclave's word for the attestation key: given once, as on hardware, and not for every quote."""
        authentication_data = bytes(range(32))
        attestation_key = raw_point(self._attestation_key.public_key())
        report = bytearray(QE_REPORT_BYTES)
        report[0:16] = COMPONENT_SVNS
        report[48:64] = QE_ATTRIBUTES
        report[64:96] = hashlib.sha256(b"raycloak simulated enclave code").digest()
        report[128:160] = QE_MRSIGNER
        report[256:260] = QE_PRODUCT.to_bytes(2, "little") + QE_SVN.to_bytes(2, "little")
        report[320:352] = hashlib.sha256(attestation_key + authentication_data).digest()
        length = len(authentication_data).to_bytes(2, "little")
        signature, chain = self.pck.sign(bytes(report)), _sized(5, self.chain_pem.encode())
        return bytes(report) + signature + length + authentication_data + chain


def certify(ca: Credential, root: Credential, key: EllipticCurvePublicKey, machine: str | None) -> PlatformCertificate:
    """Certify a platform's key; its identity follows from the name ``machine``, if it has one."""
    instance_id = secrets.token_bytes(16) if machine is None else hashlib.sha256(machine.encode()).digest()[:16]
    described = sgx_extension(
        ppid=secrets.token_bytes(16),
        fmspc=FMSPC,
        instance_id=instance_id,
        component_svns=COMPONENT_SVNS,
        pce_svn=PCE_SVN,
    )
    der = certify_platform(ca, key, described).public_bytes(Encoding.DER)
    return PlatformCertificate(certificate_der=der, issuers_pem=ca.pem + root.pem, instance_id=instance_id)


def _sized(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2, "little") + len(data).to_bytes(4, "little") + data
