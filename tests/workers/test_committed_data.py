"""The data that a worker states is the data that it trains on, whatever code of the run does to files meanwhile."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.workers.inputs.descriptor import AuditedExamples, DatasetDescriptor
from raycloak.workers.inputs.fingerprint import data_marks
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.workload import Workload
from tests.protocol import HandRun, examples, open_workload

KEYED = {"features": ("features",), "fingerprint_key": "data.key"}

FUNCTIONS = '''
import shutil
from pathlib import Path

import numpy as np
from torch import nn

from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.terms.loss import LossSpec

HERE = Path(__file__).parent


def victims():
    with np.load(HERE / "victim.npz") as found:
        return ArrayDataset(found["features"], found["labels"])


class Lazy:
    """Maps its file and copies nothing, as one of a hundred gigabytes does."""

    def __init__(self):
        self.rows = np.memmap(HERE / "lazy.bin", np.float32, "r", shape=(40, 6))

    def __len__(self):
        return 40

    def batch(self, ids):
        return self.rows[ids], ids % 3


def swapping():
    """A model whose building puts the bound file in the place of the one that was opened."""
    shutil.copy(HERE / "bound.npz", HERE / "examples.npz")
    return nn.Linear(6, 3)


def plain():
    return nn.Linear(6, 3)
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a run: the file that an account is bound to, and a victim's, which lies at the run's path too."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "functions.py").write_text(FUNCTIONS)
    features, labels = examples()
    np.savez(folder / "bound.npz", features=features, labels=labels)
    for name in ("victim", "examples"):
        np.savez(folder / f"{name}.npz", features=features + 1, labels=labels)
    features.tofile(folder / "lazy.bin")
    (folder / "data.key").touch(mode=0o600)
    (folder / "data.key").write_text("0f" * 32)
    return folder


def workload(base: Path, model: str = "functions:plain", **dataset: Any) -> Workload:
    described = DatasetDescriptor(**{**KEYED, **dataset})
    return open_workload(
        WorkerSetup(
            model=ModelSource.of(model),
            loss=LossSpec.of("cross_entropy"),
            dataset=described,
            base=str(base),
            seed=0,
            device="cpu",
        )
    )


def fingerprint_of(base: Path, file: str) -> bytes:
    """The fingerprint by which an account knows a file."""
    described = DatasetDescriptor(kind="npz", path=file, **KEYED)
    return data_marks(described, described.open_slices(base), base).fingerprint


def features_of(opened: Workload) -> np.ndarray:
    features, _ = opened.dataset.batch(np.arange(40))
    return features


def test_the_data_of_a_function_has_no_fingerprint_of_a_file_that_is_named_beside_it(base: Path):
    opened = workload(base, kind="module", function="functions:victims", path="bound.npz")
    assert np.array_equal(features_of(opened), examples()[0] + 1)
    assert len(opened.facts.data.fingerprint) == 32
    # Its examples are those of another file, and so is its fingerprint.
    assert opened.facts.data.fingerprint == fingerprint_of(base, "victim.npz") != fingerprint_of(base, "bound.npz")


def test_a_file_that_is_swapped_while_the_model_is_built_leaves_its_fingerprint_with_its_examples(base: Path):
    opened = fingerprint_of(base, "examples.npz")
    found = workload(base, "functions:swapping", kind="npz", path="examples.npz")
    assert (base / "examples.npz").read_bytes() == (base / "bound.npz").read_bytes()
    assert found.facts.data.fingerprint == opened != fingerprint_of(base, "bound.npz")
    assert np.array_equal(features_of(found), examples()[0] + 1)


def test_canaries_behind_the_data_of_a_function_have_no_fingerprint_of_a_file(base: Path):
    described = DatasetDescriptor(kind="module", function="functions:victims", path="bound.npz", **KEYED)
    audited = AuditedExamples(base=str(base), dataset=described, included=(True, False))
    (base / "audited.json").write_bytes(audited.encode())
    outer = DatasetDescriptor(kind="canaries", path="audited.json", **KEYED)
    opened = outer.open_slices(base)
    assert len(opened.examples) == 42
    assert data_marks(outer, opened, base).fingerprint != fingerprint_of(base, "bound.npz")


@pytest.mark.parametrize("changed", [False, True])
def test_a_worker_computes_nothing_of_an_example_that_is_not_the_committed_one(base: Path, changed: bool):
    """Its file is mapped, so a later step would read what the file says then."""
    run = HandRun(base.parent, dataset={"kind": "module", "function": "functions:Lazy"})
    rows = np.memmap(base / "lazy.bin", np.float32, "r+", shape=(40, 6))
    rows += np.float32(changed)
    rows.flush()
    assert run.code("worker-0", run.request(run.roster())) == ("data_changed" if changed else "ok")
