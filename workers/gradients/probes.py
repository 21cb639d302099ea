"""Synthetic examples that could make one row of a batch move another: ordinary ones, padding, odd ids and labels.

Everything here is a function of public shapes and of the model's structure.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.named_inputs import packed, unpacked
from raycloak.workers.models.text_model import TextModel

# Padding is mostly 0 or 1; -100 is the index that losses of torch ignore; ids may be hashes far above a vocabulary.
_ODD_IDS = (0, 1, -1, -100, 2**20, 255, 65535, -999, -9999)
# Tables spell a missing value as one of these; 255 and 65535 are white, or no measurement, of an image. Finite ones are
# first.
_ODD_VALUES = (0.0, 1.0, -1.0, 255.0, 65535.0, 1e4, -1e4, -999.0, -9999.0, math.inf, -math.inf, math.nan)


@dataclass(frozen=True, slots=True)
class Examples:
    """A batch: features [n, ...], labels [n, ...]."""

    features: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Pair:
    """Two batches that differ in their first row alone."""

    before: Examples
    after: Examples


@dataclass(frozen=True, slots=True)
class Filling:
    """Ordinary examples, and examples that are almost all one value, such as a text that is almost all padding.

    Attributes:
        ordinary: features [n, ...], of which none has any of the values.
        filled: by value, the features [1, ...] of an example that has it everywhere but in its middle.
    """

    ordinary: Tensor
    filled: Mapping[float, Tensor]


class Probes:
    """Synthetic batches in the form of a dataset, with labels in {0, 1} or [0, 1).

    Draws come from torch's global CPU generator, on whatever device the batches are then.

    Args:
        ids_below: integer features are drawn below it; at least 2.
        odd_ids: ids that a model may treat otherwise than others, see :func:`odd_ids`; needed for fillings alone.
        device: where the batches are to be.
    """

    def __init__(
        self,
        form: DatasetForm,
        ids_below: int = 2,
        odd_ids: tuple[int, ...] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self._form, self._ids_below, self._device = form, ids_below, device
        # Of several inputs by name, each is drawn as if it were alone.
        alone = [{"feature_shape": each.shape, "feature_dtype": each.dtype, "inputs": ()} for each in form.inputs]
        forms = zip(alone, form.inputs, strict=True)
        self._parts = [
            Probes(form.model_copy(update=one), each.vocabulary or 2, (*odd_ids, (each.vocabulary or 2) - 1))
            for one, each in forms
        ]
        self._integers: bool = all(each.dtype == "int64" for each in form.inputs) and form.feature_dtype == "int64"
        odd = dict.fromkeys(odd_ids) if self._integers else dict.fromkeys(_ODD_VALUES)
        self.fills: tuple[float, ...] = tuple(odd)

    def draws(self, count: int) -> Iterator[Pair]:
        """Yield pairs of ordinary batches of ``count`` rows: one of ids, or one of each distribution of values."""
        for normal in (False,) if self._integers else (False, True):
            yield self.pair(Examples(self._features(count, normal), self._labels(count)))

    def pair(self, before: Examples) -> Pair:
        """Return ``before``, and a batch whose first row has another label and other ordinary features."""
        labels = before.labels.clone()
        labels[0] = 1 - labels[0]
        return Pair(before, Examples(self._with_other_first(before.features), labels))

    def fillings(self, count: int) -> Iterator[Filling]:
        """Yield all values to fill with beside ``count`` ordinary rows; one by one where too few other ids are left.

        Of several inputs by name, every one is filled at once, each with a value of its own kind, by their turn.
        """
        for turn in range(max((len(each.fills) for each in self._parts), default=0)):
            found = [each._filling(count, each._of_turns([turn])) for each in self._parts]
            filled = self._packed([example for each in found for example in each.filled.values()])
            yield Filling(self._packed([each.ordinary for each in found]), {float(turn): filled})
        if self._parts:
            return
        inside = sum(0 <= fill < self._ids_below for fill in self.fills)
        together = not self._integers or self._ids_below - inside >= 2
        for fills in [self.fills] if together else [(fill,) for fill in self.fills]:
            yield self._filling(count, fills)

    def varied(self, count: int, fills: Sequence[float]) -> Examples:
        """Return ``count`` rows of different lengths and sizes, each ending in one of ``fills``, in no order.

        A length runs over the first extent of an example or over its last one, in turn. A size is a factor of
        floating-point features, from 0.1 to 100. Of several inputs by name, each varies for itself.
        """
        if self._parts:
            turns = [[fill for fill in each._of_turns(fills) if math.isfinite(fill)] for each in self._parts]
            parts = [each.varied(count, own).features for each, own in zip(self._parts, turns, strict=True)]
            return Examples(self._packed(parts), self._labels(count))
        features, numbers = self._features(count, normal=True), torch.randperm(count, device="cpu").tolist()
        for row, number in zip(features, numbers, strict=True):
            if not self._integers:
                row *= 10.0 ** (number % 4 - 1)
            axis = 0 if number % 2 else row.ndim - 1
            if row.ndim:
                kept = 1 + number * row.shape[axis] // count
                row.narrow(axis, kept, row.shape[axis] - kept).fill_(fills[number % len(fills)] if fills else 0)
        return Examples(features, self._labels(count))

    def labelled(self, features: Tensor) -> Examples:
        """Return ``features`` with ordinary labels."""
        return Examples(features, self._labels(len(features)))

    def _filling(self, count: int, fills: tuple[float, ...]) -> Filling:
        ordinary = self._features(count)
        # Once for each value: the next id may be another of them. The remainder keeps it inside the vocabulary.
        for _ in fills if self._integers else ():
            hit = torch.isin(ordinary, torch.tensor(fills, device="cpu").to(self._device))
            ordinary = torch.where(hit, (ordinary + 1) % self._ids_below, ordinary)
        return Filling(ordinary, {fill: _filled(ordinary[:1], fill) for fill in fills})

    def _of_turns(self, turns: Sequence[float]) -> tuple[float, ...]:
        return tuple(self.fills[int(turn) % len(self.fills)] for turn in turns)

    def _packed(self, parts: list[Tensor]) -> Tensor:
        inputs = self._form.inputs
        arrays = {each.name: part.numpy() for each, part in zip(inputs, parts, strict=True)}
        return torch.from_numpy(packed(arrays, inputs)).to(self._device)

    def odd_labels(self, ordinary: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of labels that differ in their first row: some of no class beside ``ordinary`` ones, and the
        reverse; none for float labels."""
        if self._form.label_dtype != "int64":
            return
        for label in (-100, -1, 2**20):
            odd = torch.full_like(ordinary, label)
            for before, after in ((ordinary, odd), (odd, ordinary)):
                mixed = before.clone()
                mixed[0] = after[0]
                yield before, mixed

    def _features(self, count: int, normal: bool = False) -> Tensor:
        if self._parts:
            return self._packed([each._features(count, normal and not each._integers) for each in self._parts])
        shape = (count, *self._form.feature_shape)
        if self._integers:
            return torch.randint(self._ids_below, shape, device="cpu").to(self._device)
        draw = torch.randn if normal else torch.rand
        return draw(shape, device="cpu").to(self._device)

    def _labels(self, count: int) -> Tensor:
        shape = (count, *self._form.label_shape)
        if self._form.label_dtype == "int64":
            return torch.randint(2, shape, device="cpu").to(self._device)
        return torch.rand(shape, device="cpu").to(self._device)

    def _with_other_first(self, before: Tensor) -> Tensor:
        if self._parts:
            parts = unpacked(before.numpy(), self._form.inputs).values()
            changed = [
                each._with_other_first(torch.from_numpy(part)) for each, part in zip(self._parts, parts, strict=True)
            ]
            return self._packed(changed)
        features = before.clone()
        features[0] = (features[0] + 1) % self._ids_below if self._integers else 1 - features[0]
        return features


def _filled(example: Tensor, fill: float) -> Tensor:
    """Return an example [1, ...] with ``fill`` everywhere but in its middle, which stays as it is in ``example``."""
    filled = torch.full_like(example, fill)
    if example.ndim > 1 and example.shape[1] > 2:
        middle = example.shape[1] // 2
        filled[:, middle] = example[:, middle]
    return filled


def odd_ids(module: nn.Module, ids_below: int) -> tuple[int, ...]:
    """Return the ids that the module may treat otherwise than others: of a text model its own.

    Of any other, all odd ones, what its embeddings take for padding, the last id of each, and the last one of all.
    """
    if isinstance(module, TextModel):
        return module.odd_ids
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    padding = {layer.padding_idx for layer in layers if layer.padding_idx is not None}
    return (*_ODD_IDS, ids_below - 1, *sorted(padding | {layer.num_embeddings - 1 for layer in layers}))
