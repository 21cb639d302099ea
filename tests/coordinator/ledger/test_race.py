"""Concurrent charges can never pass the cap; see `ledger_race.py`."""

import json
from pathlib import Path
from typing import Any

from tests.rounds import rounds

CHILD = str(Path(__file__).with_name("ledger_race.py"))
ROUNDS = rounds(60)
"""The lock is what each of them tests; a ledger without it fails in one of the first."""
RACERS = 8


def test_of_eight_processes_that_race_for_the_last_step_exactly_one_is_charged(run_python: Any, ledger_url: str):
    """In each round the account's cap has room for one more step, and eight coordinators try to charge a run each."""
    done = run_python(CHILD, ledger_url, str(ROUNDS), deadline_s=1200)
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["codes"] == [0] * RACERS, done.stderr
    assert [len(winners) for winners in result["winners"]] == [1] * ROUNDS
    # What the chain says, after every entry of it was checked, is what the processes were told.
    told = [winner for (winner,) in result["winners"]]
    assert result["charged"] == [[step for step in range(ROUNDS) if told[step] == racer] for racer in range(RACERS)]
