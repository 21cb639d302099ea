"""The key service that a run's configuration names: its contract, read before the manifest is built."""

from pathlib import Path

from pydantic import ValidationError

from attestation.messages import parse
from attestation.service_contract import ServiceContract
from coordinator.config_sections import KeyServiceConfig
from metrics.errors import ConfigError, ProtocolError
from metrics.file_errors import file_error


def given_contract(config: KeyServiceConfig | None, base: Path) -> ServiceContract | None:
    """The contract of the data owner's key service; None if the configuration names none.

    Args:
        base: folder that a relative path starts from.

    Raises:
        ConfigError: ``key_service`` if the file is no contract of an evidence service.
    """
    if config is None:
        return None
    path = base / config.contract
    try:
        contract = parse(ServiceContract, path.read_bytes().strip())
        _ = contract.orchestrator
    except OSError as error:
        raise file_error("key_service", "read", path, error) from None
    except (ProtocolError, ValidationError):
        raise ConfigError(
            "key_service",
            f"{path} is not the contract of an evidence service.",
            "The owner of the data gets it from 'raycloak attest serve' and hands it over.",
        ) from None
    return contract
