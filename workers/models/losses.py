"""The built-in losses: one number per example, computed from its own output and label alone.

Hides how each loss is computed so that a row has the same bits alone and in any batch. An operation whose kernel rounds
the last few values of a batch in another way is not used: binary cross entropy is a softmax over each value and zero,
and Huber's loss is made of products and sums.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from raycloak.metrics.errors import ModelError
from raycloak.workers.inputs.void import IGNORED
from raycloak.workers.terms.loss import LOSSES_OF_TOKENS, LossName, LossTerm


@dataclass(frozen=True, slots=True)
class BuiltInLoss:
    """A built-in loss, or the weighted sum of several, each over its own outputs and labels.

    Guarantee: entry i of the result and of its gradient is computed from row i of output and labels alone, and has the
    same bits whatever else is in the batch.

    Attributes:
        terms: one without ``outputs``, which takes all of them; or several, which take theirs in this order.
    """

    terms: tuple[LossTerm, ...]

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the losses [n] of output [n, ...] and labels [n, ...].

        Raises:
            ModelError: ``loss_shape`` if outputs, labels and settings do not fit each other.
        """
        first = self.terms[0]
        if first.outputs is None:
            return _LOSSES[first.name](output, labels, first)
        width, columns = sum(term.outputs or 0 for term in self.terms), sum(term.labels for term in self.terms)
        if (output.shape[1:], labels.shape[1:]) != ((width,), (columns,)):
            raise _shapes(output, labels, f"these losses need outputs [n, {width}] and labels [n, {columns}].")
        total, outputs, targets = output.new_zeros(len(output)), 0, 0
        for term in self.terms:
            assert term.outputs is not None, "each of several losses has its outputs"
            of_term = output[:, outputs : outputs + term.outputs], labels[:, targets : targets + term.labels]
            total = total + term.weight * _LOSSES[term.name](of_term[0], _targets(*of_term, term), term)
            outputs, targets = outputs + term.outputs, targets + term.labels
        # Without a gradient by the other losses either.
        return torch.where(total.isnan(), torch.nan, total)

    @property
    def of_tokens(self) -> LossTerm | None:
        """The term of a loss that judges one class a token; None for any other loss."""
        first = self.terms[0]
        return first if first.outputs is None and first.name in LOSSES_OF_TOKENS else None


def loss_of_tokens(
    losses_of: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, classes: int, term: LossTerm
) -> Tensor:
    """Return the losses [n] of a term of tokens from the cross entropy of each token.

    Args:
        losses_of: from classes that all exist, int64 [n, T], to the cross entropies [n, T].
        hidden: [n, T, width], from which it takes them.
        labels: int64 [n, T].

    Raises:
        ModelError: ``loss_shape``.
    """
    return _mean_of_tokens(losses_of, _labels_of_tokens(hidden, labels, term), classes)


def predicted(output: Tensor, labels: Tensor) -> Tensor:
    """Return what outputs say of each label, int64 in the shape of the labels.

    An output for each class [n, classes, ...] says the largest one. As many outputs as labels are logits of binary
    cross entropy: above 0 says 1.
    """
    if output.numel() == labels.numel():
        return (output.reshape(labels.shape) > 0).long()
    return output.argmax(1)


def share_predicted(output: Tensor, labels: Tensor) -> Tensor:
    """Return the share of each example's labels that are predicted, float64 [n].

    Of several labels an example, -100 is not counted; an example without any other has a share of 0.
    """
    counted = (labels != IGNORED) | (labels.ndim == 1)
    right = predicted(output, labels) == labels
    found, all_of_them = (part.double().reshape(len(labels), -1).sum(1) for part in (right, counted))
    return found / all_of_them.clamp(min=1)


def _targets(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return the labels of one of several losses; columns of one type hold classes as numbers with a point, too."""
    if term.name != "cross_entropy":
        return labels
    if labels.is_floating_point():
        # What is no number is no class: -1. A conversion of NaN is another number on each device.
        finite = labels.nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0)
        labels = finite.clamp(-1, output.shape[1]).round().long()
    return labels[:, 0]


def _cross_entropy(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return the cross entropy of logits [n, classes, ...] with class numbers [n, ...], averaged to [n].

    Of several labels an example, such as one a pixel, -100 is not counted. Any other label that is no class gives its
    example a loss of NaN and no gradient: an error would tell of the example.
    """
    if output.ndim < 2 or labels.shape != (len(output), *output.shape[2:]):
        raise _shapes(output, labels, "cross_entropy needs logits [n, classes, ...] and class numbers [n, ...].")
    # One list of values: the kernel for a class dimension in the middle has no deterministic form on a GPU.
    if output.ndim == 2:
        known = labels.clamp(0, output.shape[1] - 1)
        return torch.where(labels == known, class_losses(output, known, term), torch.nan)
    return _mean_of_logits(output.movedim(1, -1).flatten(1, -2), labels.flatten(1), term)


def _token_cross_entropy(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return the mean cross entropy of each example's own tokens [n], from logits [n, T, classes] and labels [n, T].

    Under ``next_token_cross_entropy`` it is that of each token given those before it: label t + 1 judges output t.
    A token with label -100 is not counted; an example without any other has a loss of 0. A label that is no class gives
    its example a loss of NaN and no gradient: an error would tell of the example.
    """
    return _mean_of_logits(output, _labels_of_tokens(output, labels, term), term)


def _labels_of_tokens(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return the label of each output [n, T, ...]: under ``next_token_cross_entropy`` that of the token after it."""
    if output.ndim != 3 or output.shape[:2] != labels.shape:
        raise _shapes(output, labels, f"{term.name} needs logits [n, T, classes] and labels [n, T].")
    # The labels are moved, not the logits: a slice of those would be copied.
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if term.name == "next_token_cross_entropy" else labels


def _binary_cross_entropy(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return the cross entropy of logits [n, ...] with labels in [0, 1], one each, averaged over an example: [n].

    A label outside gives its example a loss of NaN and no gradient: an error would tell of the example.
    """
    if output.numel() != labels.numel():
        raise _shapes(output, labels, "binary_cross_entropy needs one output for each label, which is 0 or 1.")
    logits = output.reshape(len(output), -1)
    given = labels.reshape(logits.shape).to(logits.dtype)
    known = given.nan_to_num(nan=0.0).clamp(0, 1)
    target = known * (1 - term.label_smoothing) + term.label_smoothing / 2
    no, yes = torch.stack([torch.zeros_like(logits), logits], -1).log_softmax(-1).unbind(-1)
    if term.positive_weights:
        if len(term.positive_weights) != logits.shape[1]:
            raise _settings("positive_weights", len(term.positive_weights), logits.shape[1])
        yes = yes * logits.new_tensor(term.positive_weights)
    losses = -(target * yes + (1 - target) * no)
    return torch.where((given == known).all(1), losses.mean(1), torch.nan)


def _mse(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return the squared error, averaged over all values of an example: [n]."""
    return _per_example(_errors(output, labels, term).square())


def _huber(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return Huber's loss, averaged over all values of an example: [n].

    Half the square of an error up to ``delta``; beyond it a line, so that one outlier pulls no harder than another.
    """
    size = _errors(output, labels, term).abs()
    near = size.clamp(max=term.delta)
    return _per_example(near * (size - near / 2))


def _errors(output: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    if output.numel() != labels.numel():
        raise _shapes(output, labels, f"{term.name} needs as many outputs as labels.")
    # An infinite label would have a gradient under huber.
    return output - torch.where(labels.isfinite(), labels, torch.nan).reshape(output.shape)


def _mean_of_logits(logits: Tensor, labels: Tensor, term: LossTerm) -> Tensor:
    """Return the mean over an example's own labels [n, T], but for -100; the logits are [n, T, classes]."""
    return _mean_of_tokens(
        lambda known: class_losses(logits.flatten(0, 1), known.flatten(), term).reshape(known.shape),
        labels,
        logits.shape[2],
    )


def _mean_of_tokens(losses_of: Callable[[Tensor], Tensor], labels: Tensor, classes: int) -> Tensor:
    counted = labels != IGNORED
    known = labels.clamp(0, classes - 1)
    mean = torch.where(counted, losses_of(known), 0.0).sum(1) / counted.sum(1).clamp(min=1)
    return torch.where(((labels == known) | ~counted).all(1), mean, torch.nan)


def class_losses(logits: Tensor, known: Tensor, term: LossTerm) -> Tensor:
    """Return the cross entropies [values] of logits [values, classes] with classes that all exist.

    Raises:
        ModelError: ``loss_shape`` if there are more or fewer weights than classes.
    """
    if term.class_weights and len(term.class_weights) != logits.shape[1]:
        raise _settings("class_weights", len(term.class_weights), logits.shape[1])
    weights = logits.new_tensor(term.class_weights) if term.class_weights else None
    smoothing = term.label_smoothing
    return functional.cross_entropy(logits, known, weight=weights, reduction="none", label_smoothing=smoothing)


def _per_example(losses: Tensor) -> Tensor:
    return losses if losses.ndim == 1 else losses.flatten(1).mean(1)


def _shapes(output: Tensor, labels: Tensor, remedy: str) -> ModelError:
    return ModelError("loss_shape", f"outputs of shape {tuple(output.shape)}, labels {tuple(labels.shape)}.", remedy)


def _settings(field: str, given: int, outputs: int) -> ModelError:
    return ModelError(
        "loss_shape",
        f"loss.{field} has {given} numbers, and there are {outputs} outputs that it weighs.",
        "Give one public number for each, in their order.",
    )


_LOSSES: Mapping[LossName, Callable[[Tensor, Tensor, LossTerm], Tensor]] = MappingProxyType(
    {
        "cross_entropy": _cross_entropy,
        "token_cross_entropy": _token_cross_entropy,
        "next_token_cross_entropy": _token_cross_entropy,
        "binary_cross_entropy": _binary_cross_entropy,
        "mse": _mse,
        "huber": _huber,
    }
)

BUILT_IN_LOSSES: Mapping[str, BuiltInLoss] = MappingProxyType(
    {name: BuiltInLoss((LossTerm(name=name),)) for name in _LOSSES}
)
"""Each at its defaults, by name."""

cross_entropy, token_cross_entropy, next_token_cross_entropy, binary_cross_entropy, mse, huber = (
    BUILT_IN_LOSSES.values()
)
