"""The trust file: all that an auditor believes before looking at a run. It comes over another channel than the run.

Nothing in it is ever read from beside a log or out of a bundle. A bundle that brings its own keys proves nothing.
"""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationError

from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.core.messages import Message
from raycloak.attestation.files.whole import whole_file
from raycloak.attestation.policy.policy import Policy
from raycloak.attestation.sealed.package_keys import TrustStore
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error


class Trust(Message):
    """The keys and rules that an auditor trusts.

    Attributes:
        orchestrators: owners of evidence logs. Each run has its own, since the keys derive from the run's secret.
        ledger: raw Ed25519 key that the site's ledger has or had.
        signers: of packages and bundles.
        policy: what evidence to accept, with the roots of its vendors.
    """

    DOMAIN: ClassVar[str] = "raycloak/trust/v1"

    format: Literal["raycloak trust 1"] = "raycloak trust 1"
    orchestrators: tuple[SignerPublic, ...] = Field(min_length=1)
    ledger: bytes = Field(min_length=32, max_length=32)
    signers: TrustStore
    policy: Policy

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a trust file; ConfigError ``trust_file`` if it cannot be read or is none."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise file_error("trust_file", "read", path, error) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(each) for each in first["loc"]) or "the document"
            raise ConfigError(
                "trust_file", f"{path}: {field}: {first['msg']}.", "The site makes one: raycloak trust RUN_DIR."
            ) from None

    def save(self, path: Path) -> None:
        """Write a new trust file; ConfigError ``trust_exists``, or ``trust_file`` if it cannot be written."""
        if path.exists():
            raise ConfigError("trust_exists", f"{path} already exists.", "Choose another name, or remove it.")
        try:
            with whole_file(path) as file:
                file.write(self.model_dump_json(indent=2).encode() + b"\n")
        except OSError as error:
            raise file_error("trust_file", "write", path, error) from None
