"""Carries our errors across gRPC: a status for the kind; code, sentence and remedy in the trailing metadata."""

import json
from collections.abc import Iterable
from typing import Final

import grpc

from raycloak.attestation.core.canonical import canonical_json
from raycloak.metrics.errors import EvidenceError, ProtocolError, RaycloakError

SERVICE_NAME: Final = "raycloak.evidence.v1.Evidence"
REFUSAL_KEY: Final = "raycloak-refusal-bin"
_MAX_REFUSAL_BYTES = 4096  # room for a code, and for message and remedy of 1,024 characters each

_STATUS = {
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "rate_limited": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "no_roster": grpc.StatusCode.FAILED_PRECONDITION,
    "malformed": grpc.StatusCode.INVALID_ARGUMENT,
}


def status_of(error: RaycloakError) -> grpc.StatusCode:
    """Return the gRPC status of a refusal."""
    return _STATUS.get(error.code, grpc.StatusCode.PERMISSION_DENIED)


def trailing(error: RaycloakError) -> tuple[tuple[str, bytes], ...]:
    """Build the metadata that carries a refusal."""
    kind = "protocol" if isinstance(error, ProtocolError) else "evidence"
    said = {"kind": kind, "code": error.code, "message": error.message[:1024], "remedy": error.remedy[:1024]}
    return ((REFUSAL_KEY, canonical_json(said)),)


def refusal_in(metadata: Iterable[tuple[str, str | bytes]]) -> RaycloakError | None:
    """Return the refusal that trailing metadata carries, if any."""
    for key, value in metadata:
        if key == REFUSAL_KEY and isinstance(value, bytes) and len(value) <= _MAX_REFUSAL_BYTES:
            try:
                said = json.loads(value)
                cls = ProtocolError if said["kind"] == "protocol" else EvidenceError
                return cls(str(said["code"]), str(said["message"]), str(said["remedy"]))
            except (ValueError, LookupError, TypeError, RecursionError):
                return None
    return None
