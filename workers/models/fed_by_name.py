"""A model that gets its inputs by name, where a batch is one packed tensor of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.inputs.named_inputs import Inputs, NamedInput, cut
from raycloak.workers.models.text_model import TextModel


class _Unpacking:
    """A hook that gives a model its inputs by name in the place of one packed tensor; other calls pass as they are."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        if len(args) != 1 or named:
            return None
        features: Tensor = args[0]
        parts = {}
        for each, rows in cut(features[:, 0], self._inputs):
            values = rows if each.dtype == "int64" else rows.to(torch.int32).view(torch.float32)
            parts[each.name] = values.reshape(len(features), *each.shape)
        return (), parts


def fed_by_name(module: nn.Module, inputs: Sequence[NamedInput]) -> nn.Module:
    """Let ``module`` take packed features from now on, and get the inputs by name; without any it stays as it is.

    The names of its parameters stay, and so does what it does when it is called with the inputs themselves.

    Raises:
        ModelError: ``text_form`` if it is a model of `transformers`, which takes token ids alone.
    """
    if not inputs:
        return module
    if isinstance(module, TextModel):
        raise ModelError(
            "text_form",
            f"a text model takes token ids, and the dataset gives {', '.join(each.name for each in inputs)} by name.",
            "Leave dataset.inputs out, or wrap the model in a module of your own whose forward takes them.",
        )
    # First of all hooks, so that any other sees what the model gets.
    module.register_forward_pre_hook(_Unpacking(tuple(inputs)), prepend=True, with_kwargs=True)
    return module
