"""Sealed data of a run: sealing what a configuration names, and what the orchestrator is told of it."""

import secrets
from pathlib import Path

from attestation.policy import Policy, load_policy, simulated_policy
from attestation.private_files import publish
from attestation.sealed_data import SealedHeader, SealedTerms, load_dataset_key
from attestation.simulator import SimulatedVendor, code_measurement
from coordinator import state
from coordinator.config import RunConfig
from coordinator.plan_command import descriptor
from metrics.errors import ConfigError
from workers.sealed_dataset import seal


def sealed_terms(config: RunConfig, base: Path) -> SealedTerms | None:
    """What the orchestrator needs of a run's sealed dataset; None if the run's data is not sealed.

    Raises:
        ConfigError: ``sealed_data`` if there is none at its path, or it has another number of slices than the run.
    """
    dataset = config.dataset
    if dataset is None or dataset.kind != "sealed":
        return None
    assert dataset.path is not None, "a sealed dataset has a path"
    assert dataset.key_file is not None, "a sealed dataset has a key"
    return load_terms(base / dataset.path, base / dataset.key_file, config.virtual_workers)


def load_terms(folder: Path, key_file: Path, virtual_workers: int) -> SealedTerms:
    """The terms of the sealed dataset in ``folder``; ConfigError ``sealed_data`` as :func:`sealed_terms`."""
    header = SealedHeader.load(folder)
    if header.virtual_workers != virtual_workers:
        raise ConfigError(
            "sealed_data",
            f"{folder} is sealed in {header.virtual_workers} slices, and there are {virtual_workers} virtual workers.",
            "Seal it with the virtual_workers of the run.",
        )
    return SealedTerms(header, str(key_file.resolve()))


def seal_for(config: RunConfig, base: Path, key_file: Path, out: Path) -> tuple[SealedHeader, Policy]:
    """Encrypt the dataset that ``config`` names for the policy and the virtual workers that it names.

    Args:
        key_file: the data owner's key; made, mode 0600, if there is none.

    Raises:
        ConfigError, DatasetError: what keeps it from being sealed.
    """
    if config.dataset is None or config.dataset.kind == "sealed":
        raise ConfigError("config", "there is no dataset to seal.", "Name one that is not sealed in the configuration.")
    if config.policy is None:
        vendor = SimulatedVendor.load_or_create(state.simulator_folder())
        policy = simulated_policy(vendor, code_measurement())
    else:
        policy = load_policy(base / config.policy)
    dataset = descriptor(config.dataset).open(base)
    try:
        publish(key_file, secrets.token_bytes(32).hex().encode() + b"\n")
    except OSError as error:
        raise ConfigError("dataset_key", f"cannot write {key_file}: {error.strerror}.") from None
    return seal(dataset, config.virtual_workers, policy.digest(), load_dataset_key(key_file), out), policy
