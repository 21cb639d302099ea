"""`benchmarks/correlated_simulation.py`: each part of the float simulation is the product's, and so is the table."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import solve_triangular

from benchmarks.correlated import PAIRS, RESULTS, configuration, table
from benchmarks.correlated_simulation import Examples, Rule, Solver, clipped_sum, part_of
from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.coordinator.aggregation.update_rules import Optimizer
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.config.sections import OptimizerConfig
from raycloak.coordinator.planning.manifest import optimizer_spec
from raycloak.coordinator.planning.plan import plan_mechanism
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.inputs.datasets import slice_ids
from raycloak.workers.models.models import loss_function
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import TensorSpec
from raycloak.workers.terms.model_digest import AVERAGED
from tests.layout import ROOT

# Few examples and steps; 3 does not divide the examples of a slice.
EXAMPLES, FEATURES, CLASSES, BANDS, STEPS = 1001, 5, 3, 3, 8
PAIR = PAIRS[2]
SIDE = replace(PAIR.correlated, batch=64, steps=STEPS, bands=BANDS)


def mechanism(side=SIDE):
    return plan_mechanism(parse_config(configuration(PAIR, side)), EXAMPLES, FEATURES * CLASSES)


def drawn(count):
    draw = np.random.default_rng(2)
    # Gradients on both sides of the clipping norm.
    features = draw.standard_normal((count, FEATURES)) * draw.choice([0.05, 1], (count, 1))
    return Examples(features.astype(np.float32).astype(np.float64), draw.integers(0, CLASSES, count))


def test_the_released_gradients_are_those_of_the_factorisation():
    """The simulation solves step by step; here a triangular system is solved, with the planned coefficients."""
    planned = mechanism()
    exact = np.array(planned.coefficients) / COEFFICIENT_UNIT
    lags = np.subtract.outer(np.arange(STEPS), np.arange(STEPS))
    weights = np.where((lags >= 0) & (lags < BANDS), exact[np.clip(lags, 0, BANDS - 1)], 0)
    sums = np.random.default_rng(3).standard_normal((STEPS, 4))
    solver, clear = Solver(planned, np.random.default_rng(4)), Solver(planned, None)
    mixed, solved = zip(*((found := solver.mixed(each), solver.solved(found)) for each in sums), strict=True)
    np.testing.assert_allclose(solved, solve_triangular(weights, np.array(mixed), lower=True), rtol=1e-12)
    without = [clear.solved(clear.mixed(each)) for each in sums]
    np.testing.assert_allclose(without, sums / planned.expected_batch_size, rtol=1e-12)
    assert np.abs(np.array(solved) - without).max() > 0.001


@pytest.mark.parametrize("bands", [1, BANDS])
def test_the_noise_is_that_of_all_virtual_workers(bands):
    planned = mechanism(replace(SIDE, bands=bands))
    noise = Solver(planned, np.random.default_rng(5)).mixed(np.zeros(100_000)) * planned.expected_batch_size
    added = planned.sigma * planned.gamma * planned.virtual_workers**0.5
    assert noise.std() == pytest.approx(added, rel=0.01)


def test_parts_are_disjoint_and_are_those_that_virtual_workers_draw_from():
    planned = mechanism()
    parts = [part_of(planned, step) for step in range(BANDS)]
    assert sorted(np.concatenate(parts)) == list(range(EXAMPLES))
    count = planned.virtual_workers
    for step, part in enumerate(parts):
        slices = [slice_ids(v, count, EXAMPLES)[step::BANDS] for v in range(count)]
        assert sorted(np.concatenate(slices)) == part.tolist()
    np.testing.assert_array_equal(part_of(planned, BANDS + 1), parts[1])


@pytest.mark.parametrize("clipping", ["norm", "normalised"])
def test_gradients_are_clipped_as_a_worker_clips_them(clipping):
    planned, examples = mechanism(replace(SIDE, clipping=clipping)), drawn(32)
    module = torch.nn.Linear(FEATURES, CLASSES, bias=False)
    weights = np.random.default_rng(6).standard_normal((CLASSES, FEATURES)).astype(np.float32)
    engine = GradientEngine(module, loss_function(LossSpec.of("cross_entropy"), ROOT)[0], planned)
    rows = planned.micro_batch_rows
    places = np.arange(rows) % 32
    valid = np.arange(rows) < 32
    batch = examples.features[places].astype(np.float32), examples.labels[places], valid
    (found,) = engine.clipped_sum(weights.ravel(), [batch])
    expected = clipped_sum(weights.astype(np.float64), examples, planned)
    np.testing.assert_allclose(found.numpy().ravel(), expected.ravel(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_weights_are_updated_as_an_aggregator_updates_them(name):
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    spec = optimizer_spec(OptimizerConfig(name=name, learning_rate=0.3, averaged_weights=True, **momentum), ".")
    optimizer = Optimizer(spec, [TensorSpec(name="weight", shape=(4,))], STEPS)
    weights, state = np.zeros(4, np.float32), optimizer.initial_state()
    steps = Rule(name, 0.3).steps(np.zeros(4))
    next(steps)
    for step, gradient in enumerate(np.random.default_rng(7).standard_normal((STEPS, 4))):
        weights, state = optimizer.update(weights, gradient, state, step)
        found, averaged = steps.send(gradient)
        np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(averaged, state[f"weight/{AVERAGED}"], rtol=1e-4, atol=1e-5)


def test_the_documented_table_is_the_one_of_the_results():
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert table(found) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
