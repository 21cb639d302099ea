"""What a configuration leaves open of the physical batch is chosen once; a resume takes it from the manifest."""

from types import SimpleNamespace
from typing import Any

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.measurements import plan_measurements
from raycloak.coordinator.planning.plan import plan_mechanism
from raycloak.coordinator.training.admitted import _recorded_shape
from raycloak.metrics.errors import ConfigError

RAW: dict[str, Any] = {
    "expected_batch_size": 64.0,
    "steps": 20,
    "dataset": {"kind": "digits"},
    "dp_config": {"noise_multiplier": 2.0, "epsilon_cap": 50.0},
    "measurements": {"class_counts": {"classes": 10, "noise_multiplier": 20}},
}


def order(mechanism: Any, largest_rows: int, **changes: Any) -> Any:
    computation = SimpleNamespace(mechanism=mechanism, largest_rows=largest_rows)
    recorded = SimpleNamespace(computation=computation) if mechanism else None
    return SimpleNamespace(config=parse_config(RAW | changes), assignment=SimpleNamespace(recorded=recorded))


def test_a_resume_plans_the_recorded_shape_whatever_it_measures_and_however_many_workers_it_has():
    config = parse_config(RAW | {"num_workers": 4})
    first = plan_mechanism(config, 1437, 4810, largest_rows=16)
    assert first.virtual_workers == 4
    assert first.micro_batches > 1
    resumed = _recorded_shape(order(first, 16, num_workers=3))
    again = plan_mechanism(resumed, 1437, 4810, largest_rows=4096)
    assert again == first
    measured = plan_measurements(config, first, 16)
    assert plan_measurements(resumed, again, 4096) == measured
    # Planned anew, the same run would have another shape.
    assert plan_mechanism(parse_config(RAW | {"num_workers": 3}), 1437, 4810, largest_rows=4096) != first


def test_a_resume_takes_the_recorded_rows_in_the_place_of_their_memory():
    """A later version may measure other rows in the same memory."""
    first = plan_mechanism(parse_config(RAW | {"micro_batch_bytes": 2**28}), 1437, 4810, largest_rows=16)
    resumed = _recorded_shape(order(first, 16, micro_batch_bytes=2**28))
    assert plan_mechanism(resumed, 1437, 4810, largest_rows=4096) == first


def test_a_new_run_keeps_its_configuration():
    asked = order(None, 0)
    assert _recorded_shape(asked) is asked.config


def test_a_resume_with_more_workers_than_virtual_ones_is_refused():
    first = plan_mechanism(parse_config(RAW | {"num_workers": 4}), 1437, 4810)
    with pytest.raises(ConfigError, match=r"virtual_workers \(4\) must be at least num_workers \(5\)"):
        _recorded_shape(order(first, 64, num_workers=5))
