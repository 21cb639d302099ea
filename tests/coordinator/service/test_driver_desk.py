"""Who gets a driver's place, and who gives one up."""

import pytest

from raycloak.coordinator.service.driver_desk import ClientPlace, late, leaving, next_client


def test_a_place_goes_to_the_tenant_with_the_fewest_that_got_none_for_longest_and_there_to_the_longest_wait():
    waiting = [("a1", "a"), ("b1", "b"), ("a2", "a")]
    assert next_client(waiting, [], {}) == ("a1", "a")
    assert next_client(waiting, [ClientPlace("a", 0)], {}) == ("b1", "b")
    assert next_client(waiting, [ClientPlace("a", 0), ClientPlace("b", 0)], {}) == ("a1", "a")
    assert next_client(waiting, [], {"a": 2, "b": 1}) == ("b1", "b")
    assert next_client(waiting, [], {"a": 1, "b": 2}) == ("a1", "a")


def test_idle_clients_leave_longest_idle_first_and_no_more_than_wait():
    places = {"x": ClientPlace("a", 0, idle_since=5), "y": ClientPlace("a", 0, idle_since=2), "z": ClientPlace("a", 0)}
    assert leaving([("w", "a")], places, {}, 20, 10, 100) == ["y"]
    assert leaving([("w", "a"), ("v", "a")], places, {}, 20, 10, 100) == ["y", "x"]
    assert leaving([("w", "a")], places, {}, 11, 10, 100) == []
    assert leaving([], places, {}, 20, 10, 100) == []
    places["y"].leave(12)
    assert leaving([("w", "a")], places, {}, 20, 10, 100) == []


def test_a_busy_client_leaves_for_a_tenant_with_two_places_fewer_and_for_no_other_before_its_turn_ends():
    places = {"x": ClientPlace("a", 3), "y": ClientPlace("a", 2)}
    assert leaving([("w", "a")], places, {}, 20, 10, 100) == []
    assert leaving([("w", "b")], places, {}, 20, 10, 100) == ["y"]
    assert leaving([("w", "b"), ("v", "b")], places, {}, 20, 10, 100) == ["y"]
    assert leaving([("w", "b")], {"x": ClientPlace("a", 3)}, {}, 20, 10, 100) == []
    assert leaving([("w", "b")], {**places, "z": ClientPlace("b", 0)}, {}, 20, 10, 100) == []
    # Three to one: tenant b has work for a second place.
    more = {**places, "v": ClientPlace("a", 1), "z": ClientPlace("b", 0)}
    assert leaving([("w", "b")], more, {}, 20, 10, 100) == ["v"]
    assert leaving([("w", "b"), ("u", "b")], more, {}, 20, 10, 100) == ["v"]
    more["y"].idle_since = 19
    assert leaving([("w", "b")], more, {}, 20, 10, 100) == ["y"], "one without work, though not for long"


def test_nobody_leaves_whose_place_would_come_back_to_it():
    places = {"x": ClientPlace("a", 0), "y": ClientPlace("b", 50), "z": ClientPlace("b", 60)}
    assert leaving([("w", "b")], places, {}, 120, 10, 100) == []
    assert leaving([("w", "b")], places, {}, 150, 10, 100) == ["y"]
    places["y"].leave(12)
    assert leaving([("w", "b")], places, {}, 200, 10, 100) == []


def test_a_driver_is_late_once_it_was_to_end_for_so_long_and_is_told_of_once():
    places = {"x": ClientPlace("a", 0), "y": ClientPlace("a", 0)}
    places["y"].leave(5)
    places["y"].leave(12)
    assert late(places, 14.9, 10) == []
    assert late(places, 15, 10) == ["y"]
    assert late(places, 16, 10) == []


@pytest.mark.parametrize(("places", "turns"), [(1, 2), (2, 1), (3, 1)])
def test_guarantee_no_client_waits_longer_because_another_tenant_has_more_clients(places, turns):
    """Tenant a has fifty clients that always have work, b has one, and they take turns of a hundred seconds."""
    waiting = [(f"a{each}", "a") for each in range(50)] + [("b", "b")]
    held, served, since, worst = {}, {}, dict.fromkeys([client for client, _ in waiting], 0), {}
    for now in range(0, 30_000, 5):
        for client in leaving(waiting, held, served, now, 10, 100):
            waiting.append((client, held.pop(client).tenant))
            since[client] = now
        while len(held) < places:
            client, tenant = next_client(waiting, held.values(), served)
            waiting.remove((client, tenant))
            held[client], served[tenant] = ClientPlace(tenant, now), now
            worst[client] = max(worst.get(client, 0), now - since[client])
    assert worst["b"] <= (turns - 1) * 100
    of_a = max(1, places - 1)
    assert max(worst.values()) <= 50 * turns * 100 / of_a
    assert len(worst) == 51
