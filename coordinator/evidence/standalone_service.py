"""A standalone evidence service: an orchestrator without a cluster. It attests members and gives them their keys."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from raycloak.attestation.collateral.files import load_collateral
from raycloak.attestation.collateral.keeper import CollateralKeeper, CollateralRefresh
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.evidence import CollateralBundle
from raycloak.attestation.core.messages import parse_stored
from raycloak.attestation.files.whole import write_whole
from raycloak.attestation.files.yaml_reader import read_yaml
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import KeyContract
from raycloak.attestation.keys.run_secret import load_secret, run_id_of
from raycloak.attestation.orchestrator.hosting import AnyHosting, StaticHosting
from raycloak.attestation.orchestrator.orchestrator import OpenRun, RunSession, open_run
from raycloak.attestation.orchestrator.peer_desk import PeerDesk
from raycloak.attestation.orchestrator.run_terms import RunTerms
from raycloak.attestation.policy.policy import Policy, load_policy, simulated_policy
from raycloak.attestation.sealed.sealed_data import SealedSource, Use
from raycloak.attestation.service.fair_lock import Turn
from raycloak.attestation.service.limits import ServiceLimits
from raycloak.attestation.service.server import EvidenceServer
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.config import home
from raycloak.coordinator.config.section import Section, validated
from raycloak.coordinator.config.sections import MetricsConfig
from raycloak.coordinator.planning.references import load_terms
from raycloak.metrics.collectors import ServiceCollector
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.metrics.exporter import Exporter
from raycloak.metrics.file_errors import file_error
from raycloak.metrics.server import MetricsServer
from raycloak.workers.terms.manifest import Manifest

SESSION = "evidence service"


class ContractConfig(Section):
    """The terms of a service that is not for a run of raycloak's own workers.

    Attributes:
        virtual_workers, epochs: the number of keys.
        known_answer: 64 hexadecimal digits that every worker must present; by default the digest of no bytes.
    """

    virtual_workers: int = Field(gt=0, le=65_536)
    epochs: int = Field(default=1, gt=0, le=65_536)
    known_answer: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = digest(b"").hex()


class SealedConfig(Section):
    """The sealed examples whose slice keys are given with the virtual-worker keys.

    Attributes:
        path: folder that ``raycloak data seal`` wrote.
        key_file: the data owner's key.
    """

    path: str
    key_file: str


class ServiceConfig(Section):
    """The file of ``raycloak attest serve``; paths are relative to it.

    Attributes:
        bind: ``host:port`` to listen on.
        run_secret: file of 64 hexadecimal digits, which all keys derive from.
        hosting: the virtual workers that each member hosts; every one is hosted once. ``any`` makes it a key service:
            any worker may have any key of the contract, and there are no rosters; see
            `raycloak.attestation.service.key_service`.
        aggregators: member ids, in range order.
        policy, collateral: files to judge evidence by. Without them, simulated evidence is accepted, which proves
            nothing about a machine. A policy that names a collateral service needs no file of collateral.
        manifest: the manifest of a run whose keys are given; or ``contract``.
        sealed, evaluation: examples to train on and to evaluate on, if they are sealed. ``sealed`` goes with a
            manifest, which must meet the demand of their owner.
        limits: limits of the service, by name.
        metrics: where its metrics page is served; see docs/metrics.md.
    """

    bind: str = "127.0.0.1:7443"
    run_secret: str
    hosting: dict[str, tuple[int, ...]] | Literal["any"]
    aggregators: tuple[str, ...] = ()
    policy: str | None = None
    collateral: str | None = None
    manifest: str | None = None
    contract: ContractConfig | None = None
    sealed: SealedConfig | None = None
    evaluation: SealedConfig | None = None
    limits: ServiceLimits = ServiceLimits()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "ServiceConfig":
        if (self.manifest is None) == (self.contract is None):
            raise ValueError("give exactly one of manifest and contract")
        if self.policy is None and self.collateral is not None:
            raise ValueError("collateral goes with a policy")
        if self.hosting == "any" and (self.contract is None or self.aggregators):
            raise ValueError("a key service (hosting: any) has a contract, and no aggregators")
        if self.hosting == "any" and (self.sealed or self.evaluation):
            raise ValueError(
                "slice keys (sealed, evaluation) go to workers that hosting names; with any, each would get all"
            )
        if self.sealed and self.manifest is None:
            raise ValueError("sealed goes with a manifest: the owner of the data makes demands of what it states")
        return self


@dataclass(frozen=True, slots=True)
class EvidenceServiceFacts:
    """The facts about a service that members and readers of its output need.

    Attributes:
        evidence: ``SIMULATED`` if the policy accepts simulated evidence.
        manifest_digest: digest of the manifest or the contract.
        contract: file with the contract, if any.
        metrics: URL of its metrics page.
        memory: that its calls take at most, and what they have.
    """

    evidence: str
    address: str
    run_id: str
    manifest_digest: bytes
    orchestrator_key: bytes
    contract: Path | None
    metrics: str
    memory: str


def load_service(path: Path) -> ServiceConfig:
    """Read the service's file; ConfigError ``config``."""
    return validated(ServiceConfig, read_yaml(path, "config"), "docs/evidence-service.md")


def start_service(config: ServiceConfig, base: Path) -> tuple[EvidenceServer, RunSession, EvidenceServiceFacts]:
    """Open the orchestrator below ``RAYCLOAK_HOME/service`` and serve it; a restart resumes its session.

    Args:
        base: folder that relative paths start from.

    Raises:
        ConfigError: a part that cannot be used, by name.
    """
    policy, collateral, keeper = _policy(config, base)
    secret = base / config.run_secret
    run_id = run_id_of(load_secret(secret))
    folder = home.service_folder()
    # A service that is started again with the same secret resumes its run.
    known = (folder / "orchestrator" / f"{run_id}.sqlite").is_file()
    run = open_run(str(folder / "orchestrator"), time.time, str(secret), run_id if known else None)
    try:
        terms = _terms(config, base, run, policy, collateral)
        count = terms.contract.key_owners
        # A key service does not decide who hosts what.
        hosting = StaticHosting.of(config.hosting, config.aggregators, count) if config.hosting != "any" else None
        # Members that the table names are kept. Others are forgotten when their evidence expires.
        lasting = () if hosting is None else (*hosting.workers, *hosting.aggregators)

        def source(sealed: SealedConfig | None, use: Use) -> SealedSource | None:
            return load_terms(base / sealed.path, base / sealed.key_file, count, use) if sealed else None

        sealed, evaluation = source(config.sealed, "training"), source(config.evaluation, "evaluation")
        session = run.begin(replace(terms, lasting=lasting, sealed=sealed, evaluation=evaluation), SESSION)
        if hosting is None:
            desk = PeerDesk(session, AnyHosting(count), attests=("worker",), keys_alone=True)
        else:
            desk = PeerDesk(session, hosting)
        # The server's calls and the refresh of collateral take turns at the orchestrator.
        turn = Turn()
        server = EvidenceServer(desk, terms.manifest_digest, config.bind, config.limits, turn)
    except BaseException:
        # Otherwise its files stay open in a process that serves nothing.
        run.close()
        raise
    page = _page(server, session, config)
    if keeper is not None:
        refresh = CollateralRefresh(keeper, session.admission.take_collateral, turn)
        # Before the service stops, because the refresh uses its orchestrator.
        server.at_stop(refresh.stop)
        refresh.start()
    contract = None
    if isinstance(terms.contract, ServiceContract):
        contract = folder / f"{run_id}.contract.json"
        write_whole(contract, terms.contract.encode() + b"\n")
    facts = EvidenceServiceFacts(
        evidence="SIMULATED" if policy.accepts_simulated else "hardware",
        address=f"{config.bind.rpartition(':')[0]}:{server.port}",
        run_id=run_id,
        manifest_digest=terms.manifest_digest,
        orchestrator_key=run.public.ed25519,
        contract=contract,
        metrics=page.url,
        memory=server.memory,
    )
    return server, session, facts


def _page(server: EvidenceServer, session: RunSession, config: ServiceConfig) -> MetricsServer:
    """Serve the metrics of ``server`` until it stops; an address that cannot be had stops it."""
    exporter = Exporter()
    exporter.add(ServiceCollector(lambda: server.figures(session.admission.collateral_ends)))
    try:
        page = MetricsServer(exporter.registry, config.metrics.bind)
    except ConfigError:
        server.stop()
        session.run.close()
        raise

    def close() -> None:
        # Of a failure, Prometheus sees nothing but the last page.
        if server.failure is not None:
            page.await_reader()
        page.close()

    server.at_stop(close)
    return page


def _policy(config: ServiceConfig, base: Path) -> tuple[Policy, CollateralBundle, CollateralKeeper | None]:
    if config.policy is None:
        vendor = SimulatedVendor.load_or_create(home.simulator_folder())
        return simulated_policy(vendor, code_measurement()), vendor.collateral(int(time.time())), None
    given = load_collateral(base / config.collateral) if config.collateral is not None else None
    policy = load_policy(base / config.policy)
    if policy.collateral_service is not None:
        keeper = CollateralKeeper(policy, home.collateral_folder(), given)
        return policy, keeper.current(), keeper
    if given is None:
        raise ConfigError(
            "collateral",
            "there is no collateral to judge evidence with, and the policy names no collateral service.",
            "Name a file in 'collateral', or a collateral_service in the policy.",
        )
    return policy, given, None


def _terms(
    config: ServiceConfig, base: Path, run: OpenRun, policy: Policy, collateral: CollateralBundle
) -> RunTerms[KeyContract]:
    """Return the terms of the service's subject: a run by its manifest, or a contract of its own."""
    run_id, key = run.run_id, run.public
    if config.manifest is not None:
        manifest = _manifest(base / config.manifest)
        stated = (manifest.run_id, manifest.orchestrator_key, manifest.policy_digest)
        if stated != (run_id, key.ed25519, policy.digest()):
            raise ConfigError(
                "manifest",
                "the manifest names another run secret or another policy than this file.",
                "Name the secret and the policy of that run.",
            )
        return RunTerms(manifest, policy, collateral)
    assert config.contract is not None  # the configuration has one of the two
    answer, count = bytes.fromhex(config.contract.known_answer), config.contract.virtual_workers
    unkeyed = ServiceContract(
        run_id=run_id,
        orchestrator_key=key.ed25519,
        orchestrator_ml_dsa=key.ml_dsa_65,
        policy_digest=policy.digest(),
        virtual_workers=count,
        known_answer=answer,
        key_commitments=(),
    )
    contract = unkeyed.with_keys(run.key_commitments(unkeyed.key_context, count, config.contract.epochs))
    # At a key service, a worker that died before its release makes room on its machine.
    return RunTerms(contract, policy, collateral, displaces=config.hosting == "any")


def _manifest(path: Path) -> Manifest:
    try:
        return parse_stored(Manifest, path.read_bytes().strip(), str(path))
    except OSError as error:
        raise file_error("manifest", "read", path, error) from None
    except ProtocolError:
        raise ConfigError(
            "manifest", f"{path} is not the manifest of a run.", "It is manifest.json in a run directory."
        ) from None
