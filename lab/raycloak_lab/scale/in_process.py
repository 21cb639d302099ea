"""Steps of the whole protocol in this process, with the processor time of each member's calls: the base of `--scale`.

Every member is the product's own, on one linear model of a chosen size; Ray alone is left out
(`raycloak.coordinator.runs.local_session`). Evidence is SIMULATED, and the ledger is thrown away.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raycloak.coordinator.cluster.backend import LocalBackend
from raycloak.coordinator.cluster.remote import Actor
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.planning.model_source import loss_spec
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.record.folder import RunFolder, RunRecord
from raycloak.coordinator.runs.local_session import local_session
from raycloak.coordinator.runs.verdict import run_facts
from raycloak.coordinator.training.assignment import NewRun, Order
from raycloak.coordinator.training.phases import Coordinator
from raycloak.coordinator.training.reporting import Reporting
from raycloak.coordinator.vaults.calls import Reference
from raycloak.metrics.collectors import RunMetrics
from raycloak.metrics.events import EventWriter
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.mechanism import Mechanism

CLASSES = 20
EXAMPLES_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class MeteredRun:
    """The processor time of a run's steps, in seconds.

    Attributes:
        mechanism: of the run. masked_bytes: payload of all masked vectors of a step.
        before: until the first step, all together. ledger_wall: charge and binding of a step on the clock, the median.
        first, steps: the first step and the later ones, each by the called method, over all members. ``all`` is the
            whole step, the driver included.
    """

    workers: int
    mechanism: Mechanism
    masked_bytes: int
    before: float
    ledger_wall: float
    first: Mapping[str, float]
    steps: tuple[Mapping[str, float], ...]

    def usual(self, *methods: str) -> float:
        """Return the median over the later steps of what these methods took together."""
        return float(np.median([sum(step.get(method, 0.0) for method in methods) for step in self.steps]))

    @property
    def driver(self) -> float:
        """Return the median of what no called method took."""
        return float(np.median([2 * step["all"] - sum(step.values()) for step in self.steps]))


class _Metered(LocalBackend):
    """A local backend that adds up the processor time of each method that members are called by."""

    def __init__(self, inner: LocalBackend) -> None:
        super().__init__(
            lambda member_id: inner.start_worker(member_id).handle,
            lambda member_id: inner.start_aggregator(member_id).handle,
        )
        self.seconds: dict[str, float] = defaultdict(float)
        self.ledger_wall: list[float] = []

    def call(
        self, actor: Actor, method: Callable[..., Any], *args: Any, returns: int = 1
    ) -> tuple[Reference[Any], ...]:
        began, clock = time.process_time(), time.perf_counter()
        try:
            return super().call(actor, method, *args, returns=returns)
        finally:
            self.seconds[method.__name__] += time.process_time() - began
            if method.__name__ in ("charge", "bind_vectors"):
                self.ledger_wall.append(time.perf_counter() - clock)


def metered_run(workers: int, parameters: int, steps: int) -> MeteredRun:
    """Train a linear model of about so many parameters with so many workers for some steps, at least two."""
    assert steps > 1, "the first step is not like the others"
    width = max(parameters // CLASSES, 1)
    with tempfile.TemporaryDirectory(prefix="raycloak-scale-") as home, ExitStack() as stack:
        folder = Path(home)
        config = _config(workers, steps)
        _write_examples(folder, workers, width)
        session, backend = local_session(folder)
        metered = _Metered(backend)
        control = replace(session.control, backend=metered)
        session = replace(session, backend=metered, control=control)
        stack.callback(lambda: [actor.handle.close() for actor in control.actors.values()])
        events = stack.enter_context(EventWriter(folder / "metrics.jsonl"))
        began, seen = time.process_time(), []

        def look() -> None:
            seen.append({"all": time.process_time(), **metered.seconds})

        reporting = Reporting(
            metrics=lambda manifest, evidence: RunMetrics(run_facts(manifest, evidence, config)),
            events=events,
            progress=lambda report: look(),
            departure=lambda departure: None,
            joined=lambda member_id: None,
            restart=lambda restart: None,
            begun=lambda outset: look(),
        )
        run_folder = RunFolder(folder, _record(session.run_id, folder))
        order = Order(config, session, _setup(config, folder, width), lambda: None, reporting, run_folder, NewRun())
        finished = Coordinator(order).run()
    # Each look but the first is at the end of a step.
    taken = tuple({name: now[name] - then.get(name, 0.0) for name in now} for then, now in pairwise(seen))
    return MeteredRun(
        workers=workers,
        mechanism=finished.plan.mechanism,
        masked_bytes=finished.outcomes[-1].masked_bytes,
        before=seen[0]["all"] - began,
        ledger_wall=2 * float(np.median(metered.ledger_wall)),
        first=taken[0],
        steps=taken[1:],
    )


def _config(workers: int, steps: int) -> RunConfig:
    return parse_config(
        {
            "num_workers": workers,
            "virtual_workers": workers,
            "expected_batch_size": EXAMPLES_PER_WORKER * workers / 2,
            "steps": steps,
            "dataset": {"kind": "npz", "path": "examples.npz", "features": "features", "labels": "labels"},
            # So much noise that the few large batches fit a usual cap.
            "dp_config": {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "accountant": "rdp"},
        }
    )


def _write_examples(folder: Path, workers: int, width: int) -> None:
    count = EXAMPLES_PER_WORKER * workers
    features = np.random.default_rng(1).standard_normal((count, width), np.float32)
    np.savez(folder / "examples.npz", features=features, labels=np.arange(count) % CLASSES)


def _setup(config: RunConfig, folder: Path, width: int) -> WorkerSetup:
    assert config.dataset is not None, "it is named above"
    model = ModelSource.of(lambda: torch.nn.Linear(width, CLASSES, bias=False))
    return WorkerSetup(
        model=model,
        loss=loss_spec(config.loss),
        dataset=descriptor(config.dataset),
        base=str(folder),
        seed=config.seed,
        device="cpu",
    )


def _record(run_id: str, folder: Path) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        name="scale",
        base=str(folder),
        secret_file=None,
        started_at=time.time(),
        status="running",
        driver_base=str(folder),
    )
