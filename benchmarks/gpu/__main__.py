"""The command of the check: ``python -m benchmarks.gpu``. Exit code 0 if every section ran and found no fault, else 1.

It prints the report as one line of JSON, and the name of each section as it ends to the standard error. Without a GPU,
the engine's sections run on the CPU and the kernels' in Triton's interpreter. It skips the others and exits with 1.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raycloak.workers.gradients.environment import worker_environment

if TYPE_CHECKING:
    from benchmarks.gpu.place import Place
    from benchmarks.gpu.report import Found, Section

BENCHES = ("gpt2", "gpt2-lora")
BUDGET_S = 420.0


def main(arguments: Sequence[str]) -> int:
    """Run the sections, or those whose names begin as asked; return the exit code."""
    options = _parser().parse_args(arguments)
    # Before torch is imported, which reads these once.
    os.environ.update(worker_environment("default"))
    warnings.simplefilter("ignore")
    import torch

    from benchmarks.gpu.place import Place
    from benchmarks.gpu.report import Report
    from raycloak.workers.gradients.numerics import pin_numerics

    place = Place(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not place.on_gpu:
        # Before the kernels are imported, which are then functions of NumPy.
        os.environ["TRITON_INTERPRET"] = "1"
    # Before any work, after which torch takes no other number of threads.
    pin_numerics()
    report = Report(options.output, place, options.budget)
    for section in sections(place):
        if section.name.startswith(tuple(options.only)):
            report.add(section)
    print(report.text())
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check the device path.")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no section begins")
    parser.add_argument("--only", nargs="+", default=[""], help="run the sections whose names begin so")
    parser.add_argument("--output", type=Path, default=Path(".gpu/report.json"), help="file of the report")
    return parser


def sections(place: "Place") -> Iterator["Section"]:
    """Yield all sections: right before fast, what decides most before the rest, and what takes longest at the end."""
    from benchmarks.gpu import engine, hazards, kernels, proof
    from benchmarks.gpu.machine import machine
    from benchmarks.gpu.report import Section
    from benchmarks.gpu.step import SHAPES, step
    from benchmarks.gpu.whole_run import whole_run

    def section(name: str, needs_s: float, run: "Callable[[Place], Found]", needs_gpu: bool = False) -> Section:
        return Section(name, needs_s, partial(run, place), needs_gpu)

    yield section("machine", 10, machine)
    yield section("kernel_bytes", 40, kernels.kernel_bytes)
    yield section("fused_rows", 10, proof.fused_rows)
    yield section("proof_property", 10, proof.proof_property)
    yield section("checkpointing", 5, engine.checkpointing)
    for model in engine.MODELS:
        yield section(f"repeats {model}", 12, partial(engine.repeats, model=model))
    yield section("environment", 15, hazards.environment, needs_gpu=True)
    yield section("kernel_speed", 15, kernels.kernel_speed, needs_gpu=True)
    for shape in SHAPES:
        yield section(f"step {shape}", 15, partial(step, shape=shape), needs_gpu=True)
    yield section("residue", 15, hazards.residue, needs_gpu=True)
    yield section("errors", 8, hazards.errors, needs_gpu=True)
    for name in BENCHES:
        yield section(f"bench {name}", 30, partial(_bench, name), needs_gpu=True)
    yield section("whole_run", 110, whole_run, needs_gpu=True)


def _bench(name: str, place: "Place") -> "Found":
    """Measure the engine beside non-private training and Opacus on the same card."""
    from benchmarks.gpu.report import Found
    from raycloak_lab.bench.gradient import bench_gradient
    from raycloak_lab.bench.gradient_cases import case_named

    peers = ("opacus", "ghost", "plain")
    found = bench_gradient(case_named(name), peers, device=place.device.type, threads=1, rounds=3)
    return Found({"bench": found})


# The bench measures memory in processes that import this file.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
