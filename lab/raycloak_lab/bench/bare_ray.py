"""A bare Ray program with the actors and calls of a step and one durable write: the floor of what a step may cost.

Hides the program. It keeps no promise: nothing is signed, masked, checked or charged, and an actor that dies ends it.
Its messages have about the sizes of the product's. Run as a script, it only starts: the floor of what a start may cost.
"""

import json
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray

DEADLINE_S = 60.0
"""Bounds each wait; a step takes milliseconds."""
# About the sizes of a receipt, a roster of four members, a signed header and a binding.
_RECEIPT, _ROSTER, _HEADER, _BINDING = bytes(900), bytes(1800), bytes(700), bytes(400)


class _Ledger:
    def __init__(self, folder: str) -> None:
        self._db = sqlite3.connect(Path(folder) / "bare.sqlite", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        # What the ledger asks of its disk.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("CREATE TABLE charges (step INTEGER PRIMARY KEY, body BLOB)")

    def charge(self, step: int) -> bytes:
        self._db.execute("INSERT INTO charges VALUES (?, ?)", (step, _RECEIPT))
        return _RECEIPT

    def bind(self, headers: list[bytes]) -> bytes:
        return _BINDING


class _Orchestrator:
    def roster(self, step: int) -> bytes:
        return _ROSTER


class _Worker:
    def __init__(self, parameters: int) -> None:
        self._vector = np.zeros(parameters, np.uint32)

    def step(self, receipt: bytes, roster: bytes, parameters: Any) -> tuple[bytes, np.ndarray]:
        return _HEADER, self._vector


class _Aggregator:
    def reduce(
        self, request: tuple[bytes, ...], binding: bytes, parameters: np.ndarray, *vectors: np.ndarray
    ) -> np.ndarray:
        return parameters + np.sum(vectors, axis=0, dtype=np.uint32)


class BareProgram:
    """The actors of the program, on the cluster that this process is connected to; to be closed.

    Args:
        workers: how many. parameters: words of each one's vector.
    """

    def __init__(self, workers: int, parameters: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="raycloak-bare-")
        # Ray's stubs know no class that is made an actor by a call.
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)
        self._ledger = actor(_Ledger).remote(self._folder.name)
        self._orchestrator = actor(_Orchestrator).remote()
        self._aggregator = actor(_Aggregator).remote()
        self._workers = [actor(_Worker).remote(parameters) for _ in range(workers)]
        self._parameters = ray.put(np.zeros(parameters, np.uint32))
        self._roster = self._orchestrator.roster.remote(0)
        self._count = 0

    def step(self) -> float:
        """Take a step; returns its wall time in seconds, which is all control: its workers compute nothing."""
        began = time.perf_counter()
        receipt = self._wait(self._ledger.charge.remote(self._count))
        # Asked for during the step before, as the product does.
        roster = self._wait(self._roster)
        asked = [each.step.options(num_returns=2).remote(receipt, roster, self._parameters) for each in self._workers]
        self._count += 1
        self._roster = self._orchestrator.roster.remote(self._count)
        headers = self._wait([header for header, _ in asked])
        binding = self._wait(self._ledger.bind.remote(headers))
        request = (roster, *headers)
        vectors = [vector for _, vector in asked]
        self._parameters = self._aggregator.reduce.remote(request, binding, self._parameters, *vectors)
        self._wait(self._parameters)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the actors and remove what the ledger wrote."""
        for each in (self._ledger, self._orchestrator, self._aggregator, *self._workers):
            ray.kill(each)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _wait(asked: Any) -> Any:
        return ray.get(asked, timeout=DEADLINE_S)


class _Importer:
    """An actor that only imports."""

    def __init__(self, libraries: Sequence[str]) -> None:
        for name in libraries:
            import_module(name)

    def is_up(self) -> bool:
        return True


def start(driver: Sequence[str], actors: Sequence[tuple[str, Sequence[str]]], num_cpus: int) -> None:
    """Start Ray and actors that import libraries; say ``ready`` on standard error when all have them.

    Args:
        driver: libraries of this process, which it imports while the others start.
        actors: the name of each one's class, and its libraries.
    """
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, configure_logging=False)
    options: Any = ray.remote(num_cpus=0)
    started = [options(type(name, (_Importer,), {})).remote(libraries) for name, libraries in actors]
    for name in driver:
        import_module(name)
    ray.get([each.is_up.remote() for each in started], timeout=DEADLINE_S)
    print("ready", file=sys.stderr, flush=True)  # noqa: T201 - its caller waits for it
    # Until its caller has looked at the processes and ends it.
    signal.pause()


if __name__ == "__main__":
    start(**json.loads(sys.argv[1]))
