"""Verifies an Intel TDX quote against collateral and one trust anchor.

Hardware and simulated evidence take the same path; the class of the result is the class of the anchor. Each stage
sets one refusal code. The signatures, chains, roles, revocation lists and windows are checked here, so that a refusal
has a reason of ours; then dcap-qvl verifies the whole quote again and rates the platform, and only what both accept
passes. Not checked here: measurements, freshness and report data, which `attestation.appraisal` compares.
"""

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, NoReturn

import dcap_qvl
from cryptography import x509

from attestation.certificates import (
    check_certificate_windows,
    check_crl_window,
    check_links,
    check_not_revoked,
    check_root,
    common_name,
    ecdsa_is_valid,
    key_id,
    load_chain,
    load_crl,
    point,
    signed_by,
)
from attestation.evidence import Collateral, EvidenceClass, Refusal, refuse, require_class
from attestation.quote_format import TdxQuote, parse_quote
from attestation.roots import Anchor, anchor_of
from attestation.tdx_rules import TdxRules

TCB_SIGNER: Final = "Intel SGX TCB Signing"
PCK_LEAF: Final = "Intel SGX PCK Certificate"
PCK_ISSUERS: Final = ("Intel SGX PCK Platform CA", "Intel SGX PCK Processor CA")
QE_VENDOR: Final = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")

_DEBUG = 1
_SEPT_VE_DISABLE = 1 << 28
# SEPT_VE_DISABLE, PKS, key locker and PERFMON; any other bit is reserved or lets the guest migrate.
_TOLERATED_BITS = _SEPT_VE_DISABLE | 1 << 30 | 1 << 31 | 1 << 63
_FOREVER_S = 2**31


@dataclass(frozen=True, slots=True)
class TdxClaims:
    """What a verified quote says.

    Attributes:
        evidence_class: class of the anchor whose root verified the quote.
        measurement, rtmrs: ``mr_td`` and the run-time registers of the guest, 48 bytes each.
        report_data: 64 bytes that the guest chose.
        platform_id: platform instance id, 16 bytes; the PPID where the certificate has none.
        evaluation_number: ``tcbEvaluationDataNumber`` of the collateral.
        expires_at: unix seconds at which collateral or a certificate stops being valid.
    """

    evidence_class: EvidenceClass
    measurement: bytes
    rtmrs: tuple[bytes, ...]
    report_data: bytes
    tcb_status: str
    advisory_ids: tuple[str, ...]
    evaluation_number: int
    fmspc: bytes
    platform_id: bytes
    root_key_id: bytes
    expires_at: int


class _Chains(NamedTuple):
    pck: tuple[x509.Certificate, ...]
    pck_crl: tuple[x509.Certificate, ...]
    tcb_info: tuple[x509.Certificate, ...]
    qe_identity: tuple[x509.Certificate, ...]


class _Crls(NamedTuple):
    root: x509.CertificateRevocationList
    pck: x509.CertificateRevocationList


class _Documents(NamedTuple):
    tcb_info: dict[str, Any]
    qe_identity: dict[str, Any]


def verify_tdx(
    quote: bytes,
    collateral: Sequence[Collateral],
    *,
    anchors: Sequence[Anchor],
    accepted: Collection[EvidenceClass],
    rules: TdxRules,
    now: int,
    evaluation_floor: int = 0,
) -> TdxClaims:
    """Verify ``quote`` at unix second ``now``.

    Guarantee: returns only for a canonical quote of a TD that ``rules`` accept, whose signature chain ends in one of
    ``anchors`` of an accepted class, with signed, current, unrevoked collateral of its own platform family.

    Args:
        collateral: of one or several platform families; that of the quote's own is used.
        evaluation_floor: highest ``tcbEvaluationDataNumber`` seen so far; collateral below it is refused.

    Raises:
        EvidenceError: one of the codes of `attestation.evidence.Refusal`, that of the first stage that fails.
    """
    parsed = parse_quote(quote)
    anchor = _select_anchor(parsed, anchors, accepted)
    own = _collateral_for(parsed, collateral)
    documents = _read_documents(own)
    chains = _linked_chains(parsed, own, anchor)
    _check_platform(parsed, documents)
    _check_attestation_key(parsed, documents)
    _check_signatures(parsed, own, chains)
    crls = _load_crls(own, chains)
    _check_roles(chains)
    check_not_revoked(crls.pck, chains.pck[:1])
    check_not_revoked(crls.root, (*chains.pck[1:], chains.tcb_info[0], chains.qe_identity[0]))
    expires_at = _check_windows(chains, crls, documents, now)
    number = _check_evaluation_number(documents, max(evaluation_floor, rules.min_tcb_evaluation_data_number))
    rating = _rate(parsed, own, anchor, now, rules, number)
    _check_rating(rating, anchor, rules)
    _check_attributes(parsed, rating, rules)
    return _claims(parsed, rating, anchor, expires_at, number)


def _select_anchor(quote: TdxQuote, anchors: Sequence[Anchor], accepted: Collection[EvidenceClass]) -> Anchor:
    """The anchor under whose root the quote's chain ends, if its class is accepted.

    Guarantee: a quote under a simulator's root never passes where only hardware is accepted.
    """
    if not quote.chain:
        refuse(Refusal.CHAIN_BROKEN, "the quote carries no certificate chain")
    anchor = anchor_of(anchors, "tdx", quote.chain[-1])
    if anchor is None:
        check_links(quote.chain, "PCK")
        refuse(Refusal.ROOT_UNKNOWN, f"'{common_name(quote.chain[-1])}' is not a root that the policy trusts")
    require_class(anchor.evidence_class, accepted)
    return anchor


def _collateral_for(quote: TdxQuote, collateral: Sequence[Collateral]) -> Collateral:
    """The entry for the quote's platform family, or any where there is none."""
    if not collateral:
        refuse(Refusal.COLLATERAL_STALE, "there is no collateral for a TDX quote")
    if len(collateral) == 1:
        return collateral[0]
    try:
        family = bytes(dcap_qvl.parse_pck_extension_from_pem(quote.chain_pem).fmspc).hex()
    except ValueError:
        return collateral[0]
    own = (each for each in collateral if _family_of(each) == family)
    return next(own, collateral[0])


def _family_of(collateral: Collateral) -> str:
    return str(_read_documents(collateral).tcb_info.get("fmspc", "")).lower()


def _read_documents(collateral: Collateral) -> _Documents:
    try:
        tcb_info, qe_identity = json.loads(collateral.tcb_info), json.loads(collateral.qe_identity)
    except (ValueError, RecursionError):
        refuse(Refusal.COLLATERAL_STALE, "TCB info or QE identity is missing or cannot be read")
    if not isinstance(tcb_info, dict) or not isinstance(qe_identity, dict):
        refuse(Refusal.COLLATERAL_STALE, "TCB info or QE identity is not a JSON object")
    return _Documents(tcb_info, qe_identity)


def _linked_chains(quote: TdxQuote, collateral: Collateral, anchor: Anchor) -> _Chains:
    chains = _Chains(
        pck=quote.chain,
        pck_crl=load_chain(collateral.pck_crl_issuer_chain, "PCK CRL issuer"),
        tcb_info=load_chain(collateral.tcb_info_issuer_chain, "TCB info issuer"),
        qe_identity=load_chain(collateral.qe_identity_issuer_chain, "QE identity issuer"),
    )
    root = anchor.root_key_id
    for chain, what in zip(chains, chains._fields, strict=True):
        check_links(chain, what)
        check_root(chain, root, what)
    if len(chains.pck) < 3 or key_id(chains.pck[1]) != key_id(chains.pck_crl[0]):
        refuse(Refusal.CHAIN_BROKEN, "the PCK revocation list is of another issuer than the PCK certificate")
    return chains


def _check_platform(quote: TdxQuote, documents: _Documents) -> None:
    try:
        extension = dcap_qvl.parse_pck_extension_from_pem(quote.chain_pem)
        found = (bytes(extension.fmspc).hex(), bytes(extension.pce_id).hex())
    except ValueError:
        refuse(Refusal.PLATFORM_MISMATCH, "the PCK certificate does not name its platform family")
    expected = tuple(str(documents.tcb_info.get(name, "")).lower() for name in ("fmspc", "pceId"))
    if found != expected:
        refuse(Refusal.PLATFORM_MISMATCH, f"the platform is of family {found[0]}, the collateral of {expected[0]}")


def _check_attestation_key(quote: TdxQuote, documents: _Documents) -> None:
    certified = hashlib.sha256(quote.attestation_key + quote.authentication_data).digest() + bytes(32)
    if quote.qe_report[320:384] != certified:
        refuse(Refusal.ATTESTATION_KEY_UNCERTIFIED, "the quoting enclave did not certify the attestation key")
    if quote.qe_vendor != QE_VENDOR or not _is_the_enclave(quote.qe_report, documents.qe_identity):
        refuse(Refusal.ATTESTATION_KEY_UNCERTIFIED, "the quoting enclave is not the one of the QE identity")


def _is_the_enclave(report: bytes, identity: dict[str, Any]) -> bool:
    """Whether a QE report matches signer, product, attributes and lowest known version of the identity."""
    try:
        lowest = min(int(level["tcb"]["isvsvn"]) for level in identity["tcbLevels"])
        return (
            identity["id"] == "TD_QE"
            and report[128:160] == bytes.fromhex(identity["mrsigner"])
            and int.from_bytes(report[256:258], "little") == identity["isvprodid"]
            and int.from_bytes(report[258:260], "little") >= lowest
            and _masked(report[48:64], identity["attributesMask"]) == bytes.fromhex(identity["attributes"])
            and _masked(report[16:20], identity["miscselectMask"]) == bytes.fromhex(identity["miscselect"])
        )
    except (KeyError, TypeError, ValueError):
        return False


def _masked(value: bytes, mask: str) -> bytes:
    return bytes(a & b for a, b in zip(value, bytes.fromhex(mask), strict=True))


def _check_signatures(quote: TdxQuote, collateral: Collateral, chains: _Chains) -> None:
    key = point(quote.attestation_key)
    tcb_info, qe_identity = collateral.tcb_info.encode(), collateral.qe_identity.encode()
    signatures = {
        "quote": key is not None and ecdsa_is_valid(key, quote.signature, quote.signed),
        "quoting enclave's report": signed_by(chains.pck[0], quote.qe_signature, quote.qe_report),
        "TCB info": signed_by(chains.tcb_info[0], collateral.tcb_info_signature, tcb_info),
        "QE identity": signed_by(chains.qe_identity[0], collateral.qe_identity_signature, qe_identity),
    }
    for what, holds in signatures.items():
        if not holds:
            refuse(Refusal.EVIDENCE_TAMPERED, f"the signature over the {what} does not hold")


def _load_crls(collateral: Collateral, chains: _Chains) -> _Crls:
    root = load_crl(collateral.root_ca_crl, chains.pck[-1], "root")
    return _Crls(root, load_crl(collateral.pck_crl, chains.pck_crl[0], "PCK"))


def _check_roles(chains: _Chains) -> None:
    """dcap-qvl takes TCB info of any certificate under the root, even a platform's own."""
    roles = {
        "TCB info signer": (chains.tcb_info[0], (TCB_SIGNER,)),
        "QE identity signer": (chains.qe_identity[0], (TCB_SIGNER,)),
        "PCK certificate": (chains.pck[0], (PCK_LEAF,)),
        "PCK issuer": (chains.pck[1], PCK_ISSUERS),
    }
    for role, (certificate, names) in roles.items():
        if common_name(certificate) not in names:
            refuse(Refusal.SIGNER_ROLE, f"'{common_name(certificate)}' may not act as {role}")


def _check_windows(chains: _Chains, crls: _Crls, documents: _Documents, now: int) -> int:
    instant = datetime.fromtimestamp(now, UTC)
    ends = [check_certificate_windows(chain, instant, what) for chain, what in zip(chains, chains._fields, strict=True)]
    ends += [check_crl_window(crl, instant, what) for crl, what in zip(crls, crls._fields, strict=True)]
    ends += [_document_window(document, instant) for document in documents]
    return int(min(ends).timestamp())


def _document_window(document: dict[str, Any], now: datetime) -> datetime:
    try:
        start, end = (datetime.fromisoformat(document[name]) for name in ("issueDate", "nextUpdate"))
        current = start <= now < end
    except (KeyError, TypeError, ValueError):
        refuse(Refusal.COLLATERAL_STALE, "TCB info or QE identity has no readable validity")
    if not current:
        refuse(Refusal.COLLATERAL_STALE, f"the {document.get('id')} collateral is valid from {start} to {end}, not now")
    return end


def _check_evaluation_number(documents: _Documents, floor: int) -> int:
    numbers = [document.get("tcbEvaluationDataNumber") for document in documents]
    if not all(isinstance(number, int) and number >= floor for number in numbers):
        refuse(Refusal.COLLATERAL_ROLLBACK, f"collateral of evaluation number {numbers} where {floor} is the lowest")
    return min(int(number) for number in numbers if number is not None)


def _rate(
    quote: TdxQuote, collateral: Collateral, anchor: Anchor, now: int, rules: TdxRules, floor: int
) -> dict[str, Any]:
    # Every setter returns a new object; a result that is dropped would be a limit that does not exist.
    policy = dcap_qvl.QuotePolicy.strict(now).allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
    policy = policy.min_tcb_eval_data_number(floor).reject_advisories(list(rules.rejected_advisories))
    policy = policy.platform_grace_period(_FOREVER_S).qe_grace_period(_FOREVER_S)
    for status in rules.tcb_statuses:
        policy = policy.allow_status(status)
    fields = {name: getattr(collateral, name) for name in Collateral.model_fields}
    verifier = dcap_qvl.QuoteVerifier(anchor.root_der)
    try:
        claims = verifier.verify_with_policy(quote.raw, dcap_qvl.QuoteCollateralV3(**fields), now, policy)
    except ValueError as error:
        _refuse_by_text(str(error))
    rating: dict[str, Any] = json.loads(claims.to_json())
    return rating


# The quote is refused whatever the library's text is; the text only selects the name of the refusal.
_TEXT_CODES: Final = (
    (r"No matching|TDX module|module identity|advisor|Revoked", Refusal.TCB_UNACCEPTABLE),
    (r"TCB status|grace", Refusal.TCB_STATUS),
    (r"[Dd]ebug", Refusal.DEBUG),
    (r"SEPT_VE|PKS|KL |[Rr]eserved|attributes|service|PERFMON|migrat", Refusal.ATTRIBUTES),
    (r"eval", Refusal.COLLATERAL_ROLLBACK),
)


def _refuse_by_text(text: str) -> NoReturn:
    detail = text.removeprefix("Verification failed: ")
    code = next((code for pattern, code in _TEXT_CODES if re.search(pattern, detail)), Refusal.EVIDENCE_TAMPERED)
    refuse(code, f"the quote verifier refuses: {detail}")


def _check_rating(rating: dict[str, Any], anchor: Anchor, rules: TdxRules) -> None:
    if bytes(rating["platform"]["root_key_id"]) != anchor.root_key_id:
        refuse(Refusal.CHAIN_BROKEN, "the quote was verified under another root than the anchor")
    statuses = (
        rating["tcb"]["status"],
        rating["platform"]["tcb_level"]["tcbStatus"],
        rating["qe"]["tcb_level"]["tcbStatus"],
    )
    for status in statuses:
        if status not in rules.tcb_statuses:
            refuse(Refusal.TCB_STATUS, f"the platform's TCB status is {status}")


def _check_attributes(quote: TdxQuote, rating: dict[str, Any], rules: TdxRules) -> None:
    attributes = quote.td_attributes
    if attributes & _DEBUG:
        refuse(Refusal.DEBUG, "the guest was launched with the debug attribute, so the host can read its memory")
    if not attributes & _SEPT_VE_DISABLE or attributes & ~_TOLERATED_BITS:
        refuse(Refusal.ATTRIBUTES, f"the guest's attributes {attributes:#x} are not acceptable")
    if any(quote.mr_service_td):
        refuse(Refusal.ATTRIBUTES, "a service TD is bound to the guest")
    pck = rating["platform"]["pck"]
    tolerated = {
        "dynamic_platform": rules.allow_dynamic_platform,
        "cached_keys": rules.allow_cached_keys,
        "smt_enabled": rules.allow_smt,
    }
    for name, allowed in tolerated.items():
        if not allowed and pck[name] != "False":
            refuse(Refusal.ATTRIBUTES, f"the policy does not allow a platform with {name}")


def _claims(quote: TdxQuote, rating: dict[str, Any], anchor: Anchor, expires_at: int, number: int) -> TdxClaims:
    pck = rating["platform"]["pck"]
    return TdxClaims(
        evidence_class=anchor.evidence_class,
        measurement=quote.mr_td,
        rtmrs=quote.rtmrs,
        report_data=quote.report_data,
        tcb_status=rating["tcb"]["status"],
        advisory_ids=tuple(rating["tcb"]["advisory_ids"]),
        evaluation_number=number,
        fmspc=bytes(pck["fmspc"]),
        platform_id=bytes(pck["platform_instance_id"] or pck["ppid"]),
        root_key_id=anchor.root_key_id,
        expires_at=expires_at,
    )
