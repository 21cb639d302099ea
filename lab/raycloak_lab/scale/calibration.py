"""Rates of this machine for `raycloak-lab scale`, measured on the product's own code, and their check.

Times of Ray and of the ledger's disk are on the clock, all others processor time. It takes about a minute.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.processes.deadline import Deadline
from raycloak.attestation.processes.program import run
from raycloak.coordinator.aggregation.aggregator import decoded_average
from raycloak.coordinator.aggregation.update_rules import Optimizer
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.terms.model_digest import own_copy, tensor_digests
from raycloak.workers.vectors.masks import masked_sum
from raycloak.workers.vectors.noise import NoiseSampler, decompose
from raycloak.workers.vectors.payload import tag_payload
from raycloak.workers.vectors.ring import RingBits, RingSpec, encode_into, ring_dtype
from raycloak.workers.vectors.vector_tag import TensorLeaves, vector_tag
from raycloak_lab.scale.in_process import CLASSES, MeteredRun, metered_run
from raycloak_lab.scale.simulation import (
    Line,
    Rates,
    ScaleConfig,
    WordRates,
    aggregator,
    mask_seconds,
    vector_seconds,
)

WORDS = 2**23
"""Parameters of the measurements: so many that each array gets fresh pages, as arrays of larger models do."""

CHECKED = 4 * WORDS
"""Parameters of the check, beyond all that was measured."""

REPEATS = 5
FEW, MANY = 4, 16
"""Workers between which a line is drawn."""

_FINE_SIGMA, _COARSE_SIGMA = 2.0**30, 2.0**8
"""Noise of several base draws and of one."""

_IMPORT_S = 300.0
_IMPORT = (
    "import resource, raycloak.workers.train_worker, ray; used = resource.getrusage(resource.RUSAGE_SELF);"
    "print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)"
)


@dataclass(frozen=True, slots=True)
class Check:
    """A step at a size that no rate was measured at.

    Attributes:
        parameters, workers: of the step; its processor time includes the linear model's gradient.
        ratio: predicted over measured.
    """

    workers: int
    parameters: int
    predicted_seconds: float
    measured_seconds: float
    ratio: float


def calibrate(optimizer: str) -> Rates:
    """Measure this machine; it starts Ray, or joins the cluster of RAY_ADDRESS, and trains on a ledger of its own."""
    # A first run, so that imports are in neither of the two that are compared.
    metered_run(FEW, CLASSES, steps=2)
    few, many = (metered_run(workers, CLASSES, steps=6) for workers in (FEW, MANY))
    imports, process_bytes = _import()
    start_wall, ray_wall = _ray()
    words: dict[RingBits, WordRates] = {32: _words(32), 64: _words(64)}
    receive, update = _each(_received), _each(_updated(optimizer))
    appraisal = Line.through((FEW, _appraised(few)), (MANY, _appraised(many))).each
    admission = Line.through((FEW, few.before), (MANY, many.before)).each

    def line(*methods: str, among: Callable[[MeteredRun], int] = lambda run: 1) -> Line:
        return Line.through((FEW, few.usual(*methods) / among(few)), (MANY, many.usual(*methods) / among(many)))

    found = Rates(
        words=words,
        receive=receive,
        update=update,
        gradient=0.0,
        worker=line("step", among=lambda run: run.workers),
        aggregator=line("reduce"),
        orchestrator=line("open_step", "commit"),
        driver=Line.through((FEW, few.driver), (MANY, many.driver)),
        ray_wall=ray_wall,
        ledger_wall=many.ledger_wall,
        start_wall=start_wall,
        imports=imports,
        process_bytes=process_bytes,
        admission=admission,
        appraisal=appraisal,
    )
    return _with_gradient(found)


def check(rates: Rates) -> Check:
    """Compare the processor time of a real step of `CHECKED` parameters with what the rates predict."""
    run = metered_run(2, CHECKED, steps=3)
    predicted, measured = _processor_seconds(rates, run), run.usual("all")
    return Check(run.workers, run.mechanism.dimension, predicted, measured, predicted / measured)


def _processor_seconds(rates: Rates, run: MeteredRun) -> float:
    """Return the processor time of a step in which each worker hosts one virtual worker, all members together."""
    size, mechanism, workers = run.mechanism.dimension, run.mechanism, run.workers
    rate = rates.words[mechanism.ring_bits]
    draws = decompose(mechanism.sigma).draws
    worker = (
        (rates.receive + rates.gradient) * size
        + vector_seconds(rate, size, 1, draws)
        + mask_seconds(rate, size, workers - 1)
        + rates.worker.at(workers)
    )
    summed = aggregator(ScaleConfig(), rates, workers, mechanism, 1).seconds
    return workers * worker + summed + rates.orchestrator.at(workers) + rates.driver.at(workers)


def _with_gradient(rates: Rates) -> Rates:
    """Measure the linear model's own part, which a check has to add."""
    run = metered_run(2, WORDS, steps=4)
    rest = run.usual("all") - _processor_seconds(rates, run)
    return replace(rates, gradient=max(rest, 0.0) / (run.workers * run.mechanism.dimension))


def _words(bits: RingBits) -> WordRates:
    random = np.random.default_rng(0)
    summed = random.standard_normal(WORDS)
    spec, out = RingSpec(bits, -20, 2.0**8), np.zeros(WORDS, ring_dtype(bits))
    key = Secret(bytes(32))
    samplers = [NoiseSampler(sigma, bits) for sigma in (_COARSE_SIGMA, _FINE_SIGMA)]
    few, many = ((each.decomposition.draws, _each(partial(each.add_to, out, key))) for each in samplers)
    noise, encoded = Line.through(few, many), _each(partial(encode_into, summed, spec, out))
    averages = [(count, _each(partial(decoded_average, [out] * count, bits, -20, 4.0, np.float32))) for count in (2, 8)]
    return WordRates(
        vector=Line(encoded + _each(lambda: vector_tag(key, bits, [TensorLeaves.of(out)])) + noise.fixed, noise.each),
        mask=_each(partial(masked_sum, [out], [(key, 1)], out)),
        tag=_each(partial(tag_payload, key, out)),
        averaged=Line.through(*averages),
    )


def _tensors() -> list[TensorSpec]:
    return [TensorSpec(name="weight", shape=(WORDS,))]


def _received() -> None:
    flat = own_copy([np.ones(WORDS, np.float32)])
    tensor_digests(flat, _tensors())


def _updated(name: str) -> Callable[[], None]:
    config = parse_config({"optimizer": {"name": name}, "expected_batch_size": 1, "dp_config": {"enabled": False}})
    rule = Optimizer(optimizer_spec(config.optimizer, Path()), _tensors(), total_steps=10)
    parameters, average = np.ones(WORDS, np.float32), np.ones(WORDS, np.float32)
    _, state = rule.update(parameters, average, rule.initial_state(), 0)

    def update() -> None:
        updated, _ = rule.update(parameters, average, state, 1)
        tensor_digests(updated, _tensors())

    return update


def _each(act: Callable[[], object]) -> float:
    """Return the processor seconds of ``act`` for one of `WORDS`, the median of several."""
    act()
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        act()
        found.append(time.process_time() - began)
    return median(found) / WORDS


def _appraised(run: MeteredRun) -> float:
    """Return what the first step took beyond the others for each worker: it appraises all of them."""
    return max(run.first["step"] - run.usual("step"), 0.0) / run.workers


def _import() -> tuple[float, float]:
    """Return processor seconds and largest resident memory of a process that imports what a worker does."""
    _, said = run([sys.executable, "-c", _IMPORT], Deadline(_IMPORT_S))
    seconds, peak = said.split()
    return float(seconds), float(peak)


def _ray() -> tuple[float, Line]:
    """Return the seconds until Ray is up, and the seconds of a bare program's step, a line in the workers."""
    from raycloak.coordinator.cluster.actors import connect, disconnect
    from raycloak_lab.bench.bare_ray import BareProgram

    began = time.perf_counter()
    connected = connect(num_cpus=2)
    started = time.perf_counter() - began
    try:
        steps = {}
        for workers in (2, FEW):
            with BareProgram(workers, CLASSES) as program:
                steps[workers] = median([program.step() for _ in range(30)][5:])
    finally:
        if connected:
            disconnect()
    return started, Line.through((2, steps[2]), (FEW, steps[FEW]))
