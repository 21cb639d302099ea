"""The tables of docs/results.md: ``python benchmarks/records.py``, after ``prepare.py`` of each set in examples.

Runs every recipe with three run secrets through the whole path, and the same recipe in plain Opacus (plain torch where
nothing is private) with three seeds, and prints the tables. One run follows the other, the first seed of all recipes
before the second. Each result is a file under ``benchmarks/results``; a result that is there is not made again.
``--table`` runs nothing; names of recipes limit what runs and what is printed.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
RECIPES = (
    *("mnist-scattering-eps1", "mnist-scattering", "mnist-cnn", "mnist-cnn-together", "mnist-cnn-correlated"),
    *("sst2-eps1", "sst2-eps3", "sst2-eps8", "sst2-nonprivate"),
    *("shakespeare-eps8", "shakespeare-nonprivate"),
)
"""The set and the name of its configuration: ``sst2-eps1`` is examples/sst2/eps1.yaml.."""

VERSIONS_OF_IMAGES = "dataset.augment={kind: shift, pixels: 1, copies: 2}"
GAINS: dict[str, tuple[str, ...]] = {
    "mnist-cnn-constant": ("optimizer.schedule=constant",),
    "mnist-cnn-averaged": ("optimizer.schedule=constant", "optimizer.averaged_weights=true"),
    "mnist-cnn-normalised": ("dp_config.clipping=normalised",),
    "mnist-cnn-shifted": (VERSIONS_OF_IMAGES,),
}
"""Each gain alone: the settings that differ from mnist-cnn. Test images are read once."""

READ_ONCE = "evaluation.every=400"
SEEDS = (1, 2, 3)
LIBRARIES = ("torch", "numpy", "opacus", "ray", "transformers", "peft")
PATIENCE = ("--set", "failure.admission_deadline_s=900", "--set", "failure.step_deadline_s=900")
"""A machine that others use must not fail a run; deadlines change no result."""

HIDDEN = ("run_dir",)
"""Fields of a run's JSON that name this machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument("--table", action="store_true", help="only print the table")
    chosen = parser.parse_args()
    known = (*RECIPES, *GAINS)
    if unknown := set(chosen.recipes) - set(known):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    RESULTS.mkdir(exist_ok=True)
    recipes = () if chosen.table else chosen.recipes or known
    for seed in SEEDS:
        for recipe in recipes:
            for path in paths(recipe):
                _make(recipe, path, seed)
    print(tables(chosen.recipes or known))


def paths(recipe: str) -> tuple[str, ...]:
    """The product, and its peer; of the gains alone only averaged weights have one, and correlated noise has none."""
    if recipe == "mnist-cnn-correlated" or (recipe in GAINS and recipe != "mnist-cnn-averaged"):
        return ("raycloak",)
    return ("raycloak", "torch" if recipe.endswith("-nonprivate") else "opacus")


def tables(recipes: Sequence[str]) -> str:
    """Markdown: one table of accuracies in percent, and one of losses, of those that have results."""
    found = {(recipe, path): _results(recipe, path) for recipe in recipes for path in paths(recipe)}
    texts = []
    for metric, scale in (("accuracy", 100), ("loss", 1)):
        name = f"evaluation_{metric}"
        rows = [
            _row(recipe, path, [result[name] * scale for result in results], results)
            for (recipe, path), results in found.items()
            if results and results[0].get(name) is not None
        ]
        head = f"| recipe | path | ε | {metric} per seed | mean | shortest time | of it steps |"
        texts += ["\n".join([head, "|---|---|---|---|---|---|---|", *rows])] if rows else []
    return "\n\n".join(texts)


def _results(recipe: str, path: str) -> list[dict[str, Any]]:
    files = sorted(RESULTS.glob(f"{recipe}-{path}-[0-9].json"))
    return [json.loads(file.read_text(encoding="utf-8"))["result"] for file in files]


def _row(recipe: str, path: str, scores: list[float], results: list[dict[str, Any]]) -> str:
    """A row: the score of each seed, the largest epsilon, and the shortest times, which other work lengthened least."""
    private = all(result.get("private", True) for result in results)
    spent = f"{max(result['privacy_epsilon_charged'] for result in results):.3f}" if private else "none"
    each = ", ".join(f"{score:.2f}" for score in scores)
    seconds = f"{min(result['wall_seconds'] for result in results):.0f} s"
    timed = all("step_seconds" in result for result in results)
    steps = f"{min(result['step_seconds'] for result in results):.0f} s" if timed else "–"
    return f"| {recipe} | {path} | {spent} | {each} | {mean(scores):.2f} | {seconds} | {steps} |"


def _make(recipe: str, path: str, seed: int) -> None:
    target = RESULTS / f"{recipe}-{path}-{seed}.json"
    if target.exists():
        return
    print(f"{recipe} through {path}, seed {seed}", file=sys.stderr, flush=True)
    folder, _, name = recipe.partition("-")
    changes = [part for each in (*GAINS[recipe], READ_ONCE) for part in ("--set", each)] if recipe in GAINS else []
    config = f"examples/{folder}/{'cnn' if changes else name}.yaml"
    made = _raycloak([config, *changes], recipe, seed) if path == "raycloak" else _peer([config, *changes], seed)
    target.write_text(json.dumps({**made, **_conditions()}, indent=1) + "\n", encoding="utf-8")


def _raycloak(config: list[str], recipe: str, seed: int) -> dict[str, object]:
    # The first results had the secrets of names without their set.
    phrase = f"{recipe.removeprefix('mnist-')}/{seed}"
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(hashlib.sha256(phrase.encode()).hexdigest(), encoding="utf-8")
        arguments = ["-m", "raycloak", "run", *config, "--run-secret", str(secret), "--json", *PATIENCE]
        result = _json_of(arguments, home=folder)
        lines = (Path(result["run_dir"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [event["seconds"] for event in map(json.loads, lines) if event["event"] == "step"]
    evidence = "SIMULATED" if result["evidence_class"] == "simulated" else result["evidence_class"]
    options = " ".join(("--json", *PATIENCE))
    shown = (
        f"raycloak run {shlex.join(config)} --run-secret FILE {options}, FILE holding sha256('{phrase}') in hexadecimal"
    )
    kept = {key: value for key, value in result.items() if key not in HIDDEN}
    return {"command": shown, "evidence": evidence, "result": {**kept, "step_seconds": sum(steps)}}


def _peer(config: list[str], seed: int) -> dict[str, object]:
    command = ["benchmarks/peer.py", *config, "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        return {"command": shlex.join(["python", *command]), "result": _json_of(command, home=folder)}


def _json_of(arguments: list[str], *, home: str) -> dict[str, Any]:
    """The JSON that a child of this interpreter prints.

    Args:
        home: a new state folder. The account of the data allows one run, and these sets are published.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYCLOAK_HOME": home}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True
    )
    return json.loads(done.stdout)


def _conditions() -> dict[str, object]:
    return {
        "commit": os.environ.get("RAYCLOAK_COMMIT") or _commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "cpu_count": os.cpu_count(),
        "load_average_at_end": os.getloadavg(),
    }


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
