"""The file of ``raycloak-lab adapter serve``: where it listens, who may ask, and how many tokens anybody gets."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from raycloak.attestation.files.yaml_reader import read_yaml
from raycloak.coordinator.config.section import Section, validated
from raycloak.coordinator.config.sections import MetricsConfig


class AdapterSettings(Section):
    """The settings of one served adapter. Neither budget has a default: see the table in docs/encrypted-adapters.md.

    Attributes:
        bind: ``host:port`` to listen on.
        clients: the clients' identity keys by name, 64 hexadecimal digits each. Nobody else is answered. A budget
            belongs to the name, so a new key under an old name gives nothing back.
        tokens_of_adapter: tokens that each projection ever answers, for all clients together.
        tokens_of_client: tokens that each projection ever answers for one client.
        evidence: of the worker: ``guest`` for a trusted execution environment, ``simulated`` for none.
        shared: trained parts beside the adapter, such as ``classifier``, that every client is given in the clear. A
            trained part that is not named here keeps the adapter from being served.
        block_tokens: tokens of one encrypted block. A block counts whole, since the server cannot see what is in it.
        sessions: most sessions at once; each holds some 10 MB of keys.
        idle_s: seconds after which a session without a request ends.
        metrics: where its metrics page is served; see docs/metrics.md.
    """

    bind: str = "127.0.0.1:7444"
    clients: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(min_length=1)
    tokens_of_adapter: int = Field(gt=0, lt=2**53)
    tokens_of_client: int = Field(gt=0, lt=2**53)
    evidence: Literal["guest", "simulated"]
    shared: tuple[str, ...] = ()
    block_tokens: int = Field(default=64, ge=16, le=1024)
    sessions: int = Field(default=16, gt=0, le=256)
    idle_s: float = Field(default=600.0, gt=0)
    metrics: MetricsConfig = MetricsConfig()

    @field_validator("clients")
    @classmethod
    def _one_name_for_a_key(cls, clients: dict[str, str]) -> dict[str, str]:
        # Each name has a budget, so two names of one key would be two budgets of one client.
        if len(set(clients.values())) < len(clients):
            raise ValueError("two clients have one key; name each key once")
        return clients

    @model_validator(mode="after")
    def _budgets_hold_a_block(self) -> Self:
        if min(self.tokens_of_adapter, self.tokens_of_client) < self.block_tokens:
            raise ValueError(f"a budget holds no block of {self.block_tokens} tokens, and would answer nothing")
        return self


def load_settings(path: Path) -> AdapterSettings:
    """Read the file; ConfigError ``config``."""
    return validated(AdapterSettings, read_yaml(path, "config"), "docs/encrypted-adapters.md")
