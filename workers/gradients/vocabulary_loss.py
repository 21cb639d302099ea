"""Losses of tokens from a text model's hidden states: no logits [tokens, vocabulary] of a whole row are in memory.

Logits, their probabilities and their gradients are most of what a row of a language model takes. Here the head, which
is the model's last layer, computes a piece of one row's tokens at a time, and each piece is gone before the next:

    forward    logits of a piece, its losses, their gradient, and from it that of the hidden states, which is kept
    backward   the kept gradient times that of each token's loss
    weight     a trained head computes its pieces once more, and forms the gradient of its weight row by row

So a frozen head has the two products that any head has, and a trained one four where non-private training has three.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raycloak.workers.gradients.parts import BLOCK, SUMS, LookupUse, Use, add_block, dense_rows, finite, joined
from raycloak.workers.gradients.row_loss import RowLoss
from raycloak.workers.models.compute_mode import has_autocast
from raycloak.workers.models.losses import BuiltInLoss, class_losses, loss_of_tokens
from raycloak.workers.models.text_model import TextModel, heads_apart
from raycloak.workers.terms.loss import LossTerm

PIECE_BYTES = {"cpu": 2**24, "cuda": 2**27, "meta": 2**27}
"""Memory of the logits of a piece. Each reads the whole weight, so a small one is slow: 256 tokens of GPT-2's head took
0.85 s of processor time with 4 MiB, and 0.48 s with 16 or 64. At Llama's vocabulary, 64 MiB took two thirds of the time
that 16 took. A GPU needs more tokens to be busy."""

Tap = Callable[[Tensor, "VocabularyHead", Tensor, Tensor], Tensor]
"""A function from the loss of each token [m, T], the head, its input and the classes [m, T] to the same losses, tapped:
it sees what a trained head does."""


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """The linear layer that ends a text model, and the loss of one token by its logits.

    Guarantee: what a row gets is computed from this row alone, in memory of its own. Shapes and work depend on those of
    the row alone.

    Attributes:
        layer: the layer itself.
        weight: [classes, width], and ``bias`` [classes] or None, in the type in which the product is computed.
        term: of the loss.
    """

    layer: nn.Linear
    weight: Tensor
    bias: Tensor | None
    term: LossTerm

    @classmethod
    def of(cls, layer: nn.Linear, dtype: torch.dtype, term: LossTerm) -> "VocabularyHead":
        """Return the head whose products are computed in ``dtype``."""
        bias: Tensor | None = layer.bias  # torch's own annotation leaves the None out
        return cls(layer, layer.weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype), term)

    def pieces(self, tokens: int) -> list[slice]:
        """Return the tokens of each piece of a row."""
        # Logits are float32 for the loss, whatever the type of the product is.
        step = max(1, PIECE_BYTES[self.weight.device.type] // (4 * len(self.weight)))
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]

    def losses(self, hidden: Tensor, known: Tensor) -> Tensor:
        """Return the losses [t] of some tokens of a row: ``hidden`` [t, width], with classes that all exist, [t]."""
        return class_losses(self._logits(hidden).float(), known, self.term)

    def gradients(self, hidden: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses [t], and the gradient of each token's own loss for its logits, [t, classes]."""
        logits = self._logits(hidden)
        with torch.enable_grad():
            leaf = logits.requires_grad_()
            losses = class_losses(leaf.float(), known, self.term)
            (left,) = torch.autograd.grad(losses, leaf, torch.ones_like(losses))
        return losses.detach(), left

    def _logits(self, hidden: Tensor) -> Tensor:
        # A copy, because a kernel may round by where its memory begins, and rows begin anywhere.
        return torch.nn.functional.linear(hidden.to(self.weight.dtype, copy=True), self.weight, self.bias)


class _TokenLosses(torch.autograd.Function):
    """The loss of every token, [m, T] of hidden states [m, T, width]; the backward pass computes no logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: VocabularyHead, known: Tensor) -> Tensor:
        losses = torch.empty(known.shape, device=hidden.device)
        kept = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for row in range(len(hidden)):
            for some in head.pieces(hidden.shape[1]):
                tokens, classes = hidden[row, some], known[row, some]
                if kept is None:
                    losses[row, some] = head.losses(tokens, classes)
                else:
                    losses[row, some], left = head.gradients(tokens, classes)
                    kept[row, some] = left @ head.weight
        ctx.save_for_backward(*([] if kept is None else [kept]))
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * gradients[0][:, :, None], None, None


@dataclass(frozen=True, slots=True)
class HeadUse:
    """A use of a head's weight: of each row k the gradient is the sum of l_t r_tᵀ over its tokens.

    Attributes:
        head: computes the sides l, the gradients of the logits, once more.
        hidden: the sides r, [m, T, width].
        known: classes [m, T].
        factors: gradients of the token's losses, [m, T].
    """

    head: VocabularyHead
    hidden: Tensor
    known: Tensor
    factors: Tensor

    def bias_rows(self) -> Tensor:
        """Return the gradient of the bias for each row, float32 [m, classes]."""
        rows = torch.zeros(len(self.hidden), len(self.head.weight), device=self.hidden.device)
        for row, sums in enumerate(rows):
            for _, left in self.pieces(row):
                sums += left.sum(0)
        return rows

    def pieces(self, row: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the tokens of each piece of a row, with their sides l, float32 [t, classes]."""
        for some in self.head.pieces(self.hidden.shape[1]):
            _, left = self.head.gradients(self.hidden[row, some], self.known[row, some])
            yield some, left.float().mul_(self.factors[row, some, None])


class HeadPart:
    """The part of a head's weight, whose rows are formed one after another in one buffer of the weight's size.

    A row is in memory between its measure and its sum, so it is formed once: :meth:`in_turn` lends each, and
    `raycloak.workers.gradients.clipping.ClippedSum` measures and adds it before the next one takes its place.

    Args:
        others: all other uses of the same weight, as of a table of tokens that is tied to the head.
        shape: of the weight.
    """

    def __init__(self, use: HeadUse, others: list[Use], shape: tuple[int, ...]) -> None:
        self._use, self._shape = use, shape
        tables = [each for each in others if isinstance(each, LookupUse)]
        rest: list[Use] = [each for each in others if not isinstance(each, LookupUse)]
        self._table = joined(tables, shape[0]) if tables else None
        self._rest = dense_rows(rest, len(use.hidden), shape) if rest else None

    def in_turn(self) -> Iterator["FormedRow"]:
        """Yield each row, in order; the next one is formed in the same memory."""
        entries, width = self._shape
        spare = 0 if self._table is None else self._table.ids.shape[1]
        buffer = torch.empty(entries + spare, width, device=self._use.hidden.device)
        formed = buffer[:entries]
        for row, right in enumerate(self._use.hidden):
            for some, left in self._use.pieces(row):
                # With beta 0 what is in the memory does not matter.
                formed.addmm_(left.T, right[some].float(), beta=0.0 if some.start == 0 else 1.0)
            if self._table is not None:
                # The tokens that name no row of the table have rows of their own below it.
                buffer[entries:] = 0.0
                buffer.index_add_(0, self._table.ids[row], self._table.values[row])
            if self._rest is not None:
                formed += self._rest[row].view_as(formed)
            yield FormedRow(formed.flatten())

    def squares(self) -> Tensor:
        """Return the squared norms, as :class:`raycloak.workers.gradients.parts.Part`: for checks."""
        return torch.stack([row.square() for row in self.in_turn()])

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Add the weighted rows: for checks."""
        for row, weight in zip(self.in_turn(), weights, strict=True):
            row.add(weight, total)

    def rows(self) -> Tensor:
        """Return all rows, float32 [m, size]."""
        return torch.stack([row.values.clone() for row in self.in_turn()])


@dataclass(frozen=True, slots=True)
class FormedRow:
    """One row's gradient, float32 [size]."""

    values: Tensor

    def square(self) -> Tensor:
        """Return the squared norm, float64 []: the squares are exact."""
        blocks = torch.split(self.values, BLOCK[self.values.device.type])
        return torch.stack([torch.dot(*[block.double()] * 2) for block in blocks]).sum()

    def add(self, weight: Tensor, total: Tensor) -> None:
        """Add the row times its weight, a float32 number in float64 [], to float64 [size], in place."""
        size, sums = BLOCK[total.device.type], SUMS[total.device.type]
        for block, target in zip(torch.split(self.values, size), torch.split(total, size), strict=True):
            add_block(target, finite(block.to(sums)) * weight.to(sums))


class ModelLosses:
    """The loss of each example by a module and a loss function; without logits where the loss alone would read them.

    Guarantee: entry i is computed from row i of the module's output and of the labels alone; see :class:`RowLoss`.

    Args:
        module: a :class:`TextModel` with a head, under a built-in loss of tokens, gives hidden states.
        classes: the most that a frozen head has, for checks: its first ones. None for all of them, as the loss has
            where it weighs each class.
    """

    def __init__(self, module: nn.Module, loss: RowLoss, classes: int | None = None) -> None:
        self._module, self._loss = module, loss
        self._term = loss.loss_fn.of_tokens if isinstance(loss.loss_fn, BuiltInLoss) else None
        self._layer = module.head if isinstance(module, TextModel) and self._term is not None else None
        if self._layer is not None and self._term is not None and classes is not None:
            is_frozen = not any(each.requires_grad for each in self._layer.parameters())
            if is_frozen and not self._term.class_weights:
                self._layer = _first_classes(self._layer, classes)

    @property
    def reads_logits(self) -> bool:
        """Return whether the loss takes the module's own output."""
        return self._layer is None

    def module_form(self) -> AbstractContextManager[None]:
        """Return a block in which the module gives what :meth:`of` takes."""
        return nullcontext() if self._layer is None else heads_apart()

    def of(self, output: Tensor, labels: Tensor, tap: Tap | None = None) -> Tensor:
        """Return the losses [n] of the module's output in that block.

        Raises:
            ModelError: ``loss_shape``.
        """
        if self._layer is None or self._term is None:
            return self._loss(output, labels)
        labels = labels.to(output.device)
        narrow = has_autocast(self._module)
        head = VocabularyHead.of(self._layer, torch.bfloat16 if narrow else self._layer.weight.dtype, self._term)

        def losses_of(known: Tensor) -> Tensor:
            losses: Tensor = _TokenLosses.apply(output, head, known)  # type: ignore[no-untyped-call]
            return losses if tap is None else tap(losses, head, output, known)

        return loss_of_tokens(losses_of, output, labels, len(head.weight), head.term)

    def backward_by_logits(self, features: Tensor, labels: Tensor) -> None:
        """Give the module's parameters autograd's gradient of the summed losses, through a row's logits: for checks."""
        with self.module_form():
            output = self._module(features)
        if self._layer is None:
            self._loss(output, labels).sum().backward()  # type: ignore[no-untyped-call]
            return
        leaf = output.detach().requires_grad_()
        for row in range(len(leaf)):
            logits = self._layer(leaf[row : row + 1].to(self._layer.weight.dtype)).float()
            self._loss(logits, labels[row : row + 1]).sum().backward()  # type: ignore[no-untyped-call]
        if output.requires_grad:
            output.backward(leaf.grad)

    def __call__(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [n] of features [n, ...] and labels [n, ...]; errors as :meth:`of`."""
        with self.module_form():
            output = self._module(features)
        return self.of(output, labels)


def _first_classes(layer: nn.Linear, classes: int) -> nn.Linear:
    """Return a layer of the first classes of a frozen one, whose memory it shares."""
    few = nn.Linear(1, 1, bias=layer.bias is not None, device="meta")
    for name, tensor in layer.named_parameters():
        setattr(few, name, nn.Parameter(tensor[:classes], requires_grad=False))
    return few
