"""Runs with correlated noise: their bytes whatever fails, their record, and what a forged past meets."""

import numpy as np
import pytest
from scipy.linalg import solve_triangular

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.coordinator.aggregation import aggregator
from raycloak.coordinator.membership import hosting
from raycloak.coordinator.proof.verify import verify_parts
from raycloak.coordinator.training.assignment import ReplayedRun, ResumedRun
from tests.coordinator.proof.proof_cases import packed, proved, train, whole
from tests.coordinator.runs.test_resumed_runs import manifest_of
from tests.protocol import RENYI, Call, Fate, WholeRun

BANDS, EPOCH, STEPS = 3, 4, 8
NOISE = RENYI | {"noise": {"correlated": "auto", "bands": BANDS}}
FIELDS = {"steps": STEPS, "epoch_steps": EPOCH, "dp_config": NOISE, "measurements": {}, "expected_batch_size": 12}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> WholeRun:
    return train(tmp_path_factory.mktemp("mixed"), **FIELDS)


def weights(coefficients: tuple[int, ...]) -> np.ndarray:
    """Return C: lower triangular, banded, anew in each epoch."""
    steps = np.arange(STEPS)
    lags = np.subtract.outer(steps, steps)
    inside = (lags >= 0) & (lags < len(coefficients)) & (steps[:, None] // EPOCH == steps // EPOCH)
    return np.where(inside, np.array(coefficients)[np.clip(lags, 0, len(coefficients) - 1)], 0) / COEFFICIENT_UNIT


def test_the_released_gradients_are_those_of_the_factorisation(tmp_path, monkeypatch):
    """The aggregator solves step by step and keeps float32; here a triangular system is solved in float64."""
    averages, solved = [], []
    decode, reduce = aggregator.decoded_average, aggregator.MaskedAggregator.reduce

    def decoded(vectors, bits, gamma_log2, divisor, dtype, threads, earlier=()):
        averages.append(decode(vectors, bits, gamma_log2, divisor, np.float64))
        return decode(vectors, bits, gamma_log2, divisor, dtype, threads, earlier)

    def reduced(*arguments):
        answer = reduce(*arguments)
        solved.append(answer[3])
        return answer

    monkeypatch.setattr(aggregator, "decoded_average", decoded)
    monkeypatch.setattr(aggregator.MaskedAggregator, "reduce", reduced)
    run = train(tmp_path, **FIELDS)
    mechanism = manifest_of(run).computation.mechanism
    assert mechanism.bands == BANDS
    expected = solve_triangular(weights(mechanism.coefficients), np.array(averages), lower=True)
    np.testing.assert_allclose(np.array(solved), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(np.array(averages) - expected).max() > 0.01


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_guarantee_any_number_of_workers_gives_one_digest_with_a_move_in_every_step(mixed, tmp_path, workers):
    """In each step of a round, and across an epoch, a worker dies, and another computes the sums that it held."""

    def disturb(call: Call) -> Fate:
        # Each dies in the second step that it is asked for: in one of two or more, another keeps what it has.
        mortal = workers == 1 or call.member_id != "worker-1"
        return "dies" if (call.method, call.index, mortal) == ("step", 1, True) else None

    run = whole(tmp_path, num_workers=workers, secure_aggregation=workers > 1, disturb=disturb, **FIELDS)
    run.train()
    assert len(run.departures) >= STEPS // 2
    assert run.digests == mixed.digests


def test_a_virtual_worker_that_comes_back_within_a_step_finds_its_past(mixed, tmp_path, monkeypatch):
    """Worker 0 gives virtual workers to a newcomer, drops their sums, and gets them back when the newcomer dies."""
    genuine, deaths = hosting.rehost, {("step", "worker-1", 2), ("step", "worker-2", 0)}

    def to_the_newcomer(current, workers, virtual_workers):
        if [*workers] == ["worker-0", "worker-2"]:
            return {"worker-0": (3,), "worker-2": (0, 1, 2, 4, 5, 6, 7)}
        return genuine(current, workers, virtual_workers)

    def disturb(call: Call) -> Fate:
        return "dies" if (call.method, call.member_id, call.index) in deaths else None

    monkeypatch.setattr(hosting, "rehost", to_the_newcomer)
    run = whole(tmp_path, num_workers=2, disturb=disturb, **FIELDS)
    run.train()
    assert {member for member, _ in run.left} == {"worker-1", "worker-2"}
    assert run.digests == mixed.digests


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


@pytest.mark.parametrize("step", range(1, STEPS))
def test_guarantee_a_resume_within_a_round_repeats_it(mixed, tmp_path, step):
    first = whole(tmp_path, **FIELDS)

    def disturb(call: Call) -> Fate:
        if (call.method, call.index) == ("charge", step):
            first.coordinator._training.checkpoints.close(60)
            raise Killed
        return None

    first.stage.disturb = disturb
    with pytest.raises(Killed):
        first.train()
    assert first.digests == mixed.digests[:step]
    again = whole(tmp_path, assignment=ResumedRun(manifest_of(first), packed(tmp_path)), num_workers=2, **FIELDS)
    again.train()
    # From the newest package on, which has the models and releases of the steps that its next one mixes.
    assert again.digests == mixed.digests[step // 2 * 2 :]
    assert again.finished.model_digest == mixed.finished.model_digest


def test_a_replay_and_a_verification_agree(mixed):
    home = mixed.home
    for first, last in ((0, 3), (6, STEPS)):
        replay = whole(home, assignment=ReplayedRun(manifest_of(mixed), packed(home), first, last), **FIELDS)
        replay.train()
        # From the newest package on that was written in time.
        assert replay.digests == mixed.digests[last - len(replay.digests) : last] != []
    record = proved(home, mixed)
    report = verify_parts(record.parts, record.trust)
    assert not report.failed, [(claim.name, claim.says) for claim in report.failed]
