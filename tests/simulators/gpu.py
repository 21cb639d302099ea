"""A simulated GPU vendor: devices under a root of its own, their reports, reference values and OCSP answers.

Its evidence has the genuine format and goes through the verifier of hardware evidence, but proves nothing about a
machine. Every subject says ``O=SIMULATOR - NOT A TEE``. Keys are held in memory only.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol, Self

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key

from raycloak.attestation.core.evidence import EvidenceClass, GpuEvidence
from raycloak.attestation.gpu.report import Opaque
from raycloak.attestation.gpu.verify import GpuReferences
from raycloak.attestation.trust.roots import Anchor
from tests.simulators.gpu_pki import (
    GOOD,
    GpuCredential,
    OcspVariant,
    blackwell_firmware_identity,
    hopper_firmware_identity,
    issue,
    ocsp_answer,
)
from tests.simulators.gpu_rim import Manifest, sign_manifest, write_manifest

DRIVER_VERSION: Final = "590.12"
VBIOS_VERSION: Final = "96.00.A5.00.01"
DRIVER_INDICES: Final = range(8, 24)
VBIOS_INDICES: Final = range(8)
"""The measurement indices, counted from 0, for which each manifest has values."""

_CHIP_INFO: Final = 35  # a field of opaque data that no rule judges
_COUNT: Final = 64
_ANSWER_AGE_S: Final = 3600


@dataclass(frozen=True, slots=True)
class GpuVariant:
    """A report's content. The defaults pass, any other value is for testing refusals.

    Attributes:
        measurements: values by index, counted from 0, that replace the genuine ones.
        fwid: replaces the firmware's own; empty leaves it out.
        feature_flag: mode of the GPU, or the field's bytes; None leaves it out.
        protected_pcie: the older way to say the same.
        switch_ids: ids of the switches at its links, 8 bytes each, first byte first.
        signed_by_boot_rom: sign with the key that certifies the firmware's.
        request: the first four bytes.
    """

    driver_version: str = DRIVER_VERSION
    vbios_version: str = VBIOS_VERSION
    measurements: Mapping[int, bytes] = field(default_factory=dict)
    fwid: bytes | None = None
    feature_flag: int | bytes | None = 0
    protected_pcie: bool = False
    switch_ids: tuple[bytes, ...] = ()
    signed_by_boot_rom: bool = False
    request: bytes = bytes.fromhex("11e001ff")


GENUINE: Final = GpuVariant()


class Certified(Protocol):
    """A device with a chain of this vendor."""

    @property
    def credentials(self) -> tuple[GpuCredential, ...]: ...


class SimulatedGpu:
    """One simulated device.

    Attributes:
        credentials: firmware leaf, boot ROM, provisioner, family and root.
        device_id: the id by which NVLink devices name it, 8 bytes.
    """

    def __init__(self, credentials: tuple[GpuCredential, ...], chip: str, fwid: bytes, device_id: bytes) -> None:
        self.credentials: tuple[GpuCredential, ...] = credentials
        self.chip = chip
        self.device_id = device_id
        self._fwid = fwid

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The certificates in DER, leaf first."""
        return tuple(each.der for each in self.credentials)

    def report(self, nonce: bytes, variant: GpuVariant = GENUINE) -> bytes:
        """Return the SPDM request over ``nonce`` (32 bytes) followed by the answer to it."""
        signer = self.credentials[1 if variant.signed_by_boot_rom else 0]
        values = [variant.measurements.get(index, genuine_value(index)) for index in range(_COUNT)]
        return spdm_report(signer, variant.request, nonce, values, self._opaque(variant))

    def evidence(self, nonce: bytes, variant: GpuVariant = GENUINE) -> bytes:
        """Return the encoded message that a worker presents."""
        return GpuEvidence(report=self.report(nonce, variant), chain=self.chain).encode()

    def _opaque(self, variant: GpuVariant) -> dict[int, bytes]:
        fwid = self._fwid if variant.fwid is None else variant.fwid
        fields: dict[int, bytes] = {
            Opaque.VBIOS_VERSION: _packed(variant.vbios_version),
            Opaque.DRIVER_VERSION: variant.driver_version.encode() + b"\0",
            Opaque.PROTECTED_PCIE_STATUS: b"\xaa" if variant.protected_pcie else b"\x55",
            _CHIP_INFO: self.chip.encode() + b"\0",
        }
        if fwid:
            fields[Opaque.FWID] = fwid
        flag = variant.feature_flag
        if flag is not None:
            fields[Opaque.FEATURE_FLAG] = flag if isinstance(flag, bytes) else flag.to_bytes(2, "little")
        if variant.switch_ids:
            # Two links to each switch, and one that leads nowhere. A GPU writes the last byte of an id first.
            fields[Opaque.DEVICE_ID] = b"".join(2 * each[::-1] for each in variant.switch_ids) + bytes(8)
        return fields


@dataclass(frozen=True, slots=True)
class SimulatedGpus:
    """The `raycloak.attestation.attester.attester.GpuSource` of an actor with these devices."""

    gpus: tuple[SimulatedGpu, ...]

    def collect(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return one encoded `GpuEvidence` per device over ``nonce``."""
        return tuple(gpu.evidence(nonce) for gpu in self.gpus)

    def collect_switches(self, nonce: bytes) -> tuple[bytes, ...]:
        """Return nothing: these GPUs are not in protected-PCIe mode."""
        return ()


class SimulatedGpuVendor:
    """The roots of devices and of reference values, and the certificates below them."""

    def __init__(self) -> None:
        self._root = issue("NVIDIA Device Identity CA", None, is_ca=True)
        self._rim_root = issue("NVIDIA CoRIM signing Root CA", None, is_ca=True)
        self._rim_ca = issue("NVIDIA Reference Value CA", self._rim_root, is_ca=True)
        self.rim_signer = issue("RIM Signer", self._rim_ca)

    @classmethod
    def create(cls) -> Self:
        """Make a new vendor."""
        return cls()

    @property
    def anchors(self) -> tuple[Anchor, Anchor]:
        """The anchors with which a policy accepts this vendor's devices and reference values as simulated."""
        return (
            Anchor(evidence_class=EvidenceClass.SIMULATED, family="nvidia_gpu", root_der=self._root.der),
            Anchor(evidence_class=EvidenceClass.SIMULATED, family="nvidia_rim", root_der=self._rim_root.der),
        )

    def gpu(self, chip: str = "GH100") -> SimulatedGpu:
        """Make a new device with a new chain. A ``chip`` such as ``LS_10`` gives it the certificates of a switch."""
        device_id, fwid = secrets.token_bytes(8), hashlib.sha384(chip.encode()).digest()
        return SimulatedGpu(self.issue_chain(chip, device_id, fwid), chip, fwid, device_id)

    def issue_chain(self, chip: str, device_id: bytes, fwid: bytes) -> tuple[GpuCredential, ...]:
        """Issue a device's chain: firmware leaf, boot ROM, provisioner, family and root."""
        family = issue(f"NVIDIA {chip} Identity", self._root, is_ca=True)
        provisioner = issue(f"NVIDIA {chip} Provisioner ICA 1", family, is_ca=True)
        # The genuine serial number has one byte before the id.
        boot_rom = issue(f"{chip} A01 GSP BROM", provisioner, is_ca=True, serial=f"41{device_id.hex().upper()}")
        identity = (
            blackwell_firmware_identity(fwid, chip)
            if chip.startswith("GB")
            else hopper_firmware_identity(fwid, generate_private_key(SECP384R1()))
        )
        leaf = issue(f"{chip} A01 GSP FMC LF", boot_rom, extensions=(identity,))
        return leaf, boot_rom, provisioner, family, self._root

    def references(self, product: str = "GH100") -> GpuReferences:
        """Sign values of the driver and the VBIOS that simulated reports state."""
        driver = Manifest(DRIVER_VERSION, product, _values(DRIVER_INDICES), VBIOS_INDICES)
        vbios = Manifest(VBIOS_VERSION, product, _values(VBIOS_INDICES), DRIVER_INDICES)
        return GpuReferences(self.sign(driver), self.sign(vbios))

    def sign(self, manifest: Manifest, signer: GpuCredential | None = None) -> bytes:
        """Sign a manifest, with ``signer`` or with the vendor's own."""
        return sign_manifest(write_manifest(manifest), signer or self.rim_signer, (self._rim_ca, self._rim_root))

    def issue_rim_signer(self, valid_until: datetime) -> GpuCredential:
        """Make another signer of reference values."""
        return issue("RIM Signer", self._rim_ca, valid_until=valid_until)

    def ocsp(self, gpu: Certified, now: int, variants: Mapping[int, OcspVariant] | None = None) -> tuple[bytes, ...]:
        """Answer about boot ROM (position 1), provisioner (2) and family (3), an hour old at unix second ``now``."""
        at = datetime.fromtimestamp(now - _ANSWER_AGE_S, UTC)
        chosen = variants or {}
        return tuple(
            ocsp_answer(gpu.credentials[i].certificate, gpu.credentials[i + 1], at, chosen.get(i, GOOD))
            for i in (1, 2, 3)
        )

    def rim_ocsp(self, now: int, variants: Mapping[int, OcspVariant] | None = None) -> tuple[bytes, ...]:
        """Answer about the signer of reference values (position 0) and its CA (1), an hour old at ``now``."""
        at = datetime.fromtimestamp(now - _ANSWER_AGE_S, UTC)
        chain, chosen = (self.rim_signer, self._rim_ca, self._rim_root), variants or {}
        return tuple(ocsp_answer(chain[i].certificate, chain[i + 1], at, chosen.get(i, GOOD)) for i in (0, 1))


def genuine_value(index: int) -> bytes:
    """Return the measurement of simulated firmware at an index counted from 0, 48 bytes."""
    return hashlib.sha384(f"simulated measurement {index}".encode()).digest()


def _values(indices: range) -> dict[int, tuple[bytes, ...]]:
    return {index: (genuine_value(index),) for index in indices}


def spdm_report(
    signer: GpuCredential, request: bytes, nonce: bytes, values: Sequence[bytes], opaque: Mapping[int, bytes]
) -> bytes:
    """Return a report: the request over ``nonce`` (32 bytes), and the signed answer with measurements and fields."""
    record = b"".join(_block(index, value) for index, value in enumerate(values))
    fields = b"".join(
        kind.to_bytes(2, "little") + len(value).to_bytes(2, "little") + value for kind, value in opaque.items()
    )
    response = bytes((request[0], 0x60, 0, 0, len(values))) + len(record).to_bytes(3, "little") + record
    signed = request + nonce + b"\0" + response + secrets.token_bytes(32) + len(fields).to_bytes(2, "little") + fields
    return signed + signer.sign(signed)


def _block(index: int, value: bytes) -> bytes:
    block = b"\x01" + len(value).to_bytes(2, "little") + value
    return bytes((index + 1, 1)) + len(block).to_bytes(2, "little") + block


def _packed(version: str) -> bytes:
    """Pack a version as a GPU packs ``96.00.A5.00.01``; see
    `raycloak.attestation.gpu.report.DeviceReport.vbios_version`."""
    first, second, third, fourth, fifth = bytes.fromhex(version.replace(".", ""))
    return bytes((fourth, third, second, first, fifth, 0, 0, 0))
