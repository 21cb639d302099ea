"""A configuration in plain Opacus: ``python benchmarks/peer.py CONFIG --seed N``; in plain torch if it is not private.

Same model, initial parameters, data, sampling rate, Poisson sampling, clipping norm, noise multiplier, divisor, steps,
update rule and learning rates as `raycloak run CONFIG`; Opacus samples, clips and adds noise. Without masks, ring,
ledger or evidence, so the difference in the result is what the whole path costs. Prints one JSON object.

One process, with as many threads as the run's workers have together.
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
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.training.public_evaluation import public_evaluator
from raycloak.workers.inputs.models import build_model, loss_function, read_flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    chosen = parser.parse_args()
    config, base = load_config(chosen.config, None), chosen.config.parent
    plan = plan_of(config, base)
    # Planning checks the model under deterministic kernels; Opacus' users have torch's default.
    torch.set_deterministic_debug_mode("default")
    threads = config.num_workers * config.threads_per_worker
    torch.set_num_threads(threads)
    torch.manual_seed(chosen.seed)
    started = time.perf_counter()
    module, step_seconds = train(config, base, plan)
    found = public_evaluator(config, model_source(config.model), base).measure(read_flat(module))
    private = plan.mechanism.private
    result = {
        "private": private,
        "evaluation_accuracy": found.accuracy,
        "evaluation_loss": found.loss,
        "privacy_epsilon_charged": plan.epsilon if private else None,
        "noise_multiplier": plan.mechanism.noise_multiplier if private else None,
        "steps": config.steps,
        "threads": threads,
        "wall_seconds": time.perf_counter() - started,
        "step_seconds": step_seconds,
    }
    print(json.dumps(result))


def train(config: RunConfig, base: Path, plan: Plan) -> tuple[torch.nn.Module, float]:
    """The trained model, and the seconds that its steps took."""
    mechanism, spec = plan.mechanism, optimizer_spec(config.optimizer, base)
    dataset = descriptor(config.dataset).open(base)
    module = build_model(model_source(config.model), base, config.seed)
    loss_fn, _ = loss_function(config.loss, base)
    trained = [tensor for tensor in module.parameters() if tensor.requires_grad]
    rule, wrapped = update_rule(trained, spec), module
    if mechanism.private:
        # Its own check for buffers would refuse transformers that it computes correctly.
        wrapped = GradSampleModule(module, loss_reduction="sum", strict=False)
        rule = DPOptimizer(
            rule,
            noise_multiplier=mechanism.noise_multiplier,
            max_grad_norm=mechanism.max_grad_norm,
            expected_batch_size=mechanism.expected_batch_size,
            loss_reduction="mean",
        )
    accumulate = _clipped if mechanism.private else _plain
    sampler = UniformWithReplacementSampler(
        num_samples=mechanism.num_examples, sample_rate=mechanism.sample_rate, steps=config.steps
    )
    started = time.perf_counter()
    for step, ids in enumerate(sampler):
        for group in rule.param_groups:
            group["lr"] = learning_rate(spec, step, config.steps)
        accumulate(wrapped, rule, loss_fn, dataset.batch(np.asarray(ids)), mechanism)
        rule.step()
        rule.zero_grad()
    return module, time.perf_counter() - started


def update_rule(trained, spec) -> torch.optim.Optimizer:
    """The run's update rule, as torch has it."""
    if spec.name == "sgd":
        return torch.optim.SGD(trained, lr=spec.learning_rate, momentum=spec.momentum, weight_decay=spec.weight_decay)
    rule = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[spec.name]
    betas = (spec.beta1, spec.beta2)
    return rule(trained, lr=spec.learning_rate, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay)


def _clipped(wrapped, optimizer, loss_fn, batch, mechanism) -> None:
    """Clip and add up micro-batches, as Opacus' virtual steps do; the last one stays for the step itself."""
    features, labels = batch
    rows = mechanism.micro_batch_size
    starts = range(0, len(features), rows)
    for start in starts:
        part = slice(start, start + rows)
        loss_fn(wrapped(torch.from_numpy(features[part])), torch.from_numpy(labels[part])).sum().backward()
        if start != starts[-1]:
            optimizer.signal_skip_step()
            optimizer.step()
            optimizer.zero_grad()


def _plain(module, _optimizer, loss_fn, batch, mechanism) -> None:
    """Add up the gradients of all examples over the expected number of them."""
    features, labels = batch
    rows = mechanism.micro_batch_size
    for start in range(0, len(features), rows):
        part = slice(start, start + rows)
        losses = loss_fn(module(torch.from_numpy(features[part])), torch.from_numpy(labels[part]))
        (losses.sum() / mechanism.expected_batch_size).backward()


if __name__ == "__main__":
    main()
