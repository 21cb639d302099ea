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

import torch

from raycloak.coordinator.config.run import RunConfig, load_config
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.plan import Plan
from raycloak.coordinator.training.evaluation import public_evaluation
from raycloak.workers.models.models import read_flat
from raycloak_lab.bench.opacus_steps import OpacusTraining


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    chosen = parser.parse_args()
    config, base = load_config(chosen.config, None), chosen.config.parent
    plan = plan_of(config, base)
    threads = config.num_workers * config.threads_per_worker
    torch.set_num_threads(threads)
    torch.manual_seed(chosen.seed)
    started = time.perf_counter()
    module, step_seconds = train(config, base, plan)
    evaluation = public_evaluation(config, model_source(config.model), base)
    found = evaluation.evaluator().measure(read_flat(module))
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
    training = OpacusTraining(config, base, plan.mechanism)
    started = time.perf_counter()
    for _ in range(plan.mechanism.steps):
        training.step()
    return training.module, time.perf_counter() - started


if __name__ == "__main__":
    main()
