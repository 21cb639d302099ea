"""The number of rows of a model that fit in a micro-batch, measured once on public synthetic examples.

The measurement counts the bytes of tensors that are alive at once. So it is a function of model, loss, form of the data
and kind of device, and no machine's memory or load enters it. Every process of a run, and a resume elsewhere, finds the
same number. The model's own tensors do not count: rows take no part of them, and a frozen base may be larger than all
rows.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.probes import Probes
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.streaming import streams_of
from raycloak.workers.gradients.vocabulary_loss import ModelLosses
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.models import LossFn, device_of, read_flat, twin_of
from raycloak.workers.terms.mechanism import Mechanism

MICRO_BATCH_BYTES = {"cpu": 2**30, "cuda": 2**34}
"""Memory that one micro-batch may take where nobody says how much. A worker on a small machine has 1 GiB, and more rows
gain a CPU little speed. A GPU is filled by larger products only."""

CACHED_BYTES = 2**27
"""Memory that the rows of it may take on a CPU: those that no cache holds are slower. MNIST's CNN took 0.16 ms a row
below 70 MiB and 0.22 ms at 140; a GPT-2 adapter took 25 ms a row at 62 MiB and 33 ms at 250."""

FEWEST_ROWS, MOST_ROWS = 4, 4096
"""Fewer rows take other kernels, and give other bits; more no longer make a forward pass faster."""

MOST_SCORED = 256
"""More rows no longer make a forward pass faster."""

_TRIED = (4, 6)
"""The first two sizes that are tried. Small ones, because the gradients of a large model may all be alive at once."""


def largest_rows(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    deterministic: bool = True,
    vocabulary: int | None = None,
    device: str = "cpu",
    most_bytes: int | None = None,
) -> int:
    """Return the rows of the largest micro-batch that memory holds, a power of two; ``module`` is kept.

    A power of two, because a byte more or less must not change the shape of a run.

    Args:
        deterministic, vocabulary: as of `raycloak.workers.gradients.model_checks.check_trainable`, which must have
            passed the model.
        device: ``cpu`` or ``cuda``, where the run computes. The measurement is made where ``module`` is, and so with
            the blocks that sums are cut into there.
        most_bytes: that one micro-batch may take; as ``device`` has them by default.
    """
    most = most_bytes or MICRO_BATCH_BYTES[device]
    return _rows_that_fit(
        lambda rows: _micro_batch_bytes(module, form, loss_fn, rows, deterministic, vocabulary),
        range(FEWEST_ROWS, MOST_ROWS + 1),
        most,
        CACHED_BYTES if device == "cpu" else most,
    )


def scored_rows(
    module: nn.Module,
    form: DatasetForm,
    loss_fn: LossFn,
    vocabulary: int | None = None,
    most_bytes: int | None = None,
) -> int:
    """Return how many rows to score at once, a power of two: as many as a micro-batch's memory holds, at most 256.

    Args as of :func:`largest_rows`. As many on every worker, since a kernel may round by their number.
    """
    probes = Probes(form, vocabulary or 2, device=device_of(module))
    losses = ModelLosses(module, RowLoss.of(loss_fn))

    def measured(rows: int) -> int:
        batch = next(probes.draws(rows)).before
        return peak_bytes(lambda: losses(batch.features, batch.labels), _tensors_of(module))

    most = most_bytes or MICRO_BATCH_BYTES[device_of(module).type]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        torch.default_generator.manual_seed(1)
        return _rows_that_fit(measured, range(1, MOST_SCORED + 1), most, most)


def _rows_that_fit(measured: Callable[[int], int], allowed: range, most: int, cached: int) -> int:
    """Return the largest power of two within ``allowed`` that all memory and the rows' own part of it hold.

    The peak is the largest of several moments, each of which a row adds bytes to. At few rows it may be one that hardly
    grows, such as a head's that computes row after row. So what a row adds is taken for granted only up to twice as
    many rows as were tried, or where all bytes of the last trial would fit once for each of its rows.

    Args:
        measured: from a number of rows to the bytes that they take at once.
        most, cached: bytes for all, and for what rows add.
    """
    tried, peaks = list(_TRIED), [measured(rows) for rows in _TRIED]
    while True:
        row = max(1, -(-(peaks[-1] - peaks[-2]) // (tried[-1] - tried[-2])))
        fixed, rows = max(0, peaks[-1] - tried[-1] * row), allowed[-1]
        while rows > allowed[0] and (rows * row > cached or fixed + rows * row > most):
            rows //= 2
        if rows <= 2 * tried[-1] or rows * peaks[-1] <= min(most, cached) * tried[-1]:
            return rows
        tried.append(2 * tried[-1])
        peaks.append(measured(tried[-1]))


def _micro_batch_bytes(
    module: nn.Module, form: DatasetForm, loss_fn: LossFn, rows: int, deterministic: bool, vocabulary: int | None
) -> int:
    """Return the bytes of all tensors that are alive at once while a micro-batch of ``rows`` is computed."""
    own = twin_of(module)
    parameters, device = read_flat(own), device_of(own)
    engine = GradientEngine(own, loss_fn, mechanism_of_rows(parameters.size, rows), device, deterministic)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.default_generator.manual_seed(1)
        examples = next(Probes(form, vocabulary or 2).draws(rows)).before
        batch = examples.features.numpy(), examples.labels.numpy(), np.ones(rows, np.bool_)
        return peak_bytes(lambda: engine.clipped_sum(parameters, [batch]), _tensors_of(own))


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Return what the module holds from now on; a streamed block comes and goes."""
    for stream in streams_of(module):
        stream.leave()
    return chain(module.parameters(), module.buffers())


def mechanism_of_rows(dimension: int, rows: int) -> Mechanism:
    """Return a mechanism whose step is one micro-batch; nothing is drawn or released under it."""
    return Mechanism(
        private=True,
        num_examples=rows,
        virtual_workers=1,
        sample_rate=1.0,
        steps=1,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        honest_share=1.0,
        expected_batch_size=float(rows),
        dimension=dimension,
        ring_bits=32,
        gamma_log2=-16,
        clamp=float(rows),
        sigma=2.0**20,
        micro_batch_size=rows,
        micro_batches=1,
        overflow_probability=0.0,
    )


def peak_bytes(compute: Callable[[], object], held: Iterable[Tensor] = ()) -> int:
    """Return the peak of the bytes that ``compute`` has alive in tensors that it makes.

    Args:
        held: tensors that are there before and after it.
    """
    collecting = gc.isenabled()
    # Nothing is collected before: what was alive then is not counted, and a collection takes longer than all the rest.
    # Cycles would be freed at moments that depend on what else the process did.
    gc.disable()
    try:
        with _LiveTensors(held) as live:
            compute()
    finally:
        if collecting:
            gc.enable()
    return int(live.peak)


@dataclass(slots=True)
class _Counted:
    """Bytes that count as long as one of ``storages`` is alive."""

    size: int
    storages: int = 0


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from their first use until they are freed, except those of ``held``.

    A copy on another device counts as one with what it is of: so a model over several devices has the count that it has
    on one, and its micro-batches have as many rows.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._now: int = 0
        self._counted = {tensor.untyped_storage()._cdata: _Counted(0, storages=1) for tensor in held}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch loads its compiler here, a second of processor time in every worker."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        crossed = function is torch.ops.aten._to_copy.default and result.device != args[0].device
        of = self._counted.get(args[0].untyped_storage()._cdata) if crossed else None
        for each in tree_leaves(result):
            # Of single numbers, a record has some on every device.
            if isinstance(each, Tensor) and each.ndim:
                self._meet(each.untyped_storage(), of)
        return result

    def _meet(self, storage: torch.UntypedStorage, of: _Counted | None) -> None:
        place = storage._cdata
        if place not in self._counted:
            if of is None:
                of = _Counted(storage.nbytes())
                self._now += of.size
                self.peak = max(self.peak, self._now)
            of.storages += 1
            self._counted[place] = of
            weakref.finalize(storage, self._forget, place)

    def _forget(self, place: int) -> None:
        counted = self._counted.pop(place)
        counted.storages -= 1
        if not counted.storages:
            self._now -= counted.size
