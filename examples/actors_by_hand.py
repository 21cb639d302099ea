"""The step loop on raycloak's actors, written out, with an aggregation rule of your own. Evidence is SIMULATED.

Run it with `python examples/actors_by_hand.py`.
"""

import os
import tempfile

import numpy as np

import raycloak as rc

os.environ.setdefault("RAYCLOAK_HOME", tempfile.mkdtemp())  # without it, every try would be charged to the real account
config = rc.RunConfig(
    model="raycloak.coordinator.runs.demo:digits_model",
    dataset=rc.DatasetConfig(kind="digits", scale=16.0),
    expected_batch_size=360,
    steps=5,
    dp_config=rc.DPConfig(target_epsilon=8.0),
)


def aggregated(average: np.ndarray, momentum: np.ndarray, deviation: float) -> np.ndarray:
    """Shrink what the noise alone explains, then add momentum: the average is released, so this costs no epsilon."""
    return 0.9 * momentum + np.sign(average) * np.maximum(np.abs(average) - deviation, 0.0)


with rc.by_hand(config) as run:
    parameters, momentum = run.initial_parameters, np.zeros_like(run.initial_parameters)
    mechanism = run.plan.mechanism
    deviation = mechanism.noise_multiplier * mechanism.sensitivity / mechanism.expected_batch_size
    for step in range(config.steps):
        # Charged; then every worker draws its sample, clips, adds noise and masks. Nobody can read one vector.
        vectors = run.vectors(parameters)
        average = run.aggregate(vectors)  # Bound in the ledger; then only the sum of all vectors is decoded.
        momentum = aggregated(average, momentum, deviation)
        parameters = parameters - 1.5 * momentum
        print(f"SIMULATED step {step}: the average has norm {np.linalg.norm(average):.3f}", flush=True)
    print(f"epsilon {run.plan.epsilon_outsiders:.3f}, parameters {run.finish(parameters)}")
