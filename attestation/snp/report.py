"""Reads AMD SEV-SNP attestation reports into typed parts. Checks form only; nothing here is verified.

Layout and names follow AMD's SEV-SNP firmware ABI specification (document 56860), table "ATTESTATION_REPORT".

Guarantee: for any bytes, :func:`parse_report` returns a report or raises EvidenceError ``evidence_malformed``. Two
different byte strings that it accepts differ in their signed part or in the signature's value.
"""

from struct import Struct
from typing import Final, NamedTuple

from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.snp.rules import KeyKind

# Sizes and codes are the ABI's: a change of one would misread every report.
REPORT_BYTES: Final = 1184
SIGNED_BYTES: Final = 0x2A0
SIGNATURE_FIELD_BYTES: Final = 72
SIGNATURE_VALUE_BYTES: Final = 48
VERSIONS: Final = (2, 3, 4, 5)
ECDSA_P384_SHA384: Final = 1

KEY_KINDS: Final[dict[int, KeyKind]] = {0: "VCEK", 1: "VLEK"}

_S_AT = SIGNED_BYTES + SIGNATURE_FIELD_BYTES
_TAIL_AT = _S_AT + SIGNATURE_FIELD_BYTES


_LAYOUT: Final = Struct("<I4xQ32xII8xQI4x64s48s32s96x32s32x8s24x64s8s8x8s")


class SnpReport(NamedTuple):
    """A report in canonical form, and those of its fields that are used here, in the order of the format.

    Attributes:
        raw: the whole report, 1,184 bytes.
        policy: the 64-bit policy that the guest was launched with.
        vmpl: the privilege level that asked for the report: 0 is the highest, 2^32 - 1 stands for the host.
        platform_info: the 64-bit word about the machine.
        host_data: the 32 bytes that the host chose at launch.
        report_id: the 32 random bytes that name this guest from launch to end.
        reported_tcb: the TCB version, 8 bytes, that the endorsement key is derived from.
        chip_id: the chip's id, 64 bytes; all zero if the host masks it.
        committed_tcb: the lowest TCB version that the machine can still be rolled back to.
        launch_tcb: the TCB version at the guest's launch or import.
    """

    raw: bytes
    version: int
    policy: int
    vmpl: int
    algorithm: int
    platform_info: int
    flags: int
    report_data: bytes
    measurement: bytes
    host_data: bytes
    report_id: bytes
    reported_tcb: bytes
    chip_id: bytes
    committed_tcb: bytes
    launch_tcb: bytes

    @property
    def key_kind(self) -> KeyKind:
        """The endorsement key that the firmware claims to have signed with: the chip's own (VCEK), or one that a cloud
        provider's machines share (VLEK)."""
        return KEY_KINDS[self.flags >> 2 & 0b111]

    @property
    def signed(self) -> bytes:
        """The bytes that the endorsement key signs, 672 of them."""
        return self.raw[:SIGNED_BYTES]

    @property
    def signature(self) -> bytes:
        """The signature's r and s, big-endian, 48 bytes each."""
        # AMD writes both little-endian.
        r, s = (self.raw[at : at + SIGNATURE_VALUE_BYTES][::-1] for at in (SIGNED_BYTES, _S_AT))
        return r + s


def parse_report(data: bytes) -> SnpReport:
    """Read a report of version 2 to 5.

    Raises:
        EvidenceError: ``evidence_malformed`` for another length, version, signature algorithm or kind of key. Also
            raised for a byte other than zero that no signature covers: behind r and s, and in the reserved tail.
    """
    if len(data) != REPORT_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"an SEV-SNP report has {REPORT_BYTES} bytes, not {len(data)}")
    report = SnpReport(bytes(data), *_LAYOUT.unpack_from(data))
    if report.version not in VERSIONS:
        refuse(Refusal.EVIDENCE_MALFORMED, f"SEV-SNP report version {report.version} is not one of {VERSIONS}")
    if report.algorithm != ECDSA_P384_SHA384:
        refuse(
            Refusal.EVIDENCE_MALFORMED, f"signature algorithm {report.algorithm} is not ECDSA P-384 with SHA-384 (1)"
        )
    if report.flags >> 2 & 0b111 not in KEY_KINDS:
        refuse(Refusal.EVIDENCE_MALFORMED, "the report is signed by neither a chip's nor a provider's endorsement key")
    # No signature covers these bytes, so anything but zero would give one report two encodings.
    unused = (data[start + SIGNATURE_VALUE_BYTES : start + SIGNATURE_FIELD_BYTES] for start in (SIGNED_BYTES, _S_AT))
    if any(map(any, unused)) or any(data[_TAIL_AT:]):
        refuse(Refusal.EVIDENCE_MALFORMED, "bytes other than zero stand where the report has only padding")
    return report
