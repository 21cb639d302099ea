"""References of a configuration, checked before anything starts or is charged.

A configuration refers to more than data and model: sealed examples, a key service's contract, accounts, files.
"""

from pathlib import Path

from pydantic import ValidationError

from raycloak.attestation.core.canonical import canonical_json
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.sealed.package_keys import load_recipients
from raycloak.attestation.sealed.sealed_data import SealedHeader, SealedSource, Use
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.config.sections import DatasetConfig, KeyServiceConfig
from raycloak.coordinator.ledger.location import usable_url
from raycloak.coordinator.ledger.witness import open_witness
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.descriptor import DatasetDescriptor


def preflight(config: RunConfig, base: Path) -> None:
    """Refuse a configuration that names something unusable, before anything starts or is charged.

    Guarantee: connects to nothing and writes nothing.

    Args:
        base: folder that relative paths start from.

    Raises:
        ConfigError: ``evaluation_not_public``, ``ledger_url``, ``witness``, ``recipient`` or ``key_service``.
    """
    if config.evaluation is not None:
        require_public(config.evaluation.dataset.kind, config.evaluation.dataset.public)
    if config.ledger.url is not None:
        usable_url(config.ledger.url)
    if config.ledger.witness is not None:
        open_witness(config.ledger.witness, bytes(32)).close()
    load_recipients([base / path for path in config.checkpoint.recipients])
    given_contract(config.key_service, base)


def descriptor(dataset: DatasetConfig) -> DatasetDescriptor:
    """Return the descriptor that workers open, from the configuration's section."""
    columns = [dataset.features] if isinstance(dataset.features, str) else dataset.features
    return DatasetDescriptor(**{**dataset.model_dump(exclude={"key_file"}), "features": tuple(columns)})


def given_contract(config: KeyServiceConfig | None, base: Path) -> ServiceContract | None:
    """Return the contract of the data owner's key service; None if the configuration names none.

    Args:
        base: folder that a relative path starts from.

    Raises:
        ConfigError: ``key_service`` if the file is not the contract of an evidence service.
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


def sealed_terms(config: RunConfig, base: Path, use: Use = "training") -> SealedSource | None:
    """Return the terms of a run's sealed examples for ``use``; None if there are none, or they are not sealed.

    Raises:
        ConfigError: ``sealed_data`` if there are none at their path, or they are for another use or in another number
            of slices than the run's; ``evaluation_not_public``.
    """
    dataset = part_of(config, use)
    if dataset is None or dataset.kind != "sealed":
        return None
    if use == "evaluation":
        require_public(dataset.kind, dataset.public)
    assert dataset.path is not None, "a sealed dataset has a path"
    assert dataset.key_file is not None, "a sealed dataset has a key"
    return load_terms(base / dataset.path, base / dataset.key_file, config.virtual_workers, use)


def evaluation_folder(config: RunConfig) -> str | None:
    """Return the folder of the sealed evaluation split; None if the run has none."""
    dataset = part_of(config, "evaluation")
    return dataset.path if dataset is not None and dataset.kind == "sealed" else None


def evaluation_form(terms: SealedSource) -> DatasetForm:
    """Return the outline of a sealed split, from its header."""
    return DatasetForm.model_validate_json(canonical_json(terms.header.form))


def load_terms(folder: Path, key_file: Path, virtual_workers: int, use: Use) -> SealedSource:
    """Return the terms of the sealed dataset in ``folder``; ConfigError ``sealed_data`` as :func:`sealed_terms`."""
    header = SealedHeader.load(folder)
    header.require_use(use)
    if header.virtual_workers != virtual_workers:
        raise ConfigError(
            "sealed_data",
            f"{folder} is sealed in {header.virtual_workers} slices, and there are {virtual_workers} virtual workers.",
            "Seal it with the virtual_workers of the run.",
        )
    return SealedSource(header, str(key_file.resolve()))


def require_public(kind: str, public: bool) -> None:
    """Require that results on a dataset of this kind may be public; ConfigError ``evaluation_not_public``."""
    if not public:
        what = "results on it" if kind == "sealed" else "its examples"
        raise ConfigError(
            "evaluation_not_public",
            "the evaluation dataset is not declared public, so results on it would leak.",
            f"Set evaluation.dataset.public: true if {what} need no protection.",
        )


def part_of(config: RunConfig, use: Use) -> DatasetConfig | None:
    """Return the dataset that ``config`` names for ``use``."""
    if use == "training":
        return config.dataset
    return config.evaluation.dataset if config.evaluation else None
