"""Defects that leave no trace in an audit: each has a check of its own, which passes on the product and fails on it.

An audit sees a canary stand out from its noise. It does not see what changes for a canary's neighbours (a realised
divisor), what the adversary of the theorem could use and the canaries do not (shuffling, an empty batch that is not
released), or what only destroys the sum (masks). Keys are fixed, so nothing here depends on chance.
"""

import numpy as np
import pytest
import torch

from raycloak.workers import peers, virtual_worker
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.inputs.datasets import slice_ids
from raycloak.workers.vectors.ring import decode
from raycloak.workers.virtual_worker import VirtualWorkerComputer
from tests.protocol import (
    DATA_ROOT,
    VIRTUAL_WORKERS,
    HandRun,
    SilentWords,
    computer,
    examples,
    initial_parameters,
    keys_of,
    mechanism,
    trained,
)

RUN, MODEL = b"c" * 32, b"p" * 32
START = initial_parameters()
BUILD = pytest.mark.parametrize("build", ["correct", "defective"])


def release(chosen, data=None, step=0, noise=True) -> np.ndarray:
    """Return the decoded sum of a step, in real units."""
    vectors = computer(chosen, data, words=None if noise else SilentWords())
    total = np.zeros(chosen.dimension, f"<u{chosen.ring_bits // 8}")
    for v in range(VIRTUAL_WORKERS):
        total += vectors.vector(v, keys_of(RUN, v), step, MODEL, DATA_ROOT, START).values
    return decode(total, chosen.gamma_log2)


# --- dividing by the realised batch size


def divide_by_the_realised_batch_size(monkeypatch):
    genuine = GradientEngine.clipped_sum

    def clipped_sum(self, parameters, batches):
        kept = list(batches)
        valid = sum(int(valid.sum()) for _, _, valid in kept)
        return tuple(each / max(valid, 1) for each in genuine(self, parameters, kept))

    monkeypatch.setattr(GradientEngine, "clipped_sum", clipped_sum)


@BUILD
def test_others_contributions_do_not_depend_on_whether_an_example_is_in_the_batch(monkeypatch, build):
    """Example 3 moves the release by its own clipped gradient, up to rounding, for any other examples in the batch."""
    if build == "defective":
        divide_by_the_realised_batch_size(monkeypatch)
    chosen = mechanism(sample_rate=1.0)
    genuine = virtual_worker.draw_ids

    def release_of(keep) -> np.ndarray:
        monkeypatch.setattr(
            virtual_worker, "draw_ids", lambda *given: np.array([i for i in genuine(*given) if keep(i)], np.int64)
        )
        return release(chosen, noise=False)

    everybody, others, alone = (release_of(keep) for keep in (lambda i: True, lambda i: i != 3, lambda i: i == 3))
    rounding = 3 * chosen.gamma * np.sqrt(chosen.dimension)
    assert (np.linalg.norm(everybody - others - alone) <= rounding) == (build == "correct")


# --- shuffling accounted as Poisson


def shuffle_instead_of_sampling(monkeypatch):
    position = {}

    def draw_ids(key, ids, rate, capacity):
        """Return each example once per epoch, in batches of one size."""
        size = max(1, round(rate * len(ids)))
        at = position[ids[0]] = position.get(ids[0], -size) + size
        return np.sort(np.roll(ids, -at)[:size])

    monkeypatch.setattr(virtual_worker, "draw_ids", draw_ids)


@BUILD
def test_batch_sizes_vary_as_independent_coins_do(monkeypatch, build):
    """320 draws of five coins at rate 0.4: sizes have the binomial's variance 1.2, not that of batches of one size.

    Over keys, the variance leaves [0.8, 1.7] with a chance below 1e-5; these keys are fixed. And two consecutive draws
    share examples, which no epoch of a shuffle does.
    """
    if build == "defective":
        shuffle_instead_of_sampling(monkeypatch)
    chosen = mechanism(sample_rate=0.4)
    drawn, genuine = [], virtual_worker.draw_ids
    monkeypatch.setattr(virtual_worker, "draw_ids", lambda *given: drawn.append(genuine(*given)) or drawn[-1])
    monkeypatch.setattr(
        GradientEngine, "clipped_sum", lambda *given: (torch.zeros(chosen.dimension, dtype=torch.float64),)
    )
    for step in range(40):
        release(chosen, step=step, noise=False)
    sizes = np.array([len(each) for each in drawn])
    shared = [len(set(a) & set(b)) for a, b in zip(drawn[:-VIRTUAL_WORKERS], drawn[VIRTUAL_WORKERS:], strict=True)]
    assert (0.8 < sizes.var() < 1.7) == (build == "correct")
    assert (0.5 < np.mean(shared) < 1.1) == (build == "correct")


# --- a dropped empty batch


def drop_empty_batches(monkeypatch):
    genuine = VirtualWorkerComputer.vector

    def vector(self, v, keys, *context):
        with monkeypatch.context() as patch:
            drawn, draw = [], virtual_worker.draw_ids
            patch.setattr(virtual_worker, "draw_ids", lambda *given: drawn.append(draw(*given)) or drawn[-1])
            result = genuine(self, v, keys, *context)
        if not len(drawn[0]):
            result.values[:] = 0
        return result

    monkeypatch.setattr(VirtualWorkerComputer, "vector", vector)


@BUILD
def test_an_empty_batch_is_released_under_all_of_its_noise(monkeypatch, build):
    """At rate 0 the release is noise of the whole deviation; 83 values are off by half with a chance below 1e-8."""
    if build == "defective":
        drop_empty_batches(monkeypatch)
    chosen = mechanism(sample_rate=0.0)
    deviation = chosen.sigma * chosen.gamma * np.sqrt(VIRTUAL_WORKERS)
    assert (0.5 < release(chosen).std() / deviation < 1.5) == (build == "correct")


def test_an_empty_batch_is_a_charged_step_that_moves_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual_worker, "draw_ids", lambda *given: np.empty(0, np.int64))
    run = trained(tmp_path, steps=2)
    assert run.finished.steps == 2
    assert len(set(run.digests)) == 2
    assert sum(line["event"] == "step" for line in run.told) == 2


# --- masks left on one side


def leave_masks_on_one_side(monkeypatch):
    genuine = peers.roster_masks

    def roster_masks(*arguments, **context):
        return [[(key, sign) for key, sign in each if sign > 0] for each in genuine(*arguments, **context)]

    monkeypatch.setattr(peers, "roster_masks", roster_masks)


@BUILD
def test_the_sum_of_masked_vectors_is_the_sum_of_the_clear_ones(tmp_path, monkeypatch, build):
    """Left on one side, a mask makes the released model noise of the ring's width: no audit would object."""
    if build == "defective":
        leave_masks_on_one_side(monkeypatch)
    hand = HandRun(tmp_path)
    _, (vectors,) = hand.compute(hand.roster())
    clear = sum(hand.clear_vector(v) for v in range(VIRTUAL_WORKERS))
    assert np.array_equal(sum(vectors), clear) == (build == "correct")


def test_each_virtual_workers_slice_is_what_these_checks_assume():
    assert len(examples()[0]) == 40
    assert {len(slice_ids(v, VIRTUAL_WORKERS, 40)) for v in range(VIRTUAL_WORKERS)} == {5}
