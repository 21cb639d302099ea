"""The command of the check: ``python -m benchmarks.gpu``. Exit code 0 if every section ran and found no fault, else 1.

It prints the report as one line of JSON, and the name of each section as it ends to the standard error.
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

BENCHES = ("cnn", "gpt2-lora", "gpt2", "bert")
BUDGET_S = 330.0


def main(arguments: Sequence[str]) -> int:
    """Run the sections that the device can run; return the exit code."""
    options = _parser().parse_args(arguments)
    # Before torch and triton are imported, which read these once.
    os.environ.update(worker_environment("default"))
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    import torch

    from benchmarks.gpu.place import Place
    from benchmarks.gpu.report import Report
    from raycloak.workers.gradients.numerics import pin_numerics

    device = "cpu" if options.interpret else options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here. Use --device cpu, or --interpret for the kernels.", file=sys.stderr)
        return 2
    # Before any work, after which torch takes no other number of threads.
    pin_numerics()
    place = Place(torch.device(device), options.interpret)
    report = Report(options.output, place.card, options.budget)
    for section in _sections(place):
        if section.name.startswith(tuple(options.only)):
            report.add(section)
    print(report.text())
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check the device path.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs the engine's sections")
    parser.add_argument("--interpret", action="store_true", help="run the kernels' sections in Triton's interpreter")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no section begins")
    parser.add_argument("--only", nargs="+", default=[""], help="run the sections whose names begin so")
    parser.add_argument("--output", type=Path, default=Path(".gpu/report.json"), help="file of the report")
    return parser


def _sections(place: "Place") -> Iterator["Section"]:
    """Yield the sections for this place: right before fast, and what decides most before the rest."""
    from benchmarks.gpu import engine, proof
    from benchmarks.gpu.machine import machine
    from benchmarks.gpu.report import Section

    def section(name: str, needs_s: float, run: "Callable[[Place], Found]") -> Section:
        return Section(name, needs_s, partial(run, place))

    yield section("machine", 10, machine)
    if place.on_gpu or place.interpreted:
        from benchmarks.gpu import kernels

        yield section("kernel_bytes", 40, kernels.kernel_bytes)
        yield section("fused_rows", 10, proof.fused_rows)
    if place.interpreted:
        return
    yield section("proof_property", 10, proof.proof_property)
    yield section("checkpointing", 5, engine.checkpointing)
    for model in engine.MODELS:
        yield section(f"repeats {model}", 25, partial(engine.repeats, model=model))
    if not place.on_gpu:
        return
    from benchmarks.gpu import hazards, kernels, large_step

    yield section("environment", 30, hazards.environment)
    yield section("kernel_speed", 20, kernels.kernel_speed)
    for shape in large_step.SHAPES:
        yield section(f"large_step {shape}", 15, partial(large_step.large_step, shape=shape))
    yield section("residue", 15, hazards.residue)
    yield section("errors", 10, hazards.errors)
    for name in BENCHES:
        yield section(f"bench {name}", 40, partial(_bench, name))


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
