"""A run with measurements, an evaluation split and a lost worker, whose directory the documents are made from."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.coordinator.proof.proof_cases import proved, train
from tests.protocol import on

SPLIT = {"kind": "npz", "path": "examples.npz", "features": "features", "public": True}


@pytest.fixture(scope="session")
def ended(tmp_path_factory) -> Path:
    """Return the directory of a run that ended; tests change copies of it."""
    home = tmp_path_factory.mktemp("reported")
    split = {"dataset": SPLIT, "every": 2}
    return proved(home, train(home, evaluation=split, disturb=on("step", "worker-1", "dies", 1))).folder


@pytest.fixture
def copied(ended, tmp_path) -> Callable[[], Path]:
    """Return what makes a copy of the directory."""
    return lambda: Path(shutil.copytree(ended, tmp_path / "run"))
