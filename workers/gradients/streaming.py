"""Streaming: the frozen tensors of a model's blocks on a device that does not hold all of them.

They stay in the host's memory, which maps the files of a base. A block's are copied to its device before the first of
its layers runs, also where the backward pass computes the block again, and leave it when another block runs. Streaming
changes no arithmetic: docs/proofs/011-placement.md has the proof.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_BLOCKS_THERE = 2
"""The one that runs, and what the backward pass still holds of the one before."""


class Home(NamedTuple):
    """A frozen parameter, and the tensor that has its numbers in the host's memory."""

    parameter: nn.Parameter
    host: Tensor


class BlockStream:
    """The blocks of one device that have their frozen tensors there in turn.

    Trained tensors stay on the device, and so do frozen ones that other layers have, too. Which tensors are trained is
    looked up now: while taps record, none says so.

    Guarantee: an operation that takes a frozen tensor of a block, also in a backward pass, takes the bits of the host's
    memory, whichever blocks have run since. It fails where the block's tensors are not on its device.

    Args:
        module: that the blocks are of.
        blocks: layers that a backward pass computes again. It would hold the tensors of any others.
        device: where they run.

    Attributes:
        spared: bytes of the model that the device needs no room for.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        inside = {layer for block in blocks for layer in block.modules()}
        beside = (layer.parameters(recurse=False) for layer in module.modules() if layer not in inside)
        kept = {id(each) for each in chain.from_iterable(beside)}
        self.device = device
        self._homes = {
            block: [
                Home(each, each.detach())
                for each in block.parameters()
                if not each.requires_grad and id(each) not in kept
            ]
            for block in blocks
        }
        self._there: Sequence[Home] = ()
        largest = max((sum(each.host.nbytes for each in homes) for homes in self._homes.values()), default=0)
        self.spared: int = max(0, sum(each.host.nbytes for each in self.homes()) - _BLOCKS_THERE * largest)

    def homes(self) -> list[Home]:
        """Return those of all blocks, each once."""
        return list({id(each.parameter): each for homes in self._homes.values() for each in homes}.values())

    def begin(self) -> None:
        """Let every layer of a block bring the block's tensors: a block that is computed again runs no hook itself."""
        for block, homes in self._homes.items():
            for layer in block.modules():
                layer.register_forward_pre_hook(_BlockHook(self, homes), prepend=True)

    def leave(self) -> None:
        """Have no block's tensors on the device."""
        for each in self._there:
            each.parameter.data = each.host
        self._there = ()

    def enter(self, homes: Sequence[Home]) -> None:
        """Have the tensors of one block on the device, and those of no other."""
        if homes is self._there:
            return
        # First, so that its memory is free; a view that the backward pass needs keeps it.
        self.leave()
        # The record of a forward pass is of the model's operations.
        with torch._C.DisableTorchFunction():
            copies = [each.host.to(self.device) for each in homes]
        for each, copy in zip(homes, copies, strict=True):
            # In place of its numbers: identity and count of writes stay, by which others know it.
            each.parameter.data = copy
        self._there = homes


@dataclass(frozen=True, slots=True, eq=False)
class _BlockHook:
    """The hook at a layer of a streamed block. Twins share the frozen tensors, and so this."""

    stream: BlockStream
    homes: Sequence[Home]

    def __call__(self, _layer: nn.Module, _args: Any) -> None:
        self.stream.enter(self.homes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_BlockHook":
        return self


def streams_of(module: nn.Module) -> Iterator[BlockStream]:
    """Yield the streams of the blocks of ``module``, each once."""
    hooks = (hook for layer in module.modules() for hook in layer._forward_pre_hooks.values())
    yield from dict.fromkeys(hook.stream for hook in hooks if isinstance(hook, _BlockHook))
