"""A step takes no more memory for each parameter than is promised, however many virtual workers a worker hosts."""

from importlib import import_module
from pathlib import Path


def test_a_worker_takes_16_bytes_a_parameter_beside_its_model_an_aggregator_24_and_an_opened_package_12(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    found = import_module("memory").measured(13_000_000, hosted=(4,), rules=("adam",))
    # Half a byte for what libraries take more with the size.
    assert found["worker, 4 hosted"] < 16.5
    assert found["aggregator, adam"] < 24
    assert found["opened, adam"] < 12.5
