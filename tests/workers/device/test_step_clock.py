"""`workers/device/step_clock.py`: phases add up to the step, on a GPU by what its events say."""

import time
from itertools import pairwise

import pytest
import torch

from raycloak.attestation.core.messages import parse
from raycloak.metrics.errors import ProtocolError
from raycloak.metrics.registry import WORKER_PHASES
from raycloak.workers.device import step_clock
from raycloak.workers.device.step_clock import StepClock, StepUsage
from raycloak.workers.messages import StepReply


def ticking(monkeypatch, *readings):
    monkeypatch.setattr(time, "perf_counter", iter(readings).__next__)


def test_time_counts_for_the_phase_that_it_passed_in(monkeypatch):
    clock = StepClock(torch.device("cpu"))
    ticking(monkeypatch, 0.0, 1.0, 3.0, 10.0, 11.0, 13.0, 17.0, 18.0, 50.0)
    clock.begin("words")
    clock.start()
    assert clock.stop() == StepUsage(copy_seconds=2.0)
    clock.start()
    for phase in ("model", "sums", "model", "masks"):
        clock.begin(phase)
    found = clock.stop()
    assert found == StepUsage(copy_seconds=1.0, model_seconds=2.0 + 1.0, sums_seconds=4.0, masks_seconds=32.0)
    assert tuple(found.seconds()) == WORKER_PHASES


def test_no_more_marks_are_kept_than_a_gpu_is_behind(monkeypatch):
    clock = StepClock(torch.device("cpu"))
    ticking(monkeypatch, *range(10_000))
    clock.start()
    for number in range(9_000):
        clock.begin(("model", "sums")[number % 2])
        assert len(clock._marks) <= step_clock._KEPT
    found = clock.stop()
    assert (found.copy_seconds, found.model_seconds, found.sums_seconds) == (1, 4500, 4500)


class Gpu:
    """A GPU that gets to each mark 2^k ms after the last one, and says so once it was waited for."""

    def __init__(self):
        self.marks = []

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu, self.is_done = gpu, False

    def record(self, stream):
        assert stream == "its stream"
        self.at = sum(2**number for number in range(len(self.gpu.marks)))
        self.gpu.marks.append(self)

    def synchronize(self):
        for each in self.gpu.marks[: self.gpu.marks.index(self) + 1]:
            each.is_done = True

    def elapsed_time(self, later):
        assert self.is_done
        assert later.is_done
        return later.at - self.at


def test_a_gpu_is_asked_when_it_got_there_and_what_its_tensors_took(monkeypatch):
    """Of several, the first has the times, and the fullest the memory."""
    gpu, devices, asked = Gpu(), [torch.device("cuda:1"), torch.device("cuda:2")], []
    for name, replacement in {
        "Event": gpu.event,
        "current_stream": lambda device: "its stream" if device == devices[0] else "another",
        "reset_peak_memory_stats": asked.append,
        "max_memory_allocated": lambda device: asked.append(device) or 4709 + device.index,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    clock = StepClock(*devices)
    clock.start()
    for phase in ("model", "sums", "words", "masks", "out"):
        clock.begin(phase)
    assert not any(each.is_done for each in gpu.marks), "nothing waits within a step"
    found = clock.stop()
    assert list(found.seconds().values()) == [later.at / 1e3 - each.at / 1e3 for each, later in pairwise(gpu.marks)]
    assert (found.gpu_memory_peak_bytes, asked) == (4711, 2 * devices)


@pytest.mark.parametrize("peak", ["-1", "9007199254740992", "1.5"])
def test_memory_that_no_machine_has_is_no_answer(peak):
    usual = StepReply(member_id="worker-0", code="ok", usage=StepUsage(gpu_memory_peak_bytes=7)).encode()
    assert parse(StepReply, usual).usage.gpu_memory_peak_bytes == 7
    with pytest.raises(ProtocolError, match="malformed"):
        parse(StepReply, usual.replace(b'"gpu_memory_peak_bytes":7', f'"gpu_memory_peak_bytes":{peak}'.encode()))
