"""`raycloak-lab bench start`: measures a run from its command to its first step, beside a bare Ray program.

Both are fresh processes that take turns. The bare program calls ``ray.init``, starts as many actors, and has each
import the libraries that the product's process of that role needs, at once. It is the floor of a start on Ray.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.program import Program
from raycloak.coordinator.cluster.processes import descendants, process_table
from raycloak.coordinator.config.home import HOME_VARIABLE
from raycloak.coordinator.config.run import RunConfig
from raycloak.metrics.errors import RunFailedError

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "driver": (
        "typer", "rich.progress", "yaml", "pydantic", "cryptography.x509", "sqlalchemy", "prometheus_client", "numpy",
        "torch", "safetensors", "dp_accounting.pld.privacy_loss_distribution",
    ),
    "OrchestratorActor": ("pydantic", "cryptography.x509", "dcap_qvl", "signxml"),
    "LedgerActor": ("pydantic", "cryptography.x509", "sqlalchemy", "dp_accounting.pld.privacy_loss_distribution"),
    "NodePlatform": ("pydantic", "cryptography.x509"),
    "TrainWorkerActor": ("torch", "numpy", "pydantic", "cryptography.x509", "dcap_qvl", "signxml"),
    "MaskedAggregatorActor": ("torch", "numpy", "pydantic", "cryptography.x509"),
}  # fmt: skip
"""The libraries beside Ray that each process of a run needs before the first step, by the class of its actor."""

DEADLINE_S = 600.0
"""Bounds a start, which takes seconds on an idle machine, and the end of a run after its first step."""


@dataclass(frozen=True, slots=True)
class StartBench:
    """The medians over all rounds.

    Attributes:
        start_s: from the command to the end of its first step.
        processor_s: of all processes of the run until then.
        bare_ray_s, bare_ray_processor_s: the same of the bare program, until every process has its libraries.
        start_vs_bare_ray, processor_vs_bare_ray: the ratios of those, each round for itself.
        phases: seconds of each phase of the run's start.
        processes: processor seconds by the class of the actor; ``driver`` and ``ray`` are no actors.
        bare_ray_processes: the same of the bare program.
    """

    rounds: int
    workers: int
    start_s: float
    processor_s: float
    bare_ray_s: float
    bare_ray_processor_s: float
    start_vs_bare_ray: float
    processor_vs_bare_ray: float
    phases: dict[str, float]
    processes: dict[str, float]
    bare_ray_processes: dict[str, float]


@dataclass(frozen=True, slots=True)
class Start:
    """One start: its wall time, its phases, and the processor seconds of its processes."""

    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    processes: dict[str, float] = field(default_factory=dict)

    @property
    def processor_s(self) -> float:
        """Of all processes."""
        return sum(self.processes.values())


def bench_start(config: RunConfig, path: Path, overrides: Sequence[str], rounds: int) -> StartBench:
    """Start the run of the file ``path``, and the bare program after it, ``rounds`` times.

    Args:
        config: the configuration that file and ``overrides`` give.

    Raises:
        RunFailedError: ``bench_start`` if a program ends, or says nothing, before it has started.
    """
    ours, bare = [], []
    for _ in range(rounds):
        ours.append(_start_run(config.name, path, overrides))
        bare.append(_start_bare(config))
    return StartBench(
        rounds=rounds,
        workers=config.num_workers,
        start_s=median(each.seconds for each in ours),
        processor_s=median(each.processor_s for each in ours),
        bare_ray_s=median(each.seconds for each in bare),
        bare_ray_processor_s=median(each.processor_s for each in bare),
        start_vs_bare_ray=median(own.seconds / its.seconds for own, its in zip(ours, bare, strict=True)),
        processor_vs_bare_ray=median(own.processor_s / its.processor_s for own, its in zip(ours, bare, strict=True)),
        phases=_medians([each.phases for each in ours]),
        processes=_medians([each.processes for each in ours]),
        bare_ray_processes=_medians([each.processes for each in bare]),
    )


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(each.get(name, 0.0) for each in rounds) for name in rounds[0]}


def _start_run(name: str, path: Path, overrides: Sequence[str]) -> Start:
    """Start the command of a run, and stop it after its first step."""
    settings = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "raycloak", "run", str(path), *settings]
    with tempfile.TemporaryDirectory(prefix="raycloak-bench-") as home:
        began, phases = time.perf_counter(), {"command": 0.0}
        phase, since = "command", began
        with _program(command, {HOME_VARIABLE: home}, home) as (child, lines):
            for line in lines:
                words = _progress(name, line)
                if words is None:
                    continue
                now = time.perf_counter()
                phases[phase] = now - since
                if words.startswith("step "):
                    return Start(now - began, phases, _processor_times(child.pid))
                phase, since = words, now
    raise AssertionError("the program ends by an error or by its first step")


def _progress(name: str, line: str) -> str | None:
    """Return the phase that a line of a run's progress begins, or its step; None if it does neither."""
    if not line.startswith(f"{name} "):
        return None
    _, _, words = line.removeprefix(f"{name} ").partition(" ")
    # A phase that lasts is said again, with its length.
    return None if ", for " in words else words.partition(" (after ")[0].strip()


def _start_bare(config: RunConfig) -> Start:
    """Start the bare program, and end it when every process has its libraries."""
    counts = {
        "OrchestratorActor": 1,
        "LedgerActor": 1,
        "NodePlatform": 1,
        "TrainWorkerActor": config.num_workers,
        "MaskedAggregatorActor": config.first_aggregators,
    }
    actors = [(role, LIBRARIES[role]) for role, count in counts.items() for _ in range(count)]
    plan = {"driver": LIBRARIES["driver"], "actors": actors, "num_cpus": config.num_workers + 1}
    # By its path, so that its actors are known by value and import nothing of raycloak.
    command = [sys.executable, "-P", str(Path(__file__).with_name("bare_ray.py")), json.dumps(plan)]
    with tempfile.TemporaryDirectory(prefix="raycloak-bench-") as folder:
        began = time.perf_counter()
        with _program(command, {}, folder) as (child, lines):
            for line in lines:
                if line.startswith("ready"):
                    return Start(time.perf_counter() - began, processes=_processor_times(child.pid))
    raise AssertionError("the program ends by an error or by being ready")


@contextmanager
def _program(
    command: Sequence[str], environment: Mapping[str, str], folder: str
) -> Iterator[tuple[Program, Iterator[str]]]:
    """Run a program on a cluster of its own, with the lines that it says; it is asked to end at the end."""
    own = {**os.environ, **environment}
    own.pop("RAY_ADDRESS", None)
    with Program(command, environment=own, log=Path(folder) / "program.log") as program:
        try:
            yield program, _lines(program)
        finally:
            program.signal(signal.SIGTERM)
            program.wait(Deadline(DEADLINE_S))


def _lines(program: Program) -> Iterator[str]:
    yield from program.lines(Deadline(DEADLINE_S))
    words = program.last_words() or "it said nothing"
    raise RunFailedError("bench_start", f"a program ended before it had started: {words}")


def _processor_times(driver: int) -> dict[str, float]:
    """Return the processor seconds of a driver and all processes below it, by the class of the actor."""
    table = process_table()
    times: defaultdict[str, float] = defaultdict(float)
    times["driver"] = next(each.processor_s for each in table if each.pid == driver)
    titles = {each.pid: each.title for each in table}
    for each in descendants([driver], table):
        times[_role(each.title, titles.get(each.parent, ""))] += each.processor_s
    return dict(times)


def _role(title: str, parent: str) -> str:
    """Return the role of a process with these titles: of an actor, or its only child, the vault that does its work."""
    names = (each.removeprefix("ray::").partition(".")[0].strip() for each in (title, parent))
    return next((name for name in names if name in LIBRARIES), "ray")
