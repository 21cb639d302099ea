"""How a call of an encoder is cut into two calls on fewer sequences each, and how their results are joined."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
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
# Of the largest value: results of a part and of the whole differ by rounding, also in bfloat16.
_ROUNDING: Final = 0.02


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

        return type(self)(
            self.names, [part(each) for each in self.args], {name: part(each) for name, each in self.kwargs.items()}
        )

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
        """Return what calls have in common that one bare pass can tell of: shapes, types and settings."""
        return tuple(
            (name, tuple(each.shape), each.dtype) if isinstance(each, Tensor) else (name, _setting(each))
            for name, each in self.arguments.items()
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What a bare pass shows of a call.

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
    """How a call is made: in which parts, and with how many blocks in all; ``inputs`` as in `Reading`."""

    inputs: Mapping[str, int]
    parts: Sequence[Call]
    blocks: int


@dataclass(slots=True)
class _Kind:
    """What is known of calls of a kind; ``is_apart`` is None until a call of it could have been cut."""

    inputs: Mapping[str, int]
    shapes: Sequence[torch.Size]
    is_apart: bool | None = None


class Planner:
    """Plans the calls of one model: two parts if that changes no result and takes no more blocks, or else one.

    Args:
        read: makes a bare pass of a call, which sends nothing. A kind of call takes two or three passes, once.
        block: tokens of a block.
    """

    def __init__(self, read: Callable[[Call], Reading], block: int) -> None:
        self._read, self._block = read, block
        self._kinds: dict[Hashable, _Kind] = {}

    def plan(self, call: Call) -> Plan:
        """Return the plan of a call."""
        kind, whole = self._kinds.get(call.kind()), None
        if kind is None:
            whole = self._read(call)
            kind = self._kinds[call.kind()] = _Kind(whole.inputs, whole.shapes)
        tokens = _tokens(call, kind.shapes)
        parts = self._parts(call, tokens)
        if len(parts) > 1 and kind.is_apart is None:
            kind.is_apart = self._is_apart(whole or self._read(call), parts)
        return Plan(kind.inputs, parts if kind.is_apart else [call], _blocks(tokens, self._block))

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
        try:
            found = [self._read(part) for part in parts]
        except (IndexError, RuntimeError, TypeError, ValueError):
            # The whole can be computed, and will be: some models fail on a single sequence.
            return False
        return all(each.is_steady for each in (whole, *found)) and _agree(whole.result, [each.result for each in found])


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
    if isinstance(first, Mapping):
        # Hugging Face's results are dictionaries and data classes; both take their parts by name.
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
        return has_rows and sum(map(len, parts)) == len(whole) and _is_close(torch.cat(list(parts)), whole)
    if isinstance(whole, Mapping):
        is_named = all(isinstance(each, str) for each in whole) and all(each.keys() == whole.keys() for each in parts)
        return is_named and all(_agree(whole[name], [each[name] for each in parts]) for name in whole)
    if isinstance(whole, tuple | list):
        return all(len(each) == len(whole) for each in parts) and all(map(_agree, whole, zip(*parts, strict=True)))
    return whole is None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    finite = expected[expected.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(found, expected, rtol=0, atol=_ROUNDING * largest, equal_nan=True)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a setting, and no tensor or collection of them."""
    return value is None or isinstance(value, bool | int | float | str)


def _setting(value: Any) -> bool | float | str | None:
    return value if _is_plain(value) else type(value).__name__
