"""The URL of a ledger: how it is read, and the form without secrets in which it may be written down."""

from pathlib import Path
from typing import TYPE_CHECKING

from metrics.errors import ConfigError

if TYPE_CHECKING:
    import sqlalchemy as sa

    from coordinator.config import RunConfig

URL_REMEDY = "Use sqlite:////absolute/path/ledger.sqlite or postgresql://user@host/database."

_SECRETS = ("password", "sslpassword")
"""Secrets that libpq also takes as parameters of a URL."""


def parse_url(url: str) -> "sa.URL":
    """The parts of a ledger's URL; ConfigError ``ledger_url``, which does not repeat it, if it has none."""
    import sqlalchemy as sa  # not for the runs that keep their ledger in the state folder

    try:
        return sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigError("ledger_url", "the ledger URL cannot be read.", URL_REMEDY) from None


def usable_url(url: str) -> "sa.URL":
    """The parts of a URL under which a ledger can be kept; ConfigError ``ledger_url`` if none can."""
    parsed = parse_url(url)
    kind = parsed.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise ConfigError("ledger_url", f"a ledger cannot be kept in {kind}.", URL_REMEDY)
    if kind == "sqlite" and (not parsed.database or not Path(parsed.database).is_absolute() or parsed.query):
        path = parsed.database or ""
        raise ConfigError("ledger_url", f"'{path}' is not an absolute path of a ledger.", URL_REMEDY)
    return parsed


def without_secrets(url: str) -> str:
    """The same URL without its passwords; the driver then asks ``PGPASSWORD`` and ``~/.pgpass``.

    Guarantee: what it returns contains no password of the URL, neither before the host nor as a parameter.

    Raises:
        ConfigError: ``ledger_url``.
    """
    bare = parse_url(url)._replace(password=None).difference_update_query(_SECRETS)
    return bare.render_as_string(hide_password=False)


def recorded(config: "RunConfig") -> "RunConfig":
    """The configuration as it may be written down and shown: with `without_secrets` of its ledger's URL."""
    if config.ledger.url is None:
        return config
    ledger = config.ledger.model_copy(update={"url": without_secrets(config.ledger.url)})
    return config.model_copy(update={"ledger": ledger})
