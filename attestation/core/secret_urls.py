"""Secrets in URLs: which part of a URL is one, and where it belongs instead.

A URL of a configuration is an argument of Ray's actors, which the control store keeps, and stands in records and on
command lines. So none may hold a secret.
"""

from urllib.parse import parse_qsl

_PARAMETERS = frozenset(
    {
        *("oauth_client_secret", "password", "scram_client_key", "scram_server_key", "sslpassword"),
        # What signs a shared access to Azure's stores.
        "sig",
        # Nothing takes these, but whoever writes one has written a secret.
        *("access_token", "account_key", "client_secret", "sas_token", "secret_access_key", "secret_key"),
        *("session_token", "x-amz-security-token", "x-amz-signature"),
    }
)
"""The secrets that stand as parameters of URLs: those of libpq, and those of object stores."""

_PLACES = {
    "postgres": "put it into ~/.pgpass of this machine, mode 0600, or name such a file: ?passfile=/absolute/file",
    "s3": "put both keys into ~/.aws/credentials of each machine, mode 0600, or give the machine a role",
    "abfs": "give each machine an identity, or log it in: az login",
}
_ELSEWHERE = "leave it out"


def secret_in(url: str) -> str | None:
    """Return what a URL has that no configuration may hold, and where it belongs; None for any other text.

    Guarantee: the answer repeats nothing of the URL but the name of a parameter.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return None
    place = next((place for kind, place in _PLACES.items() if scheme.lower().startswith(kind)), _ELSEWHERE)
    path, _, query = rest.partition("#")[0].partition("?")
    if _has_password(path.partition("/")[0]):
        return f"it has a password: {place}"
    parameters = parse_qsl(query, keep_blank_values=True)
    # Such as an endpoint's.
    if any(secret_in(value) is not None for _, value in parameters):
        return f"it has a password in a parameter: {place}"
    named = sorted(_PARAMETERS.intersection(name.lower() for name, _ in parameters))
    return f"it has the parameter {named[0]}: {place}" if named else None


def _has_password(authority: str) -> bool:
    """Return whether text stands where a password does: before the host, or behind a colon though it is no port.

    The second is a password with a slash in it, which ends the host for whoever reads the URL.
    """
    user, _, hosts = authority.rpartition("@")
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")]
    return ":" in user or any(port != "" and not port.isdigit() for port in ports)
