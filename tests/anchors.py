"""Intel's pinned root as an anchor of a policy."""

from raycloak.attestation.core.evidence import EvidenceClass
from raycloak.attestation.trust.roots import pinned_anchors

(INTEL_TDX_ANCHOR,) = pinned_anchors(EvidenceClass.INTEL_TDX)
