"""Tasks of one thread take turns: one computes while another awaits."""

import threading
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch

from raycloak.coordinator.adapter import turns as turns_module
from raycloak.coordinator.adapter.turns import Turns

pytest.importorskip("greenlet", reason="needs greenlet (pip install 'raycloak[he]')")


def done(value=None):
    future = Future()
    future.set_result(value)
    return future


def test_a_task_computes_while_another_awaits():
    turns, said, late = Turns(), [], Future()

    def first():
        said.append("first asks")
        said.append(turns.result(late))
        return 1

    def second():
        said.append("second computes")
        late.set_result("first goes on")
        turns.result(done())
        said.append("second ends")
        return 2

    assert turns.run([first, second]) == [1, 2]
    assert said == ["first asks", "second computes", "first goes on", "second ends"]
    assert turns.idle_s == 0


def test_time_in_which_every_task_awaits_is_idle(monkeypatch):
    turns, late, now = Turns(), Future(), [0.0]

    def computes():
        now[0] += 2.0
        return turns.result(done(2))

    def wait(futures, return_when):
        assert futures == [late]
        now[0] += 5.0
        late.set_result("late")

    monkeypatch.setattr(turns_module, "wait", wait)
    monkeypatch.setattr(turns_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert turns.run([lambda: turns.result(late), computes]) == ["late", 2]
    assert turns.idle_s == 5.0


def test_a_task_whose_answers_are_there_leaves_the_others_their_turns():
    turns, said = Turns(), []

    def task(name):
        for number in range(3):
            said.append(f"{name}{turns.result(done(number))}")

    turns.run([lambda: task("a"), lambda: task("b")])
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize("awaits", [True, False])
def test_the_first_error_ends_the_others_where_they_wait(awaits):
    turns, said = Turns(), []

    def fails():
        if awaits:
            turns.result(done())
        raise KeyError("first")

    def waits():
        try:
            turns.result(Future())
        finally:
            said.append("ended")

    # The error is kept, and with it its frames: nothing is ended by being forgotten.
    with pytest.raises(KeyError, match="first") as error:
        turns.run([waits, fails, waits])
    assert error.value.args == ("first",)
    # One that did not begin has nothing to end.
    assert said == (["ended", "ended"] if awaits else ["ended"])
    assert turns.run([lambda: turns.result(done("again"))]) == ["again"]


def test_the_first_error_stays_though_another_task_makes_an_error_of_its_end():
    turns, said = Turns(), []

    def fails():
        turns.result(done())
        raise KeyError("first")

    def stubborn():
        try:
            turns.result(Future())
        except BaseException as error:
            said.append(1)
            raise RuntimeError("the model failed") from error

    with pytest.raises(KeyError, match="first"):
        turns.run([stubborn, fails, stubborn])
    assert said == [1, 1]


def test_the_error_of_an_answer_is_raised_where_it_is_awaited():
    turns, failed, said = Turns(), Future(), []
    failed.set_exception(ValueError("refused"))

    def task():
        try:
            turns.result(failed)
        except ValueError as error:
            said.append(str(error))

    turns.run([task])
    assert said == ["refused"]


def test_tasks_have_the_settings_of_their_caller_and_context_variables_of_their_own():
    turns, own = Turns(), ContextVar("own", default="none")
    own.set("caller's")

    def task(name):
        before = own.get()
        own.set(name)
        turns.result(done())
        return before, own.get(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), threading.get_ident()

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = turns.run([lambda: task("a"), lambda: task("b")])
    here = threading.get_ident()
    assert found == [("caller's", "a", True, False, here), ("caller's", "b", True, False, here)]
    assert own.get() == "caller's"
