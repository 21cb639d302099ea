"""Who gets a driver's place, and who gives one up."""

from raycloak.coordinator.service.places import Place, leaving, next_client


def test_the_longest_wait_comes_first_among_tenants_with_equally_many_places():
    waiting = [("a1", "a"), ("b1", "b"), ("a2", "a")]
    assert next_client(waiting, []) == ("a1", "a")
    assert next_client(waiting, [Place("a", 0)]) == ("b1", "b")
    assert next_client(waiting, [Place("a", 0), Place("b", 0)]) == ("a1", "a")


def test_idle_clients_leave_longest_idle_first_and_no_more_than_wait():
    places = {"x": Place("a", 0, idle_since=5), "y": Place("a", 0, idle_since=2), "z": Place("a", 0)}
    assert leaving([("w", "a")], places, 20, 10, 100) == ["y"]
    assert leaving([("w", "a"), ("v", "a")], places, 20, 10, 100) == ["y", "x"]
    assert leaving([("w", "a")], places, 11, 10, 100) == []
    assert leaving([], places, 20, 10, 100) == []
    places["y"].is_leaving = True
    assert leaving([("w", "a")], places, 20, 10, 100) == []


def test_a_busy_client_leaves_only_for_a_tenant_without_a_place_if_its_own_has_several():
    places = {"x": Place("a", 3), "y": Place("a", 2)}
    assert leaving([("w", "a")], places, 20, 10, 100) == []
    assert leaving([("w", "b")], places, 20, 10, 100) == ["y"]
    assert leaving([("w", "b"), ("v", "b")], places, 20, 10, 100) == ["y"]
    assert leaving([("w", "b")], {"x": Place("a", 3)}, 20, 10, 100) == []
    assert leaving([("w", "b")], {**places, "z": Place("b", 0)}, 20, 10, 100) == []


def test_with_work_on_all_places_each_client_waits_for_a_bounded_number_of_turns():
    places = {"x": Place("a", 0), "y": Place("b", 50)}
    assert leaving([("w", "c")], places, 99, 10, 100) == []
    assert leaving([("w", "c")], places, 100, 10, 100) == ["x"]
    assert leaving([("w", "c"), ("v", "c")], places, 150, 10, 100) == ["x", "y"]
    places["x"].is_leaving = True
    assert leaving([("w", "c")], places, 150, 10, 100) == []
    # Ten clients that always have work take turns on two places: none waits for more than five turns.
    places, waiting, served = (
        {},
        [(str(each), str(each % 3)) for each in range(10)],
        {str(each): 0 for each in range(10)},
    )
    for now in range(5000):
        for client in leaving(waiting, places, now, 10, 100):
            waiting.append((client, places.pop(client).tenant))
        while len(places) < 2:
            client, tenant = next_client(waiting, places.values())
            waiting.remove((client, tenant))
            places[client] = Place(tenant, now)
            assert now - served[client] <= 500
            served[client] = now
