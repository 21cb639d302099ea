"""The tenants: who calls, by a token of which only the hash is known or by a client certificate, and until when."""

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.metrics.service_errors import ServiceAuthenticationError

_PREFIX: Final = "rct_"
"""Begins every token, so that scanners of leaked secrets know one."""
_LONGEST_TOKEN: Final = 512


@dataclass(frozen=True, slots=True)
class CallingTenant:
    """The tenant that made a call; ``expires`` in Unix seconds is the end of its credentials, 0 if they have none."""

    tenant: str
    expires: float


def expired() -> ServiceAuthenticationError:
    """Return the refusal of credentials that have come to their end."""
    return ServiceAuthenticationError("expired", "the credentials have expired.", "Ask the operator for new ones.")


def new_token() -> tuple[str, str]:
    """Return a new token and its SHA-256 in hexadecimal."""
    # So random that its plain hash tells nothing of it.
    token = f"{_PREFIX}{secrets.token_urlsafe(32)}"
    return token, hashlib.sha256(token.encode()).hexdigest()


class Tenants:
    """The credentials of all tenants.

    Args:
        clock: Unix time.
    """

    def __init__(self, settings: ServiceSettings, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._tokens = {
            token.sha256: CallingTenant(name, token.expires.timestamp() if token.expires is not None else 0.0)
            for name, tenant in settings.tenants.items()
            for token in tenant.token_sha256
        }
        self._names = {name: tenant for tenant, each in settings.tenants.items() for name in each.certificates}

    def caller(self, metadata: Mapping[str, str | bytes], certificate: bytes | None) -> CallingTenant:
        """Return who calls.

        Args:
            certificate: the peer's, in PEM, which TLS has verified; None if it has none.

        Raises:
            ServiceAuthenticationError: ``unauthenticated``, or ``expired``. Both tell nothing of what is known here.
        """
        found: list[CallingTenant] = []
        if certificate is not None:
            name, ends_at = _subject(certificate)
            if name in self._names:
                found.append(CallingTenant(self._names[name], ends_at))
        header = metadata.get("authorization")
        if isinstance(header, str) and header.startswith("Bearer ") and len(header) <= _LONGEST_TOKEN:
            # A lookup by hash: its time tells of the hash alone, from which no token follows.
            known = self._tokens.get(hashlib.sha256(header.removeprefix("Bearer ").encode()).hexdigest())
            # A token that is given and wrong is refused, whatever the certificate says.
            found.append(known or CallingTenant("", 0.0))
        if not found or len({each.tenant for each in found}) > 1 or not found[0].tenant:
            message = "the credentials are missing or unknown."
            remedy = "Give the token, or the certificate, that the operator registered."
            raise ServiceAuthenticationError("unauthenticated", message, remedy)
        ends = [each.expires for each in found if each.expires]
        if ends and min(ends) <= self._clock():
            raise expired()
        return CallingTenant(found[0].tenant, min(ends, default=0.0))


@lru_cache(maxsize=1024)  # each call of a channel asks it again
def _subject(pem: bytes) -> tuple[str, float]:
    """Return the common name of a certificate, and its end in Unix seconds."""
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else "", certificate.not_valid_after_utc.timestamp()
