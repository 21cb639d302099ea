"""One run has one digest for any number of workers, through deaths of workers and of the driver: real models.

`test_exactness.py` and `test_resumed_runs.py` show on a small model all else that must not change a byte.
"""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.training.assignment import NewRun, ResumedRun
from raycloak.workers.terms.manifest import Manifest
from tests.conftest import ROOT
from tests.protocol import RENYI, Call, Fate, WholeRun, whole_run
from tests.text_model import DATASET, texts
from tests.tiny_text import write_bert, write_gpt2, write_reviews

LORA = {"rank": 2}


def cnn(base: Path) -> dict[str, object]:
    """The convolutions of examples/mnist, on images of noise."""
    draw = np.random.default_rng(3)
    return {
        "model": "recipes:cnn",
        "data": (draw.integers(0, 256, (40, 28, 28)).astype(np.uint8), draw.integers(0, 10, 40)),
        "dataset": {"kind": "npz", "path": "examples.npz", "features": "features", "scale": 255},
        "micro_batch_size": 8,
    }


def patients(base: Path) -> dict[str, object]:
    """Images of persons with one to nine of them, of whom a step sees three at most, each moved in two ways."""
    draw = np.random.default_rng(4)
    owners = draw.permutation(np.repeat(np.arange(12), [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 5, 5]))
    images, labels = draw.integers(0, 256, (60, 28, 28)).astype(np.uint8), draw.integers(0, 10, 60)
    np.savez(base / "images.npz", images=images, labels=labels, patient=owners)
    data = {"kind": "npz", "path": str(base / "images.npz"), "scale": 255, "unit": "patient", "rows_per_unit": 3}
    return {
        "model": "recipes:cnn",
        "dataset": {**data, "augment": {"kind": "shift", "pixels": 2, "flip": True, "copies": 2}},
        "expected_batch_size": 6,
        "micro_batch_size": 12,
    }


def transformer(base: Path) -> dict[str, object]:
    """A tied table that is too large for a gradient of each row, so rows are formed twice."""
    return {
        "model": "tests.text_model:transformer",
        "data": texts(),
        "dataset": DATASET,
        "micro_batch_size": 32,
    }


def bert(base: Path) -> dict[str, object]:
    folder, path = write_bert(base / "bert", num_hidden_layers=1), write_reviews(base / "train.tsv", 40)
    return {
        "model": {"hf": str(folder), "task": "sequence_classification", "classes": 2, "lora": LORA},
        "dataset": {"kind": "text", "path": str(path), "max_length": 8},
        "micro_batch_size": 8,
    }


def gpt2(base: Path, **model: object) -> dict[str, object]:
    folder, path = write_gpt2(base / "gpt2", n_layer=1), base / "plot.txt"
    path.write_text("the film was very fine a plot is dull\n" * 36)
    return {
        "model": {"hf": str(folder), "task": "causal_lm", **model},
        "dataset": {"kind": "text_blocks", "path": str(path), "max_length": 8},
        "micro_batch_size": 8,
    }


TASKS: dict[str, Callable[[Path], dict[str, object]]] = {
    "cnn": cnn,
    "patients": patients,
    "transformer": transformer,
    "bert lora": bert,
    "gpt2 lora": lambda base: gpt2(base, lora=LORA),
    "gpt2 whole": gpt2,
}
COUNTS = {
    "cnn": [1, 3, 8],
    "patients": [2, 3, 5, 1],
    "transformer": [2, 5],
    "bert lora": [1, 3],
    "gpt2 lora": [5, 2],
    "gpt2 whole": [3, 2],
}
"""Workers of the executions of one run, each of which the next resumes; the first task has the fewest and the most."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return the fields of each task's run, and the digests of one worker that nothing disturbs, made once each."""
    made = {}

    def task(name: str) -> tuple[dict[str, object], list[str]]:
        if name not in made:
            public = tmp_path_factory.mktemp("public")
            fields = {**TASKS[name](public), "steps": len(COUNTS[name]), "dp_config": RENYI}
            alone = run(tmp_path_factory.mktemp("alone"), fields, 1, NewRun())
            alone.train()
            made[name] = fields, alone.digests
        return made[name]

    return task


def run(home: Path, fields: dict[str, object], workers: int, assignment, **more) -> WholeRun:
    (home / "data").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "examples" / "mnist" / "recipes.py", home / "data")
    return whole_run(
        home, num_workers=workers, secure_aggregation=workers > 1, assignment=assignment, **{**fields, **more}
    )


class Killed(BaseException):
    """An error that stands for a driver that ends without any of its handlers."""


@pytest.mark.parametrize("name", TASKS)
def test_any_number_of_workers_gives_one_digest_through_deaths_and_a_resume(tasks, tmp_path, name):
    """Each execution has another number of workers and loses one of them in its step; then its driver is killed."""
    fields, digests = tasks(name)
    counts = COUNTS[name]
    archive = Archive(CheckpointConfig(checkpoint_frequency=1, storage="packages"), "run", tmp_path, lambda line: None)
    found: list[str] = []
    assignment: NewRun | ResumedRun = NewRun(archive)
    for workers in counts:
        execution = run(tmp_path, fields, workers, assignment)
        execution.stage.disturb = partial(disturbed, execution, kill=workers != counts[-1])
        with nullcontext() if workers == counts[-1] else pytest.raises(Killed):
            execution.train()
        assert execution.left[0] == ("worker-0", "died"), workers
        found += execution.digests
        if isinstance(assignment, NewRun):
            manifest = Manifest.model_validate_json((execution.folder / "manifest.json").read_bytes())
            assignment = ResumedRun(manifest, archive)
    assert found == digests
    assert len(set(digests)) == len(counts)


def disturbed(execution: WholeRun, call: Call, kill: bool) -> Fate:
    """Let worker-0 die in the execution's first step, and the driver ahead of the second one."""
    if kill and (call.method, call.index) == ("charge", 1):
        execution.coordinator._training.checkpoints.close(60)
        raise Killed
    return "dies" if (call.method, call.member_id, call.index) == ("step", "worker-0", 0) else None
