"""The 64 bytes through which a TEE vouches for a session and its keys.

Guarantee: SHA-512 over an injective encoding. So evidence for one nonce, run, member, role, key, manifest, known
answer, list of GPUs, list of switches or bundle of code fits no other.
"""

import hashlib

from raycloak.attestation.core.canonical import length_prefixed
from raycloak.attestation.core.evidence import Presentation

_LABEL = "raycloak/attest/v1"
_GPU_LABEL = "raycloak/gpu-evidence/v1"
_SWITCH_LABEL = "raycloak/switch-evidence/v1"


def expected_report_data(presentation: Presentation) -> bytes:
    """Compute the 64 bytes that the quote inside ``presentation`` must carry.

    The quote cannot bind itself. Its format and its certificates say nothing that its signature does not.
    """
    shown = presentation
    gpu_list = hashlib.sha384(length_prefixed(_GPU_LABEL, *shown.gpu_evidence)).digest()
    session = (shown.nonce, shown.run_id, shown.member_id, shown.role)
    keys = (shown.hpke_key, shown.mask_key, shown.identity_key)
    gpus = (gpu_list, len(shown.gpu_evidence))
    # One or two more fields, and so another encoding than any with fewer.
    later: tuple[bytes, ...] = (shown.code,) if shown.code else ()
    if shown.switch_evidence:
        switches = hashlib.sha384(length_prefixed(_SWITCH_LABEL, *shown.switch_evidence)).digest()
        later = (shown.code, switches)
    bound = length_prefixed(_LABEL, *session, *keys, shown.manifest_digest, shown.known_answer, *gpus, *later)
    return hashlib.sha512(bound).digest()
