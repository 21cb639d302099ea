"""Plans of units of several rows: what counts units, what counts rows, and what memory refuses before a charge."""

from typing import Any

import pytest

from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.config.run import RunConfig
from raycloak.coordinator.planning.plan import make_plan, plan_mechanism
from raycloak.metrics.errors import ConfigError
from tests.protocol import config

DATA = {"kind": "csv", "path": "visits.csv", "labels": "well"}


def of_patients(rows_per_unit: int = 8, **fields: Any) -> RunConfig:
    fields = {"micro_batch_size": None} | fields
    return config(dataset=DATA | {"unit": "patient_id", "rows_per_unit": rows_per_unit}, **fields)


def test_the_capacity_counts_units_and_a_micro_batch_holds_the_rows_that_memory_does() -> None:
    persons = plan_mechanism(of_patients(), 400, 83, largest_rows=64)
    records = plan_mechanism(config(dataset=DATA, micro_batch_size=None), 400, 83, largest_rows=64)
    assert (persons.unit, persons.rows_per_unit) == ("patient_id", 8)
    assert persons.micro_batch_rows <= 64
    assert persons.micro_batch_size <= 8
    capacities = [each.micro_batch_size * each.micro_batches for each in (persons, records)]
    assert abs(capacities[0] - capacities[1]) < 8, "of units and of examples, which are as many"
    assert persons.noise_multiplier == records.noise_multiplier, "k costs nothing"


def test_measurements_count_the_units_of_whole_slices() -> None:
    measured = {
        "evaluation": {"every": 2, "noise_multiplier": 3.0},
        "class_counts": {"classes": 3, "noise_multiplier": 3.0},
    }
    plan = make_plan(of_patients(measurements=measured), 400, 83, largest_rows=64)
    assert [each.query for each in plan.measurements] == ["class_counts", "evaluation"]
    for each in plan.measurements:
        own = each.mechanism
        assert (own.unit, own.rows_per_unit) == ("patient_id", 8)
        assert own.micro_batch_size * own.micro_batches >= 400 / own.virtual_workers
        assert own.micro_batch_rows <= 64


def test_versions_of_a_row_are_rows_of_its_unit_in_a_step_and_none_in_a_measurement() -> None:
    measured = {"class_counts": {"classes": 3, "noise_multiplier": 3.0}}
    versions = {"kind": "shift", "pixels": 1, "copies": 2}
    for data, rows, said in (
        (DATA | {"unit": "patient_id", "rows_per_unit": 4}, 4, "one patient_id (at most 4 rows a step, 2 versions of"),
        (DATA, 1, "one example (2 versions of each row)"),
    ):
        given = config(dataset=data | {"augment": versions}, micro_batch_size=None, measurements=measured)
        plan = make_plan(given, 400, 83, largest_rows=64)
        assert (plan.mechanism.rows_per_unit, plan.mechanism.copies) == (2 * rows, 2)
        (own,) = (each.mechanism for each in plan.measurements)
        assert (own.rows_per_unit, own.copies) == (rows, 1)
        assert dict(plan_rows(plan))["unit"].startswith(said)


def test_a_unit_whose_rows_memory_does_not_hold_is_refused_with_the_number_that_it_does() -> None:
    for changes, held in (({}, 64), ({"micro_batch_size": 5}, 5)):
        with pytest.raises(ConfigError, match=f"unit_too_large: .*65 rows of a patient_id.*the {held} that"):
            plan_mechanism(of_patients(65, **changes), 400, 83, largest_rows=64)


SPLIT = {"kind": "csv", "path": "others.csv", "labels": "well", "public": True}
SEALED = {"kind": "sealed", "path": "sealed", "key_file": "key", "public": True, "unit": "patient_id"}


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (SPLIT, "nobody tells whether a patient_id is in both splits"),
        (SEALED, "sealed data names no patient_id"),
        (SPLIT | {"unit": "patient_id"}, None),
    ],
)
def test_a_plan_says_where_nobody_can_tell_whether_a_person_is_in_both_splits(
    split: dict[str, Any], said: str | None
) -> None:
    warnings = make_plan(of_patients(evaluation={"every": 1, "dataset": split}), 400, 83).warnings
    found = [each for each in warnings if "both splits" in each]
    assert [each.startswith(said or "") for each in found] == [True] * (said is not None)


def test_a_plan_says_what_the_unit_is_and_one_of_examples_says_nothing() -> None:
    said = dict(plan_rows(make_plan(of_patients(), 400, 83)))
    assert said["unit"] == "one patient_id (at most 8 rows a step)"
    assert "of 400 units" in said["sample rate"]
    alone = dict(plan_rows(make_plan(config(dataset=DATA), 400, 83)))
    assert "unit" not in alone
    assert "of 400 examples" in alone["sample rate"]
