"""Appraises a presentation: pure functions from evidence, collateral, policy and time to a result or a refusal.

The orchestrator calls :func:`open_presentation`, consumes the nonce (`raycloak.attestation.orchestrator.nonces`) and
then appraises. Workers appraise every peer in the same way, without the nonces. This module has no network, clock or
state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from raycloak.attestation.core.canonical import digest, length_prefixed
from raycloak.attestation.core.evidence import (
    MLKEM_BYTES,
    CollateralBundle,
    EvidenceClass,
    Links,
    Presentation,
    Refusal,
    Role,
    refuse,
)
from raycloak.attestation.core.keys import mlkem_public, signature_is_valid
from raycloak.attestation.core.messages import Envelope, parse
from raycloak.attestation.core.report_data import expected_report_data
from raycloak.attestation.gpu.device import DeviceClaims
from raycloak.attestation.gpu.switches import links_of, verify_switches
from raycloak.attestation.gpu.verify import gpu_nonce, verify_gpus
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.snp.rules import KeyKind
from raycloak.attestation.snp.verify import verify_snp
from raycloak.attestation.tdx.quote import MAX_QUOTE_BYTES
from raycloak.attestation.tdx.verify import verify_tdx
from raycloak.attestation.trust.floors import NO_FLOORS, Fact, Floors
from raycloak.attestation.trust.guest import GuestClaims, check_measurement, check_registers
from raycloak.attestation.trust.roots import VerifierTerms
from raycloak.metrics.errors import ProtocolError

# A quote, and sixteen GPUs with their switches, of which each takes some forty thousand characters.
MAX_PRESENTATION_BYTES: Final = 16 * MAX_QUOTE_BYTES

_P = 2**255 - 19
# In every encoding, on curve25519 and its twist.
_OF_BOTH = frozenset({0, 1, _P - 1, _P, _P + 1})
# The y coordinates of the Ed25519 points of order 1, 2, 4 and 8, as they are encoded.
_LOW_ORDER_Y: Final = _OF_BOTH | {
    int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"),
    int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"),
}
# The u coordinates of the X25519 points of low order (RFC 7748 ignores the top bit).
_LOW_ORDER_U: Final = _OF_BOTH | {
    int.from_bytes(bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"), "little"),
    int.from_bytes(bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"), "little"),
}


@dataclass(frozen=True, slots=True)
class Appraisal:
    """The result of an appraisal that found nothing to refuse.

    Attributes:
        evidence_class: class of the root that verified the quote.
        evidence_digest: SHA-256 of the signed body, for logs and rosters; never an identity or replay key, since
            quotes are malleable.
        evidence_classes: that class, and the classes of the GPUs.
        platform_id: names the machine, 16 bytes for TDX and up to 64 for SEV-SNP.
        names_machine: False if the provider masks the chip id, so that ``platform_id`` names the guest alone.
        gpus: the worker's GPUs, in the order in which it presented them.
        switches: the switches between them, likewise; none unless its GPUs are in protected-PCIe mode.
        facts: numbers of the collateral; the verifier keeps the highest of each as its next floor.
        hwmodel, dbgstat: of the guest's platform; see `raycloak.attestation.appraisal.eat`.
        expires_at: unix seconds after which fresh evidence is needed.
        steps: (step, verdict) in the order in which they were taken.
    """

    member_id: str
    role: Role
    mask_key: bytes
    identity_key: bytes
    known_answer: bytes
    nonce: bytes
    evidence_class: EvidenceClass
    evidence_classes: tuple[EvidenceClass, ...]
    evidence_digest: bytes
    measurement: bytes
    platform_id: bytes
    names_machine: bool
    gpus: tuple[DeviceClaims, ...]
    switches: tuple[DeviceClaims, ...]
    facts: tuple[Fact, ...]
    hwmodel: str
    dbgstat: str
    expires_at: int
    policy_digest: bytes
    steps: tuple[tuple[str, str], ...]

    @property
    def links(self) -> Links | None:
        """The links between its GPUs, as evidence shows them; None for a member without one."""
        return links_of(self.gpus)


@lru_cache(maxsize=16)  # one admission opens it several times
def open_presentation(envelope: Envelope) -> Presentation:
    """Return the presentation in ``envelope``, provided that the key it presents has signed it.

    Guarantee: the sender held the private half of ``identity_key``.

    Raises:
        EvidenceError: ``evidence_malformed``, ``peer_not_bound`` or ``key_not_bound``.
    """
    # Before parsing: the bound limits what a stranger's bytes can cost.
    if len(envelope.body) > MAX_PRESENTATION_BYTES:
        refuse(Refusal.EVIDENCE_MALFORMED, f"a presentation of {len(envelope.body)} bytes is too large")
    try:
        presentation = parse(Presentation, envelope.body)
    except ProtocolError as error:
        refuse(Refusal.EVIDENCE_MALFORMED, f"{error.message}.")
    if not _is_strong_ed25519(presentation.identity_key):
        refuse(Refusal.KEY_NOT_BOUND, f"the identity_key of '{presentation.member_id}' is not a usable public key")
    # The caller uses up the nonce next, which only the holder of the presented key may do.
    signed = length_prefixed(Presentation.DOMAIN, envelope.body)
    if not signature_is_valid(presentation.identity_key, signed, envelope.signature):
        refuse(Refusal.PEER_NOT_BOUND, f"'{presentation.member_id}' did not prove that it holds its identity key")
    return presentation


def appraise(
    envelope: Envelope,
    *,
    run_id: str,
    member_id: str,
    role: Role,
    manifest_digest: bytes,
    policy: Policy,
    collateral: CollateralBundle,
    now: int,
    floors: Floors = NO_FLOORS,
) -> Appraisal:
    """Judge a member's evidence at unix second ``now``.

    Guarantee: returns only if a root of a class that ``policy`` accepts vouches for accepted code. That code bound
    exactly this run, member, role, manifest, these keys and these GPUs into its quote. There are exactly as many GPUs
    as the policy asks for, and exactly the switches that GPUs in protected-PCIe mode need.

    Args:
        run_id, member_id, role, manifest_digest: the session the evidence must be for.
        collateral: obtained by the verifier itself, never from the member.
        floors: highest numbers of collateral seen so far.

    Raises:
        EvidenceError: with one code of `raycloak.attestation.core.evidence.Refusal`.
    """
    presentation = open_presentation(envelope)
    terms = VerifierTerms(policy.anchors, policy.accepted_classes, now, floors)
    # Each stage sets one code, and the first that fails decides: the order is that of docs/attestation.md.
    claims = verify_guest(presentation, policy, collateral, terms)
    rules = policy.tdx if presentation.quote_family == "tdx" else policy.sev_snp
    check_measurement(claims, rules.measurements or ())
    check_registers(claims, rules.registers)
    _check_session(presentation, run_id, member_id, role, manifest_digest)
    _check_keys(presentation)
    if claims.report_data != expected_report_data(presentation):
        refuse(Refusal.KEY_NOT_BOUND, f"the quote of '{member_id}' does not vouch for this session and these keys")
    policy.require_code(presentation.code, f"'{member_id}'")
    gpus, switches = _verify_devices(presentation, policy, collateral, terms)
    # Another guest of the same machine would have another name, so neither limit nor revocation would reach it.
    if not claims.names_machine and policy.workers_per_platform is not None:
        refuse(
            Refusal.PEER_NOT_BOUND,
            f"the provider masks the chip's id of '{member_id}', and workers_per_platform counts members by machine",
        )
    # A masked chip id names only the guest, so a list of machines refuses such a report.
    if policy.platforms is not None and claims.platform_id not in policy.platforms:
        refuse(Refusal.PEER_NOT_BOUND, f"the platform {claims.platform_id.hex()} is not on the policy's list")
    return _result(envelope, presentation, claims, gpus, switches, policy, now)


def verify_guest(
    presentation: Presentation, policy: Policy, collateral: CollateralBundle, terms: VerifierTerms
) -> GuestClaims:
    """Verify the quote as the policy demands for its format, and return its claims about the guest.

    Raises:
        EvidenceError: as `verify_tdx` and `verify_snp`.
    """
    if presentation.quote_family == "tdx":
        return verify_tdx(presentation.quote, collateral.tdx, policy.tdx, terms)
    crls: dict[KeyKind, Sequence[bytes]] = {"VCEK": collateral.snp_vcek_crls, "VLEK": collateral.snp_vlek_crls}
    return verify_snp(presentation.quote, presentation.certificates, crls, policy.sev_snp, terms)


def _verify_devices(
    presentation: Presentation, policy: Policy, collateral: CollateralBundle, terms: VerifierTerms
) -> tuple[tuple[DeviceClaims, ...], tuple[DeviceClaims, ...]]:
    """Verify the GPUs of the presentation, exactly as many as the policy asks for, and the switches between them."""
    rules, nonce = policy.nvidia_gpu, gpu_nonce(presentation.nonce, presentation.hpke_key)
    published = {"rims": collateral.gpu_rims, "ocsp": collateral.gpu_ocsp}
    # An aggregator has none.
    count = policy.gpus_per_worker if presentation.role == "worker" else 0
    gpus = verify_gpus(presentation.gpu_evidence, rules, terms, count=count, nonce=nonce, **published)
    return gpus, verify_switches(presentation.switch_evidence, gpus, rules, terms, nonce=nonce, **published)


@lru_cache(maxsize=16)
def _digest_of(policy: Policy) -> bytes:
    return policy.digest()


def _check_session(found: Presentation, run_id: str, member_id: str, role: Role, manifest_digest: bytes) -> None:
    differing = {
        "run": found.run_id != run_id,
        "member": found.member_id != member_id,
        "role": found.role != role,
        "manifest": found.manifest_digest != manifest_digest,
    }
    for what, differs in differing.items():
        if differs:
            refuse(Refusal.NONCE_FOREIGN, f"the evidence of '{found.member_id}' was made for another {what}")


def _check_keys(presentation: Presentation) -> None:
    mlkem, x25519 = presentation.hpke_key[:MLKEM_BYTES], presentation.hpke_key[MLKEM_BYTES:]
    usable = {
        "mask_key": _is_strong_x25519(presentation.mask_key),
        "hpke_key": _is_strong_x25519(x25519) and _is_mlkem(mlkem),
    }
    for name, is_usable in usable.items():
        if not is_usable:
            refuse(Refusal.KEY_NOT_BOUND, f"the {name} of '{presentation.member_id}' is not a usable public key")


def _is_strong_ed25519(public: bytes) -> bool:
    """Refuse the points of low order: anybody can make signatures that verify under them."""
    y = int.from_bytes(public, "little") & (2**255 - 1)
    return y not in _LOW_ORDER_Y


def _is_strong_x25519(public: bytes) -> bool:
    """Refuse the points of low order: with them every agreed secret is zero."""
    return int.from_bytes(public, "little") & (2**255 - 1) not in _LOW_ORDER_U


def _is_mlkem(public: bytes) -> bool:
    try:
        mlkem_public(public)
    except ValueError:
        return False
    # A key of zeros parses, and anybody can open what is sealed to it.
    return any(public[:-32])


def _result(
    envelope: Envelope,
    presentation: Presentation,
    claims: GuestClaims,
    gpus: tuple[DeviceClaims, ...],
    switches: tuple[DeviceClaims, ...],
    policy: Policy,
    now: int,
) -> Appraisal:
    devices: tuple[DeviceClaims, ...] = (*gpus, *switches)
    return Appraisal(
        member_id=presentation.member_id,
        role=presentation.role,
        mask_key=presentation.mask_key,
        identity_key=presentation.identity_key,
        known_answer=presentation.known_answer,
        nonce=presentation.nonce,
        evidence_class=claims.evidence_class,
        evidence_classes=tuple(dict.fromkeys([claims.evidence_class, *(each.evidence_class for each in devices)])),
        evidence_digest=digest(envelope.body),
        measurement=claims.measurement,
        platform_id=claims.platform_id,
        names_machine=claims.names_machine,
        gpus=gpus,
        switches=switches,
        facts=claims.facts,
        hwmodel=claims.hwmodel,
        dbgstat=claims.dbgstat,
        # Evidence lives no longer than its shortest-lived part.
        expires_at=min(claims.expires_at, *(each.expires_at for each in devices), now + policy.evidence_lifetime_s),
        policy_digest=_digest_of(policy),
        steps=_steps(presentation, claims, gpus, switches, policy),
    )


def _steps(
    presentation: Presentation,
    claims: GuestClaims,
    gpus: tuple[DeviceClaims, ...],
    switches: tuple[DeviceClaims, ...],
    policy: Policy,
) -> tuple[tuple[str, str], ...]:
    of_gpus = ((f"GPU {i} {step}", verdict) for i, gpu in enumerate(gpus) for step, verdict in gpu.steps)
    of_switches = ((f"switch {i} {step}", verdict) for i, each in enumerate(switches) for step, verdict in each.steps)
    compared = ", ".join(name for name, accepted in policy.tdx.registers.items() if accepted is not None)
    return (
        ("possession", "signed by the presented identity key"),
        *claims.steps,
        ("measurement", claims.measurement.hex()),
        *([("registers", compared or "not compared")] if presentation.quote_family == "tdx" else []),
        ("session", f"{presentation.run_id} {presentation.member_id} {presentation.role}"),
        ("binding", f"three keys, known answer and {len(gpus)} GPUs"),
        *([("code", presentation.code.hex() or "none")] if policy.code is not None else []),
        *of_gpus,
        *of_switches,
        *([("links", links)] if (links := links_of(gpus)) else []),
        ("machine", claims.platform_id.hex()),
    )
