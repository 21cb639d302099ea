"""`raycloak-lab bench step`: measures where a step's wall time goes, on the present cluster or a local one.

Beside a peer, blocks of both take turns on the same machine: a bare Ray program (``--against bare-ray``) for what
control costs, or plain Opacus on one core (``--against opacus``) for what the whole product does.
"""

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

from raycloak.attestation.processes.child import Child
from raycloak.attestation.processes.deadline import Deadline
from raycloak.coordinator.config.home import HOME_VARIABLE
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.console.output import attach_log
from raycloak.coordinator.record.run_reader import read_run, run_directories
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.training.reporting import StepReport
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.mechanism import Mechanism
from raycloak_lab.bench.mask import bench_mask

if TYPE_CHECKING:
    from raycloak_lab.bench.bare_ray import BareProgram

WARM_UP_STEPS = 5
BLOCK_STEPS = 5
"""Steps of each program in a turn: the first after the other's turn finds a roster that had more time than usual."""

_PEER_S = 600.0
"""Bounds the start of a peer and a block of its steps."""


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
        start_seconds: from the start of this process to the first step.
        loop_ms, loop_p90_ms: from the end of a step to the end of the next one: the step and what is done between two.
        opacus_ms, opacus_p90_ms: a step of plain Opacus on one core; None where it was not asked for.
        opacus_start_seconds: from the start of Opacus' process to its first step.
        step_vs_opacus: ``loop_ms`` over ``opacus_ms``.
        run_vs_opacus: the same of start and all planned steps together.
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
    start_seconds: float | None = None
    loop_ms: float | None = None
    loop_p90_ms: float | None = None
    opacus_ms: float | None = None
    opacus_p90_ms: float | None = None
    opacus_start_seconds: float | None = None
    step_vs_opacus: float | None = None
    run_vs_opacus: float | None = None


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
            from raycloak_lab.bench.bare_ray import BareProgram

            self._program = self._stack.enter_context(BareProgram(self._workers, _mechanism().dimension))
            for _ in range(WARM_UP_STEPS):
                self._program.step()
        if report.step > WARM_UP_STEPS:
            self.milliseconds += [1e3 * self._program.step() for _ in range(BLOCK_STEPS)]
        if report.step + BLOCK_STEPS > report.steps:
            # In the run's own time, while the cluster is there.
            self._stack.close()


class _Opacus:
    """Plain Opacus in a process of its own, which takes its turn after every `BLOCK_STEPS` steps of the run."""

    def __init__(self, config: RunConfig, base: Path) -> None:
        self._config, self._base = config, base
        self._process: Child | None = None
        self._stack = ExitStack()
        self._ended = 0.0
        self.loop: list[float] = []
        self.milliseconds: list[float] = []
        self.start_seconds = self.peer_start_seconds = 0.0

    def take_turn(self, report: StepReport) -> None:
        """Be called after a step of the run, which then waits."""
        now = time.perf_counter()
        if self._process is None:
            self.start_seconds = _process_seconds() - report.seconds
            began = time.perf_counter()
            # Only here, because Opacus' import would lengthen the start that is measured.
            from raycloak_lab.bench.opacus_steps import OpacusPeer, Seconds

            self._process = self._stack.enter_context(Child("raycloak_lab.bench.opacus_steps:take_steps"))
            plain = self._config.model_dump(mode="json", exclude_unset=True)
            peer = OpacusPeer(config=plain, base=self._base.resolve(), mechanism=_mechanism())
            self._process.call(peer, Seconds, by=Deadline(_PEER_S))
            self.peer_start_seconds = time.perf_counter() - began
            self._steps(self._process, WARM_UP_STEPS)
        elif report.step > WARM_UP_STEPS:
            self.loop.append(1e3 * (now - self._ended))
        if report.step > WARM_UP_STEPS and report.step % BLOCK_STEPS == 0:
            self.milliseconds += [1e3 * each for each in self._steps(self._process, BLOCK_STEPS)]
        if report.step == report.steps:
            self._stack.close()
        self._ended = time.perf_counter()

    @staticmethod
    def _steps(process: Child, number: int) -> tuple[float, ...]:
        """Have the peer take so many steps; return the seconds of each."""
        from raycloak_lab.bench.opacus_steps import Seconds, Steps

        return process.call(Steps(number=number), Seconds, by=Deadline(_PEER_S)).steps


def _mechanism() -> Mechanism:
    """Return the mechanism of the one run below the state folder."""
    (folder,) = run_directories()
    manifest = read_run(folder).manifest
    assert manifest is not None, "a run that trains has its manifest"
    return manifest.computation.mechanism


def _process_seconds() -> float:
    """Return how long ago this process began, interpreter and imports included."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def bench_step(config: RunConfig, *, config_dir: Path, against: str | None = None) -> StepBench:
    """Train ``config`` on a temporary ledger of its own and measure its steps.

    Args:
        against: the program that takes turns with it: ``bare-ray``, ``opacus``, or None.

    Raises:
        ConfigError: ``bench_steps`` if the configuration has too few steps to measure; ``bench_peer`` for an unknown
            program.
        RaycloakError: as a run.
    """
    if config.steps is None or config.steps <= WARM_UP_STEPS + 1:
        given = f"{config.epochs:g} epochs are no number of" if config.steps is None else f"{config.steps} are too few"
        raise ConfigError("bench_steps", f"{given} steps.", f"Set steps to at least {WARM_UP_STEPS + 2}.")
    peer = _peer(config, config_dir, against)
    kept = os.environ.get(HOME_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="raycloak-bench-") as home:
        os.environ[HOME_VARIABLE] = home
        try:
            trainer = Trainer(config, config_dir=config_dir, progress=peer.take_turn if peer else None)
            trainer.train()
        finally:
            attach_log(None)
            os.environ.pop(HOME_VARIABLE)
            if kept is not None:
                os.environ[HOME_VARIABLE] = kept
    assert trainer.finished is not None, "train() has returned"
    figures = _figures(trainer, peer.milliseconds if isinstance(peer, _Bare) else [])
    return _beside_opacus(figures, peer, config.steps) if isinstance(peer, _Opacus) else figures


def _peer(config: RunConfig, config_dir: Path, against: str | None) -> _Bare | _Opacus | None:
    match against:
        case None:
            return None
        case "bare-ray":
            return _Bare(config.num_workers)
        case "opacus":
            return _Opacus(config, config_dir.absolute())
    raise ConfigError("bench_peer", f"a step has no peer '{against}'.", "Give bare-ray or opacus.")


def _beside_opacus(figures: StepBench, peer: _Opacus, steps: int) -> StepBench:
    loop, opacus = median(peer.loop), median(peer.milliseconds)
    whole = 1e3 * peer.start_seconds + steps * loop
    return replace(
        figures,
        start_seconds=peer.start_seconds,
        loop_ms=loop,
        loop_p90_ms=quantiles(peer.loop, n=10)[-1],
        opacus_ms=opacus,
        opacus_p90_ms=quantiles(peer.milliseconds, n=10)[-1],
        opacus_start_seconds=peer.peer_start_seconds,
        step_vs_opacus=loop / opacus,
        run_vs_opacus=whole / (1e3 * peer.peer_start_seconds + steps * opacus),
    )


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
