"""Judges the GPU cases of an index."""

from attestation.gpu import GpuClaims, GpuReferences, verify_gpu
from attestation.gpu_rules import GpuRules
from attestation.vector_index import Case


def appraise_gpu(case: Case) -> GpuClaims:
    """Verify the case's report and return its claims; EvidenceError if it is refused."""
    return verify_gpu(
        case.evidence(),
        case.chain(),
        anchors=(*case.anchors("nvidia_gpu"), *case.anchors("nvidia_rim")),
        accepted=case.accepted,
        rules=case.rules(GpuRules),
        nonce=case.nonce,
        rims=references_of(case),
        ocsp=answers_of(case),
        now=case.now,
    )


def references_of(case: Case) -> GpuReferences:
    """Read the manifests that the case names."""
    named = case.fields.rim
    if named is None:
        return GpuReferences()
    driver, vbios = (None if name is None else case.file(name) for name in (named.driver, named.vbios))
    return GpuReferences(driver, vbios)


def answers_of(case: Case) -> tuple[bytes, ...]:
    """Read the OCSP answers that the case names, in base64 or DER."""
    return tuple(case.base64_file(name) for name in case.fields.ocsp or ())
