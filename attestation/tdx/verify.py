"""Verifies an Intel TDX quote against collateral and trust anchors.

Hardware and simulated evidence take the same path. The class of the result is the class of the anchor. Each stage sets
one refusal code, in the order of `raycloak.attestation.core.evidence.Refusal`, so that a refusal has a reason of ours.
Then dcap-qvl verifies the whole quote again (`raycloak.attestation.tdx.second_opinion`). Only quotes that both accept
pass. Not checked here: measurement, registers, freshness and report data, which
`raycloak.attestation.appraisal.appraisal` compares.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from raycloak.attestation.core.evidence import Collateral, Refusal, refuse
from raycloak.attestation.tdx.collateral import (
    check_family,
    documents_for,
    evaluation_facts,
    linked_chains,
    settle,
    with_newest_lists,
)
from raycloak.attestation.tdx.platform import TdxPlatform, read_platform
from raycloak.attestation.tdx.quote import DEBUG_ATTRIBUTES, SEPT_VE_DISABLE, TdReport, TdxQuote, parse_quote
from raycloak.attestation.tdx.rating import TdxRating, rate
from raycloak.attestation.tdx.rules import REGISTERS, TdxRules
from raycloak.attestation.tdx.second_opinion import check_again
from raycloak.attestation.trust.certificates import ecdsa_is_valid, point, signed_by
from raycloak.attestation.trust.floors import Fact, check_not_older
from raycloak.attestation.trust.guest import GuestClaims
from raycloak.attestation.trust.roots import Anchor, VerifierTerms
from raycloak.metrics.errors import EvidenceError

QE_VENDOR: Final = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")

# SEPT_VE_DISABLE, PKS, key locker and PERFMON. Any other bit is reserved or lets the guest migrate.
_TOLERATED_BITS = SEPT_VE_DISABLE | 1 << 30 | 1 << 31 | 1 << 63


def verify_tdx(
    quote: bytes,
    collateral: Sequence[Collateral],
    rules: TdxRules,
    terms: VerifierTerms,
) -> GuestClaims:
    """Verify ``quote``.

    Guarantee: returns only for a canonical quote of a TD that ``rules`` accept. Its signature chain ends in one of
    the ``terms``' anchors of an accepted class, with signed, current, unrevoked collateral of its own platform family.

    Args:
        collateral: of one or several platform families. The entry for the quote's own family is used.

    Raises:
        EvidenceError: the code of the first stage that fails, one of `raycloak.attestation.core.evidence.Refusal`.
    """
    parsed = parse_quote(quote)
    if not parsed.chain:
        refuse(Refusal.CHAIN_BROKEN, "the quote carries no certificate chain that can be read")
    anchor = terms.anchor_of("tdx", parsed.chain, "PCK")
    if len(parsed.chain) < 3:
        refuse(Refusal.CHAIN_BROKEN, "the PCK chain has no certificate authority between leaf and root")
    platform: TdxPlatform | None = None
    try:
        platform = read_platform(parsed.chain_pem)
    except EvidenceError as error:
        nameless = error
    documents = documents_for(platform, collateral)
    if documents is None:
        # Missing collateral must not hide a bad signature.
        _check_quote(parsed, {})
        refuse(Refusal.COLLATERAL_STALE, "there is no readable collateral for a TDX quote")
    chains = linked_chains(parsed.chain, documents.raw, anchor.root_key_id)
    # The chains come first, as in the order of stages.
    if platform is None:
        raise nameless
    check_family(documents, platform)
    _check_quote(parsed, documents.qe_identity)
    documents = with_newest_lists(documents, chains, tuple(collateral))
    expires_at, crl_facts = settle(documents, chains, terms.now)
    numbers = evaluation_facts(documents, anchor.root_key_id, rules.min_tcb_evaluation_data_number)
    facts = (*numbers, *crl_facts)
    check_not_older(facts, terms.floors)
    number = min(found for _, found in numbers)
    rating = rate(parsed, platform, documents.tcb_info, documents.qe_identity, rules)
    _check_guest(parsed.report, platform, rules)
    # After every stage of ours, so that the first failing stage decides the code.
    check_again(parsed, documents.raw, anchor, terms.now, rules, number)
    return _claims(parsed, platform, rating, anchor, expires_at, facts, number)


def _check_quote(quote: TdxQuote, qe_identity: dict[str, Any]) -> None:
    """Require that the vendor's quoting enclave certified the attestation key, which signed the quote.

    An unreadable identity is empty here, and is refused later. The vendor's id in the quote is signed, so a change of
    it shows as tampering.
    """
    certified = hashlib.sha256(quote.attestation_key + quote.authentication_data).digest() + bytes(32)
    if quote.qe_report[320:384] != certified:
        refuse(Refusal.ATTESTATION_KEY_UNCERTIFIED, "the quoting enclave did not certify the attestation key")
    if qe_identity and not _is_the_enclave(quote.qe_report, qe_identity):
        refuse(Refusal.ATTESTATION_KEY_UNCERTIFIED, "the quoting enclave is not the one of the QE identity")
    key = point(quote.attestation_key)
    signatures = {
        "quote": key is not None and ecdsa_is_valid(key, quote.signature, quote.signed),
        "quoting enclave's report": signed_by(quote.chain[0], quote.qe_signature, quote.qe_report),
    }
    for what, holds in signatures.items():
        if not holds:
            refuse(Refusal.EVIDENCE_TAMPERED, f"the signature over the {what} does not hold")
    if quote.qe_vendor != QE_VENDOR:
        refuse(Refusal.ATTESTATION_KEY_UNCERTIFIED, "the quoting enclave is of another vendor than Intel")


def _is_the_enclave(report: bytes, identity: dict[str, Any]) -> bool:
    """Return whether a QE report matches the identity's signer, product, attributes and lowest known version."""
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


def _check_guest(report: TdReport, platform: TdxPlatform, rules: TdxRules) -> None:
    attributes = report.td_attributes
    if attributes & DEBUG_ATTRIBUTES and not rules.allow_debug:
        refuse(Refusal.DEBUG, "the guest was launched with a debug attribute, so the host can read its memory")
    unprotected = rules.require_sept_ve_disable and not attributes & SEPT_VE_DISABLE
    if unprotected or attributes & ~(_TOLERATED_BITS | DEBUG_ATTRIBUTES):
        refuse(Refusal.ATTRIBUTES, f"the guest's attributes {attributes:#x} are not acceptable")
    if any(report.mr_service_td):
        refuse(Refusal.ATTRIBUTES, "a service TD is bound to the guest")
    properties = (
        (rules.allow_dynamic_platform, platform.dynamic, "to which packages may be added"),
        (rules.allow_cached_keys, platform.cached_keys, "that caches its root keys"),
        (rules.allow_smt, platform.smt, "whose threads share cores"),
    )
    for allowed, found, what in properties:
        if not allowed and found is not False:
            refuse(Refusal.ATTRIBUTES, f"the policy does not allow a platform {what}")


def _claims(
    quote: TdxQuote,
    platform: TdxPlatform,
    rating: TdxRating,
    anchor: Anchor,
    expires_at: int,
    facts: tuple[Fact, ...],
    number: int,
) -> GuestClaims:
    report, family = quote.report, platform.fmspc.hex()
    debug = bool(report.td_attributes & DEBUG_ATTRIBUTES)
    advisories = f", {' '.join(rating.advisory_ids)}" if rating.advisory_ids else ""
    return GuestClaims(
        evidence_class=anchor.evidence_class,
        measurement=report.mr_td,
        registers={name: getattr(report, name) for name in REGISTERS},
        report_data=report.report_data,
        tcb_status=rating.worst,
        platform_id=platform.platform_id,
        names_machine=True,
        facts=facts,
        expires_at=expires_at,
        hwmodel=f"Intel TDX {family}",
        dbgstat="enabled" if debug else "disabled-since-boot",
        steps=(
            ("format", f"TDX quote of version {quote.raw[0]}, {len(quote.raw)} bytes"),
            ("root", f"{anchor.evidence_class} {anchor.root_key_id.hex()[:16]}"),
            ("chain", f"{len(quote.chain)} certificates"),
            ("platform", f"family {family}"),
            ("attestation key", "certified by the quoting enclave"),
            ("signatures", "hold"),
            ("signer roles", "hold"),
            ("revocation", "nothing revoked"),
            ("validity", f"until {expires_at}"),
            ("rollback", f"evaluation number {number}"),
            ("TCB status", rating.worst + advisories),
            ("debug", "on, which the policy allows" if debug else "off"),
            ("attributes", f"{report.td_attributes:#x}"),
        ),
    )
