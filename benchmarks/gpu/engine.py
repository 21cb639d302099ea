"""Sections on the engine: the same sum gives the same bytes, whatever is beside it, and near those of a CPU."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import Found
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.models.compute_mode import ComputeMode, Precision
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import read_flat
from raycloak_lab.bench.gradient_cases import BenchCase, Features, case_named
from raycloak_lab.bench.gradient_methods import BenchWorkload

Batch = tuple[Features, NDArray[np.int64]]
FAR: dict[Precision, float] = {"float32": 1e-3, "bf16": 0.1}
"""A sum that is farther from the CPU's, over its norm, is of other numbers: another order alone moves it less."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of ``raycloak-lab bench gradient`` and how it is computed."""

    name: str
    precision: Precision = "float32"

    def __str__(self) -> str:
        return f"{self.name} {self.precision}"


MODELS = (
    Model("cnn"), Model("mlp"), Model("bert"), Model("gpt2"), Model("gpt2-lora"), Model("gpt2", "bf16"),
)  # fmt: skip


class Sums:
    """The engine of one model on a device, and the batch of its bench."""

    def __init__(self, model: Model, device: torch.device) -> None:
        case = BenchCase(model.name, case_named(model.name).rows, 1)
        work = BenchWorkload.of(case, device)
        ComputeMode(precision=model.precision).apply(work.module)
        ((features, labels),) = work.batches
        self.batch: Batch = features, labels
        self._parameters = work.parameters
        mechanism = mechanism_of_rows(len(work.parameters), case.rows)
        self._engine = GradientEngine(work.module, case.loss_fn, mechanism, device)

    def of(self, batch: Batch, rows: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Return the clipped sum of these rows of a batch, of all by default."""
        features, labels = batch
        valid = np.ones(len(labels), np.bool_)
        if rows is not None:
            valid = np.isin(np.arange(len(labels)), rows)
        return torch.cat(self._engine.clipped_sum(self._parameters, [(features, labels, valid)])).cpu().numpy()


def digest(total: NDArray[np.float64]) -> str:
    """Return the SHA-256 of a sum, in hexadecimal digits."""
    return hashlib.sha256(total.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Repeats:
    """What became of a sum's bytes.

    Attributes:
        again, new_engine, other_process: they are the same when it is computed again, by an engine in memory that is
            in pieces, and by another process. beside_others: those of one row are, beside other rows.
            other_place: those of one row are, at another place; this is promised by nothing.
        distance_from_cpu: over the norm; 0 on a CPU. far: what it may be.
    """

    again: bool
    new_engine: bool
    other_process: bool
    beside_others: bool
    other_place: bool
    norm_of_one: float
    distance_from_cpu: float
    far: float

    def faults(self) -> list[str]:
        """Return a sentence for each promise that is broken."""
        promised = ("again", "new_engine", "other_process", "beside_others")
        faults = [f"{name}: the sum has other bytes" for name in promised if not getattr(self, name)]
        if not self.norm_of_one <= 1.0:
            faults.append(f"one row adds {self.norm_of_one!r}, where C is 1")
        if not self.distance_from_cpu <= self.far:
            faults.append(f"the sum is off the CPU's by {self.distance_from_cpu:.2g} of its norm")
        return faults


def repeats(place: Place, model: Model) -> Found:
    """Compute the sum of a model in every situation that must not change its bytes."""
    pin_numerics()
    with ThreadPoolExecutor(1) as beside:
        # It starts while this one computes, on the same device.
        elsewhere = beside.submit(_elsewhere, model, place)
        sums = Sums(model, place.device)
        features, labels = sums.batch
        last = len(labels) - 1
        whole = sums.of(sums.batch)
        held = _pieces(place)
        new_engine = Sums(model, place.device).of(sums.batch)
        del held
        alone = sums.of(sums.batch, [0])
        # The same first row; the others stand in another order, and are examples that no batch has.
        strange = features.copy()
        strange[1:] = strange[:0:-1] if np.issubdtype(features.dtype, np.integer) else 1 - strange[1:]
        turned = features[::-1].copy(), labels[::-1].copy()
        on_cpu = Sums(model, torch.device("cpu")).of(sums.batch) if place.on_gpu else whole
        found = Repeats(
            again=digest(sums.of(sums.batch)) == digest(whole),
            new_engine=digest(new_engine) == digest(whole),
            other_process=elsewhere.result() == digest(whole),
            beside_others=digest(sums.of((strange, labels), [0])) == digest(alone),
            other_place=digest(sums.of(turned, [last])) == digest(alone),
            norm_of_one=float(np.linalg.norm(alone)),
            distance_from_cpu=float(np.linalg.norm(whole - on_cpu) / np.linalg.norm(on_cpu)),
            far=FAR[model.precision],
        )
    return Found({"repeats": found}, found.faults())


def _pieces(place: Place) -> list[Tensor]:
    """Return a third of many tensors of all sizes; between them is memory that the allocator gives anew."""
    draw = np.random.default_rng(5)
    held = [
        torch.empty(int(size), dtype=torch.uint8, device=place.device) for size in draw.integers(512, 2**22, 400)
    ]  # fmt: skip
    return held[::3]


def _elsewhere(model: Model, place: Place) -> str:
    """Return the digest of the sum that a new process computes."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.children", "sum", place.device.type, model.name, model.precision],
        capture_output=True, encoding="utf-8", timeout=300, check=True,
    )  # fmt: skip
    return done.stdout.split()[-1]


class _Blocks(nn.Module):
    """Three blocks that the backward pass may compute again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.last, self._again = nn.Linear(48, 64), nn.Linear(64, 10), again
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(3)
        )

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        for block in self.blocks:
            call = partial(checkpoint, block, use_reentrant=False) if self._again else block
            values = values + call(values)
        logits: Tensor = self.last(values.mean(1))
        return logits


def checkpointing(place: Place) -> Found:
    """Compare the sums with and without layers that are computed again.

    On CUDA they are computed in a thread of autograd's own, where the taps must follow.
    """
    pin_numerics()
    draw = np.random.default_rng(0)
    batch = draw.random((8, 24, 48), np.float32), draw.integers(10, size=8), np.ones(8, np.bool_)
    digests = []
    for again in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module = _Blocks(again)
        parameters = read_flat(module)
        engine = GradientEngine(module, cross_entropy, mechanism_of_rows(parameters.size, 8), place.device)
        digests.append(digest(torch.cat(engine.clipped_sum(parameters, [batch])).cpu().numpy()))
    same = digests[0] == digests[1]
    return Found({"same bytes": same}, () if same else ("layers that are computed again give other bytes",))
