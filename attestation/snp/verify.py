"""Verifies an AMD SEV-SNP attestation report with the certificate of the key that signed it.

Hardware and simulated evidence take the same path. The class of the result is the class of the anchor. Form, root,
chain, machine, signature, revocation, validity, firmware and guest are judged in this order, and the first failure sets
the code. Not checked here: measurement, freshness and report data, which `raycloak.attestation.appraisal.appraisal`
compares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey

from raycloak.attestation.core.evidence import EvidenceClass, Refusal, refuse
from raycloak.attestation.snp.endorsement import LAYOUTS, TcbLayout, certified_hardware_id, certified_tcb, issuer_role
from raycloak.attestation.snp.report import KEY_KINDS, SnpReport, parse_report
from raycloak.attestation.snp.rules import Generation, KeyKind, SnpRules
from raycloak.attestation.trust.certificates import (
    check_certificate_windows,
    check_crl_window,
    check_not_revoked,
    common_name,
    crl_issuer,
    crl_number,
    crl_scope,
    key_id,
    load_crl,
    order_chain,
    read_presented,
    signed_by,
)
from raycloak.attestation.trust.floors import Fact, check_not_older, crl_fact
from raycloak.attestation.trust.guest import GuestClaims
from raycloak.attestation.trust.roots import AMD_INTERMEDIATES, AMD_ROOTS, Anchor, VerifierTerms

# A chain has three. The bound limits the search among hints.
MAX_CERTIFICATES: Final = 8

# Bits of a guest's policy, and of the word about the machine (AMD's document 56860).
_SMT = 1 << 16
_MIGRATE_MA = 1 << 18
_DEBUG = 1 << 19
_ALIAS_CHECK_COMPLETE = 1 << 5


@dataclass(frozen=True, slots=True)
class _Endorsement:
    """A chain from an endorsement key to an anchor: the key's certificate, its CA (ASK) and the root (ARK)."""

    anchor: Anchor
    chain: tuple[x509.Certificate, ...]
    generation: Generation

    @property
    def layout(self) -> TcbLayout:
        return LAYOUTS[self.generation]


def verify_snp(
    report: bytes,
    certificates: Sequence[bytes],
    crls: Mapping[KeyKind, Sequence[bytes]],
    rules: SnpRules,
    terms: VerifierTerms,
) -> GuestClaims:
    """Verify ``report``.

    Guarantee: returns only for a canonical report that ``rules`` accept. AMD's CA of the machine's generation certified
    the signing key for this chip and the reported TCB version; a VLEK is for one provider instead of a chip. The chain
    ends in one of the ``terms``' anchors of an accepted class, and nothing in it is revoked or out of its validity.

    Args:
        certificates: the endorsement key's first, PEM or DER, then any others presented. Its CA must be among them
            only if it is not pinned.
        crls: revocation lists in DER, obtained by the verifier, by the kind of key that they are for. A list that
            states another kind in its own address counts as that one. Lists of other issuers are ignored.

    Raises:
        EvidenceError: the code of the first stage that fails, one of `raycloak.attestation.core.evidence.Refusal`.
    """
    parsed = parse_report(report)
    endorsement = _endorsement(parsed, certificates, terms)
    _check_machine(parsed, endorsement)
    if not signed_by(endorsement.chain[0], parsed.signature, parsed.signed):
        refuse(Refusal.EVIDENCE_TAMPERED, "the signature over the report does not hold")
    expires_at, facts = _judge_lists(parsed.key_kind, endorsement.chain, crls, rules, terms)
    check_not_older(facts, terms.floors)
    # A rollback of lists is judged before the firmware, as the order of stages demands.
    _check_firmware(parsed, endorsement, rules)
    _check_guest(parsed, rules)
    return _claims(parsed, endorsement, facts, expires_at)


def _endorsement(report: SnpReport, certificates: Sequence[bytes], terms: VerifierTerms) -> _Endorsement:
    """Build the chain of the presented key up to an anchor of an accepted class.

    Guarantee: under AMD's roots only the pinned CAs count.
    """
    vek, *others = _presented(certificates)
    roots = [anchor.root for anchor in terms.anchors if anchor.family == "sev_snp"]
    chain = order_chain(vek, (*AMD_INTERMEDIATES, *AMD_ROOTS, *roots, *others))
    anchor = terms.anchor_of("sev_snp", chain, "endorsement")
    role = issuer_role(chain[1])
    # Under AMD's roots only the pinned CAs count. A simulator's are not pinned.
    pinned = anchor.evidence_class is EvidenceClass.SIMULATED or key_id(chain[1]) in map(key_id, AMD_INTERMEDIATES)
    if len(chain) != 3 or role is None or not pinned:
        refuse(Refusal.CHAIN_BROKEN, f"'{common_name(chain[1])}' is not a CA of endorsement keys")
    generation, kind = role
    if kind != report.key_kind:
        refuse(Refusal.CHAIN_BROKEN, f"the report is signed by a {report.key_kind}, the certificate is of a {kind}")
    key = vek.public_key()
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        refuse(Refusal.CHAIN_BROKEN, "the endorsement key is not a P-384 key")
    return _Endorsement(anchor, chain, generation)


def _presented(certificates: Sequence[bytes]) -> tuple[x509.Certificate, ...]:
    """Return the endorsement key's certificate, and the readable ones among the others, which are hints.

    Raises:
        EvidenceError: ``chain_broken`` if the first cannot be read. ``evidence_malformed`` for too many.
    """
    presented: list[x509.Certificate] = []
    for position, each in enumerate(certificates):
        try:
            presented += read_presented(each)
        except ValueError:
            # The others are hints: AMD's CAs are pinned.
            if position == 0:
                refuse(Refusal.CHAIN_BROKEN, "the certificate of the endorsement key cannot be read")
        if max(len(presented), position + 1) > MAX_CERTIFICATES:
            refuse(Refusal.EVIDENCE_MALFORMED, f"more than {MAX_CERTIFICATES} certificates are presented")
    if not presented:
        refuse(Refusal.CHAIN_BROKEN, "no certificate of the endorsement key is presented")
    return tuple(presented)


def _check_machine(report: SnpReport, endorsement: _Endorsement) -> None:
    """Require that the key is of the chip and the TCB version that the report names."""
    hardware_id = certified_hardware_id(endorsement.chain[0], endorsement.layout)
    if report.key_kind == "VCEK":
        if not any(report.chip_id):
            refuse(Refusal.PLATFORM_MISMATCH, "the host masks the chip id, so the report names no machine")
        if hardware_id is None or len(hardware_id) != endorsement.layout.hardware_id_bytes:
            refuse(Refusal.PLATFORM_MISMATCH, "the endorsement certificate does not name its chip")
    # A Turin chip's id has 8 bytes, and the report's field 64.
    if hardware_id is not None and report.chip_id != hardware_id.ljust(len(report.chip_id), b"\0"):
        refuse(Refusal.PLATFORM_MISMATCH, "the endorsement key is of another chip than the report")
    certified = certified_tcb(endorsement.chain[0], endorsement.layout)
    if certified is None:
        refuse(Refusal.PLATFORM_MISMATCH, "the endorsement certificate does not name its TCB version")
    if certified != report.reported_tcb:
        versions = f"{certified.hex()}, the report of {report.reported_tcb.hex()}"
        refuse(Refusal.PLATFORM_MISMATCH, f"the endorsement key is of TCB version {versions}")


def _judge_lists(
    kind: KeyKind,
    chain: Sequence[x509.Certificate],
    crls: Mapping[KeyKind, Sequence[bytes]],
    rules: SnpRules,
    terms: VerifierTerms,
) -> tuple[int, tuple[Fact, ...]]:
    """Judge revocation and validity of ``chain`` by its issuers' lists.

    Returns: the unix second at which a part of this stops being valid, and the numbers of the root's lists.

    Raises:
        EvidenceError: ``evidence_tampered`` for a list in an issuer's name that it did not sign, ``revoked`` or
            ``collateral_stale``.
    """
    named = [(given, der, crl_issuer(der)) for given, ders in crls.items() for der in ders]
    issuers = {issuer.subject: issuer for issuer in chain[1:]}
    own = [(given, load_crl(der, issuers[name], "AMD")) for given, der, name in named if name in issuers]
    # Every edition of every kind counts for revocation. Only the newest edition of each list must be current.
    for _, crl in own:
        check_not_revoked(crl, chain)
    if any(name is None for _, _, name in named):
        refuse(Refusal.COLLATERAL_STALE, "a revocation list cannot be read")
    # Ascending, so that the newest edition is stored last.
    ascending = sorted(own, key=lambda each: crl_number(each[1]) or 0)
    newest = {(crl.issuer, _stated_kind(crl) or given): crl for given, crl in ascending}
    root, instant = chain[-1], terms.instant
    # AMD's root publishes one list for each kind of key, and neither has what is on the other.
    if rules.require_crl and (root.subject, kind) not in newest:
        refuse(Refusal.COLLATERAL_STALE, f"there is no {kind} revocation list of '{common_name(root)}'")
    ends = [check_certificate_windows(chain, instant, "endorsement")]
    ends += [check_crl_window(crl, instant, "AMD") for crl in newest.values()]
    numbers = [(of, crl_number(crl)) for (issuer, of), crl in newest.items() if issuer == root.subject]
    facts = [crl_fact(key_id(root), of, number) for of, number in numbers if number is not None]
    return int(min(ends).timestamp()), tuple(facts)


def _stated_kind(crl: x509.CertificateRevocationList) -> KeyKind | None:
    """Return the kind of key in the address that a list states for itself; None if it states none.

    The issuer signed that address. Only a mirror, or the author of a file, says where a list came from.
    """
    parts = crl_scope(crl).split("/")
    return next((kind for kind in KEY_KINDS.values() if kind.lower() in parts), None)


def _check_firmware(report: SnpReport, endorsement: _Endorsement, rules: SnpRules) -> None:
    generation = endorsement.generation
    if generation not in rules.allowed_generations:
        refuse(Refusal.FIRMWARE_FLOOR, f"the policy does not admit {generation} processors")
    if generation not in rules.min_snp_svn:
        refuse(Refusal.FIRMWARE_FLOOR, f"the policy sets no firmware floor for {generation} processors")
    if report.key_kind not in rules.key_kinds:
        refuse(Refusal.FIRMWARE_FLOOR, f"the policy does not admit reports that a {report.key_kind} signed")
    # A machine can be rolled back to its committed version, so the reported one alone says too little.
    versions = {"reported": report.reported_tcb, "committed": report.committed_tcb, "launch": report.launch_tcb}
    for part, floor in rules.floors(generation).items():
        for name, tcb in versions.items():
            svn = endorsement.layout.svn(tcb, part)
            if svn < floor:
                refuse(Refusal.FIRMWARE_FLOOR, f"{part} {svn} in the {name} TCB is below the floor {floor}")
    if rules.require_alias_check and not report.platform_info & _ALIAS_CHECK_COMPLETE:
        refuse(Refusal.FIRMWARE_FLOOR, "the firmware has not checked the memory for aliases (CVE-2024-21944)")


def _check_guest(report: SnpReport, rules: SnpRules) -> None:
    if report.policy & _DEBUG and not rules.allow_debug:
        refuse(Refusal.DEBUG, "the guest was launched with the debug policy, so the host can read its memory")
    if report.policy & _MIGRATE_MA and not rules.allow_migrate_ma:
        refuse(Refusal.ATTRIBUTES, "the guest's policy lets a migration agent move it")
    if report.policy & _SMT and not rules.allow_smt:
        refuse(Refusal.ATTRIBUTES, "the guest's policy lets it run beside another hardware thread (SMT)")
    if report.vmpl not in rules.allowed_vmpl:
        levels = ", ".join(map(str, rules.allowed_vmpl))
        accepted = f"{report.vmpl}, accepted: {levels or 'none'}"
        refuse(Refusal.PRIVILEGE_LEVEL, f"the report is of privilege level {accepted}")


def _claims(report: SnpReport, endorsement: _Endorsement, facts: tuple[Fact, ...], expires_at: int) -> GuestClaims:
    root, firmware = key_id(endorsement.chain[-1]), endorsement.layout.describe(report.reported_tcb)
    names_chip = any(report.chip_id)
    hwmodel = f"AMD EPYC {endorsement.generation}"
    debug = bool(report.policy & _DEBUG)
    return GuestClaims(
        evidence_class=endorsement.anchor.evidence_class,
        measurement=report.measurement,
        registers={"host_data": report.host_data},
        report_data=report.report_data,
        tcb_status=firmware,
        platform_id=report.chip_id if names_chip else report.report_id,
        names_machine=names_chip,
        facts=facts,
        expires_at=expires_at,
        hwmodel=hwmodel,
        dbgstat="enabled" if debug else "disabled-since-boot",
        steps=(
            ("format", f"SEV-SNP report of version {report.version}"),
            ("root", f"{endorsement.anchor.evidence_class} {root.hex()[:16]}"),
            ("chain", f"{hwmodel}, {report.key_kind}; chip, TCB version and signature hold"),
            ("revocation", ", ".join(f"{name}: {number}" for name, number in facts) or "no list"),
            ("collateral", f"until {expires_at}"),
            ("tcb", firmware),
            ("attributes", "debug" if debug else "no debug"),
            ("privilege", f"level {report.vmpl}"),
        ),
    )
