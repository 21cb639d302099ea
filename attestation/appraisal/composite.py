"""Verifies all evidence of one actor: its guest, by the format of its quote, and the GPUs of that guest.

The class of each piece follows from the root that verified it. The quote's report data shows that the pieces belong
together; `raycloak.attestation.appraisal.appraisal` compares it.
"""

from collections.abc import Callable, Mapping
from typing import Final

from raycloak.attestation.core.evidence import CollateralBundle, EvidenceClass, Presentation, QuoteFamily
from raycloak.attestation.gpu.gpu_set import gpu_nonce, verify_gpus
from raycloak.attestation.gpu.verify import GpuClaims
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.snp.verify import SnpClaims, verify_snp
from raycloak.attestation.tdx.verify import TdxClaims, verify_tdx
from raycloak.attestation.trust.floors import Floors

GuestClaims = TdxClaims | SnpClaims


def verify_guest(
    presentation: Presentation, policy: Policy, collateral: CollateralBundle, now: int, floors: Floors
) -> GuestClaims:
    """Verify the quote as the policy demands for its format, and return its claims about the guest.

    Raises:
        EvidenceError: as `verify_tdx` and `verify_snp`; ``collateral_rollback`` if collateral is older than ``floors``.
    """
    return _VERIFIERS[presentation.quote_family](presentation, policy, collateral, now, floors)


def verify_own_gpus(
    presentation: Presentation, policy: Policy, collateral: CollateralBundle, now: int
) -> tuple[GpuClaims, ...]:
    """Verify the GPUs of a worker, which must be exactly as many as the policy asks for. An aggregator has none.

    Raises:
        EvidenceError: as `raycloak.attestation.gpu.gpu_set.verify_gpus`.
    """
    return verify_gpus(
        presentation.gpu_evidence,
        count=policy.gpus_per_worker if presentation.role == "worker" else 0,
        nonce=gpu_nonce(presentation.nonce, presentation.hpke_key),
        anchors=policy.anchors,
        accepted=policy.accepted_classes,
        rules=policy.nvidia_gpu,
        rims=collateral.gpu_rims,
        ocsp=collateral.gpu_ocsp,
        now=now,
    )


def measurements_of(policy: Policy, family: QuoteFamily) -> tuple[bytes, ...]:
    """Return the reference values for guests of ``family``. Zero is never one."""
    rules = policy.tdx if family == "tdx" else policy.sev_snp
    # A register of zeros means that nothing was measured into it.
    return tuple(value for value in rules.measurements or () if any(value))


def classes_of(guest: GuestClaims, gpus: tuple[GpuClaims, ...]) -> tuple[EvidenceClass, ...]:
    """Return every class that the evidence rests on, the guest's first."""
    return tuple(dict.fromkeys([guest.evidence_class, *(gpu.evidence_class for gpu in gpus)]))


def _tdx(
    presentation: Presentation, policy: Policy, collateral: CollateralBundle, now: int, floors: Floors
) -> GuestClaims:
    return verify_tdx(
        presentation.quote,
        collateral.tdx,
        anchors=policy.anchors,
        accepted=policy.accepted_classes,
        rules=policy.tdx,
        now=now,
        floors=floors,
    )


def _sev_snp(
    presentation: Presentation, policy: Policy, collateral: CollateralBundle, now: int, floors: Floors
) -> GuestClaims:
    return verify_snp(
        presentation.quote,
        presentation.certificates,
        anchors=policy.anchors,
        accepted=policy.accepted_classes,
        rules=policy.sev_snp,
        crls={"VCEK": collateral.snp_vcek_crls, "VLEK": collateral.snp_vlek_crls},
        now=now,
        floors=floors,
    )


_Verifier = Callable[[Presentation, Policy, CollateralBundle, int, Floors], GuestClaims]
_VERIFIERS: Final[Mapping[QuoteFamily, _Verifier]] = {"tdx": _tdx, "sev_snp": _sev_snp}
