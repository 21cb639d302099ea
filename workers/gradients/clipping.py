"""The clipped sum of per-example gradients: the only place where a private gradient exists in the clear.

Taps give the parts of every example's gradient; this module bounds each example and adds them up. Shapes and work do
not depend on the draw: always M micro-batches of m rows, so time and memory say nothing about it.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycloak.metrics.errors import ConfigError
from raycloak.metrics.proof_bounds import require_bound
from raycloak.workers.device.step_clock import StepClock
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.kept_state import KeptState
from raycloak.workers.gradients.numerics import exact_sums
from raycloak.workers.gradients.parts import ROW_BLOCK, DensePart, Part, SmallParts, rounded_down
from raycloak.workers.gradients.placement import devices_of, on_device
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_places import SilentRows, moved_rows
from raycloak.workers.gradients.taps import Recording
from raycloak.workers.gradients.vocabulary_loss import HeadPart
from raycloak.workers.inputs.datasets import Batch, Dataset
from raycloak.workers.inputs.rows import in_turn
from raycloak.workers.models.models import LossFn, device_of, load_flat, trainable_tensors
from raycloak.workers.terms.mechanism import MAX_CLIP, MAX_DIMENSION, MIN_CLIP, Mechanism
from raycloak.workers.terms.public_sums import PublicSums

# These carry the derivation in ClippedSum, as the bounds of a mechanism do: a change needs a new derivation.
MAX_ROWS = 2**17
CLIP_MARGIN = 2.0**-16
_GAMMA = (ROW_BLOCK + 2) * 2.0**-24 / (1 - (ROW_BLOCK + 2) * 2.0**-24)
BLOCK_MARGIN = (2 * ROW_BLOCK + 1) * _GAMMA
STABILITY = 0.01
"""The gamma of normalised clipping, in units of a gradient's norm: the value that its authors use everywhere."""
HOST_PIECE = 2**22
"""Numbers of a piece, 32 MiB: threads have enough to share, and a piece's words are little beside the whole sum."""
# Gradients that nothing clips are added in float32 too, where no sum may overflow.
_LARGEST_SQUARE = 2.0**240
MicroBatch = tuple[NDArray[np.float32] | NDArray[np.int64], NDArray[np.float32] | NDArray[np.int64], NDArray[np.bool_]]


class ClippedSum:
    """A running float64 sum of clipped per-example gradients.

    Guarantee: let a set of examples differ from another only in that one example is invalid. Their totals differ by
    at most C in the l2 norm, in exact arithmetic on the computed float64 values, for any parts, finite or not, if at
    most 2^17 rows are added in the same places, d <= 2^34 and 2^-100 <= C <= 2^100.

    Derivation, with u = 2^-53, B = `ROW_BLOCK` and the target T = C * (1 - 2^-16) / (1 + (2B + 1) * gamma), gamma =
    (B + 2) * 2^-24 / (1 - (B + 2) * 2^-24). Every step is in docs/proofs/006-clipped-gradients.md; this is its frame:

    * A part adds of a row at most (1 + 2^-19) times the norm that the sum of all squares gives, by the guarantee of
      :class:`raycloak.workers.gradients.parts.Part`. The weight is min(1, T / norm), rounded towards zero to float32.
      So a weighted row has at most T' = T * (1 + 2^-19) * (1 + 2^-50).
    * A row with a non-finite or invalid gradient has w = 0, and a part adds exactly zero for it.
    * A head's rows are in memory one after the other: each is measured last of its row's parts, weighed and added.
    * A CPU adds B rows in float32, in any order that depends on them alone. Only the block of row i differs, and its
      sums differ by w_i * g_i, but for gamma times twice the weighted rows of the block: T' * (1 + (2B + 1) * gamma).
    * Blocks, and on a GPU rows, are added in float64. A total of n <= 2^17 terms has errors of at most 2^-35 of each,
      2^-17 * T' for both totals together.
    * (1 - 2^-16) * (1 + 2^-19) * (1 + 2^-16.9) < 1, so the difference is below C.

    Normalised clipping weighs a row by T / (norm + `STABILITY`), which is at most T / norm. It is above 1 for a small
    norm, where a weighted side could overflow. So rows are added as for C = `STABILITY`, with weights below 1, and
    :meth:`pieces` multiplies the sum by C / `STABILITY`.

    Args:
        sizes: number of coordinates of each tensor, in canonical order.
        clip: C, or None to add gradients as they are (data declared public); non-finite ones still contribute zero.
        device: where the gradients are, or the device of each tensor's.
        normalised: whether rows are normalised instead of clipped.

    Raises:
        RefusedError: ``proof_bound`` outside these bounds.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        clip: float | None,
        device: torch.device | Sequence[torch.device],
        normalised: bool = False,
    ) -> None:
        require_bound(sum(sizes) <= MAX_DIMENSION, "a sum has at most 2^34 coordinates")
        require_bound(clip is None or MIN_CLIP <= clip <= MAX_CLIP, "a clip is within 2^-100 .. 2^100")
        self._stability, self._scale = 0.0, 1.0
        if normalised and clip is not None:
            self._stability, self._scale, clip = STABILITY, clip / STABILITY, STABILITY
        self._target = None if clip is None else clip * (1.0 - CLIP_MARGIN) / (1.0 + BLOCK_MARGIN)
        devices = [device] * len(sizes) if isinstance(device, torch.device) else device
        self._pieces, self._targets = list[Tensor](), list[Tensor]()
        for home, run in groupby(zip(devices, sizes, strict=True), key=itemgetter(0)):
            for lengths in _cut([size for _, size in run], HOST_PIECE if home.type == "cpu" else MAX_DIMENSION):
                self._pieces.append(_zeros(sum(lengths), home))
                self._targets += torch.split(self._pieces[-1], lengths)
        self._rows = 0

    def add(self, parts: Sequence[Part], valid: Tensor) -> None:
        """Add the rows where ``valid``.

        Args:
            parts: the gradients of each tensor, m rows each.
            valid: bool [m].
        """
        self._rows += len(valid)
        require_bound(self._rows <= MAX_ROWS, "a sum has at most 2^17 rows")
        small, whole = list[tuple[DensePart, Tensor]](), list[tuple[Part, Tensor]]()
        heads = list[tuple[HeadPart, Tensor]]()
        for part, target in zip(parts, self._targets, strict=True):
            match part:
                case HeadPart():
                    heads.append((part, target))
                case DensePart() if part.is_small:
                    small.append((part, target))
                case _:
                    whole.append((part, target))
        # The rows of a second one would be measured after those of the first were added.
        require_bound(len(heads) <= 1, "a model has one head whose rows are formed in turn")
        with exact_sums():
            together = [SmallParts(small)] if small else []
            squares = torch.zeros(len(valid), dtype=torch.float64, device=valid.device)
            for measured in [each.squares() for each in together] + [part.squares() for part, _ in whole]:
                # One chain, whichever devices it passes.
                squares = squares.to(measured.device) + measured
            for head, target in heads:
                squares, valid = squares.to(target.device), valid.to(target.device)
                for row, formed in enumerate(head.in_turn()):
                    squares[row] += formed.square()
                    formed.add(self._weights(squares[row], valid[row]), target)
            weights = self._weights(squares, valid.to(squares.device))
            for each in together:
                each.add(weights)
            for part, target in whole:
                weights = weights.to(target.device)
                part.add(weights, target)

    def pieces(self) -> list[Tensor]:
        """Return the sum in float64, d together: a piece for each run of tensors on one device; the object's memory.

        In the host's memory a piece has at most `HOST_PIECE` numbers, or one tensor. Nothing is added afterwards.
        """
        scale, self._scale = self._scale, 1.0
        if scale != 1.0:
            with exact_sums():
                for piece in self._pieces:
                    # In place, because another float64 vector of a large model would not fit.
                    piece *= scale
        return list(self._pieces)

    def _weights(self, squares: Tensor, valid: Tensor) -> Tensor:
        """Return the weight of each row whose squared norms and validity are given, float64 like the squares."""
        if self._target is None:
            scale = (squares <= _LARGEST_SQUARE).double()
        else:
            # Down, because a row shall not exceed its target.
            ratio = self._target / (squares.sqrt() + self._stability)
            scale = rounded_down(ratio.clamp(max=1.0), torch.float32).double()
        return torch.where(valid & squares.isfinite(), scale, 0.0)


def _cut(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cut ``sizes`` into runs of at most ``most`` together, or of one size."""
    runs, filled = list[list[int]](), most
    for size in sizes:
        if filled + size > most:
            runs.append([])
            filled = 0
        runs[-1].append(size)
        filled += size
    return runs


def _zeros(count: int, device: torch.device) -> Tensor:
    """Return float64 zeros [count]; torch would write to them twice under deterministic algorithms."""
    if device.type == "cpu":
        # The system fills a page with zeros when it is first used, and NumPy asks it for large pages.
        return torch.from_numpy(np.zeros(count))
    with exact_sums():
        return torch.zeros(count, dtype=torch.float64, device=device)


def in_flight(devices: int) -> int:
    """Return how many micro-batches of a model over so many devices are under way at once."""
    # While one device computes the end of a micro-batch, the others compute parts of the next ones.
    return 1 if devices == 1 else devices + 1


def check_batch(mechanism: Mechanism) -> None:
    """Refuse more rows than the bound of :class:`ClippedSum` is derived for; a function of public facts only.

    Raises:
        ConfigError: ``batch_too_large``.
    """
    rows = mechanism.micro_batches * mechanism.micro_batch_size
    if rows > MAX_ROWS:
        raise ConfigError(
            "batch_too_large",
            f"a virtual worker would compute {rows} rows in a step, over {MAX_ROWS}, for which the sensitivity is "
            "proved.",
            "Use more virtual workers, or a smaller batch.",
        )


class ExampleCounter:
    """The sums over the valid rows of public micro-batches; all numbers are in float64, in the order of the rows."""

    def __init__(self) -> None:
        self._loss, self._examples = 0.0, 0
        self._tokens: int | None = None

    def add(self, features: NDArray[np.float32] | NDArray[np.int64], valid: NDArray[np.bool_], losses: Tensor) -> None:
        """Count the rows [m, ...] where ``valid``, whose losses are [m]."""
        self._examples += int(valid.sum())
        for loss in losses.double().cpu().numpy()[valid].tolist():
            self._loss += loss
        # A row of ids; a negative one is padding.
        if features.ndim == 2 and np.issubdtype(features.dtype, np.integer):
            self._tokens = (self._tokens or 0) + int((features[valid] >= 0).sum())

    def sums(self) -> PublicSums:
        """Return the sums so far."""
        return PublicSums(self._loss, self._examples, self._tokens)


class GradientEngine:
    """The sum engine of gradients, for one model, loss and mechanism.

    The process's numerics must be pinned first (`workers/gradients/numerics.py`).

    Args:
        module: becomes this engine's own; keep no other use of it.
        loss_fn: one loss per example.
        mechanism: C, M, m, k, d, and whether anything is clipped.
        device: ``cpu`` or ``cuda``; a module over several devices (`workers/gradients/placement.py`) stays there.
        deterministic: see :func:`named_operations`.
        clock: told which phase a sum is in; one of its own by default.

    Attributes:
        sizes: number of coordinates of each trained tensor, in canonical order.
        counted: sums over the examples of the last clipped sum; None under a mechanism that is private.

    Raises:
        ConfigError: ``batch_too_large``.
        ModelError: ``unsupported_layer``.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn,
        mechanism: Mechanism,
        device: str | torch.device = "cpu",
        deterministic: bool = True,
        clock: StepClock | None = None,
    ) -> None:
        self.sizes = tuple(tensor.size for tensor in trainable_tensors(module))
        require_bound(mechanism.dimension == sum(self.sizes), "a mechanism has the dimension of its model")
        check_batch(mechanism)
        self._module = on_device(module, device)
        self._device = device_of(module)
        self._clock = StepClock(self._device) if clock is None else clock
        self._homes = [tensor.device for tensor in module.parameters() if tensor.requires_grad]
        self._in_flight = in_flight(len(devices_of(module)))
        self._loss = RowLoss.of(loss_fn)
        self._gradients = GradientParts(self._module, self._loss, deterministic, rows_per_unit=mechanism.rows_per_unit)
        self._mechanism = mechanism
        self._state = KeptState(self._module, self._loss.loss_fn)
        self.counted: PublicSums | None = None
        # Weak: the model has them, and a large vector is not held twice.
        self._loaded: weakref.ref[NDArray[np.float32]] | None = None

    def clipped_sum(self, parameters: NDArray[np.float32], batches: Iterable[MicroBatch]) -> list[Tensor]:
        """Return the sum of the clipped gradients of all units, divided by nothing, in :meth:`ClippedSum.pieces`.

        A unit's gradient is the mean over its valid rows. One that has none adds nothing.

        Guarantee: the bound of :class:`ClippedSum`, in which a unit is a row. The bytes are the same for the same
        arguments in one numerics class, if operations without a deterministic kernel are refused.
        No warning is shown, since one could depend on an example.

        Guarantee: losses of rows that are not valid are zeroed before the backward pass. If a place of such a row then
        gets a gradient, another row's stands there, and there is no sum. A micro-batch without such a row is not
        checked.

        Args:
            parameters: float32 [d]. An array that owns its memory and is read-only is loaded once for several sums.
            batches: exactly M micro-batches of m units, k rows of each side by side: features [m * k, ...], labels
                [m * k] or [m * k, n], valid bool [m * k].

        Raises:
            ModelError: ``nondeterministic_op`` naming the operation; ``buffer_update`` or ``mixing_loss`` if the model
                or the loss kept anything of these examples (:class:`raycloak.workers.gradients.kept_state.KeptState`);
                ``moved_rows``.
        """
        mechanism, clock = self._mechanism, self._clock
        clock.begin("copy")
        self._load(parameters)
        clip, normalised = mechanism.max_grad_norm if mechanism.private else None, mechanism.clipping == "normalised"
        clipped = ClippedSum(self.sizes, clip, self._homes, normalised)
        counted = self.counted = None
        if not mechanism.private:
            counted = ExampleCounter()
        moved = torch.zeros((), dtype=torch.bool, device=self._device)
        count, begun = 0, deque[tuple[Recording, Tensor, Tensor]]()

        def finish() -> None:
            nonlocal moved
            recording, losses, valid = begun.popleft()
            silent = SilentRows(~valid, mechanism.rows_per_unit)
            clock.begin("model")
            parts = self._gradients.finished(recording, losses, silent)
            # Its graph holds what the parts were made of.
            del recording, losses
            clock.begin("sums")
            # A unit whose rows are all absent contributes nothing.
            clipped.add(parts, valid.view(-1, mechanism.rows_per_unit).any(1))
            moved |= silent.reached

        with warnings.catch_warnings(action="ignore"), self._gradients.lent():
            for features, labels, valid in batches:
                shaped = len(features) == len(labels) == len(valid) == mechanism.micro_batch_rows
                require_bound(shaped, "every micro-batch has the one fixed shape")
                inputs, targets, here = map(self._tensor, (features, labels, valid))
                clock.begin("model")
                recorded = self._gradients.begun(inputs, targets)
                begun.append((*recorded, here))
                if counted is not None:
                    counted.add(features, valid, recorded[1].detach())
                # Sums need none of them, and the rows of a micro-batch are as many as memory holds.
                del inputs, targets, recorded
                # In the order that they began in, so their number changes no byte.
                if len(begun) == self._in_flight:
                    finish()
                # Before the next rows meet what these left behind.
                self._state.check()
                # The next rows are read by the loop itself.
                clock.begin("copy")
                count += 1
            while begun:
                finish()
                self._state.check()
        require_bound(count == mechanism.micro_batches, "every draw takes the same number of forward passes")
        # After the last one: when an error comes says nothing of where.
        if moved:
            raise moved_rows("a row without an example got the gradient of one")
        self.counted = None if counted is None else counted.sums()
        self._loaded = weakref.ref(parameters) if _is_fixed(parameters) else None
        return clipped.pieces()

    def _load(self, parameters: NDArray[np.float32]) -> None:
        """Load parameters, except where the last sum was of the same array, which nobody can have written to since."""
        if not _is_fixed(parameters) or self._loaded is None or self._loaded() is not parameters:
            load_flat(self._module, parameters)
            self._state.parameters_set()
        # After an error the model may hold anything.
        self._loaded = None

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        """Return a copy in torch's own memory: kernels then see one alignment in every process."""
        return torch.tensor(array, device=self._device)


def _is_fixed(array: NDArray[np.float32]) -> bool:
    """Return whether nobody writes to an array: it is read-only, and no view of memory that may be written to."""
    return array.flags.owndata and not array.flags.writeable


def micro_batches(
    dataset: Dataset,
    ids: NDArray[np.int64],
    present: NDArray[np.bool_],
    mechanism: Mechanism,
    places: NDArray[np.int64],
    spare: Batch,
) -> Iterator[MicroBatch]:
    """Yield the rows of the drawn units as exactly M micro-batches of m units, those of each side by side.

    Rows that are not present are not valid. Those of a drawn unit hold what ``ids`` say: zero times the gradient of any
    other row may be NaN, which would take the whole unit out. Those of no unit hold synthetic examples. As many rows
    are read as there are places, whatever the draw.

    Args:
        ids: rows that the caller may read, int64 [M * m, r] with `Mechanism.rows_chosen` r: those of the drawn units,
            of which each has its own alone, and any for the other places.
        present: whether a row is of a drawn unit and counts, bool [M * m, r].
        places: the place of each of the M * m units, a permutation; see
            `raycloak.workers.vectors.sampling.unit_places`.
        spare: the synthetic rows, at least one; see `raycloak.workers.gradients.spare_rows`.
    """
    shape = len(places), mechanism.rows_chosen
    rows = mechanism.micro_batch_size * mechanism.rows_chosen
    require_bound(ids.shape == present.shape == shape, "every row of a step is read")
    require_bound(shape[0] == mechanism.micro_batch_size * mechanism.micro_batches, "every unit of a step has a place")
    placed, valid = np.empty_like(ids), np.empty_like(present)
    placed[places], valid[places] = ids, present
    chosen, drawn = np.arange(ids.size) % len(spare[0]), np.repeat(valid.any(1), mechanism.rows_chosen)
    batches = in_turn(dataset, list(placed.reshape(-1, rows)))
    of_rows = (part.reshape(-1, rows) for part in (valid, drawn, chosen))
    for batch, here, kept, other in zip(batches, *of_rows, strict=True):
        features, labels = (
            # Broadcast over all extents of an example.
            np.where(kept.reshape(-1, *[1] * (part.ndim - 1)), part, held[other])
            for part, held in zip(batch, spare, strict=True)
        )
        require_bound(len(features) == len(labels) == rows, "a batch has one row for each id")
        yield features, labels, here
