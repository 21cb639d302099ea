"""The URL of a ledger: parses it, and gives the form without secrets in which it may be written down."""

from pathlib import Path
from typing import TYPE_CHECKING

from metrics.errors import ConfigError

if TYPE_CHECKING:
    import sqlalchemy as sa

    from coordinator.config import RunConfig

URL_REMEDY = "Use sqlite:////absolute/path/ledger.sqlite or postgresql://user@host/database."

_SECRETS = ("password", "sslpassword")
"""The secrets that libpq also accepts as parameters of a URL."""


def parse_url(url: str) -> "sa.URL":
    """Parse a ledger's URL; ConfigError ``ledger_url`` if it cannot be parsed. The error never repeats the URL."""
    import sqlalchemy as sa  # late: runs that keep their ledger in the state folder do not need it

    try:
        return sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigError("ledger_url", "the ledger URL cannot be read.", URL_REMEDY) from None


def usable_url(url: str) -> "sa.URL":
    """Parse a URL under which a ledger can be kept; ConfigError ``ledger_url`` for any other."""
    parsed = parse_url(url)
    kind = parsed.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise ConfigError("ledger_url", f"a ledger cannot be kept in {kind}.", URL_REMEDY)
    if kind == "sqlite" and (not parsed.database or not Path(parsed.database).is_absolute() or parsed.query):
        path = parsed.database or ""
        raise ConfigError("ledger_url", f"'{path}' is not an absolute path of a ledger.", URL_REMEDY)
    return parsed


def without_secrets(url: str) -> str:
    """Return the URL without its passwords. The driver then asks ``PGPASSWORD`` and ``~/.pgpass``.

    Guarantee: the result contains no password of the URL, neither before the host nor as a parameter.

    Raises:
        ConfigError: ``ledger_url``.
    """
    bare = parse_url(url)._replace(password=None).difference_update_query(_SECRETS)
    return bare.render_as_string(hide_password=False)


def recorded(config: "RunConfig") -> "RunConfig":
    """Return the configuration as it may be written down and shown: its ledger's URL is `without_secrets`."""
    if config.ledger.url is None:
        return config
    ledger = config.ledger.model_copy(update={"url": without_secrets(config.ledger.url)})
    return config.model_copy(update={"ledger": ledger})
