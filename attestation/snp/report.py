"""Reads AMD SEV-SNP attestation reports into typed parts. Checks form only; nothing here is verified.

Layout and names follow AMD's SEV-SNP firmware ABI specification (document 56860), table "ATTESTATION_REPORT".

Guarantee: for any bytes, :func:`parse_report` returns a report or raises EvidenceError ``evidence_malformed``. Two
different byte strings that it accepts differ in their signed part or in the signature's value.
"""

from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, slots=True)
class SnpReport:
    """A report of 1,184 bytes in canonical form. Its integers are little-endian.

    Attributes:
        raw: the whole report.
        key_kind: the endorsement key that the firmware claims to have signed with: the chip's own (VCEK), or one that
            a cloud provider's machines share (VLEK).
    """

    raw: bytes
    key_kind: KeyKind

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

    @property
    def version(self) -> int:
        return self._integer(0, 4)

    @property
    def policy(self) -> int:
        """The 64-bit policy that the guest was launched with."""
        return self._integer(0x08, 8)

    @property
    def vmpl(self) -> int:
        """The privilege level that asked for the report: 0 is the highest, 2^32 - 1 stands for the host."""
        return self._integer(0x30, 4)

    @property
    def platform_info(self) -> int:
        """The 64-bit word about the machine."""
        return self._integer(0x40, 8)

    @property
    def report_data(self) -> bytes:
        return self.raw[0x50:0x90]

    @property
    def measurement(self) -> bytes:
        return self.raw[0x90:0xC0]

    @property
    def host_data(self) -> bytes:
        """The 32 bytes that the host chose at launch."""
        return self.raw[0xC0:0xE0]

    @property
    def report_id(self) -> bytes:
        """The 32 random bytes that name this guest from launch to end."""
        return self.raw[0x140:0x160]

    @property
    def reported_tcb(self) -> bytes:
        """The TCB version, 8 bytes, that the endorsement key is derived from."""
        return self.raw[0x180:0x188]

    @property
    def chip_id(self) -> bytes:
        """The chip's id, 64 bytes; all zero if the host masks it."""
        return self.raw[0x1A0:0x1E0]

    @property
    def committed_tcb(self) -> bytes:
        """The lowest TCB version that the machine can still be rolled back to."""
        return self.raw[0x1E0:0x1E8]

    @property
    def launch_tcb(self) -> bytes:
        """The TCB version at the guest's launch or import."""
        return self.raw[0x1F0:0x1F8]

    def _integer(self, at: int, size: int) -> int:
        return int.from_bytes(self.raw[at : at + size], "little")


def parse_report(data: bytes) -> SnpReport:
    """Read a report of version 2 to 5.

    Raises:
        EvidenceError: ``evidence_malformed`` for another length, version, signature algorithm or kind of key. Also
            raised for a byte other than zero that no signature covers: behind r and s, and in the reserved tail.
    """
    if len(data) != REPORT_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"an SEV-SNP report has {REPORT_BYTES} bytes, not {len(data)}")
    version = int.from_bytes(data[0:4], "little")
    if version not in VERSIONS:
        refuse(Refusal.EVIDENCE_MALFORMED, f"SEV-SNP report version {version} is not one of {VERSIONS}")
    algorithm = int.from_bytes(data[0x34:0x38], "little")
    if algorithm != ECDSA_P384_SHA384:
        refuse(Refusal.EVIDENCE_MALFORMED, f"signature algorithm {algorithm} is not ECDSA P-384 with SHA-384 (1)")
    kind = KEY_KINDS.get(data[0x48] >> 2 & 0b111)
    if kind is None:
        refuse(Refusal.EVIDENCE_MALFORMED, "the report is signed by neither a chip's nor a provider's endorsement key")
    # No signature covers these bytes, so anything but zero would give one report two encodings.
    unused = (data[start + SIGNATURE_VALUE_BYTES : start + SIGNATURE_FIELD_BYTES] for start in (SIGNED_BYTES, _S_AT))
    if any(map(any, unused)) or any(data[_TAIL_AT:]):
        refuse(Refusal.EVIDENCE_MALFORMED, "bytes other than zero stand where the report has only padding")
    return SnpReport(bytes(data), kind)
