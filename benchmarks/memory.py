"""Bytes a parameter beside the model: ``python benchmarks/memory.py [--parameters N]``.

Each case runs in a process of its own, at N / 3 and then at N parameters, on linear layers side by side. The figure is
the growth of the peak of resident memory from the smaller to the larger, over the growth of the parameters. What a
process takes without parameters is in neither. Counted is what a step adds:

    worker      the verified copy of the released parameters, clipped sums, ring words that are kept and that are sent,
                gradients; by the number of virtual workers that it hosts. The model, and what its layers keep, are not.
    aggregator  the average, the new parameters and the new state of the rule. Its inputs are not: they lie in the
                object store, which has every vector, the parameters and the state.
    opened      the parameters and the state of the rule that a driver reads from a package
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from raycloak_lab.bench.resident_memory import growth, return_freed_blocks

CLASSES = 20
LAYERS = 10
HOSTED = (1, 2, 4)
RULES = ("sgd", "adam")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=30_000_000)
    print(json.dumps(measured(parser.parse_args().parameters), indent=1))


def measured(parameters: int, hosted: Sequence[int] = HOSTED, rules: Sequence[str] = RULES) -> dict[str, float]:
    """Return bytes a parameter by case: ``worker, 2 hosted`` and ``aggregator, adam``."""
    cases = {f"worker, {each} hosted": (worker, each) for each in hosted}
    cases |= {f"aggregator, {each}": (aggregator, each) for each in rules}
    cases |= {f"opened, {each}": (opened, each) for each in rules}
    sizes = [each // (LAYERS * CLASSES) * (LAYERS * CLASSES) for each in (parameters // 3, parameters)]
    found = {}
    for name, (case, argument) in cases.items():
        small, large = _alone(case, sizes, argument)
        found[name] = (large - small) / (sizes[1] - sizes[0])
    return found


def worker(parameters: int, hosted: int) -> int:
    """Return the bytes that the vectors of a step and their masking take, by the functions of a worker."""
    import torch

    from raycloak.attestation.core.keys import Secret
    from raycloak.attestation.keys.release import VirtualWorkerKeys
    from raycloak.coordinator.config.run import parse_config
    from raycloak.coordinator.planning.plan import plan_mechanism
    from raycloak.workers.device.words import words_on
    from raycloak.workers.gradients.clipping import GradientEngine
    from raycloak.workers.gradients.numerics import pin_numerics
    from raycloak.workers.inputs.datasets import ArrayDataset
    from raycloak.workers.models.models import read_flat
    from raycloak.workers.run_member import HostedSum
    from raycloak.workers.terms.model_digest import own_copy
    from raycloak.workers.vectors.payload import VectorRange
    from raycloak.workers.vectors.threads import ONE_THREAD
    from raycloak.workers.virtual_worker import VirtualWorkerComputer

    pin_numerics()
    config = parse_config(
        {
            "num_workers": 2,
            "virtual_workers": max(HOSTED),
            "expected_batch_size": 4,
            "steps": 3,
            "micro_batch_size": 1,
            "dp_config": {"noise_multiplier": 10.0, "epsilon_cap": 8.0, "accountant": "rdp"},
        }
    )
    examples = 16
    mechanism = plan_mechanism(config, examples, parameters)
    words = words_on([torch.device("cpu")], ONE_THREAD)
    width = parameters // CLASSES // LAYERS

    class SideBySide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, CLASSES, bias=False) for _ in range(LAYERS))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            parts = zip(self.layers, features.split(width, 1), strict=True)
            return torch.stack([layer(part) for layer, part in parts]).sum(0)

    module = SideBySide()
    features = np.ones((examples, parameters // CLASSES), np.float32)
    data = ArrayDataset(features, np.arange(examples) % CLASSES)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    spare = data.batch(np.zeros(1, np.int64))
    computer = VirtualWorkerComputer(mechanism, GradientEngine(module, loss, mechanism), data, spare, words=words)
    keys = VirtualWorkerKeys(stream=Secret(bytes(32)), data=Secret(bytes(32)))
    received = read_flat(module)

    def step(number: int) -> None:
        flat, kept = own_copy([received]), HostedSum(words)
        for v in range(hosted):
            kept.add(v, computer.vector(v, keys, number, bytes(32), bytes(32), flat))
        del flat
        kept.masked(VectorRange(index=0, offset=0, length=parameters), [(Secret(bytes(32)), 1)])

    # A first time, so that libraries' workspaces are there already.
    step(0)
    return growth(lambda: step(1))


def aggregator(parameters: int, rule: str) -> int:
    """Return the bytes that the average of eight vectors and an update take, by the functions of an aggregator."""
    from raycloak.coordinator.aggregation.aggregator import decoded_average
    from raycloak.coordinator.aggregation.update_rules import Optimizer
    from raycloak.coordinator.config.sections import OptimizerConfig
    from raycloak.coordinator.planning.manifest import optimizer_spec
    from raycloak.workers.gradients.numerics import pin_numerics
    from raycloak.workers.terms.manifest import TensorSpec

    pin_numerics()
    optimizer = Optimizer(
        optimizer_spec(OptimizerConfig(name=rule, momentum=0.9 if rule == "sgd" else 0.0), Path()),
        [TensorSpec(name="weight", shape=(CLASSES, parameters // CLASSES))],
        total_steps=3,
    )
    vectors = [np.ones(parameters, np.uint32)] * 8
    start = np.ones(parameters, np.float32)

    def step(state: object, number: int) -> object:
        average = decoded_average(vectors, 32, -10, 4.0, np.float32)
        return optimizer.update(start, average, state, number)

    _, state = step(optimizer.initial_state(), 0)
    return growth(lambda: step(state, 1))


def opened(parameters: int, rule: str) -> int:
    """Return the bytes that reading the arrays of a package takes, by the function of a driver."""
    from raycloak.attestation.sealed.chunk_stream import CHUNK_BYTES
    from raycloak.coordinator.checkpoints.arrays import load_arrays, safetensors_pieces
    from raycloak.workers.terms.built_in_rules import RULES

    ones = np.ones(parameters, np.float32)
    files = [{"weight": ones}, {f"state {index}": ones.copy() for index in range(RULES[rule].state_tensors)}]

    def chunks(arrays: dict[str, np.ndarray]) -> Iterator[bytes]:
        for piece in safetensors_pieces(arrays, {}):
            for start in range(0, len(piece), CHUNK_BYTES):
                yield bytes(piece[start : start + CHUNK_BYTES])

    return growth(lambda: [load_arrays(chunks(arrays)) for arrays in files])


def _alone(case: Callable[[int, Any], int], sizes: Sequence[int], argument: object) -> list[int]:
    # Not forked: memory that this process holds free would hide what the case takes. What the smaller size has freed
    # went back to the system.
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=return_freed_blocks
    ) as pool:
        return [pool.submit(case, size, argument).result() for size in sizes]


if __name__ == "__main__":
    main()
