"""Ranges are whole tensors, in order, and as even as such cuts allow."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloak.coordinator.aggregation.ranges import ParameterRange, ranges_needed, split_ranges
from raycloak.metrics.errors import ConfigError
from raycloak.workers.terms.manifest import TensorSpec


def tensors_of(sizes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(name=f"t{index}", shape=(size,)) for index, size in enumerate(sizes)]


def smallest_largest(sizes: list[int], count: int) -> int:
    """Find it by trying every cut."""
    cuts = ((0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), count - 1))
    return min(max(sum(sizes[a:b]) for a, b in pairwise(cut)) for cut in cuts)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_ranges_cover_every_tensor_once_in_order_and_the_largest_is_as_small_as_possible(
    sizes: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    tensors = tensors_of(sizes)
    ranges = split_ranges(tensors, count)
    assert [tensor for owned in ranges for tensor in owned.tensors] == tensors
    assert [owned.index for owned in ranges] == list(range(count))
    assert [owned.start for owned in ranges] == [0, *(owned.stop for owned in ranges[:-1])]
    assert all(owned.size == sum(tensor.size for tensor in owned.tensors) > 0 for owned in ranges)
    assert max(owned.size for owned in ranges) == smallest_largest(sizes, count)


def test_one_range_is_everything() -> None:
    tensors = tuple(tensors_of([3, 4]))
    assert split_ranges(tensors, 1) == (ParameterRange(0, 0, 7, tensors),)


@pytest.mark.parametrize("count", [0, 4])
def test_more_ranges_than_tensors_are_refused(count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        split_ranges(tensors_of([1, 1, 1]), count)
    assert caught.value.code == "aggregators"


def test_ranges_of_more_parameters_than_31_bits_count_are_cut_as_others() -> None:
    sizes = [2**31 - 2, 7, 2**32, 2**31 + 5]
    ranges = split_ranges(tensors_of(sizes), 3)
    assert [(owned.start, owned.stop) for owned in ranges] == [
        (0, 2**31 + 5),
        (2**31 + 5, 3 * 2**31 + 5),
        (3 * 2**31 + 5, 2**33 + 10),
    ]


@pytest.mark.parametrize(
    ("whole", "rooms", "most", "needed"),
    [
        (10, [], 9, 1),  # one process, or one machine
        (10, [10], 9, 1),
        (11, [10], 9, 1),  # more ranges on one node take as much
        (10, [10, 10, 10], 9, 1),
        (11, [10, 10, 10], 9, 2),
        (21, [10, 10, 10], 9, 3),
        (99, [10, 10, 10], 9, 3),
        (99, [10, 10, 10], 2, 2),
        (11, [100, 10, 100], 9, 2),  # any node may get any range
    ],
)
def test_there_are_as_many_ranges_as_their_nodes_memory_needs(whole, rooms, most, needed) -> None:
    assert ranges_needed(whole, rooms, most) == needed
