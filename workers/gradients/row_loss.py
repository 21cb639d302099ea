"""The evaluation of a loss, one example at a time.

A user's loss may divide by the number of positives or of labels in its batch. Called on the whole batch, such a loss
would let one example change every other gradient, and clipping each gradient would bound nothing.
"""

import warnings

import torch
from torch import Tensor

from raycloak.metrics.errors import ModelError, is_out_of_memory
from raycloak.workers.models.losses import BuiltInLoss
from raycloak.workers.models.models import LossFn


class RowLoss:
    """A loss that sees one example at a time.

    Guarantee: entry i of the result is computed from row i of output and labels alone, by any loss that keeps no state
    between its calls. A user's loss is called on batches of one row. That happens for all rows at once under
    ``torch.func.vmap``, or row by row if its code does not run under vmap. The losses of this package treat rows alone
    by their own code, and have the same bits either way; they are called on the whole batch.

    The choice is made once, on rows of zeros, so never by an example. The two ways may differ in their last bits: the
    choice is part of the known answer, and so of the manifest (`workers/workload.py`).

    Args:
        loss_fn: one loss per example.

    Attributes:
        loss_fn: the same.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        # Under vmap torch loads a compiler's parts, for half a second and in every worker.
        self._built_in = isinstance(loss_fn, BuiltInLoss)
        self._row_by_row: bool | None = False if self._built_in else None

    @classmethod
    def of(cls, loss_fn: LossFn) -> "RowLoss":
        """Return ``loss_fn`` as a row loss; one that is a row loss stays the same object, with its choice."""
        return loss_fn if isinstance(loss_fn, RowLoss) else cls(loss_fn)

    @property
    def row_by_row(self) -> bool:
        """Return whether each row is a separate call; known after the first evaluation."""
        assert self._row_by_row is not None, "no loss was evaluated yet"
        return self._row_by_row

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [n] of output [n, ...] and labels [n, ...].

        Raises:
            ModelError: ``loss_shape``.
        """
        # Of a model over several devices, the output is on another one than what went in.
        labels = labels.to(output.device)
        if self._built_in:
            return self.loss_fn(output, labels)
        if self._row_by_row is None:
            self._row_by_row = not self._runs_under_vmap(output, labels)
        if not self._row_by_row:
            return self._all_rows(output, labels)
        pairs = zip(torch.split(output, 1), torch.split(labels, 1), strict=True)
        return torch.cat([self._one_row(*pair) for pair in pairs])

    def _one_row(self, output: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss_fn(output, labels)
        if loss.shape != (1,):
            raise ModelError(
                "loss_shape",
                f"the loss of a batch of one example has shape {list(loss.shape)}, not [1].",
                "Let the loss return one number per example: reduction='none', and squeeze(1) in place of squeeze().",
            )
        return loss

    def _all_rows(self, output: Tensor, labels: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # Torch warns of operations that it runs row by row.
            warnings.filterwarnings("ignore", "There is a performance drop")
            return torch.func.vmap(lambda row, label: self._one_row(row[None], label[None])[0])(output, labels)

    def _runs_under_vmap(self, output: Tensor, labels: Tensor) -> bool:
        zeros = torch.zeros((2, *output.shape[1:]), dtype=output.dtype, device=output.device)
        classes = torch.zeros((2, *labels.shape[1:]), dtype=labels.dtype, device=labels.device)
        try:
            # With its backward pass also where none is asked for: the choice must not depend on the first caller.
            with torch.enable_grad():
                losses = self._all_rows(zeros.requires_grad_(), classes)
                if losses.requires_grad:
                    torch.autograd.grad(losses.sum(), zeros)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # says something of the machine, and nothing of the loss
            # A fault of the loss itself shows again, row by row.
            return False
        return True
