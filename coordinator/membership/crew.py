"""The crew: the first workers and aggregators of a run, started before anything else, and the ids of all members.

It imports little, so that the processes are on their way while the driver still loads the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycloak.coordinator.cluster.backend import Backend
from raycloak.coordinator.cluster.remote import AggregatorActor, WorkerActor
from raycloak.coordinator.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Crew:
    """The first members, whose processes have been started but may not be up yet.

    Attributes:
        workers: by member id.
        aggregators: in range order.
    """

    workers: Mapping[str, WorkerActor]
    aggregators: Sequence[AggregatorActor]


def worker_id(serial: int) -> str:
    """Return the member id of the run's worker number ``serial``."""
    return f"worker-{serial}"


def aggregator_id(index: int, serial: int) -> str:
    """Return the member id of the run's aggregator number ``serial``, which owns range ``index``."""
    return f"aggregator-{index}-{serial}"


def start_crew(backend: Backend, config: RunConfig) -> Crew:
    """Start ``num_workers`` workers and the first aggregators, and wait for none of them.

    Raises:
        ConfigError: ``unplaceable`` if there is no room for them.
    """
    names = [worker_id(serial) for serial in range(config.num_workers)]
    workers = {name: backend.start_worker(name) for name in names}
    # Workers first, since they have to open the data. Aggregators are needed later, so they start meanwhile.
    aggregators = [backend.start_aggregator(aggregator_id(index, index)) for index in range(config.first_aggregators)]
    return Crew(workers, aggregators)
