"""A data owner's client as the pace of a run, as tests of whole runs on sent data need it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.client.sent_batches import DataKeys, DataTerms, SentRun
from raycloak.coordinator.config import home
from raycloak.coordinator.training.pace import Pace
from tests.owner import Owner
from tests.protocol import config

SENT: dict[str, Any] = {
    "kind": "sent",
    "shape": [6],
    "classes": 3,
    "max_participations": 2,
    "max_examples_per_step": 20,
}
PRIVATE = {"noise_multiplier": 2.0, "epsilon_cap": 20.0}
MARK = np.float32(1234.5678)
"""A value of a private example, to be searched for in what passes."""


def examples(step: int, count: int = 12) -> dict[str, Any]:
    """Return a batch; no two steps have an example in common."""
    generator = np.random.default_rng(step)
    features = generator.normal(size=(count, 6)).astype(np.float32)
    features[0, 0] = MARK
    return {
        "example_ids": [f"patient-{step}-{i}" for i in range(count)],
        "features": features,
        "labels": generator.integers(0, 3, count),
    }


def fields(owner: Owner, **changes: Any) -> dict[str, Any]:
    """Return the fields of a configuration that trains on sent data."""
    return {"dataset": SENT, "key_service": owner.section(), "dp_config": PRIVATE, "expected_batch_size": 12} | changes


def data_keys(owner: Owner, ledger_key: bytes, account: str, folder: Path, **terms: Any) -> DataKeys:
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    demanded = DataTerms(
        **{"least_noise_multiplier": 2.0, "most_participations": 2} | terms, account=account, ledger_key=ledger_key
    )
    return DataKeys(folder / "own.hex", owner.file, simulated_policy(vendor, code_measurement()), demanded)


@dataclass
class Client(Pace):
    """The owner's client as a pace: it seals a step's batches when the run asks for them, in files that stay."""

    owner: Owner
    folder: Path
    to_send: dict[int, list[dict[str, Any]]]
    files: dict[int, tuple[Path, ...]] = field(default_factory=dict)
    run: SentRun | None = None

    def admit(self, training: Any) -> bool:
        if self.run is None:
            manifest = training.runner.context.manifest
            keys = data_keys(self.owner, manifest.ledger_key, manifest.account, self.folder)
            self.run = keys.accept(manifest.encode(), config(**fields(self.owner)).dataset)
        return True

    def batches(self, step: int) -> tuple[Path, ...]:
        if step not in self.files and step in self.to_send:
            assert self.run is not None
            first, paths = 0, []
            for number, batch in enumerate(self.to_send[step]):
                sealed = self.run.seal_batch(batch, client_id="c", step=step, number=number, first=first)
                first += sealed.examples
                paths.append(self.folder / f"{step}-{number}-{sealed.sha256.hex()[:8]}.batch")
                paths[-1].write_bytes(sealed.content)
            self.files[step] = tuple(paths)
        return self.files.get(step, ())
