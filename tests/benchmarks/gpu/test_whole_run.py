"""`benchmarks/gpu/whole_run.py`: every promise that two executions of one run can break is a fault."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.place import Place
from benchmarks.gpu.whole_run import STEPS, Execution, WholeRun, run_fields
from raycloak.coordinator.config.run import parse_config

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


def test_both_workers_share_one_card():
    config = parse_config(run_fields(Place(torch.device("cuda"))))
    assert config.use_gpu is True
    assert config.num_workers * config.placement.resources_per_worker["GPU"] == 1
