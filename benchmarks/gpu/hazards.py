"""Sections on what a GPU does to promises beside the sums: memory that outlives its owner, errors, and variables."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

import torch

from benchmarks.gpu.children import MARK
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.workers.device.memory import clear_free_memory
from raycloak.workers.gradients.environment import WHOLE_PRODUCTS
from raycloak.workers.gradients.numerics import exact_sums

OVERRIDES = tuple(name for name, value in WHOLE_PRODUCTS.items() if value == "0")
"""Variables that make products of fewer bits than their types have."""


def _child(name: str, **environment: str) -> CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.children", name],
        env={**os.environ, **environment}, capture_output=True, encoding="utf-8", timeout=60, check=False,
    )  # fmt: skip
    # A context that an error ended makes the exit code another one too.
    if not done.stdout:
        raise RuntimeError(f"{name}: {done.stderr[-500:]}")
    return done


def residue(place: Place) -> Found:
    """Count words that were freed: of a process that ended, of this one, and of this one after a worker's clearing.

    Nothing is promised of the first two.
    """
    _child("write")
    other = int(_child("read").stdout)
    kept, cleared = _freed(place), _freed(place, clear_free_memory)
    faults = [f"{cleared} freed words outlive the clearing of free memory"] if cleared else []
    figures = {"words of another process": other, "words of this process": kept, "after clearing": cleared}
    return Found(figures, faults)


def _freed(place: Place, clear: Callable[[torch.device], None] = lambda _: None) -> int:
    """Return how many marked words the allocator gives again after ``clear``."""
    # Elsewhere torch fills memory that it gives.
    with exact_sums():
        freed = torch.full((2**20,), MARK, dtype=torch.int32, device=place.device)
        del freed
        clear(place.device)
        again = torch.empty(2**20, dtype=torch.int32, device=place.device)
        return int((again == MARK).sum())


def errors(place: Place) -> Found:
    """Read the code of an error of the device, and whether it prints what may name an example."""
    done = _child("errors")
    found = json.loads(done.stdout)
    faults = []
    if found["too much memory"][1] != "out_of_memory":
        faults.append(f"memory that ends is told as {found['too much memory'][1]}")
    return Found({**found, "prints the place of the index": "block: [" in done.stderr}, faults)


def environment(place: Place) -> Found:
    """Multiply as the environment is, and under each variable that would take bits away."""
    figures, faults = {}, []
    settings = {name: {name: "1", "CUBLAS_EMULATION_STRATEGY": "eager"} for name in OVERRIDES}
    settings["as it is"] = {}
    # Side by side: each takes seconds to start, and compares its own products alone.
    with ThreadPoolExecutor() as pool:
        children = list(pool.map(lambda given: _child("products", **given), settings.values()))
    for name, done in zip(settings, children, strict=True):
        off, off_wide, keeps_bits = json.loads(done.stdout)
        figures[name] = {"float32 off by": off, "float64 off by": off_wide, "keeps 24 bits": keeps_bits}
        if not settings[name] and not (keeps_bits and off_wide < 1e-12):
            faults.append("products have fewer bits than their types")
    return Found(figures, faults)
