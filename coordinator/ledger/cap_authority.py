"""Authorities: the key that may raise an account's cap, named at its opening, and the authorisation that it signs.

An authorisation is for one change: of this account in this ledger, from the cap that one entry of the chain set, to
another. Any change of the cap voids it, so nobody can use it twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field

from raycloak.attestation.core.keys import IdentityKey, Secret
from raycloak.attestation.core.messages import Envelope, Message, open_envelope, parse, seal
from raycloak.attestation.files.private import publish_pair, read_private, require_name
from raycloak.metrics.errors import BudgetError, ConfigError, ProtocolError
from raycloak.metrics.file_errors import file_error


class AuthorityPublic(Message):
    """The public half of an authority: its name, and its raw Ed25519 key of 32 bytes."""

    DOMAIN: ClassVar[str] = "raycloak/budget-authority/v1"

    name: str = Field(min_length=1)
    key: bytes = Field(min_length=32, max_length=32)


class _StoredAuthority(Message):
    """The private half: the seed of the Ed25519 key, 32 bytes."""

    DOMAIN: ClassVar[str] = "raycloak/stored-budget-authority/v1"

    name: str
    ed25519: bytes


class CapAuthorisation(Message):
    """The statement that an authority signs.

    Attributes:
        account, ledger_key: the account, and the key of its ledger.
        old_cap, new_cap: epsilon before and after.
        follows: hash of the entry that set ``old_cap``: the opening, or the last change of the account.
        expires_at: Unix time in seconds after which it is void, by the ledger's clock.
    """

    DOMAIN: ClassVar[str] = "raycloak/cap-authorisation/v1"

    account: str
    ledger_key: bytes
    old_cap: float
    new_cap: float
    follows: bytes
    expires_at: int


class SignedCap(Message):
    """An authorisation with its signature: the content of the file that an authority hands out."""

    DOMAIN: ClassVar[str] = "raycloak/signed-cap/v1"

    authorisation: CapAuthorisation
    signature: bytes


def create_authority(path: Path) -> tuple[AuthorityPublic, Path]:
    """Write a new private key to ``path``, mode 0600, and its public half to ``path`` with ``.pub`` appended.

    The name in both is the file's name without its suffix.

    Raises:
        ConfigError: ``authority_exists`` if one of the files exists, ``authority`` if they cannot be written.
    """
    require_name(path, "authority")
    stored = _StoredAuthority(name=path.stem, ed25519=Ed25519PrivateKey.generate().private_bytes_raw())
    public = AuthorityPublic(name=stored.name, key=IdentityKey.from_seed(Secret(stored.ed25519)).public)
    return public, publish_pair(path, stored.encode(), public.encode(), "authority")


@contextmanager
def _reading(path: Path, code: str, what: str, remedy: str) -> Iterator[None]:
    """Turn a failure to read ``path`` into ConfigError ``code``."""
    try:
        yield
    except OSError as error:
        raise file_error(code, "read", path, error) from None
    except (ProtocolError, ValueError):
        raise ConfigError(code, f"{path} is not {what}.", remedy) from None


def load_authority(path: Path) -> AuthorityPublic:
    """Read the public half; ConfigError ``authority`` if the file cannot be read or is no such file."""
    remedy = "It is the one with .pub that `budget keygen` wrote."
    with _reading(path, "authority", "the public file of an authority", remedy):
        return AuthorityPublic.model_validate_json(path.read_bytes())


def load_authority_key(path: Path) -> IdentityKey:
    """Read the private half; ConfigError ``authority`` if it cannot be read, is damaged, or others may read it."""
    remedy = "It is the one without .pub that `budget keygen` wrote."
    with _reading(path, "authority", "the private key of an authority", remedy):
        return IdentityKey.from_seed(Secret(parse(_StoredAuthority, read_private(path, "authority")).ed25519))


def authorise(authorisation: CapAuthorisation, key: IdentityKey) -> SignedCap:
    """Sign ``authorisation``."""
    return SignedCap(authorisation=authorisation, signature=seal(authorisation, key).signature)


def load_authorisation(path: Path) -> SignedCap:
    """Read an authorisation; ConfigError ``authorisation`` if the file cannot be read or is no such file."""
    remedy = "It is what `budget authorize --out` wrote."
    with _reading(path, "authorisation", "an authorisation to raise a cap", remedy):
        return SignedCap.model_validate_json(path.read_bytes())


def check_authorisation(signed: SignedCap | None, expected: CapAuthorisation, authority: bytes, at: int) -> None:
    """Check that ``authority`` allows ``expected`` at Unix time ``at``. Its ``expires_at`` is not compared.

    Raises:
        BudgetError: ``cap_fixed``, ``authorisation_missing``, ``authorisation_forged`` or ``authorisation_expired``.
            ``authorisation_mismatch`` for another account, ledger or cap. ``authorisation_void`` if the cap has
            changed since it was made, for example because it was already used.
    """
    account = expected.account
    if not authority:
        raise BudgetError(
            "cap_fixed",
            f"account '{account}' was opened without an authority, so its cap can only be lowered.",
            "Another account is another promise to the people in the data.",
        )
    if signed is None:
        raise BudgetError(
            "authorisation_missing",
            f"raising the cap of account '{account}' from {expected.old_cap:g} to {expected.new_cap:g} needs the "
            "signature of its authority.",
            f"Ask for it: raycloak budget authorize {account}",
        )
    # The signature first: what a forged statement says is not compared.
    envelope = Envelope(body=signed.authorisation.encode(), signature=signed.signature)
    try:
        given = open_envelope(CapAuthorisation, envelope, authority)
    except ProtocolError:
        raise BudgetError(
            "authorisation_forged",
            f"the authority of account '{account}' did not sign this.",
            "Ask its authority to sign: raycloak budget authorize.",
        ) from None
    differing = [
        name for name in ("account", "ledger_key", "new_cap") if getattr(given, name) != getattr(expected, name)
    ]
    if differing:
        raise BudgetError(
            "authorisation_mismatch",
            f"the authorisation is for another {', '.join(differing)}: it lets account '{given.account}' have "
            f"{given.new_cap:g}, not '{account}' {expected.new_cap:g}.",
            "Ask for what was signed, or have this signed: raycloak budget authorize.",
        )
    # This entry is what makes an authorisation good for one use: any change of the account voids it.
    if (given.follows, given.old_cap) != (expected.follows, expected.old_cap):
        raise BudgetError(
            "authorisation_void",
            f"the authorisation is from before the cap of account '{account}' became {expected.old_cap:g}.",
            "It was used, or the account has changed since: ask for a new one.",
        )
    if at > given.expires_at:
        raise BudgetError(
            "authorisation_expired",
            f"the authorisation expired {at - given.expires_at} s ago.",
            "Ask for a new one: raycloak budget authorize.",
        )
