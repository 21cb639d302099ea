"""Reads Intel TDX quotes of version 4 and 5 into typed parts. Checks form only; nothing here is verified.

Guarantee: for any bytes, :func:`parse_quote` returns a quote or raises EvidenceError ``evidence_malformed``.
"""

from dataclasses import dataclass
from typing import Final

from cryptography import x509

from raycloak.attestation.core.byte_reader import ByteReader
from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.trust.certificates import has_only_blocks, read_certificates

# Bounds the work on bytes that nothing vouches for yet. The sizes after it are of Intel's format.
MAX_QUOTE_BYTES: Final = 1 << 16
HEADER_BYTES: Final = 48
TD10_BYTES: Final = 584
TD15_BYTES: Final = 648
QE_REPORT_BYTES: Final = 384
DEBUG_ATTRIBUTES: Final = 0xFF
"""The lowest byte of a guest's attributes. Any of its bits opens the guest to its host."""
SEPT_VE_DISABLE: Final = 1 << 28
_ECDSA_P256, _TEE_TDX = 2, 0x81
_CERTIFIED_BY_QE, _CERTIFIED_BY_PEM_CHAIN = 6, 5
# Platform ids in three forms, a certificate alone, or a chain. Only a chain can be verified.
_INNER_CERTIFICATION = range(1, _CERTIFIED_BY_PEM_CHAIN + 1)
_V5_BODY_BYTES = {2: TD10_BYTES, 3: TD15_BYTES}


@dataclass(frozen=True, slots=True)
class TdxQuote:
    """The parts of a quote, as bytes.

    Attributes:
        raw: the canonical quote, without padding.
        signed: the bytes that the attestation key signs.
        body: the TD report, 584 bytes, or 648 for TD 1.5.
        signature: r and s, 64 bytes. attestation_key: x and y, 64 bytes.
        qe_report: the quoting enclave's report, 384 bytes. qe_signature: the PCK's signature over it.
        authentication_data: hashed into the enclave's report together with the attestation key.
        chain: PCK certificate first, root last; empty if the quote carries none that can be read.
    """

    raw: bytes
    signed: bytes
    body: bytes
    signature: bytes
    attestation_key: bytes
    qe_report: bytes
    qe_signature: bytes
    authentication_data: bytes
    chain_pem: bytes
    chain: tuple[x509.Certificate, ...]

    @property
    def version(self) -> int:
        return int.from_bytes(self.raw[:2], "little")

    @property
    def tee_tcb_svn(self) -> bytes:
        """The 16 versions at launch: of the TDX module (minor, major) and of the layers below it."""
        return self.body[:16]

    @property
    def tee_tcb_svn2(self) -> bytes:
        """The same versions now, after an update of the TDX module below a running guest; empty for TD 1.0."""
        return self.body[584:600]

    @property
    def module_signer(self) -> bytes:
        """The module's signer, 48 bytes; zero for Intel's own modules."""
        return self.body[64:112]

    @property
    def module_attributes(self) -> bytes:
        """The module's attributes, 8 bytes."""
        return self.body[112:120]

    @property
    def qe_svn(self) -> int:
        """The security version of the quoting enclave."""
        return int.from_bytes(self.qe_report[258:260], "little")

    @property
    def qe_vendor(self) -> bytes:
        return self.raw[12:28]

    @property
    def td_attributes(self) -> int:
        """The guest's 64-bit attribute word."""
        return int.from_bytes(self.body[120:128], "little")

    @property
    def mr_td(self) -> bytes:
        return self.body[136:184]

    @property
    def mr_config_id(self) -> bytes:
        """The 48 bytes that the host chose at launch."""
        return self.body[184:232]

    @property
    def rtmrs(self) -> tuple[bytes, ...]:
        return tuple(self.body[328 + 48 * i : 376 + 48 * i] for i in range(4))

    @property
    def report_data(self) -> bytes:
        return self.body[520:584]

    @property
    def mr_service_td(self) -> bytes:
        """The service TD's measurement: 48 bytes for TD 1.5, empty for TD 1.0."""
        return self.body[600:648]


def parse_quote(data: bytes) -> TdxQuote:
    """Read a quote. Zero bytes behind it, which the kernel interface appends, are cut off.

    Raises:
        EvidenceError: ``evidence_malformed`` for another kind or version, wrong lengths, or other trailing bytes.
    """
    if len(data) > MAX_QUOTE_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"a quote of {len(data)} bytes is larger than {MAX_QUOTE_BYTES}")
    reader = ByteReader(data, "quote")
    body = _read_body(reader)
    signed = data[: reader.position]
    certification = reader.take(reader.integer(4))
    if any(reader.rest()):
        refuse(Refusal.EVIDENCE_MALFORMED, "bytes other than zero follow the quote")
    return _read_certification(certification, data[: reader.position], signed, body)


def _read_body(reader: ByteReader) -> bytes:
    version = reader.integer(2)
    if version not in (4, 5):
        refuse(Refusal.EVIDENCE_MALFORMED, f"quote version {version} is not a TDX quote version (4 or 5)")
    reader.expect(2, _ECDSA_P256, "attestation key type")
    reader.expect(4, _TEE_TDX, "TEE type")
    reader.take(HEADER_BYTES - 8)
    if version == 4:
        return reader.take(TD10_BYTES)
    body_type = reader.integer(2)
    if body_type not in _V5_BODY_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"quote body type {body_type} is not a TD report")
    reader.expect(4, _V5_BODY_BYTES[body_type], "body length")
    return reader.take(_V5_BODY_BYTES[body_type])


def _read_certification(data: bytes, raw: bytes, signed: bytes, body: bytes) -> TdxQuote:
    reader = ByteReader(data, "quote")
    signature, attestation_key = reader.take(64), reader.take(64)
    reader.expect(2, _CERTIFIED_BY_QE, "certification type")
    reader.expect(4, len(data) - reader.position - 4, "certification length")
    qe_report, qe_signature = reader.take(QE_REPORT_BYTES), reader.take(64)
    authentication_data = reader.take(reader.integer(2))
    kind = reader.integer(2)
    if kind not in _INNER_CERTIFICATION:
        refuse(Refusal.EVIDENCE_MALFORMED, f"the quote's inner certification type {kind} is not known")
    reader.expect(4, len(data) - reader.position - 4, "inner certification length")
    pem = reader.rest() if kind == _CERTIFIED_BY_PEM_CHAIN else b""
    # No signature covers this part, so anything else could be put into it.
    if not has_only_blocks(pem.rstrip(b"\0")):
        refuse(Refusal.EVIDENCE_MALFORMED, "the quote's certification data contains text other than certificates")
    return TdxQuote(
        raw=raw,
        signed=signed,
        body=body,
        signature=signature,
        attestation_key=attestation_key,
        qe_report=qe_report,
        qe_signature=qe_signature,
        authentication_data=authentication_data,
        chain_pem=pem,
        chain=_read_chain(pem),
    )


def _read_chain(pem: bytes) -> tuple[x509.Certificate, ...]:
    """Read the certificates; return none if one of them cannot be read, which is not a chain."""
    try:
        return read_certificates(pem.rstrip(b"\0"))
    except ValueError:
        return ()
