"""The first members of a run: how they are called, and the start of their processes, which takes no decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.backend import Backend
from coordinator.config import RunConfig
from coordinator.remote import AggregatorActor, WorkerActor


@dataclass(frozen=True, slots=True)
class Crew:
    """Members whose processes were started.

    Attributes:
        workers: by member id.
        aggregators: in range order.
    """

    workers: Mapping[str, WorkerActor]
    aggregators: Sequence[AggregatorActor]


def worker_id(serial: int) -> str:
    """The member id of the run's worker of this number."""
    return f"worker-{serial}"


def aggregator_id(index: int, serial: int) -> str:
    """The member id of the run's aggregator of this number, for range ``index``."""
    return f"aggregator-{index}-{serial}"


def start_crew(backend: Backend, config: RunConfig) -> Crew:
    """Start ``num_workers`` workers and an aggregator per range; none of them is waited for.

    Raises:
        ConfigError: ``unplaceable`` if there is no room for them.
    """
    names = [worker_id(serial) for serial in range(config.num_workers)]
    workers = {name: backend.start_worker(name) for name in names}
    # Aggregators are needed later; their processes start while the workers open their data.
    aggregators = [backend.start_aggregator(aggregator_id(index, index)) for index in range(config.aggregators)]
    return Crew(workers, aggregators)
