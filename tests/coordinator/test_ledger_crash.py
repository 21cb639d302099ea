"""The ledger survives being killed anywhere, and processes that race for it; see `ledger_child.py`."""

import json
from pathlib import Path
from typing import Any

from tests.coordinator.ledger_cases import affordable

CHILD = str(Path(__file__).with_name("ledger_child.py"))


def test_killed_between_any_two_statements_nothing_is_lost_or_charged_twice(run_python: Any):
    """For every k, a child is killed by SIGKILL before its k-th SQL statement, from opening to the last charge."""
    done = run_python(CHILD, "kill", str(run_python.folder))
    assert done.code == 0, done.stderr
    kills = json.loads(done.stdout)
    assert len(kills) > 30
    # The sweep saw crashes before the first receipt, and after every number of receipts.
    assert set(kills) == {0, 1, 2}


def test_processes_that_race_create_one_ledger_and_never_cross_the_cap(run_python: Any):
    """Four processes open one missing file at once, and charge runs of their own to one account until refused."""
    done = run_python(CHILD, "race", str(run_python.folder))
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert len({key for key, _, _ in result}) == 1
    assert len({fencing for _, fencing, _ in result}) == 4
    assert sum(charged for _, _, charged in result) == affordable()
