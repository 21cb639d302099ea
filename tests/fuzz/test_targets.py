"""The fuzz targets on their seeds and on a few changed ones, so that they run everywhere; the search is `make fuzz`."""

import random
import time
from collections import defaultdict

import pytest

from tests.fuzz.corpus import simulated
from tests.fuzz.targets import SLOW_S, TARGETS, Target, TooSlow

_CHANGES = 12


@pytest.fixture(scope="module")
def seeds() -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = defaultdict(list)
    for target, data in simulated():
        found[target].append(data)
    return found


def test_every_target_has_seeds_and_every_seed_a_target(seeds: dict[str, list[bytes]]) -> None:
    assert set(seeds) == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_changed_seeds_are_read_or_refused(target: Target, seeds: dict[str, list[bytes]]) -> None:
    draw = random.Random(target.name)
    for seed in (b"", *seeds[target.name]):
        target(seed)
        for _ in range(_CHANGES):
            changed = bytearray(seed)
            for _ in range(draw.randrange(1, 5)):
                start = draw.randrange(len(changed) + 1)
                changed[start : start + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
            target(bytes(changed))


def test_another_exception_and_a_slow_input_are_defects() -> None:
    def spin(data: bytes) -> None:
        started = time.thread_time()
        while data and time.thread_time() - started < 1.2 * SLOW_S:
            pass

    def fail(data: bytes) -> None:
        raise KeyError(data)

    with pytest.raises(KeyError):
        Target("fails", fail, (ValueError,), own=True)(b"")
    spinner = Target("spins", spin, (), own=True)
    spinner(b"")
    with pytest.raises(TooSlow, match=str(SLOW_S)):
        spinner(b"x")
