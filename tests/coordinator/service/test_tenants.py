"""Who calls, and until when: credentials of two kinds at once. On the wire: test_server.py."""

import hashlib

import pytest
from cryptography import x509

from raycloak.coordinator.service.tenants import Tenants
from raycloak.metrics.service_errors import ServiceAuthenticationError
from tests.coordinator.service.scripted import settings
from tests.coordinator.service.serving import Authority

_, CERTIFICATE = Authority().issue("ward")
ENDS = x509.load_pem_x509_certificate(CERTIFICATE).not_valid_after_utc.timestamp()
TOKEN_ENDS = {"first": "2020-01-01", "last": "2100-01-01"}


@pytest.mark.parametrize("first", ["token", "certificate"])
def test_of_two_credentials_of_a_caller_the_one_that_ends_first_decides(first):
    ends = TOKEN_ENDS["first" if first == "token" else "last"]
    token = {"sha256": hashlib.sha256(b"north").hexdigest(), "expires": ends}
    tls = {"certificate": "c", "key": "k", "client_ca": "ca"}
    given = settings(tls=tls, tenants={"north": {"token_sha256": [token], "certificates": ["ward"]}})
    (known,) = given.tenants["north"].token_sha256
    end = min(ENDS, known.expires.timestamp())
    metadata = {"authorization": "Bearer north"}
    caller = Tenants(given, lambda: end - 1).caller(metadata, CERTIFICATE)
    assert (caller.tenant, caller.expires) == ("north", end)
    with pytest.raises(ServiceAuthenticationError, match="expired"):
        Tenants(given, lambda: end).caller(metadata, CERTIFICATE)
