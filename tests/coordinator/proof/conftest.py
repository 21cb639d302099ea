"""The proved run, once for all tests of the proof."""

import numpy as np
import pytest

from tests.coordinator.proof.proof_cases import Proved, proved, train
from tests.protocol import examples

OTHER = "cd" * 32


@pytest.fixture(scope="session")
def both(tmp_path_factory) -> tuple[Proved, Proved]:
    """Return the run, and another one of the same site, on other data, that came before it."""
    home = tmp_path_factory.mktemp("proved")
    (home / "data").mkdir()
    features, labels = examples()
    np.savez(home / "data" / "others.npz", features=features, labels=labels)
    dataset = {"kind": "npz", "path": "others.npz", "features": "features"}
    other = proved(home, train(home, secret=OTHER, steps=2, measurements={}, dataset=dataset), OTHER)
    return proved(home, train(home)), other


@pytest.fixture(scope="session")
def record(both) -> Proved:
    return both[0]


@pytest.fixture(scope="session")
def other(both) -> Proved:
    return both[1]
