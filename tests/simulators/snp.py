"""A simulated AMD: it certifies simulated machines, which sign SEV-SNP reports of genuine format.

It has a root of its own for one generation of processors and lives in memory only. Its reports go through the verifier
of hardware reports, under that root and no other. They prove nothing about a machine. Every subject says
``O=SIMULATOR - NOT A TEE``.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.core.evidence import MEASUREMENT_BYTES, REPORT_DATA_BYTES
from raycloak.attestation.simulators.tdx_vendor import COLLATERAL_AGE_S, COLLATERAL_LIFETIME_S
from raycloak.attestation.snp.endorsement import LAYOUTS, TcbLayout
from raycloak.attestation.snp.report import (
    ECDSA_P384_SHA384,
    KEY_KINDS,
    REPORT_BYTES,
    SIGNATURE_FIELD_BYTES,
    SIGNATURE_VALUE_BYTES,
    SIGNED_BYTES,
)
from raycloak.attestation.snp.rules import Generation, KeyKind
from raycloak.attestation.trust.certificates import serial_number
from tests.simulators.snp_pki import (
    GENUINE_ENDORSEMENT,
    Authority,
    AuthorityKeys,
    EndorsementVariant,
    new_amd_crl,
    new_ca,
    new_endorsement,
    new_root,
)

SNP_SVN: Final = 24
CRL_NUMBER: Final = 7
_CHIP_ID_BYTES = 64
SVNS: Final = {1: 4, 2: 1, 3: SNP_SVN, 8: 0xDB, 9: 2}
_POLICY = 0x3_0000
_PLATFORM_INFO = 0x25


@dataclass(frozen=True, slots=True)
class ReportVariant:
    """A report's content about guest and machine. The defaults pass, any other value is for testing refusals.

    Attributes:
        policy: 64-bit guest policy. platform_info: 64-bit word about the machine.
        reported_tcb, committed_tcb, launch_tcb: 8 bytes instead of the machine's TCB version.
        chip_id: 64 bytes instead of the machine's.
        key_kind: kind of the signing key instead of the machine's.
        foreign_key: sign with an uncertified key.
        low_s: True signs with the lower of the two values of s, False with the higher one, None with either.
    """

    version: int = 3
    policy: int = _POLICY
    vmpl: int = 0
    platform_info: int = _PLATFORM_INFO
    reported_tcb: bytes | None = None
    committed_tcb: bytes | None = None
    launch_tcb: bytes | None = None
    chip_id: bytes | None = None
    key_kind: KeyKind | None = None
    foreign_key: bool = False
    low_s: bool | None = None


GENUINE_REPORT: Final = ReportVariant()


class SimulatedAmd:
    """The root and CAs of one simulated generation of processors."""

    def __init__(self, generation: Generation, keys: AuthorityKeys) -> None:
        self.generation = generation
        self._root = new_root(generation, keys.root)
        self._cas: dict[KeyKind, Authority] = {
            "VCEK": new_ca(generation, "VCEK", keys.vcek_ca, self._root),
            "VLEK": new_ca(generation, "VLEK", keys.vlek_ca, self._root),
        }

    @classmethod
    def create(cls, generation: Generation) -> Self:
        """Make a new vendor with new keys."""
        return cls(generation, AuthorityKeys.generate())

    @property
    def root_der(self) -> bytes:
        """The root certificate, which a policy names as anchor of class ``simulated`` and family ``sev_snp``."""
        return self._root.der

    def machine(
        self,
        kind: KeyKind = "VCEK",
        endorsement: EndorsementVariant = GENUINE_ENDORSEMENT,
        ca_kind: KeyKind | None = None,
    ) -> "SimulatedMachine":
        """Make a new machine whose key this vendor certifies.

        Args:
            ca_kind: the CA of this kind certifies it, instead of the one for ``kind``.
        """
        layout = LAYOUTS[self.generation]
        tcb = bytes(SVNS.get(number, 0) for number in layout.components)
        hardware_id = secrets.token_bytes(layout.hardware_id_bytes)
        key = generate_private_key(endorsement.curve)
        ca = self._cas[ca_kind or kind]
        certificate = new_endorsement(
            ca,
            key.public_key(),
            generation=self.generation,
            kind=kind,
            layout=layout,
            tcb=tcb,
            hardware_id=hardware_id,
            variant=endorsement,
        )
        chip_id = hardware_id.ljust(_CHIP_ID_BYTES, b"\0") if kind == "VCEK" else bytes(_CHIP_ID_BYTES)
        return SimulatedMachine(key, (certificate, ca.certificate), kind, tcb, chip_id, layout)

    def crl(
        self,
        now: int,
        revoked: Sequence[x509.Certificate] = (),
        number: int = CRL_NUMBER,
        signer: "SimulatedAmd | None" = None,
        address: str = "",
    ) -> bytes:
        """Return the root's revocation list at unix second ``now``, valid from one hour before to 30 days after.

        Args:
            signer: another vendor, whose root signs the list in this one's name.
            address: where the list says that it is published; empty for a list that states none.
        """
        instant = datetime.fromtimestamp(now, UTC)
        start, end = instant - timedelta(seconds=COLLATERAL_AGE_S), instant + timedelta(seconds=COLLATERAL_LIFETIME_S)
        key = (signer or self)._root.key
        serials = [serial_number(certificate) for certificate in revoked]
        return new_amd_crl(Authority(key, self._root.certificate), serials, (start, end), number, address)


class SimulatedMachine:
    """One simulated machine with an endorsement key.

    Attributes:
        chain: the certificates of the endorsement key and of its CA.
        kind: of its endorsement key.
        tcb: its TCB version, 8 bytes. chip_id: 64 bytes; zero with a VLEK, because providers mask it.
    """

    def __init__(
        self,
        key: EllipticCurvePrivateKey,
        chain: tuple[x509.Certificate, x509.Certificate],
        kind: KeyKind,
        tcb: bytes,
        chip_id: bytes,
        layout: TcbLayout,
    ) -> None:
        self._key = key
        self.kind = kind
        self._layout = layout
        self.chain = chain
        self.tcb = tcb
        self.chip_id = chip_id

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """The ``chain`` in DER, as a worker presents it."""
        return tuple(certificate.public_bytes(Encoding.DER) for certificate in self.chain)

    def tcb_with(self, component: int, svn: int) -> bytes:
        """Return the machine's TCB version with another value for one component; 3 is the SNP firmware."""
        changed = bytearray(self.tcb)
        changed[self._layout.components.index(component)] = svn
        return bytes(changed)

    def report(self, report_data: bytes, measurement: bytes, variant: ReportVariant = GENUINE_REPORT) -> bytes:
        """Make a signed report.

        Args:
            report_data: 64 bytes, as `raycloak.attestation.core.report_data` makes them.
            measurement: 48 bytes.

        Raises:
            ValueError: if one of them has another length.
        """
        if len(report_data) != REPORT_DATA_BYTES or len(measurement) != MEASUREMENT_BYTES:
            raise ValueError("report data has 64 bytes and a measurement 48")
        signed = self._body(report_data, measurement, variant)
        key = generate_private_key(SECP384R1()) if variant.foreign_key else self._key
        r, s = decode_dss_signature(key.sign(signed, ECDSA(SHA384())))
        if variant.low_s is not None and (s <= _ORDER // 2) != variant.low_s:
            s = _ORDER - s
        return (signed + _field(r) + _field(s)).ljust(REPORT_BYTES, b"\0")

    def _body(self, report_data: bytes, measurement: bytes, variant: ReportVariant) -> bytes:
        kind = variant.key_kind or self.kind
        flags = next(number for number, name in KEY_KINDS.items() if name == kind) << 2
        parts = {
            0x00: variant.version.to_bytes(4, "little"),
            0x08: variant.policy.to_bytes(8, "little"),
            0x30: variant.vmpl.to_bytes(4, "little"),
            0x34: ECDSA_P384_SHA384.to_bytes(4, "little"),
            0x38: self.tcb,
            0x40: variant.platform_info.to_bytes(8, "little"),
            0x48: flags.to_bytes(4, "little"),
            0x50: report_data,
            0x90: measurement,
            0x140: secrets.token_bytes(32),
            0x160: b"\xff" * 32,
            0x180: variant.reported_tcb or self.tcb,
            0x1A0: self.chip_id if variant.chip_id is None else variant.chip_id,
            0x1E0: variant.committed_tcb or self.tcb,
            0x1F0: variant.launch_tcb or self.tcb,
        }
        body = bytearray(SIGNED_BYTES)
        for at, value in parts.items():
            body[at : at + len(value)] = value
        return bytes(body)


# The order of the group of P-384 (SP 800-186, 3.2.1.4).
_ORDER: Final = 2**384 - 0x389CB27E0BC8D220A7E5F24DB74F58851313E695333AD68D


def _field(value: int) -> bytes:
    return value.to_bytes(SIGNATURE_VALUE_BYTES, "little").ljust(SIGNATURE_FIELD_BYTES, b"\0")
