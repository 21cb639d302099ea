"""The proved run, once for all tests of the proof."""

import pytest

from tests.coordinator.proof.proof_cases import Proved, proved, train

OTHER = "cd" * 32


@pytest.fixture(scope="session")
def both(tmp_path_factory) -> tuple[Proved, Proved]:
    """Return the run, and another one of the same site that came before it."""
    home = tmp_path_factory.mktemp("proved")
    other = proved(home, train(home, secret=OTHER, steps=2, measurements={}), OTHER)
    return proved(home, train(home)), other


@pytest.fixture(scope="session")
def record(both) -> Proved:
    return both[0]


@pytest.fixture(scope="session")
def other(both) -> Proved:
    return both[1]
