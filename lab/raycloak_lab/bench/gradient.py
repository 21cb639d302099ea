"""Measures the clipped sum of a model's gradients beside Opacus and non-private training, and checks that it is right.

All methods get the same model, batch and threads, and take turns in every round, so that a slow moment of the machine
meets both sides of a ratio. A method whose sum is wrong gets no figure.
"""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

import numpy as np
import torch

from raycloak.metrics.errors import ConfigError, RaycloakError, RunFailedError
from raycloak.workers.gradients.model_checks import check_trainable
from raycloak_lab.bench.gpu_use import GpuUse, bench_device, device_name, gpu_use
from raycloak_lab.bench.gradient_cases import BenchCase
from raycloak_lab.bench.gradient_memory import peak_extra_bytes, prepare
from raycloak_lab.bench.gradient_methods import METHODS, BenchWorkload, ExactSums, Method, exact_sums

PEERS: Final = tuple(name for name in METHODS if name != "ours")
TOLERANCE: Final = 3e-3
"""Above all that is right, such as the margin of the clip and the engine's charge for a tied table
(docs/proofs/006-clipped-gradients.md). Below one example left out of the largest batch, 1/256 of it."""
_TURN_S: Final = 0.1
"""A method repeats a shorter sum for as long, so that the caches that its neighbour left cold do not decide."""
_PACKAGES: Final = ("torch", "numpy", "opacus", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class RoundSpread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "RoundSpread":
        """Return median and range of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """The figures of one method; all are None if it was refused.

    Attributes:
        refused, reason: code and sentence of the refusal, if there is one. ``wrong_sum``: its sum is not that of the
            batch.
        seconds: one sum of the whole batch.
        sum_error: distance from the sum in float64, relative to its norm. It is the clipped sum, except for plain.
        vs_nonprivate: seconds of plain over seconds of this method, in each round.
        peak_extra_bytes: peak memory beyond model and batch.
        bytes_per_parameter: that, per trained parameter.
        memory_vs_nonprivate: that, over the bytes of plain.
        gpu: launches, synchronisations and kernels of one sum on a GPU; None on a CPU.
        gpu_busy: share of ``seconds`` in which a kernel, copy or fill runs there.
    """

    refused: str | None = None
    reason: str | None = None
    seconds: RoundSpread | None = None
    sum_error: float | None = None
    vs_nonprivate: RoundSpread | None = None
    peak_extra_bytes: int | None = None
    bytes_per_parameter: float | None = None
    memory_vs_nonprivate: float | None = None
    gpu: GpuUse | None = None
    gpu_busy: float | None = None


@dataclass(frozen=True, slots=True)
class GradientBench:
    """One model, measured.

    Attributes:
        parameters: number of trained parameters. all_parameters: number of all.
        rows, micro_batches: the batch, without padding.
        clock: ``processor`` time, on a CPU with one thread; otherwise ``wall``.
        vs_nonprivate, vs_opacus_hooks, vs_opacus_ghost: seconds of the peer over our seconds in each round, so 1 is as
            fast and 2 twice as fast; None where either was refused or not asked for.
        units_vs_rows: our seconds for the same rows as units over those for single rows, in each round.
        memory_vs_nonprivate: our peak extra memory over that of plain.
        methods: by name.
        packages: versions of installed packages.
    """

    model: str
    parameters: int
    all_parameters: int
    rows: int
    micro_batches: int
    device: str
    threads: int
    rounds: int
    clock: Literal["processor", "wall"]
    vs_nonprivate: RoundSpread | None
    vs_opacus_hooks: RoundSpread | None
    vs_opacus_ghost: RoundSpread | None
    units_vs_rows: RoundSpread | None
    memory_vs_nonprivate: float | None
    methods: dict[str, MethodFigures]
    packages: dict[str, str]


@dataclass(slots=True)
class _Measured:
    """A method while it is measured."""

    refused: str | None = None
    reason: str | None = None
    method: Method | None = None
    sum_error: float | None = None
    seconds: list[float] = field(default_factory=list)


def bench_gradient(case: BenchCase, against: Iterable[str], *, device: str, threads: int, rounds: int) -> GradientBench:
    """Measure our clipped sum of ``case`` and the peers ``against``.

    Raises:
        ConfigError: ``bench_input``, ``no_cuda`` or ``missing_extra``.
        RunFailedError: ``wrong_sum`` if our sum is wrong; as `peak_extra_bytes`.
    """
    names = _names(against)
    place = bench_device(device)
    if rounds < 1 or threads < 1:
        raise ConfigError("bench_input", "the bench needs at least 1 round and 1 thread.", "Raise the number.")
    prepare(place, threads)
    work = BenchWorkload.of(case, place)
    with warnings.catch_warnings():
        # Opacus' hooks and torch's backward hooks warn at every pass.
        warnings.simplefilter("ignore")
        exact = exact_sums(work)
        measured = {name: _first_run(case, place, name) for name in names}
        _check_sums(measured, exact)
        _time_in_turns({name: each for name, each in measured.items() if each.method}, rounds, _clock(place, threads))
        # Again, since only now a sum that grew from run to run shows.
        _check_sums(measured, exact)
        uses = {name: gpu_use(each.method.run, place) for name, each in measured.items() if each.method}
    for each in measured.values():
        # Its memory is not needed beside the processes that follow.
        each.method = None
    peaks = {name: peak_extra_bytes(case, name, place, threads) for name in names if not measured[name].refused}
    return _figures(work, measured, peaks, uses, threads, rounds)


def _names(against: Iterable[str]) -> list[str]:
    peers = list(against)
    strange = sorted(set(peers) - set(PEERS))
    if strange:
        raise ConfigError("bench_input", f"the bench has no peer '{strange[0]}'.", f"Name any of {', '.join(PEERS)}.")
    return ["ours", *dict.fromkeys(peers)]


def _check_sums(measured: dict[str, _Measured], exact: ExactSums) -> None:
    """Compare the last sum of each method with the exact one; RunFailedError ``wrong_sum`` if ours is wrong."""
    for name, each in measured.items():
        if each.method is None:
            continue
        right = {"plain": exact.plain, "units": exact.units}.get(name, exact.clipped)
        each.sum_error = float(np.linalg.norm(each.method.total() - right) / np.linalg.norm(right))
        if not each.sum_error <= TOLERANCE:
            message = f"the sum of '{name}' is off by {each.sum_error:.2g} of its norm."
            if name == "ours":
                raise RunFailedError("wrong_sum", message, "A benchmark of a wrong sum is none: report this as a bug.")
            measured[name] = _Measured("wrong_sum", message, sum_error=each.sum_error)


def _first_run(case: BenchCase, device: torch.device, name: str) -> _Measured:
    try:
        work = BenchWorkload.of(case, device)
        if name == "ours":
            form, vocabulary = case.form()
            check_trainable(work.module, form, case.loss_fn, vocabulary=vocabulary)
        method = METHODS[name](work)
        method.run()
    except RaycloakError as error:
        return _Measured(error.code, error.message)
    except Exception as error:
        # Opacus refuses a model by whatever its code raises; of ours, anything else is a defect.
        if name in ("ours", "plain"):
            raise
        return _Measured(type(error).__name__, (str(error).splitlines() or [""])[0])
    return _Measured(method=method)


def _clock(device: torch.device, threads: int) -> Callable[[], float]:
    """Return processor time where all work is this thread's: it does not count what other programs take."""
    if device.type == "cpu":
        return time.process_time if threads == 1 else time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def _time_in_turns(measured: dict[str, _Measured], rounds: int, clock: Callable[[], float]) -> None:
    names = list(measured)
    for turn in range(rounds):
        # Another one begins each round, so that none always follows the same neighbour's caches.
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            method = measured[name].method
            assert method is not None, "only methods that ran are timed"
            gc.collect()
            runs, begun = 0, clock()
            while runs == 0 or clock() - begun < _TURN_S:
                method.run()
                runs += 1
            measured[name].seconds.append((clock() - begun) / runs)


def _figures(
    work: BenchWorkload,
    measured: dict[str, _Measured],
    peaks: dict[str, int],
    uses: dict[str, GpuUse | None],
    threads: int,
    rounds: int,
) -> GradientBench:
    def ratio(above: str, below: str) -> RoundSpread | None:
        pair = [measured[name].seconds if name in measured else [] for name in (above, below)]
        return RoundSpread.of([a / b for a, b in zip(*pair, strict=True)]) if all(pair) else None

    def memory(name: str) -> float | None:
        return peaks[name] / peaks["plain"] if name in peaks and peaks.get("plain") else None

    parameters = len(work.parameters)
    methods = {
        name: MethodFigures(
            refused=each.refused,
            reason=each.reason,
            seconds=RoundSpread.of(each.seconds) if each.seconds else None,
            sum_error=each.sum_error,
            vs_nonprivate=ratio("plain", name),
            peak_extra_bytes=peaks.get(name),
            bytes_per_parameter=peaks[name] / parameters if name in peaks else None,
            memory_vs_nonprivate=memory(name),
            gpu=(use := uses.get(name)),
            gpu_busy=use.busy_seconds / statistics.median(each.seconds) if use else None,
        )
        for name, each in measured.items()
    }
    return GradientBench(
        model=work.case.name,
        parameters=parameters,
        all_parameters=sum(tensor.numel() for tensor in work.module.parameters()),
        rows=work.case.rows,
        micro_batches=work.case.micro_batches,
        device=device_name(work.device),
        threads=threads,
        rounds=rounds,
        clock="processor" if work.device.type == "cpu" and threads == 1 else "wall",
        vs_nonprivate=ratio("plain", "ours"),
        vs_opacus_hooks=ratio("opacus", "ours"),
        vs_opacus_ghost=ratio("ghost", "ours"),
        units_vs_rows=ratio("units", "ours"),
        memory_vs_nonprivate=memory("ours"),
        methods=methods,
        packages={name: found for name in _PACKAGES if (found := _version(name))},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
