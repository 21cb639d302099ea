"""`benchmarks/gpu/whole_run.py` on a CPU: the section that a GPU runs, with its processes, kill and digests."""

import torch

from benchmarks.gpu.place import Place
from benchmarks.gpu.whole_run import whole_run


def test_a_run_in_which_a_worker_is_killed_gives_the_digests_of_the_same_secret_without(monkeypatch, ray_environment):
    for name, value in ray_environment.items():
        monkeypatch.setenv(name, value)
    found = whole_run(Place(torch.device("cpu")))
    assert found.faults == []
    assert len(found.figures["runs"].killed.departures) == 1
