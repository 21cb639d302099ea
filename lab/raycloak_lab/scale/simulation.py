"""The simulation of a step at another size: what raycloak adds to a model's own computation, by workers and parameters.

Each formula states its reason and unit. Its rates are measured on the machine where the command runs
(`raycloak_lab.scale.calibration`); the cluster is assumed, and every assumption is printed. Ring, grid step and
noise are those that a plan of this size would choose. The time of the gradient is not in it: that is the model's.

Times are for a step after the first in which no member fails, with one core for each process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from raycloak.attestation.core.mask_graph import least_reach
from raycloak.coordinator.config.run import MOST_VIRTUAL_WORKERS, RunConfig, apply_override, parse_config
from raycloak.coordinator.config.section import Section, validated
from raycloak.coordinator.config.sections import FailureConfig
from raycloak.coordinator.planning.batches import hosted_at_most
from raycloak.coordinator.planning.plan import plan_mechanism, reduce_bytes
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.built_in_rules import RULES
from raycloak.workers.terms.mechanism import Mechanism
from raycloak.workers.vectors.noise import decompose
from raycloak.workers.vectors.ring import RingBits
from raycloak_lab.scale.devices import FLOAT_BYTES, SUM_BYTES, DeviceConfig, DeviceScale, device_scales
from raycloak_lab.scale.large_models import LargeModel, LargeModelConfig

GB = 1e9
STORE_SHARE, MOST_STORE_BYTES = 0.3, 200 * GB
"""Ray gives its object store 30 % of a node's memory by default, and never more than 200 GB."""

DRIVER_BYTES = FLOAT_BYTES
"""At the end the driver holds the final parameters; bytes a parameter."""

SAMPLE_RATE = 1e-3
"""Of the assumed runs. It moves the size of a batch's cut alone."""

PLANNED_STEPS = 1000
"""Of the assumed runs: a longer run's mask graph needs a little more."""


class ScaleConfig(Section):
    """The sizes to simulate and the cluster to assume.

    Attributes:
        workers, parameters: a prediction is made for each pair.
        aggregators: numbers of parameter ranges, each with an aggregator on a node of its own.
        optimizer: update rule, with momentum for ``sgd``.
        examples_per_worker: expected examples of a step, for each worker; they decide the ring's capacity.
        colluding_share: of the workers; it decides how many neighbours a sparse mask graph needs.
        network_gbit_per_s: of each node, in each direction.
        node_memory_gb: of each node.
        workers_per_node, cores_per_node: for memory, and for the start.
        device: each GPU of a worker; None for workers on CPUs.
        model: takes the place of ``parameters``. Its workers are on GPUs, whose rates ``device`` states.
    """

    workers: list[int] = Field(default=[8, 64, 1024], min_length=1)
    parameters: list[int] = Field(default=[10**6, 10**7, 10**8, 10**9, 10**10], min_length=1)
    aggregators: list[int] = Field(default=[1, 8, 64], min_length=1)
    optimizer: Literal["sgd", "adam"] = "sgd"
    examples_per_worker: int = Field(default=64, gt=0)
    colluding_share: float = Field(default=1 / 3, gt=0, lt=1)
    network_gbit_per_s: float = Field(default=10.0, gt=0)
    node_memory_gb: float = Field(default=256.0, gt=0)
    workers_per_node: int = Field(default=1, gt=0)
    cores_per_node: int = Field(default=8, gt=0)
    device: DeviceConfig | None = None
    model: LargeModelConfig | None = None

    @property
    def gpu(self) -> DeviceConfig | None:
        """Return a GPU of a worker; None for workers on CPUs."""
        return DeviceConfig() if self.device is None and self.model is not None else self.device

    @property
    def bytes_per_second(self) -> float:
        """Return what a node sends or receives in a second."""
        return self.network_gbit_per_s * 1e9 / 8

    @property
    def store_limit(self) -> float:
        """Return the size of a node's object store, in bytes."""
        return min(STORE_SHARE * self.node_memory_gb * GB, MOST_STORE_BYTES)

    @property
    def process_limit(self) -> float:
        """Return what the object store leaves to the processes of a node, in bytes."""
        return self.node_memory_gb * GB - self.store_limit


@dataclass(frozen=True, slots=True)
class Line:
    """A cost that grows with a count: ``fixed + each * count``."""

    fixed: float
    each: float

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> "Line":
        """Return the line through two measurements; neither part is below zero, which only noise could make it."""
        each = max((many[1] - few[1]) / (many[0] - few[0]), 0.0)
        return cls(max(few[1] - each * few[0], 0.0), each)

    def at(self, count: float) -> float:
        """Return the cost of ``count``."""
        return self.fixed + self.each * count


@dataclass(frozen=True, slots=True)
class WordRates:
    """The costs of one ring word, in processor seconds.

    Attributes:
        vector: from the clipped sum to a noised vector with its tag, a line in the base draws of the noise.
        mask: one peer's mask. tag: the tag of a masked vector, made or checked.
        averaged: decoding the average of as many vectors, a line in the vectors.
    """

    vector: Line
    mask: float
    tag: float
    averaged: Line


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that this machine measured. Seconds are processor time of one core unless the name says wall.

    Attributes:
        words: by bits of the ring.
        receive: a worker's copy of a parameter and its digest. update: the update rule and the digest of a parameter.
        gradient: of a parameter of the linear model that the measurement trains; no part of a prediction.
        worker, aggregator, orchestrator, driver: control of a step, lines in the workers.
        ray_wall: a step of a bare Ray program with one durable write, a line in the workers.
        ledger_wall: the ledger's two durable writes of a step.
        start_wall: the start of Ray. imports: what a worker's process imports. process_bytes: of that process.
        admission: everything before the first step, of one more worker at the driver and the orchestrator.
        appraisal: of one peer's evidence by a worker.
    """

    words: Mapping[RingBits, WordRates]
    receive: float
    update: float
    gradient: float
    worker: Line
    aggregator: Line
    orchestrator: Line
    driver: Line
    ray_wall: Line
    ledger_wall: float
    start_wall: float
    imports: float
    process_bytes: float
    admission: float
    appraisal: float


@dataclass(frozen=True, slots=True)
class AggregatorScale:
    """One aggregator of ``ranks``.

    Attributes:
        seconds: from its last vector to the updated range. bytes: of its process.
        store_bytes: of the object store on its node.
        gather_seconds: until all masked vectors have reached it. spread_seconds: until all workers have its range.
    """

    ranks: int
    seconds: float
    bytes: float
    store_bytes: float
    gather_seconds: float
    spread_seconds: float


@dataclass(frozen=True, slots=True)
class Scale:
    """The prediction for one size. Seconds and bytes; ``uses`` are shares of a limit.

    Attributes:
        ring_bits, base_draws: of the ring and the noise that a plan takes.
        mask_degree: peers that a worker shares a mask with.
        up_bytes, down_bytes: of one worker and step on the wire.
        worker_bytes: of a worker's process beside its model's layers; worker_bytes_per_parameter: above an empty one.
        vector_seconds, mask_seconds, worker_seconds: of a worker: encoding and noise; masks and tags; both, with
            receiving and control.
        aggregators: by number of ranks. ranks: the fewest whose aggregators fit; the most where none does.
        worker_store_bytes: of the object store on a worker's node. store_bytes: in all, with ``ranks`` aggregators.
        driver_bytes: of the driver's process at the end.
        control_seconds: ledger, orchestrator, driver and Ray, while nobody computes.
        step_seconds: all of a step but the gradient.
        ledger_steps_per_second: steps of any number of runs that one ledger can charge and bind.
        start_seconds: from an empty cluster to the first step, without the model's own checks.
        device: a worker's GPU; None for workers on CPUs.
        uses: of each limit. first_limit: the one that is used most; it breaks where its use is above 1.
    """

    workers: int
    parameters: int
    ring_bits: RingBits
    base_draws: int
    mask_degree: int
    up_bytes: float
    down_bytes: float
    worker_bytes: float
    worker_bytes_per_parameter: float
    vector_seconds: float
    mask_seconds: float
    worker_seconds: float
    aggregators: tuple[AggregatorScale, ...]
    ranks: int
    worker_store_bytes: float
    store_bytes: float
    driver_bytes: float
    control_seconds: float
    step_seconds: float
    ledger_steps_per_second: float
    start_seconds: float
    devices: tuple[DeviceScale, ...]
    uses: Mapping[str, float]
    first_limit: str


@dataclass(frozen=True, slots=True)
class RefusedSize:
    """A size that no plan exists for: ``code`` and ``message`` of its refusal."""

    workers: int
    parameters: int
    code: str
    message: str


def parse_scale(overrides: Sequence[str]) -> ScaleConfig:
    """Return the sizes and assumptions after ``key=value`` overrides; errors as of a run's configuration."""
    raw: dict[str, Any] = {}
    for override in overrides:
        apply_override(raw, override)
    return validated(ScaleConfig, raw, "docs/scale.md")


def mask_degree(workers: int, colluding_share: float) -> int:
    """Return how many peers a worker shares a mask with: all others, or its neighbours in a mask graph.

    See `raycloak.attestation.core.mask_graph`; a run has such a graph only if it asks for it.
    """
    reach = least_reach(workers, int(workers * colluding_share), PLANNED_STEPS)
    return workers - 1 if reach is None else 2 * reach


def assumed_run(config: ScaleConfig, workers: int) -> RunConfig:
    """Return the run that is planned for so many workers."""
    return parse_config(
        {
            "num_workers": workers,
            "virtual_workers": max(workers, MOST_VIRTUAL_WORKERS),
            "expected_batch_size": config.examples_per_worker * workers,
            "steps": PLANNED_STEPS,
            "micro_batch_size": None if config.model is None else config.model.rows,
            "optimizer": {"name": config.optimizer},
            "dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 8.0, "accountant": "rdp", "target_delta": 1e-8},
        }
    )


def planned(config: ScaleConfig, workers: int, parameters: int) -> Mechanism:
    """Return the mechanism of a run of this size; ConfigError where no ring holds its sum."""
    run = assumed_run(config, workers)
    return plan_mechanism(run, round(run.batch_size / SAMPLE_RATE), parameters)


def simulate(config: ScaleConfig, rates: Rates, model: LargeModel | None = None) -> list[Scale | RefusedSize]:
    """Return the prediction for every pair of workers and parameters, the fewest workers first.

    Args:
        model: the counts of ``config.model``.
    """
    found: list[Scale | RefusedSize] = []
    for workers in config.workers:
        for parameters in config.parameters if model is None else [model.trained]:
            try:
                mechanism = planned(config, workers, parameters)
            except ConfigError as error:
                found.append(RefusedSize(workers, parameters, error.code, error.message))
            else:
                found.append(predict(config, rates, workers, mechanism, model))
    return found


def predict(
    config: ScaleConfig, rates: Rates, workers: int, mechanism: Mechanism, model: LargeModel | None = None
) -> Scale:
    """Return the prediction for one size."""
    size, word = mechanism.dimension, mechanism.ring_bits // 8
    hosted = hosted_at_most(mechanism.virtual_workers, workers)
    draws, degree = decompose(mechanism.sigma).draws, mask_degree(workers, config.colluding_share)
    rate = rates.words[mechanism.ring_bits]
    vector = vector_seconds(rate, size, hosted, draws)
    mask = mask_seconds(rate, size, degree)
    devices = () if config.gpu is None else device_scales(config.gpu, mechanism, hosted, model)
    # On a GPU of an unknown rate, words are predicted as if the host computed them.
    words = max((each.words_seconds for each in devices if each.words_seconds is not None), default=vector + mask)
    worker = rates.receive * size + words + rates.worker.at(workers)
    gradient = min((each.model_seconds for each in devices if each.model_seconds is not None), default=0.0)
    # Sums and words on a GPU leave the host the released parameters and what is sent.
    per_parameter = FLOAT_BYTES + word if devices else worker_bytes_per_parameter(word, hosted)
    store = worker_store_bytes(size, word) * config.workers_per_node
    aggregators = tuple(aggregator(config, rates, workers, mechanism, ranks) for ranks in config.aggregators)
    chosen = next((each for each in aggregators if fits(config, each)), aggregators[-1])
    control = control_seconds(rates, workers, chosen.ranks)
    step = chosen.spread_seconds + worker + chosen.gather_seconds + chosen.seconds + control
    deadline = FailureConfig().step_deadline_s
    uses = {
        "worker": (rates.process_bytes + per_parameter * size) * config.workers_per_node / config.process_limit,
        "worker's store": store / config.store_limit,
        "worker's deadline": (chosen.spread_seconds + worker + gradient) / deadline,
        "aggregator": chosen.bytes / config.process_limit,
        "aggregator's store": chosen.store_bytes / config.store_limit,
        "aggregator's deadline": (chosen.gather_seconds + chosen.seconds) / deadline,
        "driver": (rates.process_bytes + DRIVER_BYTES * size) / config.process_limit,
    }
    limits = [each.memory_bytes / each.limit_bytes for each in devices if each.limit_bytes is not None]
    if limits:
        # Of the number of GPUs that leaves the most free.
        uses["GPU"] = min(limits)
    return Scale(
        workers=workers,
        parameters=size,
        ring_bits=mechanism.ring_bits,
        base_draws=draws,
        mask_degree=degree,
        up_bytes=word * size,
        down_bytes=FLOAT_BYTES * size,
        worker_bytes=rates.process_bytes + per_parameter * size,
        worker_bytes_per_parameter=per_parameter,
        vector_seconds=vector,
        mask_seconds=mask,
        worker_seconds=worker,
        aggregators=aggregators,
        ranks=chosen.ranks,
        worker_store_bytes=store,
        store_bytes=store * math.ceil(workers / config.workers_per_node) + chosen.store_bytes * chosen.ranks,
        driver_bytes=rates.process_bytes + DRIVER_BYTES * size,
        control_seconds=control,
        step_seconds=step,
        ledger_steps_per_second=1 / rates.ledger_wall,
        start_seconds=start_seconds(config, rates, workers),
        devices=devices,
        uses=uses,
        first_limit=max(uses, key=lambda limit: uses[limit]),
    )


def vector_seconds(rate: WordRates, size: int, hosted: int, draws: int) -> float:
    """Return a worker's seconds from clipped sums to noised vectors with tags.

    Each hosted virtual worker has a vector of its own; each base draw of the noise reads 16 bits of keystream a word.
    """
    return hosted * size * rate.vector.at(draws)


def mask_seconds(rate: WordRates, size: int, degree: int) -> float:
    """Return a worker's seconds for masks and the tag; a mask costs one keystream of the vector's length."""
    return size * (degree * rate.mask + rate.tag)


def worker_bytes_per_parameter(word: int, hosted: int) -> int:
    """Return the bytes a parameter that a worker holds at its peak, beside its model.

    Its copy of the released parameters in float32, and the clipped sum in float64, whose pieces become words one by
    one. Beyond one virtual worker also the sum of the vectors before. `benchmarks/memory.py` measures it.
    """
    return FLOAT_BYTES + SUM_BYTES + (word if hosted > 1 else 0)


def worker_store_bytes(size: int, word: int) -> float:
    """Return what one worker leaves in its node's object store, in bytes.

    Two masked vectors, since the last attempt's may not be freed yet, and the parameters before and after a step.
    """
    return float(size * (2 * word + 2 * FLOAT_BYTES))


def aggregator(config: ScaleConfig, rates: Rates, workers: int, mechanism: Mechanism, ranks: int) -> AggregatorScale:
    """Return one of ``ranks`` aggregators, each with an even share of the parameters on a node of its own.

    It checks a tag and adds a vector for every worker, then decodes and updates once. All vectors of its range lie in
    its node's object store at once, of two attempts at most, and so do parameters and optimizer state, old and new.
    Its link carries its range to every worker and every worker's range to it; nodes that pass on copies would help.
    """
    whole, word = mechanism.dimension, mechanism.ring_bits // 8
    size, rate, state = whole / ranks, rates.words[mechanism.ring_bits], RULES[config.optimizer].state_tensors
    held = reduce_bytes(whole, workers * word * whole, (1 + state) * FLOAT_BYTES * whole)
    return AggregatorScale(
        ranks=ranks,
        seconds=size * (workers * rate.tag + rate.averaged.at(workers) + rates.update) + rates.aggregator.at(workers),
        bytes=rates.process_bytes + held / ranks,
        store_bytes=2 * size * (workers * word + (1 + state) * FLOAT_BYTES),
        gather_seconds=max(workers * size * word, mechanism.dimension * word) / config.bytes_per_second,
        spread_seconds=max(workers * size, mechanism.dimension) * FLOAT_BYTES / config.bytes_per_second,
    )


def fits(config: ScaleConfig, found: AggregatorScale) -> bool:
    """Return whether process and object store of an aggregator fit its node."""
    return found.bytes <= config.process_limit and found.store_bytes <= config.store_limit


def control_seconds(rates: Rates, workers: int, ranks: int) -> float:
    """Return the seconds of a step in which neither workers nor aggregators compute.

    The calls of all members and the durable writes, the roster, and the driver's own work. The roster is asked for one
    step ahead, so this is an upper bound.
    """
    calls = rates.ray_wall.at(workers + ranks) + rates.ledger_wall
    return calls + rates.orchestrator.at(workers) + rates.driver.at(workers)


def start_seconds(config: ScaleConfig, rates: Rates, workers: int) -> float:
    """Return the seconds from an empty cluster to the first step.

    Ray starts; the processes of a node import side by side on its cores; one orchestrator admits one worker after the
    other; each worker appraises those that it masks with, at the same time as they do.
    """
    imports = rates.imports * math.ceil(config.workers_per_node / config.cores_per_node)
    appraised = mask_degree(workers, config.colluding_share) + 1
    return rates.start_wall + imports + workers * rates.admission + appraised * rates.appraisal
