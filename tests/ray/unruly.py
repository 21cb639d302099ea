"""A run on Ray with one worker that no policy accepts, for which a day passes and one worker is revoked."""

import json
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycloak.attestation.orchestrator.admissions import RENEWED_AFTER
from raycloak.attestation.policy.policy import DEFAULT_LIFETIME_S
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.cluster.actors import NodeEvidenceSource, kill_all, start_platforms
from raycloak.coordinator.membership.members import Timer
from raycloak.metrics.errors import RunFailedError
from tests.ray.aged import PASSED
from tests.ray.relayed import AgedOrchestratorActor
from tests.ray.watching import Watching

BAD = "worker-4"
AGED_S = int(DEFAULT_LIFETIME_S * RENEWED_AFTER) + 60
"""Evidence is to be renewed by then, and is still valid."""


class OneBad(Watching):
    """Its fifth worker is on a platform of another vendor than the policy knows, and nobody can be started later."""

    def start_worker(self, member_id):
        if int(member_id.removeprefix("worker-")) > int(BAD.removeprefix("worker-")):
            raise RunFailedError("unplaceable", f"there is no room for {member_id}")
        if member_id != BAD:
            return super().start_worker(member_id)
        platforms = start_platforms(SimulatedVendor.create())
        sources = types.SimpleNamespace(source=lambda: NodeEvidenceSource(platforms), gpus_per_worker=0)
        honest, self._platforms = self._platforms, sources
        try:
            return super().start_worker(member_id)
        finally:
            self._platforms = honest
            self.strangers = platforms.values()

    def close(self):
        kill_all(self.strangers)
        super().close()


class Passing:
    """A time of orchestrator and driver that passes when the test says so."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / PASSED
        self._file.write_text("0")

    def let_pass(self, seconds: int) -> None:
        """Let so much time pass."""
        self._file.write_text(str(seconds))

    def timer(self) -> Timer:
        """Return the driver's timer."""
        return Timer(now=lambda: time.monotonic() + int(self._file.read_text()))


@contextmanager
def unruly(home: Path) -> Iterator[Passing]:
    """Give every trainer `OneBad` for its backend meanwhile, and yield the time."""
    passing = Passing(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raycloak.coordinator.runs.ray_session.RayBackend", OneBad)
        patch.setattr("raycloak.coordinator.cluster.ray_control.OrchestratorActor", AgedOrchestratorActor)
        patch.setattr("raycloak.coordinator.training.phases.Timer", passing.timer)
        yield passing


def revoke(run_dir: Path, member_id: str) -> None:
    """Revoke by the command, in a process of its own."""
    command = [sys.executable, "-m", "raycloak", "attest", "revoke", str(run_dir), "--member", member_id, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["name"] == member_id
