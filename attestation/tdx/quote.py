"""Reads Intel TDX quotes of version 4 and 5 into typed parts. Checks form only; nothing here is verified.

Guarantee: for any bytes, :func:`parse_quote` returns a quote or raises EvidenceError ``evidence_malformed``.
"""

from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from cryptography import x509

from raycloak.attestation.core.byte_reader import ByteReader
from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.trust.certificates import has_only_blocks, read_certificates

# Bounds the work on bytes that nothing vouches for yet. The sizes after it are of Intel's format.
MAX_QUOTE_BYTES: Final = 1 << 16
QE_REPORT_BYTES: Final = 384
DEBUG_ATTRIBUTES: Final = 0xFF
"""The lowest byte of a guest's attributes. Any of its bits opens the guest to its host."""
SEPT_VE_DISABLE: Final = 1 << 28
_ECDSA_P256, _TEE_TDX = 2, 0x81
_CERTIFIED_BY_QE, _CERTIFIED_BY_PEM_CHAIN = 6, 5
# Platform ids in three forms, a certificate alone, or a chain. Only a chain can be verified.
_INNER_CERTIFICATION = range(1, _CERTIFIED_BY_PEM_CHAIN + 1)
_HEADER_BYTES, _TD10_BODY, _TD15_BODY = 48, 2, 3


class TdReport(NamedTuple):
    """The fields of a TD report that are used here, in the order of the format.

    Attributes:
        tee_tcb_svn: the 16 versions at launch: of the TDX module (minor, major) and of the layers below it.
        module_signer: the module's signer, 48 bytes; zero for Intel's own modules. module_attributes: 8 bytes.
        td_attributes: the guest's 64-bit attribute word.
        mr_config_id: the 48 bytes that the host chose at launch.
        tee_tcb_svn2: the versions now, after an update of the TDX module below a running guest; empty for TD 1.0.
        mr_service_td: the service TD's measurement: 48 bytes for TD 1.5, empty for TD 1.0.
    """

    tee_tcb_svn: bytes
    module_signer: bytes
    module_attributes: bytes
    td_attributes: int
    mr_td: bytes
    mr_config_id: bytes
    rtmr0: bytes
    rtmr1: bytes
    rtmr2: bytes
    rtmr3: bytes
    report_data: bytes
    tee_tcb_svn2: bytes = b""
    mr_service_td: bytes = b""


_TD10, _TD15 = Struct("<16s48x48s8sQ8x48s48s96x48s48s48s48s64s"), Struct("<16s48s")
"""A TD report, and what TD 1.5 has behind it."""


@dataclass(frozen=True, slots=True)
class TdxQuote:
    """The parts of a quote, as bytes.

    Attributes:
        raw: the canonical quote, without padding.
        signed: the bytes that the attestation key signs.
        signature: r and s, 64 bytes. attestation_key: x and y, 64 bytes.
        qe_report: the quoting enclave's report, 384 bytes. qe_signature: the PCK's signature over it.
        authentication_data: hashed into the enclave's report together with the attestation key.
        chain: PCK certificate first, root last; empty if the quote carries none that can be read.
    """

    raw: bytes
    signed: bytes
    report: TdReport
    signature: bytes
    attestation_key: bytes
    qe_report: bytes
    qe_signature: bytes
    authentication_data: bytes
    chain_pem: bytes
    chain: tuple[x509.Certificate, ...]

    @property
    def qe_svn(self) -> int:
        """The security version of the quoting enclave."""
        return int.from_bytes(self.qe_report[258:260], "little")

    @property
    def qe_vendor(self) -> bytes:
        return self.raw[12:28]


def parse_quote(data: bytes) -> TdxQuote:
    """Read a quote. Zero bytes behind it, which the kernel interface appends, are cut off.

    Raises:
        EvidenceError: ``evidence_malformed`` for another kind or version, wrong lengths, or other trailing bytes.
    """
    if len(data) > MAX_QUOTE_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"a quote of {len(data)} bytes is larger than {MAX_QUOTE_BYTES}")
    reader = ByteReader(data, "quote")
    report = _read_report(reader)
    signed = data[: reader.position]
    certification = ByteReader(reader.take(reader.integer(4)), "quote")
    if any(reader.rest()):
        refuse(Refusal.EVIDENCE_MALFORMED, "bytes other than zero follow the quote")
    signature, attestation_key = certification.take(64), certification.take(64)
    certification.expect(2, _CERTIFIED_BY_QE, "certification type")
    certification.expect_rest("certification length")
    qe_report, qe_signature = certification.take(QE_REPORT_BYTES), certification.take(64)
    authentication_data = certification.take(certification.integer(2))
    kind = certification.integer(2)
    if kind not in _INNER_CERTIFICATION:
        refuse(Refusal.EVIDENCE_MALFORMED, f"the quote's inner certification type {kind} is not known")
    certification.expect_rest("inner certification length")
    pem = certification.rest() if kind == _CERTIFIED_BY_PEM_CHAIN else b""
    # No signature covers this part, so anything else could be put into it.
    if not has_only_blocks(pem.rstrip(b"\0")):
        refuse(Refusal.EVIDENCE_MALFORMED, "the quote's certification data contains text other than certificates")
    try:
        chain = read_certificates(pem.rstrip(b"\0"))
    # If one of them cannot be read, they are no chain.
    except ValueError:
        chain = ()
    parts = (signature, attestation_key, qe_report, qe_signature, authentication_data, pem, chain)
    return TdxQuote(data[: reader.position], signed, report, *parts)


def _read_report(reader: ByteReader) -> TdReport:
    version = reader.integer(2)
    if version not in (4, 5):
        refuse(Refusal.EVIDENCE_MALFORMED, f"quote version {version} is not a TDX quote version (4 or 5)")
    reader.expect(2, _ECDSA_P256, "attestation key type")
    reader.expect(4, _TEE_TDX, "TEE type")
    reader.take(_HEADER_BYTES - 8)
    body_type = reader.integer(2) if version == 5 else _TD10_BODY
    if body_type not in (_TD10_BODY, _TD15_BODY):
        refuse(Refusal.EVIDENCE_MALFORMED, f"quote body type {body_type} is not a TD report")
    parts = (_TD10, _TD15) if body_type == _TD15_BODY else (_TD10,)
    if version == 5:
        reader.expect(4, sum(part.size for part in parts), "body length")
    return TdReport(*(field for part in parts for field in part.unpack(reader.take(part.size))))
