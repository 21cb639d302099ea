"""The additions of the wired classes to the plain ones, without a cluster."""

import os
import signal
import time

import pytest

from raycloak.coordinator.cluster.aggregator_actor import MaskedAggregatorActor
from raycloak.coordinator.cluster.ledger_actor import LedgerActor
from raycloak.coordinator.cluster.orchestrator_actor import OrchestratorActor
from raycloak.coordinator.cluster.platform_actor import NodePlatform
from raycloak.coordinator.cluster.worker_actor import TrainWorkerActor
from raycloak.workers.messages import StepReply
from raycloak.workers.train_worker import TrainWorker
from tests.private_memory import memory_is_private, open_memory


class NoSource:
    def collect(self, report_data):
        raise AssertionError("nobody asked for evidence")


@pytest.fixture
def worker(monkeypatch):
    """Yield a worker whose step is asked to end while it computes, on the second and third call."""
    calls = []

    def step(self, receipt, request, *parameters):
        calls.append(request)
        if len(calls) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return StepReply(member_id="worker-0", code="ok"), "vector"

    monkeypatch.setattr(TrainWorker, "step", step)
    before = signal.signal(signal.SIGTERM, _end)
    yield TrainWorkerActor("worker-0", NoSource(), time.time, None)
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


def test_a_spare_aggregator_holds_no_key_until_it_takes_part():
    spare = MaskedAggregatorActor(NoSource())
    assert vars(spare).keys() == {"_source"}
    spare.take_part("aggregator-0-1")
    assert spare._attester.member_id == "aggregator-0-1"


@pytest.mark.parametrize(
    "start",
    [
        lambda _: TrainWorkerActor("worker-0", NoSource(), time.time, None),
        lambda home: OrchestratorActor(str(home), time.time),
        lambda home: LedgerActor(f"sqlite:///{home / 'ledger.sqlite'}").close(),
        lambda _: MaskedAggregatorActor(NoSource()),
        lambda _: NodePlatform(),
    ],
)
def test_guarantee_an_actor_that_holds_keys_closes_its_memory_as_it_starts(start, tmp_path):
    open_memory()
    before = signal.getsignal(signal.SIGTERM)
    start(tmp_path)
    signal.signal(signal.SIGTERM, before)
    assert memory_is_private()
