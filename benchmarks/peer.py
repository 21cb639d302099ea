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
from numpy.typing import NDArray

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
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of raycloak run")
    chosen = parser.parse_args()
    config, base = load_config(chosen.config, chosen.set), chosen.config.parent
    plan = plan_of(config, base)
    threads = config.num_workers * config.threads_per_worker
    torch.set_num_threads(threads)
    torch.manual_seed(chosen.seed)
    started = time.perf_counter()
    parameters, step_seconds = train(config, base, plan)
    evaluation = public_evaluation(config, model_source(config.model), base)
    found = evaluation.evaluator().measure(parameters)
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


def train(config: RunConfig, base: Path, plan: Plan) -> tuple[NDArray[np.float32], float]:
    """The last weights, or their average where the run keeps one, and the seconds that the steps took."""
    training = OpacusTraining(config, base, plan.mechanism)
    started = time.perf_counter()
    average = read_flat(training.module).astype(np.float64)
    for step in range(plan.mechanism.steps):
        training.step()
        # As the run's: a decay of (1 + t) / (10 + t).
        average += (read_flat(training.module) - average) * (9 / (10 + step))
    last = read_flat(training.module)
    kept = average.astype(np.float32) if config.optimizer.averaged_weights else last
    return kept, time.perf_counter() - started


if __name__ == "__main__":
    main()
