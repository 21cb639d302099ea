"""How ledger and orchestrator are ended: by Ray while it can, by a signal where it cannot."""

from types import SimpleNamespace

import pytest

from raycloak.coordinator.cluster import ray_control
from raycloak.coordinator.cluster.ray_control import RayControl
from raycloak.coordinator.cluster.remote import Actor


class Process:
    """A process that lives for some looks after Ray was asked to end it, and records a signal."""

    def __init__(self, looks: int) -> None:
        self.looks, self.asked, self.killed = looks, False, False

    def is_alive(self) -> bool:
        self.looks -= self.asked
        return self.looks > 0

    def kill(self) -> None:
        self.killed = self.is_alive()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the actors that Ray was asked to end."""
    asked: list[str] = []

    def kill(handle: SimpleNamespace) -> None:
        asked.append(handle.name)
        handle.process.asked = True

    monkeypatch.setattr(ray_control.ray, "kill", kill)
    return asked


def control(**processes: Process) -> RayControl:
    built = RayControl.__new__(RayControl)
    built.actors = {
        role: Actor(f"{role}-1", SimpleNamespace(name=role, process=process)) for role, process in processes.items()
    }
    built._processes = {f"{role}-1": [process] for role, process in processes.items()}
    return built


def test_guarantee_an_actor_that_is_well_is_ended_by_ray_and_by_no_signal(ended: list[str]):
    """A signal makes Ray tell the user of a finished run that a worker was killed, perhaps for want of memory."""
    ledger, orchestrator = Process(3), Process(1)
    control(ledger=ledger, orchestrator=orchestrator).close()
    assert ended[:2] == ["ledger", "orchestrator"]
    assert not ledger.killed
    assert not orchestrator.killed


def test_an_actor_that_ray_does_not_end_is_ended_by_a_signal(ended: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_control, "END_S", 0.05)
    stopped, well = Process(10**9), Process(1)
    control(ledger=stopped, orchestrator=well).close()
    assert stopped.killed
    assert not well.killed


def test_one_that_has_to_go_at_once_is_ended_by_a_signal(ended: list[str]):
    ledger = Process(10**9)
    built = control(ledger=ledger)
    built.stop(built.actors["ledger"])
    assert ledger.killed
