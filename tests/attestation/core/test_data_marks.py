"""Marks of data: how much two datasets must share to be taken for one, and that marks have one form."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from raycloak.attestation.core.data_marks import (
    CODE_BYTES,
    NO_MARKS,
    PLACE_BYTES,
    SKETCH_SIZE,
    DataMarks,
    Likeness,
    joined,
    likeness,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def keyed(codes: np.ndarray, key: bytes = KEY, fingerprint: bytes = b"f" * 32) -> DataMarks:
    """The marks of a dataset whose examples have these codes."""
    least = np.sort(codes)[:SKETCH_SIZE]
    sketch = joined({int(code).to_bytes(CODE_BYTES, "big") for code in least})
    return DataMarks(key=key, fingerprint=fingerprint, sketch=sketch)


def pair(rng: np.random.Generator, first: int, second: int, shared: int) -> tuple[DataMarks, DataMarks]:
    """Return the marks of two datasets of so many examples, ``shared`` of them in both."""
    codes = rng.integers(0, 2**64, first + second - shared, dtype=np.uint64)
    return keyed(codes[:first]), keyed(codes[first - shared :], fingerprint=b"g" * 32)


@pytest.mark.parametrize(("first", "second", "shared"), [(1000, 1000, 667), (1000, 501, 500), (40, 41, 40), (2, 1, 1)])
def test_guarantee_datasets_that_share_half_of_all_their_examples_are_found_alike(first: int, second: int, shared: int):
    """In 300 draws. A draw fails with probability 3e-10 at most, so false alarms have 1e-7."""
    rng = np.random.default_rng(35)
    for _ in range(300):
        assert likeness(*pair(rng, first, second, shared)) is Likeness.MOST_EXAMPLES


@pytest.mark.parametrize(("first", "second", "shared"), [(10_000, 10_000, 90), (5_000, 50_000, 250), (500, 500, 0)])
def test_guarantee_datasets_that_share_a_two_hundredth_are_found_different(first: int, second: int, shared: int):
    """In 100 draws. A draw fails with probability 9e-9 at most (proof 014), so false alarms have 1e-6."""
    rng = np.random.default_rng(36)
    for _ in range(100):
        assert likeness(*pair(rng, first, second, shared)) is None


def test_the_stated_probabilities_follow_from_the_rule():
    """Chernoff's bound for a draw without replacement; see proof 014."""

    def bound(share: float, found: float) -> float:
        divergence = found * math.log(found / share) + (1 - found) * math.log((1 - found) / (1 - share))
        return math.exp(-SKETCH_SIZE * divergence)

    assert bound(1 / 2, 7 / 64) < 3e-10
    assert bound(1 / 3, 7 / 64) < 2e-4
    assert bound(1 / 100, 8 / 64) < 2e-6
    assert bound(1 / 200, 8 / 64) < 1e-8


def test_the_strongest_reason_counts_and_codes_of_two_keys_have_nothing_in_common():
    codes = np.arange(64, dtype=np.uint64)
    here, there = (DataMarks(places=name.ljust(PLACE_BYTES)) for name in (b"here", b"there"))
    first = keyed(codes).model_copy(update={"places": here.places})
    assert likeness(first, first) is Likeness.ALL_EXAMPLES
    assert likeness(first, keyed(codes, fingerprint=b"g" * 32)) is Likeness.MOST_EXAMPLES
    assert likeness(first, here) is Likeness.PLACE
    assert likeness(first, there) is None
    assert likeness(keyed(codes), keyed(codes, OTHER_KEY, b"g" * 32)) is None
    assert likeness(NO_MARKS, NO_MARKS) is None
    assert (NO_MARKS.empty, here.empty, DataMarks(fingerprint=b"f" * 32).empty) == (True, False, False)


@pytest.mark.parametrize(
    "odd",
    [
        {"key": b"short", "fingerprint": b"f" * 32},
        {"fingerprint": b"short"},
        {"key": KEY},
        {"sketch": b"x"},
        {"sketch": b"b" * 8 + b"a" * 8},
        {"sketch": b"a" * 16},
        {"sketch": bytes(range(65)) * 8},
        {"places": b"x" * 15},
        {"places": b"b" * 16 + b"a" * 16},
    ],
)
def test_marks_have_one_form(odd: dict[str, bytes]):
    with pytest.raises(ValidationError):
        DataMarks(**odd)
