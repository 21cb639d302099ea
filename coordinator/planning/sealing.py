"""Sealing: the examples of a configuration are encrypted for its policy and its virtual workers.

Only `raycloak data seal` needs it: the owner seals where the data lies, before there is a run.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from raycloak.attestation.files.private import publish, require_name
from raycloak.attestation.policy.policy import Policy, load_policy, simulated_policy
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.attestation.sealed.sealed_data import SealedHeader, Use, load_dataset_key
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.references import descriptor, part_of, require_at_hand
from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.metrics.file_errors import file_error
from raycloak.workers.inputs.descriptor import require_nobody_in_both
from raycloak.workers.inputs.sealed import seal_dataset


@dataclass(frozen=True, slots=True)
class SealTerms:
    """The purpose that a dataset is sealed for, and what its owner demands."""

    use: Use
    demand: SealedDemand | None

    @classmethod
    def of(cls, use: Use, ledger_key: bytes | None, account: str | None, least_noise: float | None) -> Self:
        """Return the terms that the options of a command name; ConfigError ``seal_demand`` if they are none."""
        given = ledger_key, account, least_noise
        if use == "evaluation":
            if given != (None, None, None):
                raise ConfigError(
                    "seal_demand",
                    "an evaluation split has no ledger, account or noise: results on it are exact.",
                    "Leave --ledger-key, --account and --least-noise out, or seal it for training.",
                )
            return cls(use, None)
        if ledger_key is None or account is None or least_noise is None:
            raise ConfigError(
                "seal_demand",
                "training data is sealed for one ledger, one account and a least noise multiplier.",
                "Give --ledger-key (from 'raycloak budget key'), --account and --least-noise.",
            )
        try:
            demand = SealedDemand(ledger_key=ledger_key, account=account, least_noise_multiplier=least_noise)
        except ValidationError:
            raise ConfigError(
                "seal_demand",
                "a ledger's key has 32 bytes, an account has a name, and the least noise multiplier is above 0.",
                "Take the key as 'raycloak budget key' gives it.",
            ) from None
        return cls(use, demand)


def seal_for(config: RunConfig, base: Path, key_file: Path, out: Path, terms: SealTerms) -> tuple[SealedHeader, Policy]:
    """Encrypt the dataset that ``config`` names for a use, for its policy and its virtual workers.

    Args:
        key_file: the data owner's key; made, mode 0600, if there is none.

    Raises:
        ConfigError, DatasetError: the dataset cannot be sealed.
    """
    use = terms.use
    part = part_of(config, use)
    if part is None or part.kind == "sealed":
        field = "dataset" if use == "training" else "evaluation.dataset"
        raise ConfigError("config", f"there is no {field} to seal.", "Name a dataset that is in the clear.")
    require_at_hand(part, "sealing")
    if config.policy is None:
        vendor = SimulatedVendor.load_or_create(home.simulator_folder())
        policy = simulated_policy(vendor, code_measurement())
    else:
        policy = load_policy(base / config.policy)
    described = descriptor(part)
    opened = described.open_slices(base)
    other = part_of(config, "evaluation" if use == "training" else "training")
    if described.unit is not None and other is not None and other.unit is not None and other.kind != "sealed":
        # Here, where both are in the clear: sealed data has no names of its units.
        require_nobody_in_both(opened.units, descriptor(other).open_slices(base).units, described.unit)
    if out.exists():  # Checked before a key is made that would open nothing.
        raise DatasetError("dataset_unreadable", f"cannot write {out}: it already exists.", "Name a new folder.")
    require_name(key_file, "dataset_key")
    try:
        is_new = publish(key_file, secrets.token_bytes(32).hex().encode() + b"\n")
    except OSError as error:
        raise file_error("dataset_key", "write", key_file, error) from None
    try:
        owner = load_dataset_key(key_file)
        units = None
        # Those of an evaluation split are named for the check alone: its results are exact, and protect none.
        if use == "training" and described.unit is not None and opened.units is not None:
            units = described.unit, opened.units
        to_seal = opened.examples, config.slices, policy.digest(), owner, out, use, terms.demand
        header = seal_dataset(*to_seal, units)
        return header, policy
    except BaseException:
        if is_new:
            key_file.unlink()
        raise
