"""A data owner with a key service of its own on loopback, as tests of whole runs need it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import RunKeys
from raycloak.attestation.orchestrator.orchestrator import RunSession
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.config import home
from raycloak.coordinator.config.section import validated
from raycloak.coordinator.evidence.standalone_service import ServiceConfig, start_service
from tests.protocol import VIRTUAL_WORKERS

OWN = "cd" * 32
"""The secret of the key service."""


@dataclass
class Owner:
    """A key service that runs, as its operator knows it."""

    address: str
    file: Path
    session: RunSession

    @property
    def contract(self) -> ServiceContract:
        return parse(ServiceContract, self.file.read_bytes().strip())

    def section(self, **changes: str) -> dict[str, str]:
        """Return the section of a run's configuration about it."""
        return {"address": self.address, "contract": str(self.file), **changes}

    def half(self, v: int, secret: str = OWN) -> Secret:
        """Return the half of a virtual worker's key in epoch 0."""
        contract = self.contract
        context = contract.key_context
        return RunKeys(Secret(bytes.fromhex(secret)), contract.run_id).of(context, v, 0).stream

    @property
    def log(self) -> list[tuple[str, str]]:
        """Kind and member of each decision."""
        entries = self.session.run.books.log.entries()
        return [(entry.kind, entry.content.get("member_id", "")) for entry in entries]


@contextmanager
def key_service(
    folder: Path, secret: str = OWN, listed: tuple[bytes, ...] | None = None, **contract: int
) -> Iterator[Owner]:
    """Run a key service; ``listed`` is the list of code of its policy, which is otherwise that of this home."""
    (folder / "own.hex").write_text(secret)
    raw = {"bind": "127.0.0.1:0", "run_secret": "own.hex", "hosting": "any"}
    if listed is not None:
        raw |= {"policy": "owner.yaml", "collateral": "collateral.yaml"}
        vendor = SimulatedVendor.load_or_create(home.simulator_folder())
        policy = simulated_policy(vendor, code_measurement()).model_copy(update={"code": listed})
        (folder / "owner.yaml").write_bytes(policy.encode())
        (folder / "collateral.yaml").write_text("tdx: [tdx.json]")
        (folder / "tdx.json").write_bytes(vendor.collateral(int(time.time())).tdx[0].encode())
    terms = {"virtual_workers": VIRTUAL_WORKERS, **contract}
    server, session, facts = start_service(validated(ServiceConfig, {**raw, "contract": terms}), folder)
    assert facts.contract is not None
    try:
        yield Owner(facts.address, facts.contract, session)
    finally:
        server.stop(0.2)
        session.run.close()
