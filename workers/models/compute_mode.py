"""The way a run computes a model: the type of its forward and backward pass, and what it keeps between the two.

Both become part of the model when it is built. So every engine, check and known answer computes the same way.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.models.text_model import TextModel

Precision = Literal["float32", "bf16"]


@dataclass(frozen=True, slots=True)
class ComputeMode:
    """The way to compute a model, part of the numerics class.

    Attributes:
        precision: ``bf16`` runs the products of the forward and backward pass in bfloat16, by torch's autocast.
            Parameters, outputs, losses, norms and sums of gradients stay what they are.
        gradient_checkpointing: whether the model's blocks are computed again in the backward pass, which keeps less
            in memory.
    """

    precision: Precision = "float32"
    gradient_checkpointing: bool = False

    def apply(self, module: nn.Module) -> None:
        """Let ``module`` compute in this way from now on.

        Raises:
            ModelError: ``gradient_checkpointing`` if it has no blocks that it could compute again by itself.
        """
        blocked = [each for each in module.modules() if isinstance(each, TextModel)]
        if self.gradient_checkpointing and not blocked:
            raise ModelError(
                "gradient_checkpointing",
                f"{type(module).__name__} is no model of Hugging Face, so it cannot be told to compute its blocks "
                "again.",
                "Leave it out, and call torch.utils.checkpoint with use_reentrant=False in the model's forward.",
            )
        for model in blocked if self.gradient_checkpointing else ():
            model.checkpoint_blocks()
        if self.precision == "bf16":
            autocast = _Autocast()
            module.register_forward_pre_hook(autocast.enter)
            module.register_forward_hook(autocast.leave, always_call=True)


PLAIN = ComputeMode()
"""Everything in float32, and computed once."""


class _Autocast:
    """The hooks around a forward pass of a model: bfloat16 inside, float32 outside."""

    def __init__(self) -> None:
        # A module may call itself.
        self._entered: list[ExitStack] = []

    def enter(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        device = next((each.device.type for each in inputs if isinstance(each, Tensor)), "cpu")
        # Without its cache, nothing outlives a change of the parameters.
        entered = ExitStack()
        entered.enter_context(torch.autocast(device, torch.bfloat16, cache_enabled=False))
        self._entered.append(entered)

    def leave(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        self._entered.pop().close()
        return output.float() if isinstance(output, Tensor) and output.dtype == torch.bfloat16 else output


def in_full_precision(module: nn.Module) -> bool:
    """Return whether all that ``module`` computes with is float32: no autocast and no narrower tensor."""
    tensors = (*module.parameters(), *module.buffers())
    return not _hooks(module) and not any(each.dtype in (torch.bfloat16, torch.float16) for each in tensors)


def has_autocast(module: nn.Module) -> bool:
    """Return whether ``module`` was told to compute in bfloat16."""
    return bool(_hooks(module))


def remove_autocast(module: nn.Module) -> None:
    """Let ``module`` compute in the types of its tensors again."""
    for hooks, key in _hooks(module):
        del hooks[key]


def _hooks(module: nn.Module) -> list[tuple[dict[int, Any], int]]:
    tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
    return [
        (hooks, key)
        for hooks in tables
        for key, hook in hooks.items()
        if isinstance(getattr(hook, "__self__", None), _Autocast)
    ]
