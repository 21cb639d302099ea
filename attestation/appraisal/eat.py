"""An appraisal's result under the claim names of Entity Attestation Tokens (RFC 9711), for logs and ``--json``.

It is not a token: it is unsigned, and a relying party appraises the evidence itself.
"""

import base64
import hashlib
from typing import Any, Final

from raycloak.attestation.appraisal.appraisal import Appraisal
from raycloak.attestation.gpu.device import DeviceClaims

_RANDOM_UEID: Final = b"\x01"  # RFC 9711, 4.2.1: a type byte, then 16, 24 or 32 bytes


def claims_set(appraisal: Appraisal) -> dict[str, Any]:
    """Return JSON-able claims of an accepted member. Binary values are base64url, times are unix seconds."""
    return {
        "eat_nonce": _text(appraisal.nonce),
        "ueid": _text(ueid(appraisal.platform_id)),
        "hwmodel": appraisal.hwmodel,
        "dbgstat": appraisal.dbgstat,
        "exp": appraisal.expires_at,
        "measres": appraisal.measurement.hex(),
        "evidence_class": str(appraisal.evidence_class),
        "submods": {
            f"{what}-{position}": _device_claims(device)
            for what, devices in (("gpu", appraisal.gpus), ("switch", appraisal.switches))
            for position, device in enumerate(devices)
        },
        **({"links": appraisal.links} if appraisal.links else {}),
    }


def ueid(platform_id: bytes) -> bytes:
    """Return a universal entity id of type RAND, 17 or 33 bytes. A platform id above 16 bytes is hashed."""
    return _RANDOM_UEID + (platform_id if len(platform_id) == 16 else hashlib.sha256(platform_id).digest())


def _device_claims(device: DeviceClaims) -> dict[str, Any]:
    debug = {"dbgstat": device.dbgstat} if device.dbgstat else {}
    return {
        "eat_nonce": _text(device.report_data),
        "ueid": _text(ueid(device.platform_id)),
        "hwmodel": device.hwmodel,
        **debug,
        "mode": device.mode,
        "uncovered_measurements": list(device.uncovered),
        "exp": device.expires_at,
        "evidence_class": str(device.evidence_class),
    }


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
