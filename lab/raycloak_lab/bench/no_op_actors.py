"""Ray actors that do nothing: what a call costs before anything durable is behind it."""

from typing import Any, Self

import ray

from raycloak_lab.bench.bare_ray import DEADLINE_S


class _NoOp:
    def work(self, step: int) -> int:
        return step


class NoOpActors:
    """Actors that do nothing, on a local Ray of their own; to be closed. One process has one at a time.

    Args:
        count: how many; each is for one thread.
    """

    def __init__(self, count: int, num_cpus: int) -> None:
        ray.init(
            address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, configure_logging=False
        )
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)
        self._actors = [actor(_NoOp).remote() for _ in range(count)]
        ray.get([each.work.remote(0) for each in self._actors], timeout=DEADLINE_S)

    def call(self, number: int) -> None:
        """Call an actor, and wait for its answer."""
        ray.get(self._actors[number].work.remote(0), timeout=DEADLINE_S)

    def close(self) -> None:
        """End the actors and their Ray."""
        ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
