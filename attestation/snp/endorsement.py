"""Reads AMD's statement in an endorsement key's certificate: the machine and the TCB version it was derived for.

The extensions are those in AMD's key distribution service specification (document 57230). The meaning of the TCB
version's eight bytes depends on the processor's generation.
"""

from dataclasses import dataclass
from typing import Final, get_args

from cryptography import x509

from raycloak.attestation.snp.report import KEY_KINDS
from raycloak.attestation.snp.rules import Component, Generation, KeyKind
from raycloak.attestation.trust.certificates import common_name

AMD_OID: Final = "1.3.6.1.4.1.3704.1"
HARDWARE_ID_OID: Final = f"{AMD_OID}.4"
_INTEGER, _OCTETS = 0x02, 0x04
_BOOT_LOADER, _TEE, _SNP, _MICROCODE, _FMC = 1, 2, 3, 8, 9
_RESERVED = (4, 5, 6, 7)
_NUMBERS: Final[dict[Component, int]] = {
    "boot loader": _BOOT_LOADER,
    "TEE": _TEE,
    "SNP firmware": _SNP,
    "microcode": _MICROCODE,
}


@dataclass(frozen=True, slots=True)
class TcbLayout:
    """The way in which a generation writes TCB version and hardware id.

    Attributes:
        components: last number of the extension's OID, for each byte of a TCB version.
        hardware_id_bytes: number of leading chip-id bytes that name the chip; the others are zero.
    """

    components: tuple[int, ...]
    hardware_id_bytes: int

    def svn(self, tcb: bytes, component: Component) -> int:
        """Return the version of a component in a TCB version."""
        return tcb[self.components.index(_NUMBERS[component])]

    def describe(self, tcb: bytes) -> str:
        """Describe the TCB version's components for a person."""
        names = {_FMC: "fmc", _BOOT_LOADER: "boot loader", _TEE: "tee", _SNP: "snp", _MICROCODE: "microcode"}
        parts = zip(self.components, tcb, strict=True)
        return ", ".join(f"{names[number]} {value}" for number, value in parts if number in names)


_MILAN = TcbLayout((_BOOT_LOADER, _TEE, *_RESERVED, _SNP, _MICROCODE), 64)
_TURIN = TcbLayout((_FMC, _BOOT_LOADER, _TEE, _SNP, *_RESERVED[1:], _MICROCODE), 8)
LAYOUTS: Final[dict[Generation, TcbLayout]] = {"Milan": _MILAN, "Genoa": _MILAN, "Turin": _TURIN}


def issuer_name(generation: Generation, kind: KeyKind) -> str:
    """Return the common name of the CA that certifies keys of ``kind``."""
    return f"SEV-{generation}" if kind == "VCEK" else f"SEV-{kind}-{generation}"


_ROLES: Final = {
    issuer_name(generation, kind): (generation, kind)
    for generation in get_args(Generation)
    for kind in KEY_KINDS.values()
}


def issuer_role(issuer: x509.Certificate) -> tuple[Generation, KeyKind] | None:
    """Return the generation and kind of key that ``issuer`` is the CA of; None if it is no such CA."""
    return _ROLES.get(common_name(issuer))


def certified_tcb(certificate: x509.Certificate, layout: TcbLayout) -> bytes | None:
    """Return the TCB version, 8 bytes, that the key was derived for; None if the certificate does not say."""
    values = [_component(certificate, number) for number in layout.components]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else None


def certified_hardware_id(certificate: x509.Certificate, layout: TcbLayout) -> bytes | None:
    """Return the id of the chip that holds the key; None for a VLEK's certificate, which is for many chips.

    The value is the bare bytes, or an octet string of them. The length decides: a bare id may look like the header.
    """
    value, size = _extension(certificate, HARDWARE_ID_OID), layout.hardware_id_bytes
    # One chip in 65,536 has an id that starts like the header of an octet string.
    if value is not None and len(value) == size + 2 and value[:2] == bytes((_OCTETS, size)):
        return value[2:]
    return value


def _component(certificate: x509.Certificate, number: int) -> int | None:
    value = _extension(certificate, f"{AMD_OID}.3.{number}")
    if value is None:
        # A reserved component is zero, and certificates leave it out.
        return 0 if number in _RESERVED else None
    # DER has one form for a number: a zero byte in front only where the sign bit would be set.
    short = len(value) == 3 and value[:2] == bytes((_INTEGER, 1)) and value[2] < 0x80
    long = len(value) == 4 and value[:3] == bytes((_INTEGER, 2, 0)) and value[3] >= 0x80
    return value[-1] if short or long else None


def _extension(certificate: x509.Certificate, oid: str) -> bytes | None:
    for extension in certificate.extensions:
        if extension.oid.dotted_string == oid and isinstance(extension.value, x509.UnrecognizedExtension):
            return extension.value.value
    return None
