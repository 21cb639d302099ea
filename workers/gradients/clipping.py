"""The clipped sum of per-example gradients: the only place where a private gradient exists in the clear.

Opacus computes the gradient of every example; this module bounds each of them and adds them up. Shapes and work do not
depend on the draw: always M micro-batches of m rows, so time and memory tell nothing about it.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.numerics import choose_kernels
from raycloak.workers.inputs.datasets import Batch, Dataset
from raycloak.workers.inputs.models import LossFn, load_flat, trainable_tensors
from raycloak.workers.inputs.opacus_modules import opacus_module
from raycloak.workers.terms.mechanism import Mechanism

# These three carry the derivation in ClippedSum: a change of one needs a new derivation.
MAX_ROWS = 2**17
CLIP_MARGIN = 2.0**-16
_MAX_DIMENSION = 2**31
# Float64 copies of one block at a time: small enough for the cache of a CPU, large enough to fill a GPU.
_BLOCK_COLUMNS = {"cpu": 4096, "cuda": 2**18}
# Torch's whole first sentence is matched, so no other error's text can pass for the name of an operation.
_NONDETERMINISTIC = re.compile(
    r"(?P<name>[A-Za-z_]\w{0,63})(?: [\w=]{1,20}){0,5} does not have a deterministic implementation, "
    r"but you set 'torch\.use_deterministic_algorithms\(True\)'\.",
    re.ASCII,
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MicroBatch = tuple[NDArray[np.float32] | NDArray[np.int64], NDArray[np.float32] | NDArray[np.int64], NDArray[np.bool_]]


class ClippedSum:
    """A running float64 sum of clipped per-example gradients.

    Guarantee: let a set of examples differ from another only in that one example is invalid. Their totals differ by
    at most C in the l2 norm, in exact arithmetic on the computed float64 values, for any float32 gradients, finite
    or not, if at most 2^17 rows are added in the same places, d <= 2^31 and 2^-100 <= C <= 2^100.

    Derivation, with u = 2^-53 and the target T = C * (1 - 2^-16), itself rounded once:

    * Squares of float32 numbers are exact in float64 and cannot overflow or underflow there. A sum of d of them, in
      any order, is at least (1 - d*u) of the true one, so the computed norm is at least (1 - 2^-22) of the true one
      after its root. The weight w = min(1, T / norm) is rounded once more: w * |g| <= T * (1 + 2^-21).
    * A row with a non-finite or invalid gradient has w = 0, and its non-finite elements are replaced by zero before
      the product: it contributes exactly zero.
    * Each coordinate is a sum of n <= 2^17 products in some fixed order, with or without fused multiply-add: every
      product enters with a factor (1 + t), |t| <= (n + 2) * u < 2^-35. Both totals carry such errors, hence the
      difference is at most w_i * |g_i| * (1 + 2^-35) plus 2 * 2^-35 times the sum of all w_k * |g_k|, which is below
      T * (1 + 2^-21) * (1 + 2^-16.9).
    * (1 - 2^-16) * (1 + u) * (1 + 2^-21) * (1 + 2^-16.9) < 1, so the difference is below C.

    Args:
        sizes: number of coordinates of each tensor, in canonical order.
        clip: C, or None to add gradients as they are (data declared public); non-finite ones still contribute zero.
        device: where the gradients are.
    """

    def __init__(self, sizes: Sequence[int], clip: float | None, device: torch.device) -> None:
        assert sum(sizes) <= _MAX_DIMENSION, "the bound is derived for d up to 2^31"
        assert clip is None or 2.0**-100 <= clip <= 2.0**100, "the bound is derived for C within 2^-100 .. 2^100"
        self._target = None if clip is None else clip * (1.0 - CLIP_MARGIN)
        self._total = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._parts = _split(self._total, list(sizes))
        self._columns = _BLOCK_COLUMNS[device.type]
        self._rows = 0

    def add(self, gradients: Sequence[Tensor], valid: Tensor) -> None:
        """Add the rows where ``valid``.

        Args:
            gradients: float32 [m, ...] per tensor.
            valid: bool [m].
        """
        self._rows += len(valid)
        assert self._rows <= MAX_ROWS, "the bound is derived for 2^17 rows"
        matrices = [gradient.flatten(1) for gradient in gradients]
        weights = self._weights(matrices, valid)
        for matrix, part in zip(matrices, self._parts, strict=True):
            for block, target in zip(_split(matrix, self._columns), _split(part, self._columns), strict=True):
                finite = block.double().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                target += finite.T @ weights

    def total(self) -> NDArray[np.float64]:
        """Return the sum, float64 [d]."""
        return self._total.cpu().numpy()

    def _weights(self, matrices: Sequence[Tensor], valid: Tensor) -> Tensor:
        squares = torch.zeros(len(valid), dtype=torch.float64, device=valid.device)
        for matrix in matrices:
            for block in _split(matrix, self._columns):
                squares += block.double().square_().sum(1)
        scale = torch.ones_like(squares) if self._target is None else (self._target / squares.sqrt()).clamp(max=1.0)
        return torch.where(valid & squares.isfinite(), scale, 0.0)


def _split(array: Tensor, columns: int | list[int]) -> Sequence[Tensor]:
    """Return views of at most ``columns`` columns, or of exactly those in a list."""
    return torch.split(array, columns, dim=-1)


class PerExampleGradients:
    """The per-example gradients of a module, through Opacus' hooks.

    Args:
        module: hooks are attached to it, and it is put into train mode; it belongs to this object from then on.
        loss_fn: one loss per example.
        deterministic: see :func:`named_operations`.

    Raises:
        ModelError: ``unsupported_layer``.
    """

    def __init__(self, module: nn.Module, loss_fn: LossFn, deterministic: bool = True) -> None:
        if any(isinstance(layer, _CONVOLUTIONS) for layer in module.modules()):
            # Opacus' rule for convolutions names a class of this package without importing it. Each worker needs it,
            # since a process loads only the parts of Opacus that it uses.
            import torch.distributed.fsdp  # noqa: F401
        try:
            self._wrapped = opacus_module("opacus.grad_sample").GradSampleModule(
                module, batch_first=True, loss_reduction="sum", strict=True
            )
        except NotImplementedError as error:
            raise ModelError(
                "unsupported_layer", f"Opacus cannot give per-example gradients: {error}", "Use another layer."
            ) from None
        self._wrapped.train()
        self._loss_fn = loss_fn
        self._deterministic = deterministic
        self._trained = [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]

    def __call__(self, features: Tensor, labels: Tensor) -> list[Tensor]:
        """Return each example's gradient, float32 [n, *shape] per trained tensor in canonical order.

        Raises:
            ModelError: ``loss_shape``, ``unsupported_layer`` or ``nondeterministic_op``.
        """
        count = len(features)
        with named_operations(self._deterministic):
            losses = self._loss_fn(self._wrapped(features), labels)
            if losses.shape != (count,):
                raise ModelError(
                    "loss_shape",
                    f"the loss of {count} examples has shape {tuple(losses.shape)}.",
                    "Let the loss return one number per example: reduction='none'.",
                )
            losses.sum().backward()  # type: ignore[no-untyped-call]
        return [self._take(name, tensor, count) for name, tensor in self._trained]

    def _take(self, name: str, tensor: nn.Parameter, count: int) -> Tensor:
        gradient = getattr(tensor, "grad_sample", None)
        # Opacus appends to gradients that are already there, so they are cleared before the next batch.
        tensor.grad = tensor.grad_sample = None  # type: ignore[attr-defined]
        if not isinstance(gradient, Tensor) or gradient.shape != (count, *tensor.shape):
            raise ModelError(
                "unsupported_layer",
                f"Opacus gives no per-example gradient of parameter '{name}'.",
                "Use the parameter only through its own layer's forward, with the batch as the first dimension.",
            )
        return gradient


class GradientEngine:
    """The sum engine of gradients, for one model, loss and mechanism.

    The process's numerics must be pinned first (`workers/gradients/numerics.py`).

    Args:
        module: becomes this engine's own; keep no other use of it.
        loss_fn: one loss per example.
        mechanism: C, M, m, d, and whether anything is clipped.
        device: ``cpu`` or ``cuda``.
        deterministic: see :func:`named_operations`.

    Raises:
        ModelError: ``unsupported_layer``.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn,
        mechanism: Mechanism,
        device: str | torch.device = "cpu",
        deterministic: bool = True,
    ) -> None:
        self._sizes = [tensor.size for tensor in trainable_tensors(module)]
        assert mechanism.dimension == sum(self._sizes), "the mechanism was made for another model"
        assert mechanism.micro_batches * mechanism.micro_batch_size <= MAX_ROWS, "the bound is derived for 2^17 rows"
        self._device = torch.device(device)
        self._module = module.to(self._device)
        self._gradients = PerExampleGradients(self._module, loss_fn, deterministic)
        self._mechanism = mechanism

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> NDArray[np.float64]:
        """Return the sum of the clipped gradients of all valid rows, float64 [d], divided by nothing.

        Guarantee: the bound of :class:`ClippedSum`. The bytes are the same for the same arguments in one numerics
        class, if operations without a deterministic kernel are refused.
        No warning is shown, since one could depend on an example.

        Args:
            parameters: float32 [d].
            batches: exactly M micro-batches of m rows: features [m, ...], labels [m] or [m, k], valid bool [m].

        Raises:
            ModelError: ``nondeterministic_op`` naming the operation.
        """
        mechanism = self._mechanism
        load_flat(self._module, parameters)
        clipped = ClippedSum(self._sizes, mechanism.max_grad_norm if mechanism.private else None, self._device)
        count = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for features, labels, valid in batches:
                assert len(features) == len(labels) == len(valid) == mechanism.micro_batch_size, "one fixed shape"
                clipped.add(self._gradients(self._tensor(features), self._tensor(labels)), self._tensor(valid))
                count += 1
        assert count == mechanism.micro_batches, "M forward passes for every draw"
        return clipped.total()

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        """Return a copy in torch's own memory: kernels then see one alignment in every process."""
        return torch.tensor(array, device=self._device)


def micro_batches(
    dataset: Dataset, ids: NDArray[np.int64], mechanism: Mechanism, *, padding: int
) -> Iterator[MicroBatch]:
    """Yield the drawn examples as exactly M micro-batches of m rows.

    Rows beyond the draw repeat one example and are not valid, so the number of rows read does not depend on the draw.

    Args:
        ids: int64 [n], n <= M * m, without repetition.
        padding: id of an example that the caller may read.
    """
    rows = mechanism.micro_batch_size
    capacity = rows * mechanism.micro_batches
    assert len(ids) <= capacity, "the draw was cut to the capacity"
    padded = np.full(capacity, padding, dtype=np.int64)
    padded[: len(ids)] = ids
    valid = np.arange(capacity) < len(ids)
    for start in range(0, capacity, rows):
        features, labels = _read(dataset, padded[start : start + rows])
        yield features, labels, valid[start : start + rows]


def _read(dataset: Dataset, ids: NDArray[np.int64]) -> Batch:
    features, labels = dataset.batch(ids)
    assert len(features) == len(labels) == len(ids), "a batch has one row per id"
    return features, labels


@contextmanager
def named_operations(deterministic: bool) -> Iterator[None]:
    """Refuse operations without a deterministic kernel, by name.

    Args:
        deterministic: False lets them run, with a warning by torch; all others still use their deterministic kernels.

    Raises:
        ModelError: ``nondeterministic_op``.
    """
    before = torch.get_deterministic_debug_mode()
    choose_kernels(deterministic)
    try:
        yield
    except RuntimeError as error:
        found = _NONDETERMINISTIC.match(str(error))
        if found is None:
            raise
        raise ModelError(
            "nondeterministic_op",
            f"operation {found['name']} has no deterministic kernel on this device, so results could not be "
            "reproduced.",
            "Use another layer, or the CPU, or set allow_nondeterministic: true for a run that is NOT EXACT.",
        ) from None
    finally:
        torch.set_deterministic_debug_mode(before)
