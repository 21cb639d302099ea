"""The 64 bytes through which a TEE vouches for a session and its keys.

Guarantee: SHA-512 over an injective encoding. So evidence for one nonce, run, member, role, key, manifest, known answer
or list of GPUs fits no other.
"""

import hashlib
from collections.abc import Sequence

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.evidence import Presentation, Role

_LABEL = "raycloak/attest/v1"
_GPU_LABEL = "raycloak/gpu-evidence/v1"


def report_data(
    *,
    nonce: bytes,
    run_id: str,
    member_id: str,
    role: Role,
    hpke_key: bytes,
    mask_key: bytes,
    identity_key: bytes,
    manifest_digest: bytes,
    known_answer: bytes,
    gpu_evidence: Sequence[bytes] = (),
) -> bytes:
    """Compute the 64 bytes that a quote for these values must carry. The fields are also in `Presentation`."""
    gpu_list = hashlib.sha384(length_prefixed(_GPU_LABEL, *gpu_evidence)).digest()
    session = (nonce, run_id, member_id, role)
    keys = (hpke_key, mask_key, identity_key)
    bound = length_prefixed(_LABEL, *session, *keys, manifest_digest, known_answer, gpu_list, len(gpu_evidence))
    return hashlib.sha512(bound).digest()


def expected_report_data(presentation: Presentation) -> bytes:
    """Return the report data that the quote inside ``presentation`` must carry."""
    return report_data(**{name: getattr(presentation, name) for name in _BOUND_FIELDS})


# The quote cannot bind itself. Its format and its certificates say nothing that its signature does not.
_NOT_BOUND = ("quote", "quote_family", "certificates")
_BOUND_FIELDS = tuple(name for name in Presentation.model_fields if name not in _NOT_BOUND)
