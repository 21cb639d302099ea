"""The claims of a guest whose evidence was verified, and their comparison with the values that a policy knows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from raycloak.attestation.core.evidence import EvidenceClass, Refusal, refuse
from raycloak.attestation.trust.floors import Fact


@dataclass(frozen=True, slots=True)
class GuestClaims:
    """The claims of a verified quote or report, whatever its format.

    Attributes:
        evidence_class: class of the anchor whose root verified the evidence.
        measurement: launch measurement of the guest, 48 bytes.
        registers: what the evidence says of the guest beside it, under the names of the policy's rules: the run-time
            registers of TDX, and what the host chose at launch.
        report_data: 64 bytes that the guest chose.
        tcb_status: for TDX the first status of platform, module and quoting enclave that is not ``UpToDate``; for
            SEV-SNP the reported TCB version in words.
        platform_id: the TDX platform's id, 16 bytes, or the SEV-SNP chip's, 64 bytes. If a provider masks the chip's
            id, the 32-byte report id: it names the guest and says nothing about the machine.
        names_machine: whether ``platform_id`` is a machine's.
        facts: numbers of the collateral that may only rise.
        expires_at: unix seconds at which collateral or a certificate stops being valid.
        hwmodel, dbgstat: the claims of RFC 9711 of these names.
        steps: (step, verdict) in the order in which they were taken.
    """

    evidence_class: EvidenceClass
    measurement: bytes
    registers: Mapping[str, bytes]
    report_data: bytes
    tcb_status: str
    platform_id: bytes
    names_machine: bool
    facts: tuple[Fact, ...]
    expires_at: int
    hwmodel: str
    dbgstat: str
    steps: tuple[tuple[str, str], ...]


def check_measurement(claims: GuestClaims, accepted: Collection[bytes]) -> None:
    """Require one of the ``accepted`` measurements; EvidenceError ``measurement_unknown``. Zero is never one."""
    # A register of zeros means that nothing was measured into it.
    if claims.measurement not in [value for value in accepted if any(value)]:
        refuse(Refusal.MEASUREMENT_UNKNOWN, f"{claims.measurement.hex()} is not a measurement that the policy accepts")


def check_registers(claims: GuestClaims, accepted: Mapping[str, Collection[bytes] | None]) -> None:
    """Require an accepted value in every register but those with None; EvidenceError ``measurement_unknown``."""
    for name, values in accepted.items():
        found = claims.registers[name]
        if values is not None and found not in values:
            refuse(Refusal.MEASUREMENT_UNKNOWN, f"{name} {found.hex()} is not a value that the policy accepts")
