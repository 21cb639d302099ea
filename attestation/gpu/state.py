"""Judges the state that a genuine GPU report describes: device class, firmware identity, mode and measurements.

Every check here raises ``gpu_state``, and presumes that `raycloak.attestation.gpu.verify` has verified the report.
"""

import re
from collections.abc import Mapping
from typing import Final

from cryptography import x509
from cryptography.x509.oid import ObjectIdentifier

from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.gpu.report import GpuReport, Opaque
from raycloak.attestation.gpu.rim import GoldenValues
from raycloak.attestation.gpu.rules import GpuRules
from raycloak.attestation.trust.certificates import common_name

# A firmware id is a SHA-384.
_FWID_BYTES: Final = 48
_FWID_OIDS: Final = (ObjectIdentifier("2.23.133.5.4.1"), ObjectIdentifier("2.23.133.5.4.1.1"))  # Hopper, Blackwell
_SHA384_DIGEST: Final = bytes.fromhex("06096086480165030402020430")
"""DER of SHA-384's object identifier, then tag and length of the 48-byte digest that follows it."""

_CHIP: Final = re.compile(r"(G[A-Z])[0-9]\w*( |$)")
_MODES: Final[Mapping[int, str]] = {0: "single GPU", 1: "multi GPU", 2: "protected PCIe"}
_PPCIE_MODE, _PPCIE_ON = 2, 0xAA


def chip_family(name: str) -> str:
    """Return the family of a chip's name, such as ``GH`` for ``GH100``; empty for names of other devices."""
    found = _CHIP.match(name)
    return found[1] if found else ""


def check_device(leaf: x509.Certificate, boot_rom: x509.Certificate, rules: GpuRules) -> str:
    """Return the chip's family; refuse another kind of device, such as a switch, and models that are not accepted."""
    name = common_name(leaf)
    family = chip_family(name)
    if not family:
        refuse(Refusal.GPU_STATE, f"'{name}' is not the firmware certificate of a GPU")
    # The device itself issues the leaf. NVIDIA issues the certificate of its boot ROM, and so vouches for that name.
    model = common_name(boot_rom).partition(" ")[0]
    if rules.models is not None and model not in rules.models:
        refuse(Refusal.GPU_STATE, f"the policy does not accept a GPU whose boot ROM is of '{model}'")
    return family


def check_firmware_identity(leaf: x509.Certificate, report: GpuReport) -> None:
    """Require that the reporting firmware is the one that the leaf certifies, if the leaf names one."""
    certified, reported = _certified_fwid(leaf), report.opaque.get(Opaque.FWID)
    if certified is not None and reported is None:
        refuse(Refusal.GPU_STATE, "the GPU's certificate names its firmware, and the report does not")
    if certified is not None and certified != reported:
        refuse(Refusal.GPU_STATE, "the GPU's certificate is for other firmware than the report")


def _certified_fwid(leaf: x509.Certificate) -> bytes | None:
    """Find the firmware id. Hopper's extension ends with it; Blackwell's lists several, its own first, and more."""
    for extension in leaf.extensions:
        if extension.oid in _FWID_OIDS and isinstance(extension.value, x509.UnrecognizedExtension):
            _, found, rest = extension.value.value.partition(_SHA384_DIGEST)
            return rest[:_FWID_BYTES] if found else extension.value.value[-_FWID_BYTES:]
    return None


def check_mode(report: GpuReport, rules: GpuRules) -> str:
    """Return the mode in words. Refuse an unknown mode, and protected PCIe or no mode unless the rules allow it."""
    flag = report.opaque.get(Opaque.FEATURE_FLAG)
    # A field without bytes states nothing, although it would read as zero, the mode of a single GPU.
    mode = int.from_bytes(flag, "little") if flag else None
    protected = mode == _PPCIE_MODE or report.opaque.get(Opaque.PROTECTED_PCIE_STATUS) == bytes((_PPCIE_ON,))
    if mode is not None and mode not in _MODES:
        refuse(Refusal.GPU_STATE, f"the GPU runs in a mode that is not known ({mode})")
    if protected and not rules.allow_ppcie:
        refuse(Refusal.GPU_STATE, "the GPU runs in protected-PCIe mode, not in confidential-computing mode")
    if protected:
        return _MODES[_PPCIE_MODE]
    if mode is None and not rules.allow_unstated_mode:
        refuse(Refusal.GPU_STATE, "the GPU does not state its mode, so nothing says that it is confidential computing")
    return "not stated" if mode is None else _MODES[mode]


def check_references(
    report: GpuReport, family: str, driver: GoldenValues | None, vbios: GoldenValues | None
) -> tuple[int, ...]:
    """Compare the report with the given reference values; return the measurements, from 1, that were compared."""
    _check_described(driver, report.driver_version, family, "driver")
    _check_described(vbios, report.vbios_version, family, "VBIOS")
    driver_values, vbios_values = (each.values if each else {} for each in (driver, vbios))
    if both := driver_values.keys() & vbios_values.keys():
        refuse(Refusal.GPU_STATE, f"driver and VBIOS manifest both claim measurement {min(both)}")
    values = {**driver_values, **vbios_values}
    # Reference values count from 0, and a report from 1.
    differing = [index for index, accepted in values.items() if report.measurements.get(index + 1) not in accepted]
    if differing:
        refuse(Refusal.GPU_STATE, f"measurements {differing} of the GPU differ from its manifests")
    return tuple(sorted(index + 1 for index in values))


def _check_described(golden: GoldenValues | None, version: str, family: str, what: str) -> None:
    if golden is None:
        return
    if not version or golden.version.casefold() != version.casefold():
        refuse(Refusal.GPU_STATE, f"the {what} manifest is for version {golden.version!r}, the GPU runs {version!r}")
    if chip_family(golden.product) not in ("", family):
        refuse(Refusal.GPU_STATE, f"the {what} manifest is for {golden.product!r}, which the GPU is not")
