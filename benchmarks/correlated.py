"""Correlated beside independent noise: ``python -m benchmarks.correlated``.

It runs after ``examples/mnist/prepare.py`` and ``examples/sst2/prepare.py``. Linear models are trained in two passes,
each side with its own batch, steps and rate, on

* scattering features of MNIST (2,010 parameters);
* MiniLM's mean vectors of SST-2 sentences, centred on the public mean of dev and brought to norm 1 (770 parameters);
* the same vectors by Adam, whose second moments see the noise of single steps: at a rate that is good without noise
  (on dev, with the batches of correlated noise the best of ``--rates``), and at each side's own.

Each is a whole run of ``raycloak run``, one after the other, beside simulations in float64
(`benchmarks.correlated_simulation`). A result that is there, in ``benchmarks/results/correlated.json``, is not made
again. ``--table`` only prints. ``--rates`` simulates the rates of SST-2, and prints what they reach on dev.

How settings were chosen, none of it in epsilon. MNIST's batches, steps, bands and rates were chosen by simulations
that were measured on the test images, as both sides' best in one grid. SST-2's batches, steps and bands were chosen so
too, on the test sentences. Its rates and clipping were chosen on dev, by ``--rates``, from one grid for both sides.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.correlated_simulation import Examples, Rule, accuracy, trained
from benchmarks.whole_run import verdict_of
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.plan import plan_mechanism
from raycloak.workers.terms.mechanism import Mechanism

ROOT = Path(__file__).resolve().parent.parent
MNIST, SST2 = (ROOT / "examples" / name / "data" for name in ("mnist", "sst2"))
RESULTS = Path(__file__).resolve().parent / "results" / "correlated.json"
SEEDS = (1, 2, 3)
SIMULATED = {"scattering": range(30), "sst2": range(100)}
"""Seeds of the simulations: SST-2's small test set makes single seeds say little."""

TRIED = range(20)
"""Seeds of the simulations by which rates are chosen."""

DELTA, CLIP = 1e-5, 0.2
LENGTH, BLOCK = 128, 64

MODEL = """
import torch


def scattering():
    return _zero(torch.nn.Linear(201, 10, bias=False))


def sst2():
    return _zero(torch.nn.Linear(384, 2))


def _zero(layer):
    for each in layer.parameters():
        torch.nn.init.zeros_(each)
    return layer
"""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: bands is 1 for independent noise. For sgd, ``rate`` is of the learning rate times C."""

    batch: int
    steps: int
    bands: int
    rate: float
    clipping: str = "normalised"
    rule: str = "sgd"

    @property
    def learning_rate(self) -> float:
        return self.rate / CLIP if self.rule == "sgd" else self.rate


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sides on the same data at one epsilon; a pair of no whole runs is only simulated."""

    data: str
    epsilon: float
    independent: Side
    correlated: Side
    runs: int = len(SEEDS)

    @property
    def name(self) -> str:
        both = dict.fromkeys(f"{side.rate:g}" for side in self.sides.values())
        by = f" by Adam, rate {' and '.join(both)}" if self.independent.rule == "adam" else ""
        return f"{self.data}{by}, ε {self.epsilon:g}"

    @property
    def sides(self) -> dict[str, Side]:
        return {"independent": self.independent, "correlated": self.correlated}


PAIRS = (
    Pair("scattering", 3, Side(512, 234, 1, 20), Side(256, 468, 32, 20)),
    Pair("scattering", 1, Side(1024, 117, 1, 40), Side(256, 468, 32, 10)),
    Pair("sst2", 1, Side(512, 27, 1, 10, "norm"), Side(256, 54, 8, 5, "norm")),
    Pair("sst2", 3, Side(512, 27, 1, 20, "norm"), Side(256, 54, 13, 5, "norm")),
    Pair("sst2", 8, Side(512, 27, 1, 20, "norm"), Side(256, 54, 26, 20)),
    Pair("sst2", 8, Side(512, 27, 1, 0.1, "norm", "adam"), Side(256, 54, 26, 0.1, "norm", "adam"), 0),
    Pair("sst2", 8, Side(512, 27, 1, 0.3, "norm", "adam"), Side(256, 54, 26, 1, "norm", "adam")),
)


def split(data: str, name: str) -> dict[str, Any]:
    """Return a dataset of a configuration: train, dev or test."""
    path = MNIST / f"scattering_{name}.npz" if data == "scattering" else SST2 / f"vectors_{name}.npz"
    return {"kind": "npz", "path": str(path), "features": "features", "public": True}


def examples(data: str, name: str) -> Examples:
    """Return the same for a simulation."""
    with np.load(split(data, name)["path"]) as archive:
        features, labels = archive["features"].astype(np.float64), archive["labels"].astype(np.int64)
    if data == "sst2":
        features = np.hstack([features, np.ones((len(features), 1))])
    return Examples(features, labels)


def write_vectors() -> None:
    """Write SST-2's vectors beside its sentences, unless they are there; no sentence's depends on another private one.

    A vector is the mean of MiniLM over a sentence's tokens, less the mean vector of dev, brought to norm 1.
    """
    if all(Path(split("sst2", name)["path"]).exists() for name in ("train", "dev", "test")):
        return
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(SST2 / "minilm", local_files_only=True)
    encoder = transformers.BertModel.from_pretrained(SST2 / "minilm", local_files_only=True, add_pooling_layer=False)
    encoder.eval()

    def means(texts: list[str]) -> Iterator[np.ndarray]:
        for start in range(0, len(texts), BLOCK):
            given = tokenizer(
                texts[start : start + BLOCK], return_tensors="pt", padding=True, truncation=True, max_length=LENGTH
            )
            seen = given["attention_mask"][:, :, None]
            with torch.no_grad():
                yield ((encoder(**given).last_hidden_state * seen).sum(1) / seen.sum(1)).numpy()

    centre = None
    for name in ("dev", "train", "test"):
        rows = [line.rsplit("\t", 1) for line in (SST2 / f"{name}.tsv").read_text(encoding="utf-8").splitlines()]
        found = np.concatenate(list(means([text for text, _ in rows]))).astype(np.float64)
        centre = found.mean(axis=0) if centre is None else centre
        found -= centre
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        labels = np.array([int(label) for _, label in rows])
        np.savez(split("sst2", name)["path"], features=found.astype(np.float32), labels=labels)


def configuration(pair: Pair, side: Side) -> dict[str, Any]:
    """Return the configuration of a run."""
    momentum = {"momentum": 0.9} if side.rule == "sgd" else {}
    noise = {"correlated": "auto", "bands": side.bands} if side.bands > 1 else {"correlated": "off"}
    return {
        "num_workers": 2,
        "virtual_workers": 2,
        "steps": side.steps,
        "epoch_steps": side.steps,  # A key epoch ends a mix.
        "expected_batch_size": side.batch,
        "model": f"project:{pair.data}",
        "dataset": split(pair.data, "train"),
        "evaluation": {"every": side.steps, "dataset": split(pair.data, "test")},
        "optimizer": {"name": side.rule, "learning_rate": side.learning_rate, "averaged_weights": True, **momentum},
        "dp_config": {
            "target_epsilon": pair.epsilon,
            "target_delta": DELTA,
            "max_grad_norm": CLIP,
            "clipping": side.clipping,
            "accountant": "pld",
            "noise": noise,
        },
        "failure": {"admission_deadline_s": 900, "step_deadline_s": 900},
    }


def mechanism_of(pair: Pair, side: Side, train: Examples) -> Mechanism:
    """Return the mechanism that a run of this configuration has."""
    classes = int(train.labels.max()) + 1
    config = parse_config(configuration(pair, side))
    return plan_mechanism(config, len(train.labels), classes * train.features.shape[1])


def simulated(side: Side, mechanism: Mechanism, train: Examples, test: Examples, seeds: range) -> list[float]:
    """Return the accuracy of each seed, without whole runs."""
    rule = Rule(side.rule, side.learning_rate)
    return [accuracy(trained(mechanism, rule, train, seed), test) for seed in seeds]


def run(folder: Path, config: dict[str, Any], phrase: str) -> dict[str, float]:
    """Train, and return the accuracy on the test examples, what the ledger charged, and the seconds it took."""
    began = time.perf_counter()
    verdict = verdict_of(folder, config, phrase)
    named = {"accuracy": "evaluation_accuracy", "epsilon": "privacy_epsilon_charged"}
    return {**{ours: verdict[theirs] for ours, theirs in named.items()}, "seconds": time.perf_counter() - began}


def table(found: dict[str, Any]) -> str:
    """Return the table of docs/results.md."""
    settings, gained = "batch, steps, bands, rate | z", "gained per seed | mean"
    lines = [f"| data | noise | {settings} | accuracy per seed | mean | simulated | {gained} |", "|---" * 9 + "|"]
    for pair in PAIRS:
        of_pair = found.get(pair.name, {})
        both = [[each["accuracy"] for each in of_pair.get(noise, {}).get("runs", [])] for noise in pair.sides]
        for noise, side in pair.sides.items():
            if not (arm := of_pair.get(noise)):
                continue
            each = [100 * made["accuracy"] for made in arm["runs"]]
            alone = [100 * value for value in arm["simulated"]]
            gains = [100 * (second - first) for first, second in zip(*both, strict=False)] if side.bands > 1 else []
            cells = (
                pair.name,
                noise,
                f"{side.batch}, {side.steps}, {side.bands}, {side.rate:g}",
                f"{arm['noise_multiplier']:.3f}",
                ", ".join(f"{value:.2f}" for value in each),
                f"{mean(each):.2f}" if each else "",
                f"{mean(alone):.2f} ± {stdev(alone) / math.sqrt(len(alone)):.2f}",
                ", ".join(f"{value:+.2f}" for value in gains),
                f"{mean(gains):+.2f}" if gains else "",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rates() -> Iterator[str]:
    """Yield what the simulation reaches on dev with each rate and clipping of SST-2, the same for both sides."""
    train, dev = examples("sst2", "train"), examples("sst2", "dev")
    for pair in PAIRS:
        if pair.data != "sst2":
            continue
        for noise, side in pair.sides.items():
            grid = (2.5, 5, 10, 20, 40, 80) if side.rule == "sgd" else (0.01, 0.03, 0.1, 0.3, 1, 3)
            for clipping in ("norm", "normalised"):
                mechanism = mechanism_of(pair, replace(side, clipping=clipping), train)
                for rate in grid:
                    tried = replace(side, rate=rate, clipping=clipping)
                    noisy = simulated(tried, mechanism, train, dev, TRIED)
                    rule = Rule(tried.rule, tried.learning_rate)
                    clear = [accuracy(trained(mechanism, rule, train, seed, noisy=False), dev) for seed in SEEDS]
                    yield (
                        f"{pair.name} {noise} {clipping} {rate:g}: {100 * mean(noisy):.2f}, "
                        f"without noise {100 * mean(clear):.2f}"
                    )


def main() -> None:
    """Make what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--rates", action="store_true", help="print what the rates of SST-2 reach on dev")
    chosen = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not chosen.table:
        write_vectors()
    if chosen.rates:
        for line in rates():
            print(line, flush=True)
        return
    if not chosen.table:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "project.py").write_text(MODEL, encoding="utf-8")
            make_missing(found, Path(folder))
    print(table(found))


def make_missing(found: dict[str, Any], folder: Path) -> None:
    """Simulate and run what ``found`` lacks, the sides in turn; write each result as it comes."""
    for pair in PAIRS:
        for noise, side in pair.sides.items():
            arm = found.setdefault(pair.name, {}).get(noise, {})
            seeds = SIMULATED[pair.data]
            if arm.get("settings") != asdict(side):
                arm = {"settings": asdict(side), "runs": []}
            elif len(arm["simulated"]) == len(seeds):
                continue
            train, test = examples(pair.data, "train"), examples(pair.data, "test")
            mechanism = mechanism_of(pair, side, train)
            arm["noise_multiplier"], arm["bands"] = mechanism.noise_multiplier, mechanism.bands
            arm["simulated"] = simulated(side, mechanism, train, test, seeds)
            found[pair.name][noise] = arm
            _write(found)
    for seed in SEEDS:
        for pair in PAIRS:
            for noise, side in pair.sides.items():
                arm = found[pair.name][noise]
                if len(arm["runs"]) < min(seed, pair.runs):
                    phrase = f"correlated/{pair.name}/{noise}/{seed}"
                    arm["runs"].append(run(folder, configuration(pair, side), phrase))
                    _write(found)


def _write(found: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
