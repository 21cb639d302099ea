"""The step state of a client: what each event makes of it, and which command a driver is due."""

from raycloak.coordinator.service.pipe import Allow
from raycloak.coordinator.service.steps import StepState


def allow(computed, released, held=False):
    return Allow(computed=computed, released=released, held=held)


def test_a_step_is_charged_by_its_first_half_and_released_by_its_second():
    state = StepState().forward_submitted(0)
    assert state.is_begun
    assert state.due(allow(0, 0)) is None, "nothing is allowed before its driver has it"
    state = state.handed(is_optim=False)
    assert state.due(allow(0, 0)) == allow(1, 0)
    state = state.computed(0).optim_submitted().handed(is_optim=True)
    assert (state.charged, state.submitted_steps, state.pending) == (1, 1, -1)
    assert state.due(allow(1, 0)) == allow(1, 1)
    state = state.released(0)
    assert (state.finished, state.is_begun) == (1, False)
    assert state.due(allow(1, 1)) is None
    assert state.due(None) == allow(1, 1), "a new driver knows nothing"


def test_what_a_driver_repeats_counts_once():
    state = StepState().handed(is_optim=True).computed(0).released(0).handed(is_optim=True).computed(1).released(1)
    assert state.computed(0).released(0).paid(1) == state


def test_a_step_that_is_held_is_released_no_more_and_begins_anew():
    state = StepState().forward_submitted(0).optim_submitted().handed(is_optim=True).holding(True)
    assert state.due(None) == allow(1, 1, held=True)
    left = state.left(0).retired(1, is_optim=True).reopened(0, 3)
    assert left.due(None) == allow(1, 0, held=True)
    assert (left.pending, left.submitted_steps, left.sent_examples) == (0, 0, 3)
    again = left.optim_submitted().handed(is_optim=True)
    assert again.due(None) == allow(1, 1)
    assert again.sent_examples == 0, "what comes next is for the next step"


def test_a_cancellation_of_a_step_that_is_computed_comes_too_late():
    state = StepState().handed(is_optim=False).released(0).handed(is_optim=False).holding(True)
    assert state.computed(0).held, "a driver that resumed has not reached the step"
    assert not state.computed(1).held


def test_operations_without_a_result_leave_the_order_of_steps():
    state = StepState().forward_submitted(4, 2)
    assert state.sent_examples == 2
    assert state.retired(3, is_optim=False) == state
    assert state.retired(4, is_optim=False).pending == -1
    assert state.optim_submitted().retired(5, is_optim=True).submitted_steps == 0


def test_a_run_that_is_over_tries_no_step_again():
    state = StepState().handed(is_optim=True).computed(0).released(0).handed(is_optim=True)
    assert state.over().due(None) == allow(1, 1)
