"""Accuracy under a person's epsilon: ``python -m benchmarks.persons``, after ``examples/mnist/prepare.py``.

MNIST's training images are dealt to persons of 1 to 12 images each. A linear model is trained with three run secrets:

* by persons, of whom a step sees 1, 4 or 12 images at most, at epsilon 3 for a person;
* by images, at the epsilon at which group privacy gives a person of 12 images epsilon 3: m images of an (e, d)
  mechanism have (m e, m exp((m - 1) e) d);
* by images at epsilon 3, which protects one image and no person.

One run follows the other. A result that is there, in ``benchmarks/results/persons.json``, is not made again.
``--table`` only prints.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.whole_run import verdict_of

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "mnist" / "data"
RESULTS = Path(__file__).resolve().parent / "results" / "persons.json"
SEEDS = (1, 2, 3)
MOST, EPSILON, DELTA = 12, 3.0, 1e-5
STEPS, RATE = 100, 0.1

MODEL = """
import torch


def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
"""


def arms() -> dict[str, tuple[int | None, float, float]]:
    """Return rows of a person in a step (None: by images), and epsilon and delta of the unit of each arm."""
    of_persons = {f"persons, {rows} images a step": (rows, EPSILON, DELTA) for rows in (1, 4, MOST)}
    alone = EPSILON / MOST
    grouped = DELTA / (MOST * math.exp((MOST - 1) * alone))
    return {
        **of_persons,
        f"images, {MOST} of a person by group privacy": (None, alone, grouped),
        "images, no person protected": (None, EPSILON, DELTA),
    }


def prepare(folder: Path) -> int:
    """Write model and data to ``folder``; return the number of persons."""
    with np.load(DATA / "train.npz") as archive:
        images, labels = archive["images"], archive["labels"]
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(labels)), draw.integers(1, MOST, len(labels), endpoint=True))[: len(labels)]
    np.savez(folder / "train.npz", images=images, labels=labels, person=draw.permutation(owners))
    (folder / "project.py").write_text(MODEL, encoding="utf-8")
    return int(owners[-1]) + 1


def configuration(persons: int, images: int, rows: int | None, epsilon: float, delta: float) -> dict[str, Any]:
    """Return the configuration of an arm."""
    unit = {} if rows is None else {"unit": "person", "rows_per_unit": rows}
    split = {"kind": "npz", "path": str(DATA / "test.npz"), "scale": 255, "public": True}
    return {
        "num_workers": 2,
        "steps": STEPS,
        "expected_batch_size": round(RATE * (images if rows is None else persons)),
        "model": "project:model",
        "dataset": {"kind": "npz", "path": "train.npz", "scale": 255, "public": True, **unit},
        "evaluation": {"every": STEPS, "dataset": split},
        "optimizer": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.9},
        "dp_config": {"target_epsilon": epsilon, "target_delta": delta, "max_grad_norm": 1.0, "accountant": "pld"},
    }


def table(found: dict[str, list[float]]) -> str:
    """Return the table of docs/results.md."""
    lines = ["| clipped and sampled | ε, δ of it | accuracy per seed | mean |", "|---|---|---|---|"]
    for name, (_, epsilon, delta) in arms().items():
        if each := found.get(name):
            shown = ", ".join(f"{100 * value:.2f}" for value in each)
            lines.append(f"| {name} | {epsilon:g}, {delta:.1e} | {shown} | {100 * mean(each):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Make what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="only print the table")
    chosen = parser.parse_args()
    found: dict[str, list[float]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not chosen.table:
        with tempfile.TemporaryDirectory() as folder:
            persons = prepare(Path(folder))
            with np.load(Path(folder) / "train.npz") as archive:
                images = len(archive["labels"])
            for seed in SEEDS:
                for name, (rows, epsilon, delta) in arms().items():
                    if len(found.setdefault(name, [])) < seed:
                        config = configuration(persons, images, rows, epsilon, delta)
                        verdict = verdict_of(Path(folder), config, f"persons/{name}/{seed}")
                        found[name].append(verdict["evaluation_accuracy"])
                        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
