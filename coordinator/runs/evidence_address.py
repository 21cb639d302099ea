"""The address of a run's evidence service, for readers who check its evidence while it is in progress."""

from pathlib import Path
from typing import ClassVar

from raycloak.attestation.core.evidence import Bytes32
from raycloak.attestation.core.messages import Message, parse, parse_stored
from raycloak.attestation.files.whole import write_whole
from raycloak.coordinator.cluster.control import Control
from raycloak.metrics.errors import ConfigError, ProtocolError
from raycloak.workers.terms.manifest import Manifest

FILE = "service.json"


class RunService(Message):
    """The evidence service of a run, as its folder names it.

    Attributes:
        address: ``host:port``; it answers while the run is in progress.
        evidence: class of the members' evidence, or ``SIMULATED``.
        manifest_digest, orchestrator_key: as in the run's manifest; a client should take them from there.
    """

    DOMAIN: ClassVar[str] = "raycloak/run-service/v1"

    address: str
    evidence: str
    manifest_digest: Bytes32
    orchestrator_key: Bytes32


def announce(control: Control, manifest: Manifest, evidence_class: str, folder: Path) -> RunService | None:
    """Write ``service.json`` if the orchestrator of a run that has begun serves; returns what it says."""
    address = control.orchestrator.service_address()
    if address is None:
        return None
    service = RunService(
        address=address,
        evidence="SIMULATED" if "simulated" in evidence_class else evidence_class,
        manifest_digest=manifest.digest(),
        orchestrator_key=manifest.orchestrator_key,
    )
    write_whole(folder / FILE, service.encode() + b"\n")
    return service


def served_at(folder: Path) -> str:
    """Return the address in ``service.json``; ConfigError ``not_served`` if there is none."""
    try:
        return parse(RunService, (folder / FILE).read_bytes().strip()).address
    except (OSError, ProtocolError):
        raise ConfigError(
            "not_served",
            f"{folder} does not say where its run serves evidence.",
            "Set attestation.bind in the run's configuration, or give --address.",
        ) from None


def manifest_in(folder: Path) -> Manifest:
    """Return the manifest of the run of ``folder``; ConfigError ``not_a_run`` if none can be read."""
    try:
        return parse_stored(Manifest, (folder / "manifest.json").read_bytes().strip(), str(folder / "manifest.json"))
    except (OSError, ProtocolError):
        raise ConfigError(
            "not_a_run",
            f"{folder} has no manifest.json that can be read.",
            "Name a run directory that has begun to train.",
        ) from None
