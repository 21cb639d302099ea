"""What fits on each node, the words of a refusal, and draining nodes; for groups see tests/ray/test_nodes.py."""

from types import SimpleNamespace

import pytest
import ray

from raycloak.coordinator.cluster import placement
from raycloak.coordinator.cluster.placement import (
    BundleRequest,
    Draining,
    NodeView,
    Placement,
    carries,
    even_share,
)
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
    assert places.cpus_together == 1
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


def gpu_node(name, gpus, **labels):
    amounts = {"CPU": 4.0, "GPU": gpus}
    return NodeView(name, amounts, amounts, labels)


@pytest.mark.parametrize(
    ("nodes", "config", "gpus"),
    [
        ([gpu_node("a", 1.0)], {}, 0.5),
        ([gpu_node("a", 4.0)], {}, 1.0),
        ([gpu_node("a", 4.0)], {"resources_per_worker": {"GPU": 2.0}}, 2.0),
        # The cluster has some, and no worker gets one.
        ([gpu_node("a", 4.0)], {"resources_per_worker": {"GPU": 0.0}}, 0.0),
        ([gpu_node("a", 4.0), gpu_node("b", 0.0, pool="cpu")], {"labels": {"pool": "cpu"}}, 0.0),
        ([gpu_node("a", 4.0), gpu_node("b", 0.0)], {"strategy": "STRICT_SPREAD"}, 0.0),
        ([gpu_node("a", 0.0)], {}, 0.0),
    ],
)
def test_workers_compute_on_the_gpus_that_they_are_given_or_the_run_is_refused_by_name(
    monkeypatch, nodes, config, gpus
):
    monkeypatch.setattr(placement, "cluster_nodes", lambda: nodes)
    config = PlacementConfig(**config)
    assert Placement(config, 2, use_gpu="if_there").num_gpus == gpus
    if gpus:
        assert Placement(config, 2, use_gpu=True).num_gpus == gpus
        return
    with pytest.raises(ConfigError, match=r"no_gpu: .* each of 2 workers: .*use_gpu: if_there"):
        Placement(config, 2, use_gpu=True)


def node(name, cpus, free=None, **labels):
    return NodeView(name, {"CPU": cpus}, {"CPU": cpus if free is None else free}, labels)


THREE = [node("a", 2.0), node("b", 2.0), node("c", 1.0)]


@pytest.mark.parametrize(("strategy", "fits"), [("PACK", 5), ("SPREAD", 5), ("STRICT_PACK", 2), ("STRICT_SPREAD", 3)])
def test_each_strategy_fits_as_many_as_it_allows(strategy, fits):
    assert BundleRequest({"CPU": 1.0}, {}, 4, strategy).fitting(THREE) == fits


def test_only_free_resources_and_matching_nodes_count():
    nodes = [node("a", 4.0, free=1.5, zone="x"), node("b", 4.0, zone="y"), node("c", 4.0)]
    assert BundleRequest({"CPU": 0.5}, {"zone": "x"}, 1, "PACK").fitting(nodes) == 3
    assert BundleRequest({"CPU": 0.5, "tee": 1.0}, {}, 1, "PACK").fitting(nodes) == 0
    assert BundleRequest({"CPU": 0.1}, {}, 1, "PACK").fitting([node("a", 1.0, free=0.3)]) == 3


@pytest.mark.parametrize(
    ("bundles", "strategy", "share"),
    [(1, "PACK", 1.0), (5, "SPREAD", 1.0), (6, "PACK", 0.666), (8, "PACK", 0.5), (3, "STRICT_SPREAD", 1.0),
     (4, "STRICT_SPREAD", 0.0), (4, "STRICT_PACK", 0.5)],
)  # fmt: skip
def test_even_share_is_the_largest_at_which_all_bundles_fit_on_nodes(bundles, strategy, share):
    assert even_share(THREE, "CPU", BundleRequest({}, {}, bundles, strategy)) == share


def test_even_share_of_what_no_node_has_is_nothing():
    assert even_share(THREE, "GPU", BundleRequest({}, {}, 2, "PACK")) == 0
    assert even_share([], "CPU", BundleRequest({}, {}, 2, "PACK")) == 0
    assert even_share(THREE, "CPU", BundleRequest({}, {"zone": "x"}, 2, "PACK")) == 0


@pytest.mark.parametrize(
    ("selector", "matches"),
    [("x", True), ("y", False), ("!x", False), ("!y", True), ("in(y, x)", True), ("in(y,z)", False),
     ("!in(y, x)", False)],
)  # fmt: skip
def test_labels_match_as_ray_matches_them(selector, matches):
    assert carries({"zone": "x"}, "zone", selector) is matches
    assert carries({}, "zone", selector) is selector.startswith("!")


def test_a_refusal_names_what_was_asked_what_there_is_and_which_bundle():
    nodes = [node("a" * 56, 2.0, free=0.5, zone="x"), node("b" * 56, 1.0)]
    text = BundleRequest({"CPU": 1.0}, {"zone": "!z"}, 4, "SPREAD").shortfall(nodes)
    assert text == (
        "4 bundles of {CPU: 1} on nodes with {zone=!z} were asked for with strategy SPREAD: bundle 2 of 4 does not fit."
        " The cluster has node aaaaaaaaaaaa (CPU 0.5 of 2 free, labels {zone=x}); node bbbbbbbbbbbb (CPU 1 of 1 free)."
    )
    assert "no usable node" in BundleRequest({"CPU": 1.0}, {}, 1, "PACK").shortfall([])
