"""The guarantees of `attestation/core/mask_graph.py`, each proved in `docs/proofs/008-sparse-mask-graph.md`."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.mask_graph import (
    LARGEST_COMPLETE,
    MaskGraph,
    check_circle,
    draw_circle,
    least_reach,
    most_circles,
    split_bound,
)
from raycloak.attestation.core.roster import MaskCircle, Member, Roster
from raycloak.metrics.errors import ProtocolError

SEED = digest(b"seed")


def roster(workers: int, circle: MaskCircle | None, **changes: object) -> Roster:
    """Return a roster of ``workers`` workers and an aggregator, which has no place on the circle."""
    names = [*(f"worker-{index}" for index in range(workers)), "aggregator-0"]
    members = tuple(
        Member(
            member_id=name,
            role="worker" if name.startswith("worker") else "aggregator",
            mask_key=digest(b"mask" + name.encode()),
            identity_key=digest(b"identity" + name.encode()),
            evidence_digest=digest(b"evidence" + name.encode()),
            virtual_workers=(),
            joined=0,
        )
        for name in names
    )
    fields = {"run_id": "0" * 16, "manifest_digest": SEED, "step": 0, "attempt": 0, "ratchet": 0, "nonce": SEED}
    return Roster(**fields | {"members": members, "circle": circle} | changes)


def circle(reach: int, seed: bytes = SEED, colluding: int = 5) -> MaskCircle:
    return MaskCircle(seed=seed, reach=reach, colluding_workers=colluding)


def edges(view: Roster) -> set[tuple[str, str]]:
    graph = MaskGraph(view)
    return {(own.member_id, peer.member_id) for own in view.workers for peer in graph.neighbours(own.member_id)}


def groups(honest: set[int], workers: int, reach: int) -> int:
    """Count the groups of honest places on a circle that no pair within ``reach`` joins, by walking all pairs."""
    left, found = set(honest), 0
    while left:
        found += 1
        walk = [left.pop()]
        while walk:
            place = walk.pop()
            near = {(place + step) % workers for step in range(-reach, reach + 1)} & left
            left -= near
            walk += near
    return found


# --- the graph


@pytest.mark.parametrize(("workers", "reach"), [(33, 1), (48, 6), (101, 26), (34, 16)])
def test_of_two_workers_both_are_neighbours_or_neither_is(workers, reach):
    pairs = edges(roster(workers, circle(reach)))
    assert pairs == {(peer, own) for own, peer in pairs}
    assert len(pairs) == workers * 2 * reach
    assert all(own != peer for own, peer in pairs)


def test_without_a_circle_all_pairs_mask():
    names = {f"worker-{index}" for index in range(40)}
    complete = {(own, peer) for own in names for peer in names - {own}}
    assert edges(roster(40, None)) == complete == edges(roster(40, circle(20))) == edges(roster(40, circle(99)))


def test_the_order_on_the_circle_follows_from_the_seed_alone():
    first, other = (edges(roster(40, circle(3, seed))) for seed in (SEED, digest(b"other")))
    assert first != other
    assert first == edges(roster(40, circle(3), step=7, attempt=2, nonce=bytes(32)))
    assert first != edges(roster(40, circle(3), run_id="1" * 16))


def test_the_places_on_the_circle_are_uniform():
    """Each of 39 distances between two given workers is as likely; chi-square, which fails with probability 1e-6."""
    from scipy.stats import chi2

    counts = [0] * 12
    draws = 3000
    for index in range(draws):
        view = roster(25, circle(1, digest(index.to_bytes(4))))
        order, graph = ["worker-3"], MaskGraph(view)
        # Walked from neighbour to neighbour: the other one's distance is the number of steps.
        before = None
        while order[-1] != "worker-7":
            here = order[-1]
            step = next(p.member_id for p in graph.neighbours(here) if p.member_id != before)
            before = here
            order.append(step)
        distance = min(len(order) - 1, 25 - (len(order) - 1))
        counts[distance - 1] += 1
    expected = draws / 12
    assert sum((each - expected) ** 2 for each in counts) / expected < chi2.isf(1e-6, 11)


def test_a_strange_worker_has_no_neighbours():
    with pytest.raises(ProtocolError) as error:
        MaskGraph(roster(40, circle(3))).neighbours("aggregator-0")
    assert error.value.code == "roster_member"


# --- the bound


@pytest.mark.parametrize(("workers", "reach"), [(5, 1), (7, 1), (8, 2), (9, 3), (11, 2), (12, 1)])
def test_the_bound_is_at_least_the_probability_of_a_split_over_every_placement(workers, reach):
    """By brute force over all sets of colluding places, which are equally likely in a random order."""
    for colluding in range(workers - 1):
        placements = list(itertools.combinations(range(workers), colluding))
        split = sum(groups(set(range(workers)) - set(taken), workers, reach) > 1 for taken in placements)
        probability = Fraction(split, len(placements))
        assert probability <= split_bound(workers, colluding, reach), (colluding, probability)
        # As many as two runs need, and two honest groups between them: fewer never split, as many sometimes do.
        if colluding <= workers - 2:
            assert (probability > 0) == (colluding >= 2 * reach)


def test_the_bound_is_below_the_power_of_the_colluding_share():
    for workers, colluding, reach in ((40, 13, 3), (100, 33, 10), (1024, 341, 26)):
        exact, power = split_bound(workers, colluding, reach), Fraction(colluding, workers) ** (2 * reach)
        assert exact <= math.comb(workers, 2) * power


@pytest.mark.parametrize(("workers", "colluding", "reach"), [(60, 30, 5), (40, 22, 5), (100, 40, 5)])
def test_groups_of_every_size_are_within_the_bound(workers, colluding, reach):
    """By simulation where splits are frequent. Too many would be seen, by six standard deviations: below 1e-6."""
    draw, trials = random.Random(workers), 4000
    splits = alone = 0
    for _ in range(trials):
        honest = set(draw.sample(range(workers), workers - colluding))
        found = groups(honest, workers, reach)
        splits += found > 1
        near = ({(place + step) % workers for step in range(-reach, reach + 1)} - {place} for place in honest)
        alone += any(not each & honest for each in near)
    bound = float(split_bound(workers, colluding, reach))
    assert bound < 1
    assert splits <= trials * bound + 6 * math.sqrt(trials * bound * (1 - bound))
    # Groups of two and more are the usual case, so counting single workers would miss most.
    assert splits > 2 * alone > 0


# --- the reach


@pytest.mark.parametrize("workers", [33, 48, 100, 1024])
@pytest.mark.parametrize("releases", [1, 200, 100_000])
def test_the_reach_is_the_smallest_that_splits_in_no_attempt(workers, releases):
    for colluding in (1, 3, workers // 10, workers // 3):
        reach, circles = least_reach(workers, colluding, releases), most_circles(releases)
        assert reach is not None
        assert circles * split_bound(workers, colluding, reach) <= Fraction(1, 2**40)
        assert reach == 1 or circles * split_bound(workers, colluding, reach - 1) > Fraction(1, 2**40)


def test_small_rosters_and_those_that_need_nearly_all_have_no_circle():
    assert least_reach(LARGEST_COMPLETE, 1, 1) is None
    assert least_reach(LARGEST_COMPLETE + 1, 1, 1) == 1
    assert least_reach(40, 38, 1) is None
    assert draw_circle(SEED, 40, 38, 1) is None


def test_a_third_of_1024_workers_need_52_neighbours_over_10000_steps():
    assert least_reach(1024, 341, 10_000) == 26


# --- the check


@pytest.mark.parametrize(
    "wrong",
    [
        circle(5, colluding=16),
        circle(8, colluding=0),
        circle(8, colluding=47),
        circle(8, seed=b"short", colluding=16),
        # All 48 would mask with all: there is no such circle.
        circle(23, colluding=46),
    ],
)
def test_a_circle_that_does_not_withstand_what_it_states_is_refused(wrong):
    with pytest.raises(ProtocolError) as error:
        check_circle(roster(48, wrong), 200, 0)
    assert error.value.code == "mask_graph"


def test_a_circle_that_was_drawn_passes():
    drawn = draw_circle(SEED, 48, 16, 200)
    assert drawn is not None
    check_circle(roster(48, drawn), 200, 16)
    check_circle(roster(48, drawn.model_copy(update={"reach": drawn.reach + 1})), 200, 16)
    check_circle(roster(48, drawn), 200, 3)
    check_circle(roster(48, None), 200, None)


@pytest.mark.parametrize("agreed", [17, None])
def test_a_circle_that_withstands_less_than_was_agreed_is_refused(agreed):
    drawn = draw_circle(SEED, 48, 16, 200)
    with pytest.raises(ProtocolError, match="were agreed, not 16"):
        check_circle(roster(48, drawn), 200, agreed)
