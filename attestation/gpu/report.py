"""Reads attestation reports of NVIDIA GPUs and switches: an SPDM measurement request and its answer (DMTF DSP0274).

Checks form only; nothing here is verified.

Guarantee: for any bytes, :func:`parse_device_report` returns a report or raises EvidenceError ``evidence_malformed``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

from raycloak.attestation.core.byte_reader import ByteReader
from raycloak.attestation.core.evidence import Refusal, refuse

# Bounds the work on bytes that nothing vouches for yet.
MAX_REPORT_BYTES: Final = 1 << 16
# Fixed by SPDM.
NONCE_BYTES: Final = 32
SIGNATURE_BYTES: Final = 96  # r and s on P-384
_VERSIONS: Final = (0x11, 0x12)  # SPDM 1.1 and 1.2
_GET_MEASUREMENTS, _MEASUREMENTS = 0xE0, 0x60
_WANTS_SIGNATURE, _ALL_MEASUREMENTS = 0x01, 0xFF
_DMTF: Final = 1
_DMTF_HEAD_BYTES: Final = 3  # kind and size, before the value
_BLOCK_HEAD: Final = Struct("<BBHBH")


# Of an NVLink device: 64 bits, unique to it.
DEVICE_ID_BYTES: Final = 8
_NO_DEVICE: Final = bytes(DEVICE_ID_BYTES)  # of a link that leads nowhere


class Opaque(IntEnum):
    """A field of the report's opaque data that is used here. Field 22 of a GPU is the list of its switches."""

    DRIVER_VERSION = 3
    VBIOS_VERSION = 6
    FWID = 20
    PROTECTED_PCIE_STATUS = 21
    DEVICE_ID = 22
    LOCK_STATUS = 25
    SWITCH_TOPOLOGY = 26
    FEATURE_FLAG = 36


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The parts of a report.

    Attributes:
        signed: request and response up to the signature.
        nonce: the verifier's nonce from the request, 32 bytes.
        measurements: value by index. Indices begin at 1, whereas reference values count from 0.
        opaque: the device's fields by type.
        signature: r and s, 96 bytes.
    """

    signed: bytes
    nonce: bytes
    measurements: Mapping[int, bytes]
    opaque: Mapping[int, bytes]
    signature: bytes

    @property
    def driver_version(self) -> str:
        """The driver's version, such as ``550.90.07``; empty if the report does not state it."""
        return _text(self.opaque.get(Opaque.DRIVER_VERSION, b""))

    @property
    def vbios_version(self) -> str:
        """The VBIOS version, such as ``96.00.9F.00.01``; empty if the report does not state it.

        A GPU packs it into 8 bytes: four of the version, last one first, then the fifth and three zero bytes. A switch
        writes text.
        """
        raw = self.opaque.get(Opaque.VBIOS_VERSION, b"")
        if len(raw) == 8 and not any(raw[5:]):
            return ".".join(f"{byte:02X}" for byte in (*raw[3::-1], raw[4]))
        return _text(raw)


def device_ids(listed: bytes) -> frozenset[bytes]:
    """Return the ids in a list of them, 8 bytes each; of links that lead to no device, none.

    Raises:
        EvidenceError: ``evidence_malformed`` for a part of an id.
    """
    if len(listed) % DEVICE_ID_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"a list of device ids has {len(listed)} bytes, which is no whole number")
    starts = range(0, len(listed), DEVICE_ID_BYTES)
    return frozenset(listed[start : start + DEVICE_ID_BYTES] for start in starts) - {_NO_DEVICE}


def parse_device_report(data: bytes, what: str) -> DeviceReport:
    """Read a report of a ``what``: a GPU or a switch. Zero bytes behind the signature, which pad it to the driver's
    buffer, are cut off.

    Raises:
        EvidenceError: ``evidence_malformed`` for another message, wrong lengths, or other trailing bytes.
    """
    if len(data) > MAX_REPORT_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"a report of {len(data)} bytes is larger than {MAX_REPORT_BYTES}")
    reader = ByteReader(data, f"{what} report")
    version, code, attributes, operation = reader.take(4)
    if version not in _VERSIONS or code != _GET_MEASUREMENTS:
        refuse(Refusal.EVIDENCE_MALFORMED, f"message {code:#x} of SPDM {version:#x} is not a measurement request")
    if not attributes & _WANTS_SIGNATURE or operation != _ALL_MEASUREMENTS:
        refuse(Refusal.EVIDENCE_MALFORMED, "the request does not ask for all measurements and a signature")
    nonce = reader.take(NONCE_BYTES)
    reader.take(1)  # the slot of the certificate chain, which the report's signature covers
    found, code, *_ = reader.take(4)
    if found != version or code != _MEASUREMENTS:
        refuse(Refusal.EVIDENCE_MALFORMED, f"message {code:#x} of SPDM {found:#x} is not the answer to the request")
    count = reader.integer(1)
    measurements = _read_measurements(reader.take(reader.integer(3)), count, what)
    reader.take(NONCE_BYTES)  # the device's own
    opaque = _read_opaque(reader.take(reader.integer(2)), what)
    signed = data[: reader.position]
    signature = reader.take(SIGNATURE_BYTES)
    if any(reader.rest()):
        refuse(Refusal.EVIDENCE_MALFORMED, f"bytes other than zero follow the {what} report")
    return DeviceReport(signed, nonce, measurements, opaque, signature)


def _read_measurements(record: bytes, count: int, what: str) -> dict[int, bytes]:
    reader = ByteReader(record, f"{what}'s measurement record")
    measurements: dict[int, bytes] = {}
    for _ in range(count):
        # The fourth field says what the value describes.
        index, specification, size, _, value_size = _BLOCK_HEAD.unpack(reader.take(_BLOCK_HEAD.size))
        value = reader.take(value_size)
        if specification != _DMTF or size != _DMTF_HEAD_BYTES + value_size:
            refuse(Refusal.EVIDENCE_MALFORMED, f"measurement {index} of the {what} is not in the DMTF format")
        if index in measurements or index == 0:
            refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} report has measurement {index} twice, or counts from zero")
        measurements[index] = value
    if not reader.at_end:
        refuse(Refusal.EVIDENCE_MALFORMED, f"the {what}'s measurement record is longer than its blocks")
    return measurements


def _read_opaque(data: bytes, what: str) -> dict[int, bytes]:
    reader = ByteReader(data, f"{what}'s opaque data")
    fields: dict[int, bytes] = {}
    while not reader.at_end:
        kind = reader.integer(2)
        value = reader.take(reader.integer(2))
        if kind in fields:
            refuse(Refusal.EVIDENCE_MALFORMED, f"the {what} report states field {kind} twice")
        fields[kind] = value
    return fields


def _text(raw: bytes) -> str:
    """Decode printable ASCII up to a terminating zero; return empty text for anything else."""
    text = raw.rstrip(b"\0").decode("ascii", "replace")
    return text if text.isprintable() and text.isascii() else ""
