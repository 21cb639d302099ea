"""Launch: every process of a session on Ray, started at once.

A process that starts mostly imports, for seconds of processor time. So no process waits for another to start: a value
that one needs from another is awaited where it is used.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.hybrid_signature import SignerPublic
from raycloak.attestation.orchestrator.revocations import count_revocations
from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.cluster.actors import GpuSamplers, Platforms, shared_capability
from raycloak.coordinator.cluster.control import Control
from raycloak.coordinator.cluster.placement import Placement
from raycloak.coordinator.cluster.ray_backend import EvidenceSources, RayBackend
from raycloak.coordinator.cluster.ray_control import RayControl
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.evidence.sources import Guests, collateral_of, configured_policy
from raycloak.coordinator.membership.crew import Crew, start_crew
from raycloak.coordinator.training.assignment import Session
from raycloak.coordinator.vaults.platforms import MachinePlatform
from raycloak.metrics.errors import ConfigError
from raycloak.workers.gradients.environment import stated_capability
from raycloak.workers.terms.manifest import NumericsClass


@dataclass(frozen=True, slots=True)
class Launched:
    """The processes of a session; none of them needs to be there yet.

    Attributes:
        control: of ledger and orchestrator.
        collateral: the newest there is.
        began: on the monotonic clock.
    """

    control: RayControl
    policy: Policy
    collateral: Callable[[], CollateralBundle]
    sources: EvidenceSources
    backend: RayBackend
    crew: Crew
    samplers: GpuSamplers
    began: float

    def session(self, run_id: str, orchestrator_key: SignerPublic, control: Control) -> Session:
        """Wait until evidence can be had, and return the session that a coordinator needs."""
        self.sources.wait()
        return Session(
            run_id=run_id,
            orchestrator_key=orchestrator_key,
            backend=self.backend,
            control=control,
            policy=self.policy,
            collateral=self.collateral(),
            collateral_now=self.collateral,
            revocations=(
                control.orchestrator.revocations
                if control.is_apart
                else partial(count_revocations, home.orchestrator_file(run_id))
            ),
            crew=self.crew,
        )


def launch(
    stack: ExitStack,
    config: RunConfig,
    base: Path,
    placement: Placement,
    bind: str | None,
    recorded: NumericsClass | None,
) -> Launched:
    """Start what a session of ``config`` needs; ``stack`` ends it.

    Args:
        base: folder that relative paths start from.
        bind: where the orchestrator serves, if it does.
        recorded: class of the run that is resumed or replayed; a new one chooses its own.

    Raises:
        ConfigError: what is wrong with policy or collateral; ``boundary_required``; ``unplaceable`` if there is no room
            for the workers.
    """
    began = time.monotonic()
    policy = configured_policy(config.policy, config.collateral, base)
    if policy is not None and policy.require_boundary is not None and config.boundary is None:
        raise ConfigError(
            "boundary_required",
            "the policy demands vaults of the machines, and the run names none.",
            "Name their sockets in boundary; see docs/boundary.md.",
        )
    collateral = collateral_of(policy, config.collateral, base)
    sources: EvidenceSources = Guests(policy.gpus_per_worker if policy else 0)
    present: Mapping[str, Any] = {}
    if (policy is None or policy.accepts_simulated) and config.boundary is not None:
        platform = MachinePlatform(config.boundary.of("platform"))
        published = platform.published()
        policy = policy or simulated_policy(platform, code_measurement())
        collateral = collateral or (lambda: published)
    elif policy is None or policy.accepts_simulated:
        vendor = SimulatedVendor.load_or_create(home.simulator_folder())
        sources = platforms = Platforms(vendor)
        stack.callback(platforms.close)
        present = platforms.handles
        policy = policy or simulated_policy(vendor, code_measurement())
        made = vendor.collateral(int(time.time()))
        collateral = collateral or (lambda: made)
    assert collateral is not None, "hardware has collateral"
    ledger = config.ledger
    folder = str(home.home() / "orchestrator")
    url = ledger.url or home.ledger_url()
    control = RayControl(url, folder, ledger.witness, bind, sources.source(), config.boundary)
    # Registered as soon as it runs, so that a later failure ends these processes too.
    stack.callback(control.close)
    # Its groups, should anything fail before the backend has them.
    stack.callback(placement.close)
    backend = RayBackend(
        sources,
        placement,
        cpu_capability=_capability(config, placement, present, recorded),
        threads=config.threads_per_worker,
        aggregators=config.first_aggregators,
        boundary=config.boundary,
    )
    stack.callback(backend.close)
    crew = start_crew(backend, config)
    samplers = GpuSamplers(present)
    stack.callback(samplers.close)
    return Launched(control, policy, collateral, sources, backend, crew, samplers, began)


def _capability(
    config: RunConfig, placement: Placement, present: Mapping[str, Any], recorded: NumericsClass | None
) -> str:
    """Return the instruction set that all members keep to.

    Guarantee: a run that is resumed or replayed keeps the one that it began with, whatever its nodes have now.
    """
    if config.cpu_capability != "auto":
        return config.cpu_capability
    if recorded is not None:
        return stated_capability(recorded.cpu_capability)
    # A cluster may start nodes for the workers, which count as well.
    placement.reserve()
    return shared_capability(present)
