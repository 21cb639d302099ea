"""The table of docs/results.md: ``python benchmarks/records.py``, after ``python examples/mnist/prepare.py FOLDER``.

Runs every recipe of examples/mnist with three run secrets through the whole path, and the same recipe in plain Opacus
with three seeds, one after the other, and prints the table. Each result is a file under ``benchmarks/results``; a
result that is there is not made again. ``--table`` runs nothing; names of recipes limit what runs.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
RECIPES = ("scattering-eps1", "scattering", "cnn")
PATHS = ("raycloak", "opacus")
SEEDS = (1, 2, 3)
LIBRARIES = ("torch", "numpy", "opacus", "ray")
HIDDEN = ("run_dir",)
"""Fields of a run's JSON that name this machine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument("--table", action="store_true", help="only print the table")
    chosen = parser.parse_args()
    if unknown := set(chosen.recipes) - set(RECIPES):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    RESULTS.mkdir(exist_ok=True)
    recipes = () if chosen.table else chosen.recipes or RECIPES
    for path in PATHS:
        for recipe in recipes:
            for seed in SEEDS:
                _make(recipe, path, seed)
    print(table())


def table() -> str:
    """Markdown: accuracy per seed, mean, epsilon and mean wall time of each recipe and path that has results."""
    lines = [
        "| recipe | path | ε | accuracy per seed | mean | mean wall time |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in RECIPES:
        for path in PATHS:
            found = [json.loads(file.read_text()) for file in sorted(RESULTS.glob(f"mnist-{recipe}-{path}-[0-9].json"))]
            if not found:
                continue
            scores = [100 * one["result"]["evaluation_accuracy"] for one in found]
            spent = max(one["result"]["privacy_epsilon_charged"] for one in found)
            seconds = mean(one["result"]["wall_seconds"] for one in found)
            each = ", ".join(f"{score:.2f}" for score in scores)
            lines.append(f"| {recipe} | {path} | {spent:.3f} | {each} | {mean(scores):.2f} | {seconds:.0f} s |")
    return "\n".join(lines)


def _make(recipe: str, path: str, seed: int) -> None:
    target = RESULTS / f"mnist-{recipe}-{path}-{seed}.json"
    if target.exists():
        return
    print(f"{recipe} through {path}, seed {seed}", file=sys.stderr, flush=True)
    config = f"examples/mnist/{recipe}.yaml"
    made = _raycloak(config, recipe, seed) if path == "raycloak" else _opacus(config, seed)
    target.write_text(json.dumps({**made, **_conditions()}, indent=1) + "\n")


def _raycloak(config: str, recipe: str, seed: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(hashlib.sha256(f"{recipe}/{seed}".encode()).hexdigest())
        command = ["-m", "raycloak", "run", config, "--run-secret", str(secret), "--json"]
        result = _json_of(command)
    evidence = "SIMULATED" if result["evidence_class"] == "simulated" else result["evidence_class"]
    shown = f"raycloak run {config} --run-secret FILE --json, FILE holding sha256('{recipe}/{seed}') in hexadecimal"
    return {"command": shown, "evidence": evidence, "result": {k: v for k, v in result.items() if k not in HIDDEN}}


def _opacus(config: str, seed: int) -> dict[str, object]:
    command = ["benchmarks/mnist_opacus.py", config, "--seed", str(seed)]
    return {"command": " ".join(["python", *command]), "result": _json_of(command)}


def _json_of(arguments: list[str]) -> dict[str, object]:
    """The JSON that a child of this interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
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
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
