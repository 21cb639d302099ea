"""`raycloak bench step`: measures where a step's wall time goes, on the present cluster or a local one."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from raycloak.coordinator.bench.mask import bench_mask
from raycloak.coordinator.config.home import HOME_VARIABLE
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.console.output import attach_log
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ConfigError

WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class StepBench:
    """The medians over the steps after a warm-up, in milliseconds unless the name says otherwise.

    Attributes:
        control_overhead_ms, control_overhead_p90_ms: wall time of a step minus the slowest worker's own time in it.
        charge_ms, compute_ms, reduce_ms: receipt and roster; asking the workers; asking the aggregators.
        framing_bytes: bytes of a message besides its payload.
        chacha20_ratio: bare keystreams over clamp, encode and masks, for this size and number of workers.
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


def bench_step(config: RunConfig, *, config_dir: Path) -> StepBench:
    """Train ``config`` on a temporary ledger of its own and measure its steps.

    Raises:
        ConfigError: ``bench_steps`` if the configuration has too few steps to measure.
        RaycloakError: as a run.
    """
    if config.steps is None or config.steps <= WARM_UP_STEPS + 1:
        given = f"{config.epochs:g} epochs are no number of" if config.steps is None else f"{config.steps} are too few"
        raise ConfigError("bench_steps", f"{given} steps.", f"Set steps to at least {WARM_UP_STEPS + 2}.")
    kept = os.environ.get(HOME_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="raycloak-bench-") as home:
        os.environ[HOME_VARIABLE] = home
        try:
            trainer = Trainer(config, config_dir=config_dir)
            trainer.train()
        finally:
            attach_log(None)
            os.environ.pop(HOME_VARIABLE)
            if kept is not None:
                os.environ[HOME_VARIABLE] = kept
    assert trainer.finished is not None, "train() has returned"
    return _figures(trainer, config)


def _figures(trainer: Trainer, config: RunConfig) -> StepBench:
    finished = trainer.finished
    assert finished is not None, "train() has returned"
    outcomes = finished.outcomes[WARM_UP_STEPS:]
    mechanism = finished.plan.mechanism
    masks = bench_mask(mechanism.dimension, finished.workers, mechanism.ring_bits)
    steps = [1e3 * outcome.seconds for outcome in outcomes]
    overhead = [1e3 * (outcome.seconds - outcome.slowest_worker_seconds) for outcome in outcomes]
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
    )
