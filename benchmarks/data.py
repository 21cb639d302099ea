"""Time and memory of reading: ``python benchmarks/data.py reading`` and ``python benchmarks/data.py table --folder F``.

``reading`` takes recipes of examples/mnist on random examples of their shape. It times the vector of one virtual worker
(draw, clipped sum, encoding, noise), and the part of it in which the computation waits for examples, from memory and
from a scratch file in turn. A step of a run takes longer: it also masks, sends, adds and commits.

``table`` writes a parquet table of ``--gigabytes`` to the folder, trains on it privately with two workers, and notes
the largest resident memory of each process while it runs. Random floats do not compress, so the table on disk is
about as large as its rows. Scratch files need as much again for each worker.

Each result is a file under ``benchmarks/results``.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
RECIPES = {"cnn": ((28, 28), np.uint8), "scattering": ((201,), np.float32)}
ROUNDS = 5
COLUMNS = 100
FILE_ROWS = 2**19
GROUP_ROWS = 2**16

MODEL = """
from torch import nn


def layers():
    return nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 10))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["reading", "table"])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    if chosen.what == "table" and chosen.folder is None:
        parser.error("table needs a --folder")
    result = reading() if chosen.what == "reading" else table(chosen.folder.resolve(), chosen.gigabytes)
    conditions = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "pyarrow")}},
        "cpu_count": os.cpu_count(),
        "load_average_at_end": os.getloadavg(),
    }
    text = json.dumps({**result, **conditions}, indent=1)
    (RESULTS / f"data-{chosen.what}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


class Waited:
    """`raycloak.workers.inputs.rows.in_turn`, with the time in which the caller waits for examples added up."""

    def __init__(self) -> None:
        from raycloak.workers.inputs.rows import in_turn

        self._in_turn, self.seconds = in_turn, 0.0

    def __call__(self, dataset, groups):
        batches, done = self._in_turn(dataset, groups), object()
        while True:
            began = time.perf_counter()
            batch = next(batches, done)
            self.seconds += time.perf_counter() - began
            if batch is done:
                return
            yield batch


def reading() -> dict[str, object]:
    """Return, for each recipe and place of its rows, the median share of a vector's time in which it waits for rows."""
    from raycloak.workers.gradients.numerics import pin_numerics

    pin_numerics(True, 1)
    found = {name: dict(_shares(name, shape, dtype)) for name, (shape, dtype) in RECIPES.items()}
    return {"command": "python benchmarks/data.py reading", "rounds": ROUNDS, "result": found}


def _shares(name: str, shape: tuple[int, ...], dtype) -> Iterator[tuple[str, dict[str, float]]]:
    from raycloak.attestation.core.keys import Secret
    from raycloak.attestation.keys.release import VirtualWorkerKeys
    from raycloak.coordinator.config.run import load_config
    from raycloak.coordinator.planning.model_source import model_source
    from raycloak.coordinator.planning.plan import plan_mechanism
    from raycloak.workers.gradients import clipping
    from raycloak.workers.gradients.clipping import GradientEngine
    from raycloak.workers.inputs import rows
    from raycloak.workers.models.models import build_model, loss_function, parameter_count, read_flat
    from raycloak.workers.terms.loss import LossSpec
    from raycloak.workers.virtual_worker import VirtualWorkerComputer

    folder = ROOT / "examples" / "mnist"
    config = load_config(folder / f"{name}.yaml")
    rng = np.random.default_rng(1)
    features = rng.integers(0, 256, (60_000, *shape)).astype(dtype)
    chunks = [(features[start : start + 1000], rng.integers(0, 10, 1000)) for start in range(0, 60_000, 1000)]
    datasets = {"memory": rows.gathered(chunks, "memory", 255.0)}
    limit, rows.MEMORY_BYTES = rows.MEMORY_BYTES, 0
    datasets["scratch file"] = rows.gathered(chunks, "scratch", 255.0)
    rows.MEMORY_BYTES = limit
    module = build_model(model_source(config.model), folder, 0)
    mechanism = plan_mechanism(config, 60_000, parameter_count(module))
    parameters = read_flat(module)
    engine = GradientEngine(module, loss_function(LossSpec.of("cross_entropy"), folder)[0], mechanism)
    # Any rows do: a full draw has no place without an example, and time does not depend on what a spare row holds.
    spare = datasets["memory"].batch(np.zeros(1, np.int64))
    computers = {place: VirtualWorkerComputer(mechanism, engine, dataset, spare) for place, dataset in datasets.items()}
    keys = VirtualWorkerKeys(stream=Secret(bytes(32)), data=Secret(bytes(32)))
    for computer in computers.values():
        computer.slice(0)  # Read once in a run, for its digest.
    times = {place: ([], []) for place in datasets}
    waited = clipping.in_turn = Waited()
    for step in range(ROUNDS):
        # In turn, so that what else runs on the machine slows both.
        for place in datasets:
            waited.seconds, began = 0.0, time.perf_counter()
            computers[place].vector(0, keys, step, bytes(32), bytes(32), parameters)
            times[place][0].append(time.perf_counter() - began)
            times[place][1].append(waited.seconds)
    for place, (steps, reads) in times.items():
        share = median(read / step for step, read in zip(steps, reads, strict=True))
        yield place, {"vector_seconds": median(steps), "waiting_seconds": median(reads), "waiting_share": share}


def table(folder: Path, gigabytes: float) -> dict[str, object]:
    """Train on a table of that size; return its numbers and the largest memory of each process."""
    data = folder / "table"
    count = write_table(data, gigabytes)
    (folder / "layers.py").write_text(MODEL, encoding="utf-8")
    config = {
        "num_workers": 2,
        "virtual_workers": 2,
        "steps": 10,
        "expected_batch_size": 1024,
        "micro_batch_size": 256,
        "model": "layers:layers",
        "dataset": {"kind": "parquet", "path": str(data)},
        "dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 8.0, "target_delta": 1e-9},
        "failure": {"admission_deadline_s": 3600, "step_deadline_s": 3600},
    }
    (folder / "table.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    peaks: dict[str, int] = {}
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(peaks, over, f"TMPDIR={folder}".encode()))
    watcher.start()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "RAYCLOAK_HOME": str(folder / "home")}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "raycloak", "run", str(folder / "table.yaml"), "--json"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            check=True,
        )
    finally:
        over.set()
        watcher.join()
    verdict = json.loads(done.stdout)
    return {
        "command": f"python benchmarks/data.py table --gigabytes {gigabytes:g} --folder FOLDER",
        "examples": count,
        "bytes_on_disk": sum(file.stat().st_size for file in data.iterdir()),
        "bytes_of_rows": count * (4 * COLUMNS + 8),
        "steps": verdict["steps"],
        "wall_seconds": time.perf_counter() - began,
        "peak_resident_mb": {name: peak // 2**20 for name, peak in sorted(peaks.items())},
    }


def write_table(folder: Path, gigabytes: float) -> int:
    """Write a table of random floats and ten classes, unless it is there; returns its number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = max(1, round(gigabytes * 1e9 / (FILE_ROWS * (4 * COLUMNS + 8))))
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        path = folder / f"part-{number:04d}.parquet"
        if path.exists():
            continue
        rng = np.random.default_rng(number)
        columns = {f"f{index}": rng.random(FILE_ROWS, np.float32) for index in range(COLUMNS)}
        columns["labels"] = rng.integers(0, 10, FILE_ROWS)
        pq.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS, use_dictionary=False)
    return files * FILE_ROWS


def _watch(peaks: dict[str, int], over: threading.Event, mark: bytes) -> None:
    """Note the largest resident memory of every actor of a run, by its role; ``mark`` is in its environment alone."""
    while not over.wait(0.5):
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                name = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode()
                status = (folder / "status").read_text(encoding="utf-8")
                own = mark in (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if not own or not name.startswith("ray::") or "Actor" not in name:
                continue
            peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
            label = f"{name.partition('.')[0]} {folder.name}"
            peaks[label] = max(peaks.get(label, 0), peak)


if __name__ == "__main__":
    main()
