"""The number of bundles that fit on each node, and the words of a refusal."""

import pytest

from raycloak.coordinator.cluster.bundles import BundleRequest, NodeView, carries, even_share


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
