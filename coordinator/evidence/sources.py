"""The sources of a run's evidence, and the policy and collateral that it is judged by."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.attester.attester import CpuEvidence
from raycloak.attestation.collateral.files import load_collateral
from raycloak.attestation.collateral.keeper import CollateralKeeper
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.policy.policy import Policy, load_policy
from raycloak.attestation.simulators.tdx_platform import SimulatedPlatform
from raycloak.attestation.simulators.tdx_vendor import code_measurement
from raycloak.coordinator.config import home
from raycloak.metrics.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalPlatform:
    """The evidence source of actors that are in one process: SIMULATED, so it proves nothing about a machine."""

    platform: SimulatedPlatform

    def collect(self, report_data: bytes) -> CpuEvidence:
        """Return simulated evidence for ``report_data``."""
        return CpuEvidence(self.platform.quote(report_data, code_measurement()))


@dataclass(frozen=True, slots=True)
class Guests:
    """The nodes of a cluster whose workers run in such guests.

    Args:
        gpus_per_worker: number of confidential GPUs of each worker.
    """

    gpus_per_worker: int = 0

    def source(self) -> None:
        """Return None: a vault asks the guest that it runs in itself."""

    def wait(self) -> None:
        """Do nothing: a guest's kernel has its keys."""


def configured_policy(file: str | None, collateral: str | None, base: Path) -> Policy | None:
    """Load the policy of a run, relative to ``base``; None if it names none and so admits SIMULATED evidence.

    Guarantee: reads the files that the configuration names, and fetches nothing.

    Raises:
        ConfigError: as `raycloak.attestation.policy.policy.load_policy` and :func:`given_collateral`.
    """
    policy = load_policy(base / file) if file is not None else None
    given_collateral(policy, collateral, base)
    return policy


def collateral_of(policy: Policy | None, file: str | None, base: Path) -> Callable[[], CollateralBundle] | None:
    """Return a function that tells the collateral to judge evidence under ``policy`` with; None for simulated evidence.

    If the policy names a collateral service, the function asks it when that is due. A file adds what it does not
    publish.

    Raises:
        ConfigError: as :func:`given_collateral`. The function raises as `CollateralKeeper.current`.
    """
    collateral = given_collateral(policy, file, base)
    if policy is not None and policy.collateral_service is not None:
        return CollateralKeeper(policy, home.collateral_folder(), collateral).current
    return None if collateral is None else lambda: collateral


def given_collateral(policy: Policy | None, file: str | None, base: Path) -> CollateralBundle | None:
    """Load the collateral files with which the evidence of a run under ``policy`` is judged.

    Args:
        policy: None stands for simulated evidence.
        file: the file that the configuration names, relative to ``base``.

    Returns: None if the evidence is simulated, whose vendor makes its own, or if a service supplies all of it.

    Raises:
        ConfigError: ``collateral`` if it is missing for hardware, given for simulated evidence, or cannot be read.
    """
    if policy is not None and policy.collateral_service is not None:
        return load_collateral(base / file) if file is not None else None
    if policy is None or policy.accepts_simulated:
        if file is not None:
            raise ConfigError(
                "collateral",
                "the policy accepts simulated evidence, whose collateral the simulator makes itself.",
                "Leave 'collateral' out, or name a policy that accepts hardware only.",
            )
        return None
    if file is None:
        raise ConfigError(
            "collateral",
            "the policy accepts hardware only, and there is no collateral to judge its evidence with.",
            "Name a file in 'collateral', or a collateral_service in the policy; see docs/attestation.md.",
        )
    return load_collateral(base / file)
