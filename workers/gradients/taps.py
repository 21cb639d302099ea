"""Taps: they record, in one forward and backward pass, what each trained parameter did for each row.

A tap sees every torch operation of the forward pass that a trained parameter enters. It keeps the operation's other
input and, in the backward pass, the gradient of its output. That is all that a gradient is made of. Meanwhile the
parameters themselves need no gradient, so autograd computes none.

Autograd keeps an operation's input, like any tensor that a backward pass needs. So a checkpointed layer keeps none: the
backward pass reruns the layer under the same record, and the inputs of this second pass stand in for those of the
first. The taps of the second pass see no gradient, so no use is recorded twice.

Guarantee: a use that no rule covers raises; it is never left out. Taps do not see operations that hide from torch's
function modes, such as a custom autograd function. `workers/gradients/model_checks.py` compares the sum of the rows
with autograd's gradient and refuses them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from raycloak.metrics.errors import ModelError
from raycloak.workers.gradients.attention import multi_head_attention
from raycloak.workers.gradients.numerics import exact_sums
from raycloak.workers.gradients.parts import LookupUse, Part, Products, Use, dense_rows, part_of, settled
from raycloak.workers.gradients.patches import patches
from raycloak.workers.gradients.row_places import SilentRows, WeighedRows
from raycloak.workers.gradients.tensor_table import TensorTable
from raycloak.workers.gradients.unit_rows import grouped
from raycloak.workers.gradients.vocabulary_loss import HeadPart, HeadUse, VocabularyHead

_FIX = "Use it through Linear, Conv, Embedding or a norm, with the batch as the first dimension, or freeze it."
_Uses: TypeAlias = "list[tuple[Leaf, Use | HeadUse]]"
_Finish = Callable[[Tensor, tuple[Tensor, ...]], _Uses]
"""A function from the gradient of an operation's output, and the kept inputs, to the uses of its trained tensors.

Both come in the model's own types. Sums and elementwise products are formed in float32 (:func:`_wide`); the sides of
matrix products are widened where these are formed.
"""
_OnShared = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A trained parameter, or a tensor that was computed from trained parameters alone.

    Attributes:
        tensor: the one that the model sees, without a gradient.
        name: of the first parameter in it, for messages.
        graph: the same values with autograd's graph back to ``roots``; None for a parameter.
        roots: numbers of the parameters in it.
    """

    tensor: Tensor
    name: str
    roots: tuple[int, ...]
    graph: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _TappedCall:
    """A call of torch that trained tensors enter: those, and all other tensors in it."""

    function: Callable[..., Any]
    args: Sequence[Any]
    named: dict[str, Any]
    leaves: list[Leaf]
    inputs: list[Tensor]

    @property
    def roots(self) -> tuple[int, ...]:
        """Numbers of the parameters in it."""
        return tuple(dict.fromkeys(root for leaf in self.leaves for root in leaf.roots))

    def refused(self, why: str) -> ModelError:
        return _unsupported(self.leaves[0].name, f"{_name_of(self.function)}, {why}")


class _Record:
    """One operation: what follows from the gradient of its output, which the backward pass brings.

    Args:
        finish: see above.
        kept: the operation's inputs that ``finish`` takes.
        name: of a trained parameter in it, for messages.
        meet: takes the gradient first; returns whether its uses are wanted.
        rows_per_unit: k rows of a use become one unit's.
    """

    def __init__(
        self,
        finish: _Finish,
        kept: Sequence[Tensor],
        name: str,
        meet: Callable[[str, Tensor], bool],
        rows_per_unit: int,
    ) -> None:
        self._finish, self._name, self._meet = finish, name, meet
        self._rows_per_unit = rows_per_unit
        self._versions = [each._version for each in kept]
        # Until autograd has them.
        self._kept = tuple(each.detach() for each in kept)
        self.uses: _Uses = []

    def hand_over(self) -> tuple[Tensor, ...]:
        """Return the inputs, which this object then no longer holds."""
        kept, self._kept = self._kept, ()
        return kept

    def close(self, gradient: Tensor, take: Callable[[], tuple[Tensor, ...]]) -> None:
        """Find the uses.

        Args:
            take: gives the inputs back, and runs a checkpointed layer again for them.

        Raises:
            ModelError: ``unsupported_layer`` if an input was overwritten in the meantime.
        """
        # The record of the forward pass sees what a layer runs again, and no sum.
        with torch._C.DisableTorchFunction():
            if not self._meet(self._name, gradient):
                return
        try:
            kept = take()
        except RuntimeError as error:
            if _OVERWRITTEN not in str(error):
                raise
            raise self._overwritten() from None
        # Autograd compares no versions of what a checkpointed layer computed again.
        if [each._version for each in kept] != self._versions:
            raise self._overwritten()
        with exact_sums(), torch._C.DisableTorchFunction():
            found = ((leaf, grouped(use, self._rows_per_unit)) for leaf, use in self._finish(gradient, kept))
            self.uses = [(leaf, use if isinstance(use, HeadUse) else settled(use)) for leaf, use in found]

    def _overwritten(self) -> ModelError:
        return _unsupported(self._name, "an operation whose input is overwritten in place afterwards")


class _Tap(torch.autograd.Function):
    """The identity; it hands the gradient of its output to a record."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor, anchor: Tensor, record: _Record) -> Tensor:
        ctx.record = record  # type: ignore[attr-defined]
        ctx.save_for_backward(*record.hand_over())
        # The output stays the same tensor and no view, so that a later operation may work in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.record.close(gradients[0], lambda: ctx.saved_tensors)
        return gradients[0], None, None


class Recording(TorchFunctionMode):
    """The record of one forward pass of ``count`` rows, which runs in a block of this mode.

    Its parts are of units of ``rows_per_unit`` rows, side by side.
    """

    def __init__(
        self,
        trained: Sequence[tuple[str, Tensor]],
        fixed: Sequence[Tensor],
        count: int,
        on_shared: _OnShared | None = None,
        rows_per_unit: int = 1,
    ) -> None:
        super().__init__()
        self._trained = trained
        self._count, self._rows_per_unit = count, rows_per_unit
        self._on_shared = on_shared
        # By identity; each leaf holds its tensor, so no identity is given away twice.
        self._leaves = {id(tensor): Leaf(tensor, name, (index,)) for index, (name, tensor) in enumerate(trained)}
        self._graphs: dict[int, Tensor] = {}
        self._constants = _Constants(fixed)
        self._records: list[_Record] = []
        # Gives the first tapped output a backward pass, whatever entered it.
        self._anchor = torch.zeros((), requires_grad=True)
        self._silent: SilentRows | WeighedRows | None = None
        self._uses_wanted = True

    def backward(
        self, losses: Tensor, silent: SilentRows | WeighedRows | None = None, *, places_alone: bool = False
    ) -> None:
        """Run the backward pass of the sum of ``losses`` [m]; what runs again in it is seen as before.

        Args:
            silent: the rows whose losses are zeroed, or weighed; it meets every captured gradient.
            places_alone: whether nothing but ``silent`` looks at the pass, which another one may then follow.
        """
        if not losses.requires_grad:
            return
        self._silent, self._uses_wanted = silent, not places_alone
        weights = torch.ones_like(losses) if silent is None else silent.weights(losses)
        # Torch's own function for it would leave this mode first.
        engine = torch.autograd.Variable._execution_engine
        with self:
            engine.run_backward((losses,), (weights,), places_alone, False, (), True, True)

    @property
    def _units(self) -> int:
        return self._count // self._rows_per_unit

    def _meet(self, name: str, gradient: Tensor) -> bool:
        if self._silent is not None:
            self._silent.meet(name, gradient)
        return self._uses_wanted

    def parts(self) -> list[Part]:
        """Return the part of each trained parameter in canonical order, after the backward pass; once."""
        uses: list[list[Use]] = [[] for _ in self._trained]
        heads: dict[int, HeadUse] = {}
        derived: dict[int, tuple[Leaf, list[Use]]] = {}
        while self._records:
            for leaf, use in self._records.pop(0).uses:
                if isinstance(use, HeadUse):
                    heads[leaf.roots[0]] = use
                    continue
                of_leaf = uses[leaf.roots[0]] if leaf.graph is None else derived.setdefault(id(leaf), (leaf, []))[1]
                of_leaf.append(use)
        if derived:
            self._chain(list(derived.values()), uses)
        return [
            HeadPart(heads[index], each, tuple(tensor.shape))
            if index in heads
            else part_of(each, self._units, tuple(tensor.shape), tensor.device, self._rows_per_unit)
            for index, (each, (_, tensor)) in enumerate(zip(uses, self._trained, strict=True))
        ]

    def _chain(self, derived: Sequence[tuple[Leaf, list[Use]]], uses: list[list[Use]]) -> None:
        """Take the rows of computed tensors back to the parameters that they were computed from, row by row.

        All at once, since many may be pieces of one parameter.
        """
        graphs = [cast(Tensor, leaf.graph) for leaf, _ in derived]
        rows = [
            dense_rows(found, self._units, tuple(graph.shape)).to(graph.dtype).view(-1, *graph.shape)
            for (_, found), graph in zip(derived, graphs, strict=True)
        ]
        indices = sorted({index for leaf, _ in derived for index in leaf.roots})
        roots = [self._graphs[index] for index in indices]
        back = [
            torch.autograd.grad(graphs, roots, each, True, materialize_grads=True) for each in zip(*rows, strict=True)
        ]
        for index, gradients in zip(indices, zip(*back, strict=True), strict=True):
            uses[index].append(torch.stack(gradients))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation of the forward pass, tapped if a trained parameter enters it."""
        named = dict(kwargs or {})
        inputs = list(tensors_in(args, named))
        leaves = [self._leaves[id(each)] for each in inputs if id(each) in self._leaves]
        if not leaves or not torch.is_grad_enabled():
            constant = self._constants.have(inputs)
            output = func(*args, **named)
            if constant:
                self._constants.add((*inputs, *tensors_in((output,), {})))
            return output
        # What comes from no example has no rows to attribute; of a table, the rule tells positions of a row apart.
        rows = any(id(each) not in self._leaves and not self._is_shared(each) for each in inputs)
        rule = _RULES.get(func) if rows or func is functional.embedding else None
        try:
            if rule is not None:
                return rule(self, *args, **named)
            return self._other(func, args, named)
        except ModelError:
            raise
        except (TypeError, NotImplementedError):
            raise _unsupported(leaves[0].name, f"an unusual call of {_name_of(func)}") from None

    def leaf(self, tensor: Tensor | None) -> Leaf | None:
        """Return the leaf of ``tensor``, or None if it is not trained."""
        return None if tensor is None else self._leaves.get(id(tensor))

    def batched(self, tensor: Tensor, name: str) -> Tensor:
        """Return ``tensor`` with the rows as its first extent, or a multiple of them; one row is repeated for all.

        Args:
            name: of a trained parameter that it meets, for messages.
        """
        if tensor.shape[0] == 1 and self._count > 1:
            return tensor.expand(self._count, *tensor.shape[1:])
        if tensor.shape[0] % self._count:
            raise _unsupported(name, f"an input of shape {list(tensor.shape)} without the batch as its first dimension")
        return tensor

    def tap(self, output: Tensor, name: str, finish: _Finish, *kept: Tensor) -> Tensor:
        """Return ``output``, tapped; ``name`` is of a trained parameter in it, for messages."""
        record = _Record(finish, kept, name, self._meet, self._rows_per_unit)
        self._records.append(record)
        if self._anchor.device != output.device:
            self._anchor = torch.zeros((), device=output.device, requires_grad=True)
        tapped: Tensor = _Tap.apply(output, self._anchor, record)  # type: ignore[no-untyped-call]
        return tapped

    def head(self, losses: Tensor, head: VocabularyHead, hidden: Tensor, known: Tensor) -> Tensor:
        """Return the losses [m, T] of tokens, tapped if the head is trained.

        Args:
            hidden, known: what the head took them from, [m, T, width] and [m, T].
        """
        weights, biases = self.leaf(head.layer.weight), self.leaf(head.layer.bias)
        tapped = weights or biases
        if tapped is None:
            return losses

        def finish(gradient: Tensor, kept: tuple[Tensor, ...]) -> _Uses:
            use = HeadUse(head, kept[0], kept[1], gradient)
            found: _Uses = [(weights, use)] if weights else []
            return found + ([(biases, use.bias_rows())] if biases else [])

        return self.tap(losses, tapped.name, finish, hidden, known)

    # --- operations that have a rule

    def _layer(
        self,
        what: str,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        has_batch: bool,
        function: Callable[[Tensor], Tensor],
        of_weight: Callable[[Tensor, Tensor], Use],
        of_bias: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Tap a layer with a weight and a bias, of which at least one is trained.

        Args:
            what: the layer for messages.
            function: from rows to the layer's output.
            of_weight: from the gradient of the output, and the rows, to the use of the weight.
            of_bias: from the gradient of the output to that of the bias for each row.
        """
        weights, biases, own = self.leaf(weight), self.leaf(bias), self.leaf(input)
        name = next(leaf.name for leaf in (weights, biases, own) if leaf)
        if own or not has_batch:
            raise _unsupported(name, f"a {what} without a batch")
        rows = self.batched(input, name)

        def finish(gradient: Tensor, kept: tuple[Tensor, ...]) -> _Uses:
            found: _Uses = [(weights, of_weight(gradient, kept[0]))] if weights else []
            return found + ([(biases, of_bias(gradient))] if biases else [])

        return self.tap(function(rows), name, finish, *([rows] if weights else []))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Tap ``functional.linear``."""
        return self._layer(
            "linear layer",
            input,
            weight,
            bias,
            input.ndim > 1,
            lambda rows: functional.linear(rows, weight, bias),
            lambda gradient, rows: Products(self._tokens(gradient), self._tokens(rows)),
            self._token_sums,
        )

    def matmul(self, input: Tensor, other: Tensor) -> Any:
        """Tap a product of a batch with a matrix [in, out]."""
        if not self.leaf(other) or other.ndim != 2 or input.ndim < 2 or self.leaf(input):
            return self._other(torch.matmul, (input, other), {})
        return self._right_product(input, other, None, lambda rows: torch.matmul(rows, other))

    def addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        """Tap ``addmm`` as GPT-2's Conv1D uses it: a bias [out], flattened tokens, and a matrix [in, out]."""
        if self.leaf(mat1) or input.ndim != 1 or (beta, alpha) != (1, 1):
            return self._other(torch.addmm, (input, mat1, mat2), {"beta": beta, "alpha": alpha})
        return self._right_product(mat1, mat2, input, lambda rows: torch.addmm(input, rows, mat2))

    def _right_product(
        self, tokens: Tensor, matrix: Tensor, bias: Tensor | None, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        def of_matrix(gradient: Tensor, rows: Tensor) -> Products:
            return Products(self._tokens(rows), self._tokens(gradient))

        return self._layer("product", tokens, matrix, bias, True, function, of_matrix, self._token_sums)

    def _token_sums(self, gradient: Tensor) -> Tensor:
        return _wide(self._tokens(gradient)).sum((1, 2))

    def embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        """Tap ``functional.embedding``.

        Ids [tokens] without a batch, as of positions, are repeated for every row. Ids of pairs of places, as of
        relative positions, give a tensor that is computed from the table alone.
        """
        table = self._leaves[id(weight)]
        if max_norm is not None or scale_grad_by_freq:
            raise _unsupported(table.name, "an embedding that counts or rescales over the batch")
        if input.ndim > 1 and len(input) > 1 and self._is_shared(input):
            return self._other(functional.embedding, (input, weight, padding_idx), {})
        alone = input.ndim == 1 and (len(input) != self._count or self._constants.have([input]))
        if alone:
            self._claim(table.name, [input])
        ids = self.batched(input[None] if alone else input, table.name)
        padding = None if padding_idx is None else padding_idx % len(weight)

        def finish(gradient: Tensor, kept: tuple[Tensor, ...]) -> _Uses:
            rows = kept[0].reshape(self._count, -1)
            values = _wide(gradient).reshape(self._count, rows.shape[1], -1)
            if padding is not None:
                values = values.masked_fill((rows == padding)[:, :, None], 0.0)
            return [(table, LookupUse(rows, values))]

        return self.tap(functional.embedding(ids, weight, padding_idx), table.name, finish, ids)

    def convolution(
        self,
        function: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        """Tap ``conv1d``, ``conv2d`` or ``conv3d``."""

        def of_weight(gradient: Tensor, rows: Tensor) -> Products:
            left = self._grouped(gradient.reshape(len(gradient), groups, weight.shape[0] // groups, -1))
            right, order = patches(rows, tuple(weight.shape[2:]), stride, padding, dilation, groups)
            return Products(left.mT, self._grouped(right.mT).mT, order)

        return self._layer(
            "convolution",
            input,
            weight,
            bias,
            input.ndim == weight.ndim,
            lambda rows: function(rows, weight, bias, stride, padding, dilation, groups),
            of_weight,
            lambda gradient: self._channel_sums(_wide(gradient)),
        )

    def layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Tap ``functional.layer_norm``."""
        function = partial(functional.layer_norm, normalized_shape=list(normalized_shape), eps=eps)
        return self._norm(function, self._last(normalized_shape), input, weight=weight, bias=bias)

    def rms_norm(
        self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """Tap ``functional.rms_norm``."""
        function = partial(functional.rms_norm, normalized_shape=list(normalized_shape), eps=eps)
        return self._norm(function, self._last(normalized_shape), input, weight=weight)

    def group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Tap ``functional.group_norm``."""
        function = partial(functional.group_norm, num_groups=num_groups, eps=eps)
        return self._norm(function, self._channel_sums, input, weight=weight, bias=bias)

    def _last(self, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Return the function that adds up, for each row, values whose last extents are ``shape``."""
        return lambda values: values.reshape(self._count, -1, prod(shape)).sum(1)

    def _channel_sums(self, values: Tensor) -> Tensor:
        """Add up values [m * n, channels, ...] for each row and channel."""
        return values.reshape(self._count, -1, values.shape[1], values[0, 0].numel()).sum((1, 3))

    def _norm(
        self,
        function: Callable[..., Tensor],
        summed: Callable[[Tensor], Tensor],
        input: Tensor,
        weight: Tensor | None,
        **shift: Tensor | None,
    ) -> Tensor:
        """Tap a norm.

        Args:
            function: normalises rows; with ``weight``, and ``bias`` in ``shift``, it scales and shifts as well.
            summed: from values like the output to the sums for each row, like the weight.
        """
        return self._layer(
            "norm",
            input,
            weight,
            shift.get("bias"),
            True,
            lambda rows: function(rows, weight=weight, **shift),
            lambda gradient, rows: summed(_wide(gradient) * function(_wide(rows))),
            lambda gradient: summed(_wide(gradient)),
        )

    def attention(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Tap ``functional.multi_head_attention_forward``, whose projections torch keeps to itself."""

        def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            tapped = self.leaf(weight) or self.leaf(bias)
            return self.linear(rows, weight, bias) if tapped else functional.linear(rows, weight, bias)

        return multi_head_attention(linear, *args, **named)

    def elementwise(self, function: Callable[..., Any], factor: bool, left: Any, right: Any, **named: Any) -> Any:
        """Tap a product or a sum of a batch with a parameter that is broadcast over it."""
        leaves = [leaf for leaf in map(self.leaf, tensors_in((left, right), {})) if leaf]
        if named or len(leaves) > 1:
            return self._other(function, (left, right), named)
        leaf = leaves[0]
        other = right if left is leaf.tensor else left
        whole = isinstance(other, Tensor) and other.ndim >= leaf.tensor.ndim and self._has_rows(other)
        spread = isinstance(other, Tensor) and (other.ndim > leaf.tensor.ndim or leaf.tensor.shape[:1] == (1,))
        if not whole or not spread:
            return self._other(function, (left, right), {})

        def finish(gradient: Tensor, kept: tuple[Tensor, ...]) -> _Uses:
            rows = _wide(gradient) * _wide(kept[0]) if factor else _wide(gradient)
            shape = (1,) * (rows.ndim - leaf.tensor.ndim) + tuple(leaf.tensor.shape)
            rows = rows.reshape(self._count, -1, *rows.shape[1:])
            return [(leaf, rows.sum_to_size(self._count, *shape))]

        return self.tap(function(left, right), leaf.name, finish, *([other] if factor else []))

    # --- operations without a rule

    def _other(self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        given = list(tensors_in(args, named))
        leaves = [self._leaves[id(each)] for each in given if id(each) in self._leaves]
        inputs = [each for each in given if id(each) not in self._leaves]
        call, name = _TappedCall(function, args, named, leaves, inputs), _name_of(function)
        if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__":
            return self._rewrite(call)
        output = function(*args, **named)
        outputs = [each for each in tensors_in((output,), {}) if id(each) not in self._leaves]
        if not any(each.is_floating_point() for each in outputs) or name in _CONSTANT:
            return output
        if all(map(self._is_shared, inputs)):
            self._claim(leaves[0].name, inputs)
            return self._derive(call, output)
        if not isinstance(output, Tensor) or output.shape[:1] != (self._count,):
            raise call.refused("whose result is not one row per example")
        return self._row_by_row(call, output)

    def _has_rows(self, tensor: Tensor) -> bool:
        """Return whether the first extent of ``tensor`` is the rows, or a multiple of them, as that of windows."""
        return tensor.ndim > 0 and len(tensor) > 0 and len(tensor) % self._count == 0 and not self._is_shared(tensor)

    def _is_shared(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` comes from no example, and is no batch of equal rows, such as positions for each.

        With as many places as rows its values alone tell the two apart; they depend on no example. The wrong one of
        the two gives rows gradients of others, which the checks before a run find at its own number of rows.
        """
        if not self._constants.have([tensor]):
            return False
        own = self._constants.is_own(tensor)
        return own or tensor.shape[:1] != (self._count,) or not torch.equal(tensor, tensor[:1].expand_as(tensor))

    def _claim(self, name: str, shared: Sequence[Tensor]) -> None:
        if self._on_shared is not None:
            for each in shared:
                self._on_shared(name, each.detach())

    def _derive(self, call: _TappedCall, output: Any) -> Any:
        """Return a tensor computed from parameters, and from no example, which is then a leaf like them."""
        if not isinstance(output, Tensor):
            raise call.refused("which gives several tensors")
        name, rows, first = _name_of(call.function), tuple(output.shape[:1]), call.leaves[0]
        if name in _REPEATING and rows == (self._count,):
            return self._repeat(first, output)
        whole = tuple(first.tensor.shape)
        if name == "repeat" and whole and tuple(output.shape) == (self._count * whole[0], *whole[1:]):
            return self._repeat(first, output)
        with torch.enable_grad():
            graph = call.function(*self._with_graphs(call.args), **self._with_graphs(call.named))
        tensor = graph.detach()
        self._leaves[id(tensor)] = Leaf(tensor, first.name, call.roots, graph)
        return tensor

    def _rewrite(self, call: _TappedCall) -> Tensor:
        """Run an operation in place on a computed leaf, which from then on stands for what was written."""
        leaf = self.leaf(call.args[0])
        if leaf is None or leaf.graph is None or not all(map(self._is_shared, call.inputs)):
            raise call.refused("which works in place")
        with torch.enable_grad():
            graph = leaf.graph.clone()
            call.function(graph, *self._with_graphs(call.args[1:]), **self._with_graphs(call.named))
        # In memory of its own: the graph so far keeps its numbers. So do views, whose gradients then fail the checks.
        leaf.tensor.data = graph.detach()
        self._leaves[id(leaf.tensor)] = Leaf(leaf.tensor, leaf.name, call.roots, graph)
        return leaf.tensor

    def _repeat(self, leaf: Leaf, output: Tensor) -> Tensor:
        """Tap a parameter that the model itself repeats for every row, such as a class token."""
        shape = (1,) * (output.ndim - leaf.tensor.ndim) + tuple(leaf.tensor.shape)
        # Along another dimension of several values they would alternate, or the rows would differ.
        repeated = (len(output) // self._count, *output.shape[1:])
        if len(output) != self._count * shape[0] or any(a not in (1, b) for a, b in zip(shape, repeated, strict=True)):
            raise _unsupported(leaf.name, "a repetition along a dimension of its own")

        def finish(gradient: Tensor, _kept: tuple[Tensor, ...]) -> _Uses:
            rows = _wide(gradient).reshape(self._count, *repeated)
            return [(leaf, rows.sum_to_size(self._count, *shape))]

        return self.tap(output.clone(), leaf.name, finish)

    def _with_graphs(self, value: Any) -> Any:
        """Return an argument, or many, with autograd's graph in the place of each leaf."""
        if isinstance(value, dict):
            return {name: self._with_graphs(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._with_graphs(each) for each in value])
        if (leaf := self._leaves.get(id(value))) is None:
            return value
        if leaf.graph is not None:
            return leaf.graph
        return self._graphs.setdefault(leaf.roots[0], leaf.tensor.detach().requires_grad_())

    def _row_by_row(self, call: _TappedCall, output: Tensor) -> Tensor:
        """Tap any other operation: its vector-Jacobian product, for batches of one row."""
        function, leaves, keys = call.function, call.leaves, list(call.named)
        values = [*call.args, *call.named.values()]
        places = [at for at, each in enumerate(values) if isinstance(each, Tensor) and id(each) not in self._leaves]
        inputs = [values[at] for at in places]
        has_row = [self._has_rows(each) and len(each) == self._count for each in inputs]
        # Other tensors than leaves are autograd's alone: a checkpointed layer shall not keep them.
        fixed = [None if at in places else each for at, each in enumerate(values)]

        def one_row(own: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
            """Return one row's gradients of the leaves: ``own`` has its inputs, and ``gradient`` its output's."""
            trained = {id(leaf.tensor): leaf.tensor.detach().requires_grad_() for leaf in leaves}
            chosen = [trained.get(id(each), each) for each in fixed]
            for at, each in zip(places, own, strict=True):
                chosen[at] = each
            split = len(chosen) - len(keys)
            with torch.enable_grad():
                output = function(*chosen[:split], **dict(zip(keys, chosen[split:], strict=True)))
            if output.shape != gradient.shape:
                raise _unsupported(leaves[0].name, f"{_name_of(function)}, which gives one row another shape")
            return torch.autograd.grad(output, list(trained.values()), gradient.to(output.dtype))

        def finish(gradient: Tensor, kept: tuple[Tensor, ...]) -> _Uses:
            wide, given = [_wide(each) for each in kept], _wide(gradient)
            rows = [slice(row, row + 1) for row in range(self._count)]
            own = ([each[row] if has else each for each, has in zip(wide, has_row, strict=True)] for row in rows)
            found = [one_row(each, given[row]) for each, row in zip(own, rows, strict=True)]
            return [(leaf, torch.stack(each)) for leaf, each in zip(leaves, zip(*found, strict=True), strict=True)]

        # A copy, since the operation may need its own result in the backward pass.
        return self.tap(output.clone(), leaves[0].name, finish, *inputs)

    # --- shapes

    def _tokens(self, tensor: Tensor) -> Tensor:
        """Return [m * n, ..., width] as [m, 1, tokens, width]."""
        return tensor.reshape(self._count, 1, -1, tensor.shape[-1])

    def _grouped(self, tensor: Tensor) -> Tensor:
        """Return [m * n, groups, height, tokens] as [m, groups, height, n * tokens]."""
        if len(tensor) == self._count:
            return tensor
        several = tensor.reshape(self._count, -1, *tensor.shape[1:]).permute(0, 2, 3, 1, 4)
        return several.flatten(3)


# The head of autograd's own words for it.
_OVERWRITTEN = "one of the variables needed for gradient computation has been modified"
_CONSTANT = ("data", "detach", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "grad")
"""Names of operations whose result has no gradient."""
_REPEATING = ("expand", "expand_as", "broadcast_to", "repeat")


def _convolution(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda recording, *args, **named: recording.convolution(function, *args, **named)


def _elementwise(function: Callable[..., Any], factor: bool) -> Callable[..., Any]:
    return lambda recording, *args, **named: recording.elementwise(function, factor, *args, **named)


_RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.linear: Recording.linear,
    functional.embedding: Recording.embedding,
    functional.layer_norm: Recording.layer_norm,
    functional.rms_norm: Recording.rms_norm,
    functional.group_norm: Recording.group_norm,
    functional.multi_head_attention_forward: Recording.attention,
    **{each: _convolution(each) for each in (torch.conv1d, torch.conv2d, torch.conv3d)},
    **dict.fromkeys((torch.addmm, Tensor.addmm), Recording.addmm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), Recording.matmul),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _elementwise(torch.mul, factor=True)),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _elementwise(torch.add, factor=False)),
}
"""By torch's own function, the rule that taps it: its arguments are that function's."""


class _Constants:
    """Tensors that come from no example: the module's own, and what torch computes from such tensors alone.

    A tensor that was written to is no longer one, also by a view of it, unless what was written comes from no example.

    Args:
        own: the module's.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        # Whether a tensor is the module's own, and its version. Not held, as some are large.
        self._known = TensorTable[tuple[bool, int]]()
        for tensor in own:
            self._known[tensor] = (True, tensor._version)

    def have(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all ``tensors`` are such; true of none."""
        for each in tensors:
            found = self._known.get(each)
            if found is None or found[1] != each._version:
                return False
        return True

    def is_own(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is the module's own."""
        found = self._known.get(tensor)
        return found is not None and found[0]

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Take what an operation met and gave that had no other input than these, also in place."""
        for each in tensors:
            # A view of what it wrote to, and that itself.
            for tensor in (each, each._base):
                # No version is counted of inference tensors.
                if tensor is not None and not tensor.is_inference():
                    self._known[tensor] = (self.is_own(tensor), tensor._version)


def tensors_in(args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an operation, also those in lists and dictionaries."""
    for each in (*args, *named.values()):
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each, {})
        elif isinstance(each, dict):
            yield from tensors_in((), each)


def _wide(values: Tensor) -> Tensor:
    """Return bfloat16 or float16 numbers as float32, which is exact, and any others as they are."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _name_of(function: Callable[..., Any]) -> str:
    # A property of a tensor comes as the getter of its descriptor.
    owner = getattr(function, "__self__", None)
    named = owner if getattr(function, "__name__", "") == "__get__" and owner is not None else function
    return str(getattr(named, "__name__", type(named).__name__))


def _unsupported(name: str, by: str) -> ModelError:
    return ModelError("unsupported_layer", f"parameter '{name}' is used by {by}.", _FIX)
