"""The settings of a machine's vaults: the file that says what a vault serves, whoever asks.

All else that a vault is told comes through a relay, which whoever holds the cluster's token can replace. So the file
belongs to the vault's own user, or to root, and nobody else can write it.
"""

import os
import pwd
import stat
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

import yaml
from pydantic import AfterValidator, Field, model_validator

from raycloak.attestation.policy.policy import Policy
from raycloak.coordinator.config.section import Section, validated
from raycloak.metrics.errors import ConfigError, RefusedError
from raycloak.metrics.file_errors import file_error

DESCRIBED_IN: Final = "docs/boundary.md"
PLACELESS: Final = frozenset({"digits", "module", "sent"})
"""The kinds of datasets that lie nowhere."""


def _absolute(value: str) -> str:
    # Listener and vaults work in different folders.
    if not Path(value).is_absolute():
        raise ValueError("must be an absolute path")
    return value


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class VaultSettings(Section):
    """The settings that the vaults of every role have.

    Attributes:
        socket: absolute path that they listen at.
        peer: the user who may connect: Ray's.
        sessions: how many vaults there are at a time.
    """

    socket: AbsolutePath
    peer: str
    sessions: int = Field(default=1, gt=0, le=1024)


class LedgerSettings(VaultSettings):
    """The settings of a ledger's vault.

    Attributes:
        url, witness: as `raycloak.coordinator.ledger.ledger.PrivacyLedger` takes them.
    """

    url: str
    witness: str | None = None


class EvidencedSettings(VaultSettings):
    """The settings of vaults that give evidence of themselves.

    Attributes:
        platform: socket of the machine's SIMULATED platform; absent where the guest that it runs in gives evidence.
    """

    platform: AbsolutePath | None = None


class OrchestratorSettings(EvidencedSettings):
    """The settings of an orchestrator's vault.

    Attributes:
        state: absolute folder of its state.
        policies: digests of the policies that a run may have, in hexadecimal.
        secrets: absolute folder of the run secrets that a run may begin with; absent, each run has a generated one.
        bind: ``host:port`` at which it serves evidence and the observers.
    """

    state: AbsolutePath
    policies: tuple[Digest, ...]
    secrets: AbsolutePath | None = None
    bind: str | None = None


class AggregatorSettings(EvidencedSettings):
    """The settings of an aggregator's vault, which holds no secret but its own keys."""


class DataPlace(Section):
    """A place of data that workers may open, and on which terms.

    Attributes:
        path: absolute file, or folder with all below it; URL of object storage, with the options that a run has to
            give; or a kind of dataset that lies nowhere: ``digits``, ``module`` or ``sent``.
        account: that pays for what is released of it.
        least_noise: the least noise multiplier of a run on it.
        public: whether it may be trained on without noise, and without an account of its own.
    """

    path: str
    account: str | None = None
    least_noise: float = Field(default=0.0, ge=0)
    public: bool = False

    @model_validator(mode="after")
    def _stated(self) -> "DataPlace":
        is_url = "://" in self.path and not self.path.lower().startswith("file:")
        if not (is_url or Path(self.path).is_absolute() or self.path in PLACELESS):
            raise ValueError("path must be absolute, a URL of object storage, or a kind of data that lies nowhere")
        stated = (self.account is not None, self.least_noise > 0)
        if stated != (not self.public, not self.public):
            raise ValueError("state an account and a least_noise above 0, or public: true")
        return self


class WorkerSettings(EvidencedSettings):
    """The settings of a worker's vault.

    Attributes:
        ledgers: public keys of the ledgers whose receipts count, in hexadecimal.
        policies: digests of the policies that a run may have, in hexadecimal.
        data: the places of data.
        code: digests of the bundles that code of the user's may come from, in hexadecimal, as a policy lists them; an
            empty list admits none. ``any`` runs whatever the driver names, which sees examples.
        devices: for each of the sessions, the number of its GPU; empty for none.
    """

    ledgers: tuple[Digest, ...]
    policies: tuple[Digest, ...]
    data: tuple[DataPlace, ...]
    code: tuple[Digest, ...] | Literal["any"]
    devices: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _one_for_each(self) -> "WorkerSettings":
        if self.devices and len(self.devices) != self.sessions:
            raise ValueError("devices: name one GPU for each of the sessions")
        return self

    @model_validator(mode="after")
    def _apart(self) -> "WorkerSettings":
        # Else the terms of what lies in both would depend on the order, and a folder would serve what lies below.
        where = (Path(each.path).resolve() if each.path.startswith("/") else Path(each.path) for each in self.data)
        for one, other in permutations(where, 2):
            if one.is_relative_to(other):
                raise ValueError(f"data: {one} lies in {other}, and each place has terms of its own")
        return self


class PlatformSettings(VaultSettings):
    """The settings of the machine's SIMULATED platform, which quotes for vaults and tells its peer public facts.

    Attributes:
        state: absolute folder of the vendor's keys.
        vaults: the users whose processes get quotes.
    """

    state: AbsolutePath
    vaults: tuple[str, ...]


_HERE: Final = "raycloak.coordinator.vaults"
ROLES: Final[Mapping[str, tuple[type[VaultSettings], str]]] = MappingProxyType(
    {
        "ledger": (LedgerSettings, f"{_HERE}.ledger_vault:LedgerVault"),
        "orchestrator": (OrchestratorSettings, f"{_HERE}.orchestrator_vault:OrchestratorVault"),
        "aggregator": (AggregatorSettings, f"{_HERE}.aggregator_vault:AggregatorVault"),
        "worker": (WorkerSettings, f"{_HERE}.worker_vault:WorkerVault"),
        "platform": (PlatformSettings, f"{_HERE}.platform_vault:PlatformVault"),
    }
)
"""The settings of each role, and the class that its vaults host."""


def uid_of(user: str) -> int:
    """Return a user's id, by name or number; ConfigError ``vault_settings`` if there is no such user."""
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        if user.isdecimal():
            return int(user)
        raise ConfigError(
            "vault_settings", f"there is no user {user} on this machine.", "Make the user, or name another."
        ) from None


def require_apart(settings: VaultSettings | None, policy: Policy) -> None:
    """Require a vault of the machine where the policy demands a boundary; RefusedError ``boundary_required``."""
    if settings is None and policy.require_boundary is not None:
        raise RefusedError(
            "boundary_required",
            "the policy demands vaults of the machine, and this is a child of Ray's process.",
            "Name their sockets in boundary; see docs/boundary.md.",
        )


def policy_not_served() -> RefusedError:
    """Return the error for a run under a policy that the settings do not list."""
    return RefusedError(
        "policy_not_served",
        "the vault's settings list no such policy as the run's.",
        "Its owner can list the digest that raycloak attest policy prints.",
    )


def read_settings(role: str, path: Path, owner: int | None = None) -> VaultSettings:
    """Read the settings of a role's vaults.

    Guarantee: nobody but the owner and root could have written them.

    Args:
        owner: user id of the vaults; None for this process's own.

    Raises:
        ConfigError: ``vault_settings`` if the file is missing, is not YAML, or others can write it; ``config`` with
            each wrong field.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read()
    except OSError as error:
        raise file_error("vault_settings", "read", path, error) from None
    owners = (os.getuid() if owner is None else owner, 0)
    if found.st_uid not in owners or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            "vault_settings",
            f"{path} can be written by others than the vault's user and root.",
            f"chown root {path} && chmod 644 {path}",
        )
    try:
        raw = yaml.safe_load(content)
    except yaml.YAMLError:
        raise ConfigError("vault_settings", f"{path} is not YAML.", f"See {DESCRIBED_IN}.") from None
    return validated(ROLES[role][0], raw, DESCRIBED_IN)
