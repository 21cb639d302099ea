"""Checks OCSP answers (RFC 6960) about the certificates of a GPU, and about the signers of its reference values.

Device certificates expire in the year 9999, so these answers are the only revocation there is. Each stage is a separate
function, because the order of refusals interleaves the stages with other checks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Final, NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from raycloak.attestation.core.evidence import Refusal, refuse
from raycloak.attestation.trust.certificates import (
    check_certificate_windows,
    common_name,
    is_issued_by,
    public_key,
    read_root,
)

# Bounds the work on an answer before its signature is known to hold.
MAX_OCSP_BYTES: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class OcspAnswer:
    """One answer about one certificate of a chain.

    Attributes:
        certificate: the certificate that it is about.
        issuer: the CA that issued the certificate, and answers for it.
        responder: the certificate whose key signed the response: one that came with it, or the issuer's. None if no
            such key signed it.
        reason: why the certificate was revoked, where the answer states it.
    """

    certificate: x509.Certificate
    issuer: x509.Certificate
    responder: x509.Certificate | None
    status: ocsp.OCSPCertStatus
    this_update: datetime
    next_update: datetime | None
    reason: x509.ReasonFlags | None = None

    @property
    def is_final(self) -> bool:
        """Return whether no later answer can lift this one: of all revocations, only a hold ends (RFC 5280, 5.3.1)."""
        return self.status is ocsp.OCSPCertStatus.REVOKED and self.reason is not x509.ReasonFlags.certificate_hold


def find_answers(ders: Sequence[bytes], chain: Sequence[x509.Certificate]) -> tuple[OcspAnswer, ...]:
    """Find the answer that counts for each certificate of ``chain`` except the first and the last. Judge nothing.

    A final revocation counts first, then the newest answer, and of several of one time the worst. The result does not
    depend on the order of ``ders``. An unreadable response, or one without an answer, counts for nothing.
    """
    answers = [answer for der in ders for answer in _read(der, chain)]
    counts: dict[int, OcspAnswer] = {}
    # Ascending precedence: the answer that counts about a certificate is stored last.
    for answer in sorted(answers, key=_precedence):
        counts[chain.index(answer.certificate)] = answer
    return tuple(counts[position] for position in sorted(counts))


def check_signatures(answers: Sequence[OcspAnswer]) -> None:
    """Require that each answer is signed by one of its responders; EvidenceError ``evidence_tampered`` otherwise."""
    for answer in answers:
        if answer.responder is None:
            _refuse(Refusal.EVIDENCE_TAMPERED, answer, "is not signed by its responder")


def check_responders(answers: Sequence[OcspAnswer]) -> None:
    """Require that each responder is the issuer, or authorised by the issuer to answer.

    Raises:
        EvidenceError: ``signer_role``.
    """
    for answer in answers:
        if answer.responder is None or not _may_answer(answer.responder, answer.issuer):
            _refuse(Refusal.SIGNER_ROLE, answer, "is signed by a responder that may not answer for its issuer")


def check_good(answers: Sequence[OcspAnswer]) -> None:
    """Require that every answer is "good"; EvidenceError ``revoked`` for revoked, held and unknown certificates."""
    for answer in answers:
        if answer.status is not ocsp.OCSPCertStatus.GOOD:
            _refuse(Refusal.REVOKED, answer, f"says {answer.status.name.lower()}")


def check_current(answers: Sequence[OcspAnswer], now: datetime) -> datetime:
    """Return when the first answer ends, of at least one; EvidenceError ``collateral_stale`` if one is not current."""
    return min(_window(answer, now) for answer in answers)


def check_coverage(answers: Sequence[OcspAnswer], chain: Sequence[x509.Certificate], now: datetime) -> datetime:
    """Require a current answer about every certificate between leaf and root; return when the first one ends.

    Raises:
        EvidenceError: ``collateral_stale`` for a missing answer, and outside [this update, next update).
    """
    covered = [answer.certificate for answer in answers]
    for certificate in chain[1:-1]:
        if certificate not in covered:
            refuse(Refusal.COLLATERAL_STALE, f"there is no OCSP answer about '{common_name(certificate)}'")
    return check_current(answers, now)


# Of several answers of one time the worst counts.
_SEVERITY: Final = {
    ocsp.OCSPCertStatus.GOOD: 0,
    ocsp.OCSPCertStatus.UNKNOWN: 1,
    ocsp.OCSPCertStatus.REVOKED: 2,
}


def _precedence(answer: OcspAnswer) -> tuple[bool, datetime, int, bool, float]:
    """Return a sort key: the answer with the highest counts. Its last two parts fix the order of equal answers."""
    unsound = answer.responder is None or not _may_answer(answer.responder, answer.issuer)
    ends = answer.next_update.timestamp() if answer.next_update else 0.0
    return answer.is_final, answer.this_update, _SEVERITY[answer.status], unsound, -ends


def _read(der: bytes, chain: Sequence[x509.Certificate]) -> list[OcspAnswer]:
    try:
        if len(der) > MAX_OCSP_BYTES:
            raise ValueError("too large")
        response = ocsp.load_der_ocsp_response(der)
        if response.response_status is not ocsp.OCSPResponseStatus.SUCCESSFUL:
            raise ValueError("not an answer")
        certificates = tuple(read_root(each.public_bytes(Encoding.DER)) for each in response.certificates)
        return [answer for single in response.responses for answer in _about(response, single, certificates, chain)]
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension):
        return []


def _about(
    response: ocsp.OCSPResponse,
    single: ocsp.OCSPSingleResponse,
    certificates: tuple[x509.Certificate, ...],
    chain: Sequence[x509.Certificate],
) -> list[OcspAnswer]:
    return [
        OcspAnswer(
            certificate=certificate,
            issuer=issuer,
            responder=next((each for each in (*certificates, issuer) if _signed(each, response)), None),
            status=single.certificate_status,
            this_update=single.this_update_utc,
            next_update=single.next_update_utc,
            reason=single.revocation_reason,
        )
        for certificate, issuer in pairwise(chain[1:])
        if single.serial_number == certificate.serial_number and _names_issuer(single, issuer)
    ]


def _names_issuer(single: ocsp.OCSPSingleResponse, issuer: x509.Certificate) -> bool:
    name = hashlib.new(single.hash_algorithm.name, issuer.subject.public_bytes()).digest()
    key = hashlib.new(single.hash_algorithm.name, _key_bits(issuer)).digest()
    return (single.issuer_name_hash, single.issuer_key_hash) == (name, key)


def _key_bits(certificate: x509.Certificate) -> bytes:
    """Return the content of the public key's BIT STRING, which RFC 6960 hashes."""
    key = public_key(certificate)
    if isinstance(key, EllipticCurvePublicKey):
        return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    return key.public_bytes(Encoding.DER, PublicFormat.PKCS1)


def _signed(responder: x509.Certificate, response: ocsp.OCSPResponse) -> bool:
    key = public_key(responder)
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(response.signature_hash_algorithm, SHA384):
        return False
    try:
        key.verify(response.signature, response.tbs_response_bytes, ECDSA(SHA384()))
    except InvalidSignature:
        return False
    return True


def _may_answer(responder: x509.Certificate, issuer: x509.Certificate) -> bool:
    if public_key(responder) == public_key(issuer):
        return True
    try:
        usage = responder.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return ExtendedKeyUsageOID.OCSP_SIGNING in usage and is_issued_by(responder, issuer)


def _window(answer: OcspAnswer, now: datetime) -> datetime:
    if answer.next_update is None or not answer.this_update <= now < answer.next_update:
        _refuse(Refusal.COLLATERAL_STALE, answer, "is not current")
    return min(
        answer.next_update, check_certificate_windows((answer.responder or answer.issuer,), now, "OCSP responder")
    )


def _refuse(code: Refusal, answer: OcspAnswer, what: str) -> NoReturn:
    refuse(code, f"the OCSP answer about '{common_name(answer.certificate)}' {what}")
