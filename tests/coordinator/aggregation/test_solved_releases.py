"""An aggregator of a run with correlated noise: it solves each release by the earlier ones, and signs which it took."""

import numpy as np
import pytest

from raycloak.attestation.core.counted_noise import COEFFICIENT_UNIT
from raycloak.attestation.core.lineage import StepRelease
from raycloak.attestation.core.messages import parse
from raycloak.coordinator.aggregation.aggregator import ReduceReport
from raycloak.metrics.errors import ProtocolError, RaycloakError
from raycloak.workers.vectors.ring import decode
from tests.mixed import BANDS, EPOCH, MixedRun


def after(run: MixedRun, steps: int):
    """Take a run through so many steps; return what everybody answered to the next one."""
    roster = run.roster()
    for step in range(steps):
        roster = run.roster(step + 1, commit=run.advance(roster, step))
    return run.compute(roster, steps)


def signed(report: ReduceReport) -> StepRelease:
    assert report.release is not None
    return parse(StepRelease, report.release.release.body)


@pytest.fixture
def third(tmp_path):
    run = MixedRun(tmp_path)
    return run, after(run, 2)


def test_a_release_is_the_average_without_the_earlier_ones(third):
    run, (request, vectors) = third
    total = np.sum(vectors[0], axis=0, dtype=vectors[0][0].dtype)
    average = decode(total, run.mechanism.gamma_log2) / run.mechanism.expected_batch_size
    report, _, _ = run.reduce(request, vectors)
    solved = run.newest[0]
    _, first, second = (each / COEFFICIENT_UNIT for each in run.mechanism.coefficients)
    expected = average - first * run.solved[1][0].astype(np.float64) - second * run.solved[0][0].astype(np.float64)
    assert np.array_equal(solved, expected.astype(np.float32))
    for coefficient, earlier in ((first, run.solved[1][0]), (second, run.solved[0][0])):
        assert np.abs(coefficient * earlier).max() > 1e-3, "each of them counts"
    assert report.release is not None
    # Of the newest two, which the next step is solved by.
    assert {len(tensor.solved) for tensor in report.release.tensors} == {BANDS - 1}


def test_guarantee_a_release_that_was_solved_by_others_is_signed_as_of_another_state(third):
    """The ledger charges the next step only for a state that is the one before: see its lineage rule."""
    run, (request, vectors) = third
    newest, oldest = (each[0] for each in run.solved[::-1])
    honest = signed(run.reduce(request, vectors)[0])
    assert honest.before == run.point
    for forged in ([oldest, newest], [newest, newest], [newest + np.float32(1), oldest], [newest, 0 * oldest]):
        assert signed(run.reduce(request, vectors, earlier=forged)[0]).before.state != run.point.state
    assert signed(run.reduce(request, vectors)[0]) == honest


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_or_more_earlier_releases_than_the_step_is_solved_by_are_refused(third, count):
    run, (request, vectors) = third
    newest, oldest = (each[0] for each in run.solved[::-1])
    with pytest.raises(RaycloakError):
        run.reduce(request, vectors, earlier=[newest, oldest, newest][:count])


def test_a_new_epoch_is_solved_by_itself_and_its_state_has_no_release(tmp_path):
    run = MixedRun(tmp_path)
    request, vectors = after(run, EPOCH - 1)
    report, _, _ = run.reduce(request, vectors)
    assert report.release is not None
    assert {tensor.solved for tensor in report.release.tensors} == {()}


def test_no_average_is_shown_before_it_is_solved(third):
    run, (request, vectors) = third
    with pytest.raises(ProtocolError, match=r"query_mismatch: .* is solved before it is shown"):
        run.aggregators[0].release(request, run.binding(request), *vectors[0])


def test_a_step_whose_sums_are_not_those_that_were_bound_is_refused(third):
    run, (request, vectors) = third
    for sums in ((), run.sums[1], (b"x" * 32, *run.sums[1]), (*run.sums[1][:1], b"x" * 32, b"y" * 32)):
        with pytest.raises(RaycloakError):
            run.reduce(request, vectors, binding=run.binding(request, sums=sums))
    run.reduce(request, vectors)


@pytest.mark.parametrize("before", [b"", b"x" * 32])
def test_a_step_of_another_past_is_refused(third, before):
    run, (request, vectors) = third
    with pytest.raises(ProtocolError, match="parameters_mismatch"):
        run.reduce(request.model_copy(update={"input_before": before}), vectors)
