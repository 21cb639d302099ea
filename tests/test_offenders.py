"""A rule of many things names each that breaks it, and is no rule of nothing."""

import pytest

from tests.offenders import offenders


def is_even(number):
    assert number % 2 == 0, f"{number} is odd"


def test_each_that_breaks_a_rule_is_named_with_its_reason():
    assert offenders(range(5), is_even, lambda number: f"n{number}").keys() == {"n1", "n3"}
    assert "3 is odd" in offenders([2, 3], is_even)["3"]
    assert offenders([2, 4], is_even) == {}


def test_a_rule_of_nothing_is_an_error():
    with pytest.raises(AssertionError, match="a rule of nothing"):
        offenders([], is_even)
