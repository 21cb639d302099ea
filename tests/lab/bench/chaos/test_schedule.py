"""The plan of the chaos bench: seeded, every role, the stated share of stops."""

from collections import Counter

import pytest

from raycloak.metrics.errors import ConfigError
from raycloak_lab.bench.chaos.schedule import KILLED_ROLES, STOPPED_SHARE, make_schedule

PROCESSES = {"worker": 4, "aggregator": 1, "ledger": 1, "orchestrator": 1, "driver": 1}


@pytest.mark.parametrize("seed", range(20))
def test_ten_kills_hit_every_role(seed):
    strikes = make_schedule(10, seed, PROCESSES)
    assert {strike.role for strike in strikes} == set(KILLED_ROLES)
    assert len(strikes) == 10


def test_the_same_seed_gives_the_same_strikes_and_another_one_others():
    assert make_schedule(30, 1, PROCESSES) == make_schedule(30, 1, PROCESSES)
    assert make_schedule(30, 1, PROCESSES) != make_schedule(30, 2, PROCESSES)


def test_roles_are_hit_by_the_number_of_their_processes_and_one_in_seven_is_stopped():
    strikes = make_schedule(800, 0, PROCESSES)
    counts = Counter(strike.role for strike in strikes)
    assert 350 < counts["worker"] < 450
    assert all(60 < counts[role] < 140 for role in KILLED_ROLES[1:])
    assert sum(strike.signal == "SIGSTOP" for strike in strikes) == STOPPED_SHARE * 800
    assert all(0 <= strike.moment < 1 and 0 <= strike.pick < 1 for strike in strikes)


def test_nodes_come_on_top_and_are_killed():
    strikes = make_schedule(10, 3, PROCESSES, nodes_lost=2)
    assert [strike.signal for strike in strikes if strike.role == "node"] == ["SIGKILL"] * 2
    assert len(strikes) == 12


@pytest.mark.parametrize(("kills", "nodes_lost"), [(0, 0), (1, -1)])
def test_what_cannot_be_done_is_refused(kills, nodes_lost):
    with pytest.raises(ConfigError, match="chaos_kills"):
        make_schedule(kills, 0, PROCESSES, nodes_lost)
