"""Reads the certificate table that a host hands to its SEV-SNP guests with an extended report.

The layout is from AMD's guest-hypervisor communication block specification (document 56421, MSG_REPORT_REQ). Entries of
a 16-byte GUID, offset and length end with an entry of zeros, and the certificates follow. The host wrote the table, so
it is a hint: the verifier of the report verifies the certificates.
"""

from typing import Final
from uuid import UUID

from cryptography.hazmat.primitives.serialization import Encoding

from raycloak.attestation.snp.report import SnpReport
from raycloak.attestation.snp.rules import KeyKind
from raycloak.attestation.trust.certificates import read_presented
from raycloak.metrics.errors import EvidenceError

_ENTRY_BYTES = 24  # GUID, offset and length
# The host chooses the size, and is not trusted.
_MAX_TABLE_BYTES = 1 << 20
_MAX_ENTRIES = 64  # a megabyte of entries would take over a tenth of a second to read
_KEYS: Final[dict[KeyKind, UUID]] = {
    "VCEK": UUID("63da758d-e664-4564-adc5-f4b93be8accd"),
    "VLEK": UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"),
}
_CA: Final = UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782")


def read_table(table: bytes) -> dict[UUID, bytes]:
    """Parse the table, by GUID; empty if there is none.

    Raises:
        EvidenceError: ``tee_report`` if it is not of the format, or names a GUID twice.
    """
    found: dict[UUID, bytes] = {}
    if not any(table):
        return found
    header = table[: _MAX_ENTRIES * _ENTRY_BYTES] if len(table) <= _MAX_TABLE_BYTES else b""
    for at in range(0, len(header) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        entry = table[at : at + _ENTRY_BYTES]
        if not any(entry):
            return found
        name = UUID(bytes=entry[:16])
        offset, length = (int.from_bytes(entry[start : start + 4], "little") for start in (16, 20))
        if offset + length > len(table) or name in found:
            break
        found[name] = table[offset : offset + length]
    raise EvidenceError("tee_report", "the host's table of certificates is not of the expected format.")


def endorsement_chain(table: bytes, report: SnpReport) -> tuple[bytes, ...]:
    """Return the DER certificate of the key that signed ``report`` and, if the table has it, of its CA.

    Raises:
        EvidenceError: ``tee_report`` if the table cannot be read or lacks the key's certificate.
    """
    found = read_table(table)
    vek = found.get(_KEYS[report.key_kind])
    if not vek:
        raise EvidenceError(
            "tee_report",
            f"the host hands its guests no certificate of the {report.key_kind} (chip {report.chip_id.hex()}, "
            f"TCB version {report.reported_tcb.hex()}).",
            "Get it from AMD's key distribution service and name its file in RAYCLOAK_ENDORSEMENT.",
        )
    return (*certificates_in(vek), *certificates_in(found.get(_CA, b"")))


def certificates_in(data: bytes) -> tuple[bytes, ...]:
    """Return the certificates of a file or a table entry, in DER. ``data`` is PEM, DER or empty.

    Raises:
        EvidenceError: ``tee_report`` if it is something else.
    """
    if not data:
        return ()
    # Hosts pad PEM with zeros. DER stays as it is, because a signature may end in one.
    text = data.rstrip(b"\0") if data.startswith(b"-----BEGIN") else data
    try:
        return tuple(certificate.public_bytes(Encoding.DER) for certificate in read_presented(text))
    except ValueError:
        raise EvidenceError("tee_report", "a certificate that belongs to the platform cannot be read.") from None
