"""`raycloak-lab bench sandbox`: measures what it costs a worker to keep user code behind walls, and what stays equal.

A step here is a virtual worker's vector: draw, rows, clipped sum, encoding, noise and tag. In a run masks and messages
come on top, so the share of a run's step is at most as large. Both ways take turns in one run of the bench.
"""

import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.keys.release import VirtualWorkerKeys
from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.device.words import words_on
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.spare_rows import spare_rows
from raycloak.workers.gradients.sum_engines import SumEngine
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.models.models import read_flat
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.vectors.threads import ONE_THREAD
from raycloak.workers.virtual_worker import EncodedVector, VirtualWorkerComputer
from raycloak_lab.bench.gradient import RoundSpread
from raycloak_lab.bench.gradient_cases import SEED, BenchCase
from raycloak_lab.bench.gradient_methods import bench_mechanism
from raycloak_lab.bench.sandbox_engine import SandboxedCode, SandboxedEngine

CASES: Final = (
    # A virtual worker's rows in examples/digits.yaml, examples/mnist/cnn.yaml and examples/sst2/eps8.yaml, whose model
    # has weights that are not here. The one with a million parameters moves the most bytes for its work.
    BenchCase("digits", 116, 1),
    BenchCase("mlp", 64),
    BenchCase("cnn", 256, 5),
    # Half as many rows of twice as many tokens.
    BenchCase("bert-lora", 32, 6),
)
_TURN_S: Final = 0.1
"""A shorter step is repeated for as long, so that a turn is far above the clock and the caches of its neighbour."""
# Both ways get the same, and nobody else sees them: the rows are random numbers.
_KEYS: Final = VirtualWorkerKeys(Secret(bytes(32)), Secret(bytes(31) + b"\1"))
_PLACE: Final = (bytes(32), bytes(32))


@dataclass(frozen=True, slots=True)
class SandboxFigures:
    """The cost of the walls for one model.

    Attributes:
        parameters: trained ones. rows, micro_batches: of a step.
        start_seconds: until the child has built the model; once for a run.
        wall_ms, sandboxed_wall_ms: median wall time of a step, without walls and with them.
        processor_ms, sandboxed_processor_ms: median processor time of a step, of both processes together. Other
            programs of the machine do not lengthen it.
        wall_ratio, processor_ratio: with over without, in each round.
    """

    model: str
    parameters: int
    rows: int
    micro_batches: int
    start_seconds: float
    wall_ms: float
    sandboxed_wall_ms: float
    processor_ms: float
    sandboxed_processor_ms: float
    wall_ratio: RoundSpread
    processor_ratio: RoundSpread


@dataclass(frozen=True, slots=True)
class SandboxBench:
    """The figures of all models; every vector had the same bytes with and without walls."""

    rounds: int
    kernel: str
    torch: str
    models: tuple[SandboxFigures, ...]


def bench_sandbox(rounds: int, cases: tuple[BenchCase, ...] = CASES) -> SandboxBench:
    """Measure all cases.

    Raises:
        ConfigError: ``bench_input`` without a round; as `raycloak_lab.bench.sandbox_walls.raise_walls`.
        RunFailedError: ``wrong_sum`` if a vector has other bytes behind the walls.
    """
    if rounds < 1:
        raise ConfigError("bench_input", "the bench needs at least 1 round.", "Raise the number.")
    pin_numerics()
    figures = tuple(_figures(case, rounds) for case in cases)
    return SandboxBench(rounds, platform.release(), str(torch.__version__), figures)


def _figures(case: BenchCase, rounds: int) -> SandboxFigures:
    module, batches = case.build(), case.batches()
    parameters = read_flat(module)
    mechanism = bench_mechanism(case, len(parameters))
    form, vocabulary = case.form()
    spare = spare_rows(module, form, vocabulary=vocabulary)
    features, labels = zip(*batches, strict=True)
    dataset = ArrayDataset(np.concatenate(features), np.concatenate(labels))
    with tempfile.TemporaryDirectory(prefix="raycloak-bench-") as base:
        # The model is code of an installed package: this folder is as empty as a run's own could be.
        code = SandboxedCode(
            model=case.source, loss=LossSpec.of("cross_entropy"), base=Path(base), seed=SEED, mechanism=mechanism
        )

        def step(engine: SumEngine) -> Callable[[], EncodedVector]:
            words = words_on([torch.device("cpu")], ONE_THREAD)
            computer = VirtualWorkerComputer(mechanism, engine, dataset, spare, words=words)
            return lambda: computer.vector(0, _KEYS, 0, *_PLACE, parameters)

        began = time.perf_counter()
        with SandboxedEngine(code) as sandboxed:
            start_seconds = time.perf_counter() - began
            ways = step(code.engine()), step(sandboxed)
            _check_equal([way() for way in ways])
            taken = _in_turns(ways, rounds, sandboxed.pid)
            _check_equal([way() for way in ways])
    ratios, medians = taken[1] / taken[0], 1e3 * np.median(taken, 1)
    return SandboxFigures(
        model=case.name,
        parameters=len(parameters),
        rows=case.rows,
        micro_batches=case.micro_batches,
        start_seconds=start_seconds,
        wall_ms=float(medians[0, 0]),
        sandboxed_wall_ms=float(medians[1, 0]),
        processor_ms=float(medians[0, 1]),
        sandboxed_processor_ms=float(medians[1, 1]),
        wall_ratio=RoundSpread.of(ratios[:, 0].tolist()),
        processor_ratio=RoundSpread.of(ratios[:, 1].tolist()),
    )


def _check_equal(vectors: list[EncodedVector]) -> None:
    # Of all words, as ledger and coordinator compare them.
    first, second = (each.tag for each in vectors)
    if first != second:
        message = "a vector behind walls has other bytes than one without."
        raise RunFailedError("wrong_sum", message, "The child computes in another numerics class: see its environment.")


def _in_turns(ways: tuple[Callable[[], object], ...], rounds: int, child: int) -> NDArray[np.float64]:
    """Return wall and processor seconds of a step: [ways, rounds, 2]."""
    # The kernel's number for the processor time of another process, as clock_getcpuclockid(3) makes it.
    clock_of_child = ~child << 3 | 2
    taken = np.empty((len(ways), rounds, 2))
    for turn in range(rounds):
        # Each begins every second round, so that none always follows the other's caches.
        for index in (turn % 2, 1 - turn % 2):
            steps, began = 0, _now(clock_of_child)
            while steps == 0 or _now(clock_of_child)[0] - began[0] < _TURN_S:
                ways[index]()
                steps += 1
            taken[index, turn] = (_now(clock_of_child) - began) / steps
    return taken


def _now(clock_of_child: int) -> NDArray[np.float64]:
    """Return wall seconds, and processor seconds of both processes."""
    return np.array([time.perf_counter(), time.process_time() + time.clock_gettime(clock_of_child)])
