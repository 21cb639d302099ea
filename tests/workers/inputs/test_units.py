"""Units: their numbers, their rows, and the choice of some of a unit's rows."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

from raycloak.metrics.errors import RefusedError
from raycloak.workers.inputs.units import UnitNumbers, Units


def units_of(names: list[object]) -> Units:
    numbers = UnitNumbers()
    numbers.add(names[:3])
    numbers.add(names[3:])
    return numbers.units()


def words_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, shape, np.uint64)


def test_units_are_numbered_in_the_order_in_which_the_data_names_them() -> None:
    units = units_of(["b", "a", "b", "c", "a", "b"])
    assert len(units) == 3
    assert units.rows.tolist() == [0, 2, 5, 1, 4, 3]
    assert units.ends.tolist() == [3, 5, 6]


def test_rows_of_units_come_unit_by_unit() -> None:
    units = units_of(["b", "a", "b", "c", "a", "b"])
    assert units.rows_of(np.array([2, 0])).tolist() == [3, 0, 2, 5]
    assert units.sizes(np.array([2, 0])).tolist() == [1, 3]
    assert units.rows_of(np.empty(0, np.int64)).tolist() == []


def test_no_unit_holds_a_name() -> None:
    units = units_of(["mueller", "meier", "mueller"])
    assert "mueller" not in repr(units)


def test_a_unit_without_rows_is_refused() -> None:
    with pytest.raises(RefusedError, match="rows of its own"):
        Units(np.arange(3), np.array([3, 3]))


def test_a_row_without_a_unit_is_refused() -> None:
    with pytest.raises(RefusedError, match="rows of its own"):
        Units(np.arange(3), np.array([2]))


def test_a_unit_of_few_rows_gives_all_of_them_and_is_padded_by_its_first() -> None:
    units = units_of(["a", "b", "b", "b", "b"])
    rows, present = units.chosen(np.array([0, 1]), 6, words_of(1, 2, 6))
    assert rows[0].tolist() == [0] * 6
    assert present[0].tolist() == [True] + [False] * 5
    assert sorted(rows[1, :4].tolist()) == [1, 2, 3, 4]
    assert rows[1, 4:].tolist() == [1, 1]
    assert present[1].tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("word", [0, 2**32 - 1, 2**32, 2**64 // 3 + 1, 2**64 - 1])
def test_a_choice_is_the_shuffle_that_python_integers_make(word: int) -> None:
    units = Units(np.arange(1000), np.array([700, 1000]))
    words = np.concatenate([words_of(2, 40, 9), np.full((1, 9), word, np.uint64)])
    chosen = np.arange(41) % 2
    rows, present = units.chosen(chosen, 9, words)
    assert present.all()
    for unit, row_words, found in zip(chosen, words, rows, strict=True):
        mine = list(range(700)) if unit == 0 else list(range(700, 1000))
        for j in range(9):
            at = j + (int(row_words[j]) * (len(mine) - j) >> 64)
            mine[j], mine[at] = mine[at], mine[j]
        assert found.tolist() == mine[:9]


def test_every_k_of_a_units_rows_are_equally_likely() -> None:
    """A chi-square test over all ordered choices of 3 of 5 rows: false-alarm rate 1e-6."""
    units, rounds = Units(np.arange(5), np.array([5])), 60_000
    rows, _ = units.chosen(np.zeros(rounds, np.int64), 3, words_of(3, rounds, 3))
    numbers = rows @ np.array([25, 5, 1])
    counts = np.array([(numbers == 25 * a + 5 * b + c).sum() for a, b, c in permutations(range(5), 3)])
    assert counts.sum() == rounds
    assert ((counts - rounds / 60) ** 2).sum() / (rounds / 60) < chi2.isf(1e-6, 59)


def test_a_draw_reaches_the_last_row_of_a_unit_of_more_than_2_to_the_31(tmp_path: Path) -> None:
    # A sparse file: it takes no room.
    rows = np.memmap(tmp_path / "rows", np.int64, "w+", shape=(2**31 + 8,))
    rows[-1] = 5
    chosen, _ = Units(rows, np.array([len(rows)])).chosen(np.zeros(1, np.int64), 1, np.full((1, 1), 2**64 - 1, "u8"))
    assert chosen.tolist() == [[5]]


def test_words_of_another_shape_are_refused() -> None:
    with pytest.raises(RefusedError, match="its own word"):
        Units(np.arange(3), np.array([3])).chosen(np.array([0]), 2, words_of(4, 1, 3))
