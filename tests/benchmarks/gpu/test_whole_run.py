"""`benchmarks/gpu/whole_run.py`: every promise that two executions of one run can break is a fault."""

from dataclasses import replace

import pytest

from benchmarks.gpu.whole_run import STEPS, Execution, WholeRun

DIGESTS = tuple(f"{step:064x}" for step in range(STEPS))
KILLED = Execution(seconds=40.0, departures=("died",), digests=DIGESTS, device="cuda:a card")
LEFT = replace(KILLED, departures=())


@pytest.mark.parametrize(
    ("killed", "undisturbed", "faults"),
    [
        ({}, {}, 0),
        ({"digests": (*DIGESTS[:-1], "f" * 64)}, {}, 1),
        ({"digests": DIGESTS[:-1]}, {"digests": DIGESTS[:-1]}, 2),
        ({"departures": ()}, {}, 1),
        ({}, {"departures": ("died",)}, 1),
        ({"device": "cpu:a CPU"}, {}, 1),
    ],
)
def test_every_broken_promise_of_a_run_is_a_fault(killed, undisturbed, faults):
    found = WholeRun(replace(KILLED, **killed), replace(LEFT, **undisturbed)).faults("cuda")
    assert len(found) == faults
