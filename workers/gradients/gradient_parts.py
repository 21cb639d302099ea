"""Per-example gradients of a model and a loss: as parts for the engine, and as plain rows for checks."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.numerics import choose_kernels, exact_sums
from raycloak.workers.gradients.parts import Part
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.gradients.row_places import SilentRows, WeighedRows, silences, weighings
from raycloak.workers.gradients.settings import held_settings
from raycloak.workers.gradients.taps import Recording
from raycloak.workers.gradients.vocabulary_loss import ModelLosses
from raycloak.workers.models.models import LossFn, content_hash

# Torch's whole first sentence is matched, so no other error's text can pass for the name of an operation.
_NONDETERMINISTIC = re.compile(
    r"(?P<name>[A-Za-z_]\w{0,63})(?: [\w=]{1,20}){0,5} does not have a deterministic implementation, "
    r"but you set 'torch\.use_deterministic_algorithms\(True\)'\.",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class GradientLook:
    """The gradients of a batch, and how they came about.

    Attributes:
        parts: of each trained tensor in canonical order.
        shared: a digest of each tensor that the forward pass takes as the same for all rows, whatever the examples are,
            each with the name of a parameter that it meets.
        moved: name of a parameter where a row's loss gives a gradient to another row's place; None if nowhere.
    """

    parts: list[Part]
    shared: tuple[tuple[str, bytes], ...]
    moved: str | None


class GradientParts:
    """The gradients of a module's parameters for each row of a batch.

    Guarantee: labels enter through a :class:`RowLoss` alone. So one example's label or output changes no other
    example's loss, whatever the loss computes from its arguments.

    Args:
        module: is put into train mode; it belongs to this object from then on.
        loss_fn: one loss per example.
        deterministic: see :func:`named_operations`.
        classes: as of :class:`ModelLosses`.
        rows_per_unit: k; parts then have a row for each unit of k rows side by side, the sum of their gradients.

    Attributes:
        losses: of the module's output.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFn,
        deterministic: bool = True,
        *,
        rows_per_unit: int = 1,
        classes: int | None = None,
    ) -> None:
        self._module = module.train()
        self._rows_per_unit = rows_per_unit
        self._trained = [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]
        # Now: while they are lent, no parameter needs a gradient.
        self._frozen = [tensor for tensor in module.parameters() if not tensor.requires_grad]
        self.losses = ModelLosses(module, RowLoss.of(loss_fn), classes)
        self._deterministic = deterministic

    def __call__(self, features: Tensor, labels: Tensor) -> list[Part]:
        """Return the part of each trained tensor in canonical order, n rows each.

        Raises:
            ModelError: ``loss_shape``, ``unsupported_layer``, ``nondeterministic_op`` or ``changed_setting``.
        """
        with self.lent():
            return self.finished(*self.begun(features, labels))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let no parameter need a gradient in this block, in which batches are begun and finished."""
        for _, tensor in self._trained:
            tensor.requires_grad_(False)
        try:
            yield
        finally:
            for _, tensor in self._trained:
                tensor.requires_grad_(True)

    def begun(self, features: Tensor, labels: Tensor) -> tuple[Recording, Tensor]:
        """Run the forward pass of a batch; return its record, and the loss of each row [n].

        Raises:
            ModelError: as a call.
        """
        with self._recorded(features, labels) as begun:
            return begun

    def finished(self, recording: Recording, losses: Tensor, silent: SilentRows | None = None) -> list[Part]:
        """Run the backward pass of a batch that has begun, and return its parts.

        Args:
            silent: rows whose losses are zeroed before the backward pass; it then tells whether one moved.

        Raises:
            ModelError: as a call.
        """
        with named_operations(self._deterministic):
            recording.backward(losses, silent)
            with exact_sums():
                return recording.parts()

    def rows(self, features: Tensor, labels: Tensor) -> list[Tensor]:
        """Return each example's gradient, float32 [n, *shape] per trained tensor: for checks, and for small models.

        Raises:
            ModelError: as a call.
        """
        parts = zip(self(features, labels), self._trained, strict=True)
        return [part.rows().view(len(labels), *tensor.shape) for part, (_, tensor) in parts]

    def moved_rows(self, features: Tensor, labels: Tensor) -> str | None:
        """Return the name of a parameter where a row's loss gives a gradient to another row's place; None if nowhere.

        Raises:
            ModelError: as a call.
        """
        with self.lent(), self._recorded(features, labels) as (recording, losses):
            tried = [SilentRows(rows.to(labels.device)) for rows in silences(len(labels))]
            for silent in tried:
                recording.backward(losses, silent, places_alone=True)
            return next((silent.first for silent in tried if silent.first is not None), None)

    def looked_at(
        self, features: Tensor, labels: Tensor, forward: Callable[[Tensor], Tensor], *, places: bool = True
    ) -> GradientLook:
        """Return all that one forward pass and a few backward passes show of how rows stay in their places.

        Guarantee: a row's loss that reaches another row's place of a tensor that a trained parameter enters is named.

        Args:
            forward: runs the module.
            places: whether to look for such a row.

        Raises:
            ModelError: as a call.
        """
        shared: list[tuple[str, bytes]] = []

        def on_shared(name: str, tensor: Tensor) -> None:
            shared.append((name, content_hash(tensor)))

        with self.lent(), self._recorded(features, labels, forward, on_shared) as (recording, losses):
            exponents = weighings(len(losses), losses.device) if places else []
            weighed = [WeighedRows(each) for each in exponents]
            plain = WeighedRows(torch.zeros_like(losses, dtype=torch.int64))
            for each in weighed:
                recording.backward(losses, each, places_alone=True)
            recording.backward(losses, plain)
            with exact_sums():
                parts = recording.parts()
        apart = all(each.is_apart_from(plain) for each in weighed)
        # A narrow type rounds small numbers by their size, so silent rows decide, and they name the parameter.
        return GradientLook(parts, tuple(shared), None if apart else self.moved_rows(features, labels))

    @contextmanager
    def _recorded(
        self,
        features: Tensor,
        labels: Tensor,
        forward: Callable[[Tensor], Tensor] | None = None,
        on_shared: Callable[[str, Tensor], None] | None = None,
    ) -> Iterator[tuple[Recording, Tensor]]:
        """Lend the record of a forward pass, and the loss of each row [n], within :meth:`lent`.

        Args:
            on_shared: gets what is taken as the same for all rows, and the name of the parameter that it meets.
        """
        fixed = [*self._frozen, *self._module.buffers()]
        recording = Recording(self._trained, fixed, len(labels), on_shared, self._rows_per_unit)
        with named_operations(self._deterministic):
            with recording, self.losses.module_form():
                output = (forward or self._module)(features)
            yield recording, self.losses.of(output, labels, recording.head)


@contextmanager
def named_operations(deterministic: bool) -> Iterator[None]:
    """Refuse operations without a deterministic kernel, by name, and what changes a setting of torch.

    Args:
        deterministic: False lets them run, with a warning by torch; all others still use their deterministic kernels.

    Raises:
        ModelError: ``nondeterministic_op``, or ``changed_setting`` as
            :func:`raycloak.workers.gradients.settings.held_settings`.
    """
    before = torch.get_deterministic_debug_mode()
    choose_kernels(deterministic)
    try:
        with held_settings():
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
