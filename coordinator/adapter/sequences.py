"""How a call of an encoder is cut into two calls on fewer sequences each, and how their results are joined."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any, Final

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
# A result of one sequence alone and beside another differs by rounding, also in bfloat16.
_ROUNDING: Final = 0.05


@dataclass(frozen=True, slots=True)
class Reading:
    """What a bare pass shows of a call.

    Attributes:
        inputs: number of the tensor that each layer reads, by the layer's name.
        shapes: of each such tensor's tokens, by its number.
        result: of the call.
    """

    inputs: Mapping[str, int]
    shapes: Sequence[torch.Size]
    result: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call is made: in which parts, and with how many blocks in all; ``inputs`` as in `Reading`."""

    inputs: Mapping[str, int]
    parts: Sequence[BoundArguments]
    blocks: int


def planned(call: BoundArguments, read: Callable[[BoundArguments], Reading], block: int) -> Plan:
    """Return the plan of a call: two parts if their results can be joined and take no more blocks, or else one.

    Args:
        read: makes a bare pass of a call.
        block: tokens of a block.
    """
    mask, count = call.arguments.get("attention_mask"), _sequences_of(call)
    if count > 1:
        # Few rows: a bare pass of a large batch would take time, and show no more.
        one, two = (read(_cut(call, slice(rows))) for rows in (1, 2))
        if _is_apart(one.result, two.result) and _are_apart(one.shapes, two.shapes):
            shapes = (torch.Size((count, *each[1:])) for each in two.shapes)
            tokens = [sent_rows(each, mask).reshape(count, -1).sum(1).tolist() for each in shapes]
            place = _place_of_cut(tokens, block)
            parts = [call] if place is None else [_cut(call, slice(place)), _cut(call, slice(place, None))]
            return Plan(two.inputs, parts, _blocks(tokens, block))
    whole = read(call)
    return Plan(whole.inputs, [call], _blocks([[int(sent_rows(each, mask).sum())] for each in whole.shapes], block))


def sent_rows(shape: torch.Size, mask: Tensor | None) -> Tensor:
    """Return which tokens of a tensor to send, bool of shape [tokens]: all but those that a mask of its shape hides."""
    if mask is not None and mask.shape == shape:
        return mask.reshape(-1).bool().cpu()
    return torch.ones(shape.numel(), dtype=torch.bool)


def _sequences_of(call: BoundArguments) -> int:
    """Return how many sequences a call has; 1 for a call that cannot be cut."""
    tensors = {name: each for name, each in call.arguments.items() if isinstance(each, Tensor)}
    others = [each for name, each in call.arguments.items() if name not in tensors]
    if not tensors.keys() <= _ROWS or not _is_plain(others):
        return 1
    # One row of positions, say, is of all sequences.
    counts = {len(each) if each.ndim else 0 for each in tensors.values()} - {1}
    return counts.pop() if len(counts) == 1 else 1


def _is_plain(value: Any) -> bool:
    """Return whether a value is a setting, or a collection of settings: no tensor is in it."""
    if isinstance(value, Mapping):
        return _is_plain(list(value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _cut(call: BoundArguments, rows: slice) -> BoundArguments:
    """Return a call on some of a call's sequences."""
    count = _sequences_of(call)
    part = BoundArguments(call.signature, call.arguments.copy())
    for name, each in part.arguments.items():
        if isinstance(each, Tensor) and len(each) == count:
            part.arguments[name] = each[rows]
    return part


def _place_of_cut(tokens: Sequence[Sequence[int]], block: int) -> int | None:
    """Return how many sequences to put into the first of two parts; None if two parts would take more blocks.

    Blocks are charged as a whole, so parts that fill fewer of them would spend more of a budget.

    Args:
        tokens: of each sequence, for each tensor that is sent.
        block: tokens of a block.
    """
    whole = least = _blocks(tokens, block)
    found = None
    for place in range(1, len(tokens[0]) if tokens else 0):
        first, rest = (_blocks([each[part] for each in tokens], block) for part in (slice(place), slice(place, None)))
        # The more even the parts are, the more of the one's work hides behind the server's for the other.
        if first + rest == whole and abs(first - rest) < least:
            found, least = place, abs(first - rest)
    return found


def _blocks(tokens: Sequence[Sequence[int]], block: int) -> int:
    return sum(-(-sum(each) // block) for each in tokens)


def _are_apart(one: Sequence[torch.Size], two: Sequence[torch.Size]) -> bool:
    """Return whether each tensor that is sent has tokens of its own for each sequence."""
    return all(len(each) > 0 and each[0] == 1 for each in one) and [(2, *each[1:]) for each in one] == list(two)


def _is_apart(one: Any, two: Any) -> bool:
    """Return whether the results for a sequence, and for it and another, show that each has rows of its own.

    They do not if a result is of the whole batch, as a loss is, or if one sequence changes what another gives.
    """
    if isinstance(one, Tensor):
        return (
            isinstance(two, Tensor)
            and one.ndim > 0
            and (len(one), two.shape) == (1, (2, *one.shape[1:]))
            and torch.allclose(one.double(), two[:1].double(), rtol=0, atol=_ROUNDING * _largest(one), equal_nan=True)
        )
    if type(one) is not type(two):
        return False
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(_is_apart(one[each], two[each]) for each in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(_is_apart, one, two))
    return one is None


def joined(results: Sequence[Any]) -> Any:
    """Return the result of a call from the results of its parts, which `planned` made."""
    first = results[0]
    if len(results) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(results))
    if isinstance(first, Mapping):
        # Hugging Face's results are dictionaries and data classes; both take their parts by name.
        return type(first)(**{each: joined([result[each] for result in results]) for each in first})
    parts = [joined(each) for each in zip(*results, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().nan_to_num().abs().max()) if tensor.numel() else 0.0
