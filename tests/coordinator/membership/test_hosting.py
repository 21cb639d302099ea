"""Hosting: even, complete, with as few moves as even loads allow."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.coordinator.membership.hosting import moved, rehost

NAMES = [f"worker-{i}" for i in range(6)]
worker_sets = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)


@st.composite
def situations(draw):
    """Draw any hosting of V virtual workers, complete or not, and any workers for the next one."""
    count = draw(st.integers(1, 12))
    hosts = draw(st.lists(st.sampled_from([None, *NAMES]), min_size=count, max_size=count))
    current = {name: tuple(v for v, host in enumerate(hosts) if host == name) for name in set(hosts) - {None}}
    return current, draw(worker_sets), count


def fewest_moves(current, workers, count) -> int:
    """Find it by trying every even assignment of loads: what stays is at most min(load, share) on each worker."""
    small, larger = divmod(count, len(workers))
    best = 0
    for chosen in itertools.combinations(workers, larger):
        kept = sum(min(len(current.get(w, ())), small + (w in chosen)) for w in workers)
        best = max(best, kept)
    return count - best


@given(situations())
def test_every_virtual_worker_has_one_host_and_loads_differ_by_at_most_one(situation):
    current, workers, count = situation
    hosting = rehost(current, workers, count)
    assert sorted(v for hosted in hosting.values() for v in hosted) == list(range(count))
    assert set(hosting) == set(workers)
    loads = [len(hosted) for hosted in hosting.values()]
    assert max(loads) - min(loads) <= 1
    assert all(hosted == tuple(sorted(hosted)) for hosted in hosting.values())


@given(situations())
def test_no_even_placement_moves_fewer(situation):
    current, workers, count = situation
    taken = moved(current, rehost(current, workers, count))
    assert sum(len(each) for each in taken.values()) == fewest_moves(current, workers, count)


@given(situations(), st.randoms())
def test_the_result_depends_on_no_order(situation, order):
    current, workers, count = situation
    shuffled, items = list(workers), list(current.items())
    order.shuffle(shuffled)
    order.shuffle(items)
    assert rehost(dict(items), shuffled, count) == rehost(current, workers, count)


@given(situations())
def test_placing_again_moves_nothing(situation):
    current, workers, count = situation
    hosting = rehost(current, workers, count)
    assert rehost(hosting, workers, count) == hosting
    assert moved(hosting, rehost(hosting, workers, count)) == {}


@pytest.mark.parametrize("lost", NAMES[:3])
def test_a_lost_worker_moves_its_own_virtual_workers_only(lost):
    before = rehost({}, NAMES[:3], 9)
    rest = [name for name in NAMES[:3] if name != lost]
    taken = moved(before, rehost(before, rest, 9))
    assert sorted(v for each in taken.values() for v in each) == sorted(before[lost])


def test_moved_names_what_a_worker_did_not_host():
    before = {"a": (0, 1), "b": (2, 3)}
    assert moved(before, {"a": (0, 1, 2), "c": (3,)}) == {"a": (2,), "c": (3,)}
    assert moved({}, before) == before


def test_without_a_worker_there_is_no_hosting():
    with pytest.raises(AssertionError):
        rehost({}, [], 4)
