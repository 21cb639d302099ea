"""A recipe of examples/mnist in plain Opacus: ``python benchmarks/mnist_opacus.py CONFIG --seed N``.

Same model, data, sampling rate, Poisson sampling, clipping norm, noise multiplier, divisor, steps, learning rates and
initial parameters as `raycloak run CONFIG`; Opacus samples, clips and adds noise. Without masks, ring, ledger or
evidence, so the difference in accuracy is what the whole path costs. Prints one JSON object.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from raycloak.coordinator.aggregation.update_rules import learning_rate
from raycloak.coordinator.config.run import RunConfig, load_config
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.planning.public_split import public_split
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.training.public_evaluation import Evaluator
from raycloak.workers.inputs.models import build_model, loss_function, read_flat
from raycloak.workers.terms.manifest import OptimizerSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    chosen = parser.parse_args()
    config, base = load_config(chosen.config, None), chosen.config.parent
    torch.set_num_threads(1)
    torch.manual_seed(chosen.seed)
    plan = plan_of(config, base)
    started = time.perf_counter()
    module = train(config, base, plan)
    evaluator = Evaluator(model_source(config.model), config.loss, public_split(config, base), base)
    result = {
        "evaluation_accuracy": evaluator.measure(read_flat(module)).accuracy,
        "privacy_epsilon_charged": plan.epsilon,
        "noise_multiplier": plan.mechanism.noise_multiplier,
        "steps": config.steps,
        "wall_seconds": time.perf_counter() - started,
    }
    print(json.dumps(result))


def train(config: RunConfig, base: Path, plan: Plan) -> torch.nn.Module:
    """The trained model."""
    mechanism, spec = plan.mechanism, OptimizerSpec(**config.optimizer.model_dump())
    dataset = descriptor(config.dataset).open(base)
    module = build_model(model_source(config.model), base, config.seed)
    loss_fn, _ = loss_function(config.loss, base)
    wrapped = GradSampleModule(module, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(
            module.parameters(),
            lr=spec.learning_rate,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
        ),
        noise_multiplier=mechanism.noise_multiplier,
        max_grad_norm=mechanism.max_grad_norm,
        expected_batch_size=mechanism.expected_batch_size,
        loss_reduction="mean",
    )
    sampler = UniformWithReplacementSampler(
        num_samples=mechanism.num_examples, sample_rate=mechanism.sample_rate, steps=config.steps
    )
    for step, ids in enumerate(sampler):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step, config.steps)
        _accumulate(wrapped, optimizer, loss_fn, dataset.batch(np.asarray(ids)), mechanism.micro_batch_size)
        optimizer.step()
        optimizer.zero_grad()
    return module


def _accumulate(wrapped, optimizer, loss_fn, batch, rows) -> None:
    """Clip and add up micro-batches, as Opacus' virtual steps do; the last one stays for the step itself."""
    features, labels = batch
    starts = range(0, len(features), rows)
    for start in starts:
        part = slice(start, start + rows)
        loss_fn(wrapped(torch.from_numpy(features[part])), torch.from_numpy(labels[part])).sum().backward()
        if start != starts[-1]:
            optimizer.signal_skip_step()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
