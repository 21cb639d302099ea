"""`raycloak bench step`: measures where a step's wall time goes, on the present cluster or a local one.

Beside a bare Ray program (``--against bare-ray``), blocks of both take turns on the same cluster.
"""

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

from raycloak.coordinator.bench.mask import bench_mask
from raycloak.coordinator.config.home import HOME_VARIABLE
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.console.output import attach_log
from raycloak.coordinator.record.run_reader import read_run, run_directories
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError

if TYPE_CHECKING:
    from raycloak.coordinator.bench.bare_ray import BareProgram

WARM_UP_STEPS = 5
BLOCK_STEPS = 5
"""Steps of each program in a turn: the first after the other's turn finds a roster that had more time than usual."""


@dataclass(frozen=True, slots=True)
class StepBench:
    """The medians over the steps after a warm-up, in milliseconds unless the name says otherwise.

    Attributes:
        control_overhead_ms, control_overhead_p90_ms: wall time of a step minus the slowest worker's own time in it.
        charge_ms, compute_ms, reduce_ms: receipt and roster; asking the workers; asking the aggregators.
        framing_bytes: bytes of a message besides its payload.
        chacha20_ratio: bare keystreams over clamp, encode and masks, for this size and number of workers.
        bare_ray_ms, bare_ray_p90_ms: a step of the bare Ray program; None where it was not asked for.
        control_vs_bare_ray: ``control_overhead_ms`` over ``bare_ray_ms``.
    """

    steps: int
    workers: int
    parameters: int
    step_ms: float
    step_p90_ms: float
    control_overhead_ms: float
    control_overhead_p90_ms: float
    slowest_worker_ms: float
    charge_ms: float
    compute_ms: float
    reduce_ms: float
    bytes_per_parameter: float
    framing_bytes: int
    chacha20_ratio: float
    bare_ray_ms: float | None = None
    bare_ray_p90_ms: float | None = None
    control_vs_bare_ray: float | None = None


class _Bare:
    """The bare program, which takes its turn after every `BLOCK_STEPS` steps of the run."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._program: BareProgram | None = None
        self._stack = ExitStack()
        self.milliseconds: list[float] = []

    def take_turn(self, report: StepReport) -> None:
        """Be called after a step of the run, which then waits."""
        if report.step % BLOCK_STEPS:
            return
        if self._program is None:
            # Only now: before, the run had not connected to its cluster.
            from raycloak.coordinator.bench.bare_ray import BareProgram

            (folder,) = run_directories()
            manifest = read_run(folder).manifest
            assert manifest is not None, "a run that trains has its manifest"
            dimension = manifest.computation.mechanism.dimension
            self._program = self._stack.enter_context(BareProgram(self._workers, dimension))
            for _ in range(WARM_UP_STEPS):
                self._program.step()
        if report.step > WARM_UP_STEPS:
            self.milliseconds += [1e3 * self._program.step() for _ in range(BLOCK_STEPS)]
        if report.step + BLOCK_STEPS > report.steps:
            # In the run's own time, while the cluster is there.
            self._stack.close()


def bench_step(config: RunConfig, *, config_dir: Path, against_bare_ray: bool = False) -> StepBench:
    """Train ``config`` on a temporary ledger of its own and measure its steps.

    Args:
        against_bare_ray: whether a bare Ray program with the same actors and calls takes turns with it.

    Raises:
        ConfigError: ``bench_steps`` if the configuration has too few steps to measure.
        RaycloakError: as a run.
    """
    if config.steps is None or config.steps <= WARM_UP_STEPS + 1:
        given = f"{config.epochs:g} epochs are no number of" if config.steps is None else f"{config.steps} are too few"
        raise ConfigError("bench_steps", f"{given} steps.", f"Set steps to at least {WARM_UP_STEPS + 2}.")
    bare = _Bare(config.num_workers) if against_bare_ray else None
    kept = os.environ.get(HOME_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="raycloak-bench-") as home:
        os.environ[HOME_VARIABLE] = home
        try:
            trainer = Trainer(config, config_dir=config_dir, progress=bare.take_turn if bare else None)
            trainer.train()
        finally:
            attach_log(None)
            os.environ.pop(HOME_VARIABLE)
            if kept is not None:
                os.environ[HOME_VARIABLE] = kept
    assert trainer.finished is not None, "train() has returned"
    return _figures(trainer, bare.milliseconds if bare else [])


def _figures(trainer: Trainer, bare: list[float]) -> StepBench:
    finished = trainer.finished
    assert finished is not None, "train() has returned"
    outcomes = finished.outcomes[WARM_UP_STEPS:]
    mechanism = finished.plan.mechanism
    masks = bench_mask(mechanism.dimension, finished.workers, mechanism.ring_bits)
    steps = [1e3 * outcome.seconds for outcome in outcomes]
    overhead = [1e3 * (outcome.seconds - outcome.slowest_worker_seconds) for outcome in outcomes]
    bare_ms = median(bare) if bare else None
    return StepBench(
        steps=len(outcomes),
        workers=finished.workers,
        parameters=mechanism.dimension,
        step_ms=median(steps),
        step_p90_ms=quantiles(steps, n=10)[-1],
        control_overhead_ms=median(overhead),
        control_overhead_p90_ms=quantiles(overhead, n=10)[-1],
        slowest_worker_ms=median(1e3 * outcome.slowest_worker_seconds for outcome in outcomes),
        charge_ms=median(1e3 * outcome.charge_seconds for outcome in outcomes),
        compute_ms=median(1e3 * outcome.compute_seconds for outcome in outcomes),
        reduce_ms=median(1e3 * outcome.reduce_seconds for outcome in outcomes),
        bytes_per_parameter=outcomes[-1].masked_bytes / finished.workers / mechanism.dimension,
        framing_bytes=masks.framing_bytes,
        chacha20_ratio=masks.chacha20_ratio,
        bare_ray_ms=bare_ms,
        bare_ray_p90_ms=quantiles(bare, n=10)[-1] if bare else None,
        control_vs_bare_ray=median(overhead) / bare_ms if bare_ms else None,
    )
