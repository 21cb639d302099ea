"""A comparison shows what differs, says whether bytes are the same, and warns of figures that are no sums."""

import json

import pytest

from raycloak.coordinator.record.run_comparison import compare, leaves
from tests.coordinator.record.run_logs import LoggedRun


def finished(run_id, steps=3, digest=None, data="", config=None, **terms):
    """Return the directory of a run that is done; ``digest`` is of its last step."""
    run = LoggedRun(run_id=run_id, **(config or {}))
    run.admit(steps=steps, **terms)
    for step in range(steps):
        last = {"model_digest": digest} if digest and step == steps - 1 else {}
        run.step(step, **last)
    (run.path / "manifest.json").write_text(json.dumps({"dataset_fingerprint": data}))
    run.folder.mark("done")
    return run.path


def test_only_fields_that_differ_are_named():
    paths = [finished("ab" * 8), finished("cd" * 8, config={"seed": 1, "micro_batch_size": 5})]
    found = compare(paths)
    assert found.differing == {"seed": (0, 1), "micro_batch_size": (4, 5)}
    assert compare([paths[0], finished("ef" * 8)]).differing == {}


def test_a_field_that_one_version_does_not_have_is_none():
    paths = [finished("ab" * 8), finished("cd" * 8)]
    text = (paths[1] / "config.yaml").read_text()
    (paths[1] / "config.yaml").write_text(f"{text}\nof_another_version: {{depth: 2}}\n")
    assert compare(paths).differing == {"of_another_version.depth": (None, 2)}


def test_one_is_not_true():
    assert dict(leaves({"a": {"b": 1, "c": [1, 2]}, "d": {}})) == {"a.b": 1, "a.c": [1, 2], "d": {}}
    paths = [finished("ab" * 8), finished("cd" * 8)]
    for path, value in zip(paths, ("1", "true"), strict=True):
        (path / "config.yaml").write_text(f"field: {value}\n")
    assert compare(paths).differing == {"field": (1, True)}


def test_runs_of_the_same_bytes_and_the_step_from_which_they_differ():
    same = compare([finished("ab" * 8), finished("cd" * 8)])
    assert (same.same_bytes, same.same_steps) == (True, 3)
    apart = compare([finished("ab" * 8), finished("ef" * 8, digest="ff" * 32)])
    assert (apart.same_bytes, apart.same_steps) == (False, 2)
    begun = LoggedRun(run_id="12" * 8)
    none = compare([finished("ab" * 8), begun.path])
    assert (none.same_bytes, none.same_steps) == (None, None)


@pytest.mark.parametrize(
    ("first", "second", "caution"),
    [
        ({"account": "patients"}, {"account": "patients"}, "One account pays for these runs, patients"),
        ({"data": "aa"}, {"data": "aa"}, "together the runs claim the sum of the accounts' caps"),
        ({"data": "aa"}, {"data": "bb"}, "says nothing about the examples of another"),
        ({"data": "aa"}, {}, "no fingerprint says whether the data is the same"),
        ({"delta": 1e-5}, {"delta": 1e-6}, "δ differs"),
        ({"privacy": "not_private"}, {}, "run abababab is NOT PRIVATE: it has no ε"),
        (
            {"config": {"evaluation": {"dataset": {"kind": "digits"}, "every": 10}}},
            {"config": {"evaluation": {"dataset": {"kind": "digits", "split": "public"}, "every": 10}}},
            "The evaluation splits differ",
        ),
    ],
)
def test_figures_that_are_no_sums_are_named(first, second, caution):
    found = compare([finished("ab" * 8, **first), finished("cd" * 8, **second)])
    assert any(caution in each for each in found.cautions), found.cautions
    assert len([each for each in found.cautions if "ccount" in each]) == (0 if "privacy" in first else 1)


def test_an_unfinished_run_is_named():
    begun = LoggedRun(run_id="12" * 8)
    begun.admit()
    assert any("unfinished (killed)" in each for each in compare([finished("ab" * 8), begun.path]).cautions)
