"""How a call of an encoder is cut into two calls on fewer sequences each, and how their results are joined."""

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from itertools import chain
from typing import Any, Final, Self

import torch
from torch import Tensor

# Hugging Face's names of what has a row for each sequence. Any other tensor could be of something else: labels make a
# mean over the batch, and a mask of heads has as many rows as the model has layers.
_ROWS: Final = frozenset(
    {
        "attention_mask",
        "input_features",
        "input_ids",
        "input_values",
        "inputs_embeds",
        "pixel_values",
        "position_ids",
        "token_type_ids",
    }
)
# Of the largest value that differs: results of a part and of the whole differ by rounding. The first is for bfloat16.
_ROUNDING: Final = 0.02
_ROUNDING_32: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, as its caller gave them; ``names`` are those of the positional ones."""

    names: Sequence[str]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Self:
        """Return a call of ``function``."""
        names = list(inspect.signature(function).parameters)
        return cls([names[place] if place < len(names) else "" for place in range(len(args))], args, kwargs)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {**dict(zip(self.names, self.args, strict=True)), **self.kwargs}

    def copied(self) -> Self:
        """Return the call with copies of what a model could change: a cache, say."""

        def copy(value: Any) -> Any:
            return value if isinstance(value, Tensor) or _is_plain(value) else deepcopy(value)

        return self._mapped(copy)

    @property
    def mask(self) -> Tensor | None:
        """The attention mask, if there is one."""
        found = self.arguments.get("attention_mask")
        return found if isinstance(found, Tensor) else None

    def cut(self, rows: slice) -> Self:
        """Return the call on some of the sequences."""
        count = self.sequences()

        def part(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) and len(value) == count else value

        return self._mapped(part)

    def sequences(self) -> int:
        """Return how many sequences the call has; 1 for a call that cannot be cut."""
        given = self.arguments
        tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        others = (each for name, each in given.items() if name not in tensors)
        if not tensors.keys() <= _ROWS or not all(map(_is_plain, others)):
            return 1
        # One row of positions, say, is of all sequences, and so is one dimension: it has no rows.
        if any(each.ndim < 2 for each in tensors.values()):
            return 1
        counts = {len(each) for each in tensors.values()} - {1}
        return counts.pop() if len(counts) == 1 else 1

    def kind(self) -> Hashable:
        """Return what calls have in common whose layers read the same tensors: shapes, types and settings."""
        return tuple(
            (name, tuple(each.shape), each.dtype) if isinstance(each, Tensor) else (name, _setting(each))
            for name, each in self.arguments.items()
        )

    def _mapped(self, change: Callable[[Any], Any]) -> Self:
        args = [change(each) for each in self.args]
        return type(self)(self.names, args, {name: change(each) for name, each in self.kwargs.items()})


@dataclass(frozen=True, slots=True)
class Reading:
    """The findings of a bare pass of a call.

    Attributes:
        inputs: number of the tensor that each layer reads, by the layer's name.
        shapes: of each such tensor's tokens, by its number.
        result: of the call.
        is_steady: whether the layers ran in the settings of PyTorch and of the model that the caller had. Of a model
            that changes settings and changes them back, no two passes can take turns.
    """

    inputs: Mapping[str, int]
    shapes: Sequence[torch.Size]
    result: Any
    is_steady: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of a call: its parts, and its blocks in all; ``inputs`` as in `Reading`."""

    inputs: Mapping[str, int]
    parts: Sequence[Call]
    blocks: int


class Planner:
    """Plans the calls of one model: two parts if that changes no result and takes no more blocks, or else one.

    Args:
        read: makes a bare pass of a call, which sends nothing.
        block: tokens of a block.
    """

    def __init__(self, read: Callable[[Call], Reading], block: int) -> None:
        self._read, self._block = read, block
        self._known: dict[Hashable, tuple[Mapping[str, int], Sequence[torch.Size]]] = {}

    def plan(self, call: Call) -> Plan:
        """Return the plan of a call.

        A call that could be cut takes a bare pass, and one of its parts. Another kind of call takes one, once.
        """
        whole = None
        if call.kind() not in self._known:
            whole = self._read(call)
            self._known[call.kind()] = whole.inputs, whole.shapes
        inputs, shapes = self._known[call.kind()]
        tokens = _tokens(call, shapes)
        parts = self._parts(call, tokens)
        # Each time: the values decide too, where a model pads, trims or scales by the longest sequence of a batch.
        if len(parts) > 1 and not self._is_apart(whole or self._read(call), parts):
            parts = [call]
        return Plan(inputs, parts, _blocks(tokens, self._block))

    def _parts(self, call: Call, tokens: Sequence[Sequence[int]]) -> list[Call]:
        """Return the parts that take the blocks of the whole and are the most even; the whole if there are none.

        Blocks are charged as a whole, so parts that fill fewer of them would spend more of a budget. The more even the
        parts are, the more of the one's work hides behind the server's for the other.
        """
        whole = least = _blocks(tokens, self._block)
        parts = [call]
        for place in range(1, len(tokens[0]) if tokens else 0):
            cut = (slice(place), slice(place, None))
            first, rest = (_blocks([each[rows] for each in tokens], self._block) for rows in cut)
            if first + rest == whole and abs(first - rest) < least:
                parts, least = [call.cut(rows) for rows in cut], abs(first - rest)
        return parts

    def _is_apart(self, whole: Reading, parts: Sequence[Call]) -> bool:
        """Return whether bare passes of the parts give the result of the whole."""
        # The whole could be computed, and will be: some models fail on a single sequence.
        with suppress(Exception):
            found = [self._read(part) for part in parts]
            return all(each.is_steady for each in (whole, *found)) and _agree(
                whole.result, [each.result for each in found]
            )
        return False


def sent_rows(shape: torch.Size, mask: Tensor | None) -> Tensor:
    """Return which tokens of a tensor to send, bool of shape [tokens]: all but those that a mask of its shape hides."""
    if mask is not None and mask.shape == shape:
        return mask.reshape(-1).bool().cpu()
    return torch.ones(shape.numel(), dtype=torch.bool)


def joined(results: Sequence[Any]) -> Any:
    """Return the result of a call from the results of its parts."""
    first = results[0]
    if len(results) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(results))
    if isinstance(first, dict):
        return type(first)(**{each: joined([result[each] for result in results]) for each in first})
    parts = [joined(each) for each in zip(*results, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def _tokens(call: Call, shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Return the tokens to send of each sequence, for each tensor; of all at once, if a tensor mixes sequences."""
    count = call.sequences()
    if not all(shape and shape[0] == count for shape in shapes):
        count = 1
    return [sent_rows(shape, call.mask).reshape(count, -1).sum(1).tolist() for shape in shapes]


def _blocks(tokens: Sequence[Sequence[int]], block: int) -> int:
    return sum(-(-sum(each) // block) for each in tokens)


def _agree(whole: Any, parts: Sequence[Any]) -> bool:
    """Return whether results of parts can be joined, and give the result of the whole.

    They do not if a result is of the whole batch, as a loss is, or if one sequence changes what another gives.
    """
    if not all(type(each) is type(whole) for each in parts):
        return False
    if isinstance(whole, Tensor):
        has_rows = whole.ndim > 0 and all(each.shape[1:] == whole.shape[1:] for each in parts)
        return has_rows and sum(map(len, parts)) == len(whole) and _is_close(chain(*parts), whole)
    # Kinds that `joined` can make: Hugging Face's results are dictionaries and data classes.
    if type(whole) is dict or (isinstance(whole, dict) and is_dataclass(whole)):
        is_named = all(isinstance(each, str) for each in whole) and all(each.keys() == whole.keys() for each in parts)
        return is_named and all(_agree(whole[name], [each[name] for each in parts]) for name in whole)
    if type(whole) in (tuple, list) or (isinstance(whole, tuple) and hasattr(whole, "_fields")):
        return all(len(each) == len(whole) for each in parts) and all(map(_agree, whole, zip(*parts, strict=True)))
    return whole is None


def _is_close(found: Iterable[Tensor], expected: Tensor) -> bool:
    """Return whether rows are those of a tensor but for rounding; one by one, since results can be large."""
    error = scale = 0.0
    for mine, own in zip(found, expected, strict=True):
        differ = (mine != own) & ~(mine.isnan() & own.isnan())
        if not differ.any():
            continue
        if not own.is_floating_point():
            return False
        # Of what differs alone: the large constants of a mask would make any difference small.
        left, right = mine[differ], own[differ]
        error = max(error, float((left - right).abs().nan_to_num(nan=math.inf).max()))
        scale = max(scale, float(right.abs().max()))
    return error <= (_ROUNDING if expected.dtype.itemsize < 4 else _ROUNDING_32) * scale and math.isfinite(error)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a setting, and no tensor or collection of them."""
    return value is None or isinstance(value, bool | int | float | str)


def _setting(value: Any) -> bool | float | str | None:
    return value if _is_plain(value) else type(value).__name__
