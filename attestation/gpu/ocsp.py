"""Checks OCSP answers (RFC 6960) about the certificates of a GPU, and about the signers of its reference values.

Device certificates expire in the year 9999, so these answers are the only revocation there is. Each stage is a separate
function, because the order of refusals interleaves the stages with other checks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Final, NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding
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

    @property
    def is_authorised(self) -> bool:
        """Return whether it is signed by its issuer, or by a certificate that the issuer authorised to answer."""
        return self.responder is not None and _may_answer(self.responder, self.issuer)


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


def check_answers(answers: Sequence[OcspAnswer]) -> None:
    """Require that each answer is signed, by its issuer or whom that authorised to answer, and says "good".

    Raises:
        EvidenceError: ``evidence_tampered``, ``signer_role``, or ``revoked`` for revoked, held and unknown
            certificates: the first of these that any answer deserves.
    """
    for answer in answers:
        if answer.responder is None:
            _refuse(Refusal.EVIDENCE_TAMPERED, answer, "is not signed by its responder")
    for answer in answers:
        if not answer.is_authorised:
            _refuse(Refusal.SIGNER_ROLE, answer, "is signed by a responder that may not answer for its issuer")
    for answer in answers:
        if answer.status is not ocsp.OCSPCertStatus.GOOD:
            _refuse(Refusal.REVOKED, answer, f"says {answer.status.name.lower()}")


def check_current(answers: Sequence[OcspAnswer], now: datetime) -> datetime:
    """Return when the first answer ends, of at least one; EvidenceError ``collateral_stale`` if one is not current."""
    ends = []
    for answer in answers:
        if answer.next_update is None or not answer.this_update <= now < answer.next_update:
            _refuse(Refusal.COLLATERAL_STALE, answer, "is not current")
        signer = answer.responder or answer.issuer
        ends += [answer.next_update, check_certificate_windows((signer,), now, "OCSP responder")]
    return min(ends)


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
_SEVERITY: Final = (ocsp.OCSPCertStatus.GOOD, ocsp.OCSPCertStatus.UNKNOWN, ocsp.OCSPCertStatus.REVOKED)


def _precedence(answer: OcspAnswer) -> tuple[bool, datetime, int, bool, float]:
    """Return a sort key: the answer with the highest counts. Its last two parts fix the order of equal answers."""
    ends = answer.next_update.timestamp() if answer.next_update else 0.0
    return answer.is_final, answer.this_update, _SEVERITY.index(answer.status), not answer.is_authorised, -ends


def _read(der: bytes, chain: Sequence[x509.Certificate]) -> list[OcspAnswer]:
    try:
        if len(der) > MAX_OCSP_BYTES:
            raise ValueError("too large")
        response = ocsp.load_der_ocsp_response(der)
        if response.response_status is not ocsp.OCSPResponseStatus.SUCCESSFUL:
            raise ValueError("not an answer")
        certificates = tuple(read_root(each.public_bytes(Encoding.DER)) for each in response.certificates)
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
            for single in response.responses
            for certificate, issuer in pairwise(chain[1:])
            if single.serial_number == certificate.serial_number and _names_issuer(single, certificate, issuer)
        ]
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension):
        return []


def _names_issuer(single: ocsp.OCSPSingleResponse, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    asked = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, single.hash_algorithm).build()
    return (single.issuer_name_hash, single.issuer_key_hash) == (asked.issuer_name_hash, asked.issuer_key_hash)


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


def _refuse(code: Refusal, answer: OcspAnswer, what: str) -> NoReturn:
    refuse(code, f"the OCSP answer about '{common_name(answer.certificate)}' {what}")
