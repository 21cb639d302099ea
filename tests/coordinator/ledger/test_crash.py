"""The ledger survives being killed anywhere, and processes that race for it; see `ledger_child.py`."""

import json
from pathlib import Path
from typing import Any

from tests.coordinator.ledger.ledger_cases import affordable

CHILD = str(Path(__file__).with_name("ledger_child.py"))
ACTS = 13


def test_killed_between_any_two_statements_nothing_is_lost_or_charged_twice(run_python: Any, ledger_url: str):
    """A child is killed by SIGKILL before its k-th SQL statement, for every k in a file, through each kind of entry."""
    done = run_python(CHILD, "kill", ledger_url, deadline_s=1200)
    assert done.code == 0, done.stderr
    kills = json.loads(done.stdout)
    assert len(kills) > (50 if ledger_url.startswith("sqlite:") else 20)
    # The sweep saw crashes before the first acknowledgement, and after every number of them.
    assert set(kills) == set(range(ACTS + 1))


def test_processes_that_race_create_one_ledger_and_never_cross_the_cap(run_python: Any, ledger_url: str):
    """Four processes open one missing ledger at once, and charge runs of their own to one account until refused."""
    done = run_python(CHILD, "race", ledger_url)
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert len({key for key, _, _ in result}) == 1
    assert len({fencing for _, fencing, _ in result}) == 4
    assert sum(charged for _, _, charged in result) == affordable()
