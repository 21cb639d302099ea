"""Reading Ray's table of draining nodes. Groups on several nodes are in tests/ray/test_nodes.py."""

from types import SimpleNamespace

import pytest
import ray

from raycloak.coordinator.cluster import placement
from raycloak.coordinator.cluster.bundles import NodeView
from raycloak.coordinator.cluster.placement import Draining, Placement
from raycloak.coordinator.config.sections import PlacementConfig
from raycloak.metrics.errors import ConfigError


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


def test_workers_take_the_places_that_the_caller_has_reserved_and_leave_them(monkeypatch):
    """The first bundle is the caller's own; the group stays when the run ends."""
    removed = []
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    monkeypatch.setattr(placement.Draining, "_read", lambda self: frozenset())
    group = SimpleNamespace(
        bundle_specs=[{"node:1": 0.0001}, {"CPU": 0.5}, {"CPU": 0.5}],
        wait=lambda deadline_s: True,
        id=SimpleNamespace(hex=lambda: "abcd"),
    )
    node = NodeView("n", {}, {"CPU_group_2_abcd": 0.5}, {})
    monkeypatch.setattr(placement, "cluster_nodes", lambda: [node])
    monkeypatch.setattr(
        placement, "placement_group_table", lambda _: {"bundles_to_node_id": {0: "gone", 1: "", 2: "n"}}
    )
    places = Placement(PlacementConfig(strategy="STRICT_PACK"), 2, use_gpu=False, reserved=group)
    assert places.bundle == {"CPU": 0.5}
    taken = [places.take(name) for name in ("worker-0", "worker-1")]
    assert [(each.placement_group, each.placement_group_bundle_index) for each in taken] == [(group, 1), (group, 2)]
    for name in ("worker-0", "worker-1"):
        places.release(name)
    assert places.room() == 1, "of the vacated ones Ray shows the second as free"
    assert places.take("worker-2").placement_group_bundle_index == 2, "the first one has lost its node"
    places.close()
    assert removed == []
    with pytest.raises(ConfigError, match="unplaceable: 2 bundles are reserved for 3 workers"):
        Placement(PlacementConfig(), 3, use_gpu=False, reserved=group)
