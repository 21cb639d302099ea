"""What the vaults of the four roles add to their plain classes, without a process."""

import os
import signal

import pytest

from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.cluster.platform_actor import NodePlatform
from raycloak.coordinator.vaults import aggregator_vault, ledger_vault, openings, orchestrator_vault, worker_vault
from raycloak.coordinator.vaults.settings import AggregatorSettings, require_apart
from raycloak.metrics.errors import RefusedError
from raycloak.workers.messages import StepReply
from raycloak.workers.train_worker import TrainWorker
from tests.private_memory import memory_is_private, open_memory


class Inside:
    """The view of a vault that nobody tells anything.

    Args:
        settings: of a vault of the machine.
    """

    def __init__(self, settings=None):
        self.settings = settings
        self.leaving = False

    def is_cancelled(self):
        return False

    def is_leaving(self):
        return self.leaving

    def leave(self):
        self.leaving = True

    def ask_relay(self, *_):
        raise AssertionError("nobody asked for evidence")


@pytest.fixture
def worker(monkeypatch):
    """Yield a worker whose process is asked to end while it computes, in the second and third step."""
    calls = []

    def step(self, receipt, request, *parameters):
        calls.append(request)
        if len(calls) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return StepReply(member_id="worker-0", code="ok"), "vector"

    monkeypatch.setattr(TrainWorker, "step", step)
    before = signal.signal(signal.SIGTERM, _end)
    opening = openings.WorkerOpening(member_id="worker-0", simulated=True, gpus=0, cpus=1)
    yield worker_vault.WorkerVault(opening, Inside())
    signal.signal(signal.SIGTERM, before)


class _EndedError(Exception):
    pass


def _end(*_):
    raise _EndedError


def test_a_worker_asked_to_end_finishes_its_step_and_says_so_and_the_second_signal_ends_it(worker):
    reply, vector = worker.step(None, None)
    assert reply == StepReply(member_id="worker-0", code="ok")
    left, vector = worker.step(None, None)
    assert left == reply.model_copy(update={"leaving": True})
    assert vector == "vector"
    with pytest.raises(_EndedError):
        worker.step(None, None)


def test_a_worker_that_its_relay_tells_to_leave_says_so(worker):
    worker._inside.leave()
    left, _ = worker.step(None, None)
    assert left.leaving


def test_a_spare_aggregator_holds_no_key_until_it_takes_part():
    spare = aggregator_vault.AggregatorVault(openings.AggregatorOpening(simulated=True, cpus=1), Inside())
    assert vars(spare).keys() == {"_of_vault"}
    spare.take_part("aggregator-0-1")
    assert spare._attester.member_id == "aggregator-0-1"


def test_a_vault_has_threads_for_the_cpus_of_its_opening_and_no_more_than_it_may_use(monkeypatch):
    """Whatever a relay says: a vault of the machine does not trust it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    for cpus, threads in ((-1, 1), (0, 1), (1, 1), (2, 2), (3, 3), (10**9, 3)):
        spare = aggregator_vault.AggregatorVault(openings.AggregatorOpening(simulated=True, cpus=cpus), Inside())
        spare.take_part("aggregator-0-1")
        assert spare._threads.count == threads
        before = signal.getsignal(signal.SIGTERM)
        opening = openings.WorkerOpening(member_id="worker-0", simulated=True, gpus=0, cpus=cpus)
        worker = worker_vault.WorkerVault(opening, Inside())
        signal.signal(signal.SIGTERM, before)
        assert worker._word_threads.count == threads


def test_ledger_and_orchestrator_open_their_files(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    ledger = ledger_vault.LedgerVault(openings.LedgerOpening(url=url, create=True, witness=None), Inside())
    ledger.opened()
    ledger.close()
    opening = openings.OrchestratorOpening(state_directory=str(tmp_path / "o"), bind=None, simulated=True)
    orchestrator = orchestrator_vault.OrchestratorVault(opening, Inside())
    assert len(orchestrator.open_run(None)[0]) > 0
    orchestrator.close()


def test_a_child_serves_no_run_whose_policy_demands_a_boundary():
    policy = simulated_policy(SimulatedVendor.create(), bytes(48))
    demanding = policy.model_copy(update={"require_boundary": ()})
    require_apart(None, policy)
    with pytest.raises(RefusedError, match="boundary_required"):
        require_apart(None, demanding)
    require_apart(AggregatorSettings(socket="/run/vault", peer="0"), demanding)


def test_guarantee_an_actor_that_holds_keys_closes_its_memory_as_it_starts():
    """The simulated platform, the one actor that is no relay and has a key."""
    open_memory()
    NodePlatform()
    assert memory_is_private()
