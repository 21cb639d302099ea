"""Reading Ray's table of draining nodes. Groups on several nodes are in tests/ray/test_nodes.py."""

import ray

from raycloak.coordinator.cluster.placement import Draining


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_draining_nodes_are_asked_for_at_most_once_per_second(monkeypatch):
    tables = iter([{}, {"a": 0}, {}])
    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", lambda: next(tables))
    clock = Clock()
    draining = Draining(clock)
    seen = []
    for clock.now in (0.0, 0.9, 1.0, 1.5, 2.0):
        seen.append(set(draining.nodes()))
    assert seen == [set(), set(), {"a"}, {"a"}, set()]


def test_a_ray_without_that_table_is_named_once_and_nothing_drains(monkeypatch, caplog):
    monkeypatch.setattr(ray._private.state, "state", object())
    clock = Clock()
    draining = Draining(clock)
    for clock.now in (0.0, 5.0, 10.0):
        assert draining.nodes() == frozenset()
    (record,) = caplog.records
    assert ray.__version__ in record.getMessage()
    assert "drains are not seen" in record.getMessage()


def test_the_pinned_ray_has_the_table():
    assert callable(ray._private.state.state.get_draining_nodes)
