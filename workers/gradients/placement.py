"""Placement: a model's blocks over the devices of one process, where one device does not hold them.

    embedding, block 0, block 1   cuda:0
    block 2, block 3, block 4     cuda:1
    block 5, norm, head           cuda:2    a head that shares the embedding's table is on cuda:0

Placement changes no arithmetic: an operation has its operands on one device, in the shapes and the order of the model
that is not split, and between devices bits are copied. docs/proofs/011-placement.md has the proof.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from raycloak.metrics.errors import ModelError, is_gpu_error, is_out_of_memory
from raycloak.workers.gradients.probes import Probes
from raycloak.workers.gradients.streaming import BlockStream, streams_of
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.models import device_of
from raycloak.workers.models.text_model import recomputed_blocks

_SUM_BYTES = 8
"""A trained coordinate has a float64 number in the sum, on the device of its layer."""
_LOOKED_AT = 2
"""Rows of the look: a model may treat a single one otherwise."""


def place(
    module: nn.Module,
    devices: Sequence[torch.device],
    free: Callable[[torch.device], int | None] = lambda device: None,
    beside: int = 0,
) -> None:
    """Move ``module`` to ``devices``: contiguous runs of its blocks, one run a device, balanced by bytes.

    Blocks are the children of that one list of layers which divides best. Layers before the list are on the first
    device, layers with parameters behind it on the last. A layer behind it that shares a tensor with one on the first
    device is there, too. Blocks that are computed again are streamed where a device is too small.

    Args:
        devices: at least one, all of one model.
        free: the bytes that are free on a device; None where nobody counts them.
        beside: bytes that a device with all its blocks shall have left.

    Raises:
        ModelError: ``unsplittable_model`` if no list has a block for each device, or a tensor would be on two.
            ``model_too_large`` if a device has not the memory, even for streamed blocks.
    """
    best = _best_division(module, len(devices))
    streams = list[BlockStream]()
    for device, size, run in zip(devices, best.sizes, best.runs, strict=True):
        found = free(device)
        if found is None or size + beside <= found:
            continue
        blocks = [each for block in best.blocks[run.start : run.stop] for each in recomputed_blocks(block)]
        stream = BlockStream(module, blocks, device)
        if size - stream.spared > found:
            raise _too_large(device, size - stream.spared, found, is_streamed=stream.spared > 0)
        if stream.spared:
            streams.append(stream)
    on_host = {id(home.parameter) for stream in streams for home in stream.homes()}
    homes: dict[int, torch.device] = {}
    for layer, wanted, tensors in best.layers(devices):
        taken = {homes[id(each)] for each in tensors if id(each) in homes} or {wanted}
        tied_back = layer in best.behind and taken == {devices[0]}
        if taken != {wanted} and not tied_back:
            raise _unsplittable(f"layers on two devices share a tensor of {type(layer).__name__}")
        home = taken.pop()
        homes.update((id(each), home) for each in tensors)
        for each in layer.modules() if layer in best.blocks else [layer]:
            each._apply(partial(_moved, home, on_host), recurse=False)  # type: ignore[no-untyped-call]
        if len(devices) > 1 and layer not in best.above:
            # Before all other hooks, which may compute with the inputs.
            layer.register_forward_pre_hook(_Entry(home), with_kwargs=True, prepend=True)
    for stream in streams:
        stream.begin()


def _moved(home: torch.device, on_host: set[int], tensor: Tensor) -> Tensor:
    return tensor if id(tensor) in on_host else tensor.to(home)


def _too_large(device: torch.device, size: int, found: int, is_streamed: bool) -> ModelError:
    advice = "" if is_streamed else " with gradient_checkpointing: true, whose frozen blocks are then streamed"
    return ModelError(
        "model_too_large",
        f"parameters and sums take {size / 1e9:.1f} GB of {device}, which has {found / 1e9:.1f} GB free.",
        "Give each worker more GPUs by placement.resources_per_worker, such as {GPU: 4}, or train an adapter"
        f"{advice}.",
    )


def check_placed(module: nn.Module, form: DatasetForm, vocabulary: int | None = None) -> None:
    """Run a placed model once on synthetic rows; require that one tensor with a gradient passes between two devices.

    Then devices take turns in the backward pass. Otherwise the order in which the gradients of a tensor arrive is up to
    their threads, and three floats have several sums.

    Args:
        form: of the run's data.
        vocabulary: number of ids; needed where features are integers.

    Raises:
        ModelError: ``unsplittable_model`` if it does not run, or more than one passes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        features = next(Probes(form, vocabulary or 2, device=device_of(module)).draws(_LOOKED_AT)).before.features
    try:
        with torch.enable_grad():
            output = module(features)
    except Exception as error:
        if is_out_of_memory(error) or is_gpu_error(error):
            raise
        # The rows are synthetic, so its text tells of no example.
        said = next(iter(str(error).strip().splitlines()), "it gives no reason").rstrip(".")
        raise _unsplittable(f"over several devices it fails with {type(error).__name__}: {said}") from error
    losses = [each.grad_fn for each in tree_leaves(output) if isinstance(each, Tensor)]
    crossings = [edge for node in _nodes(losses, crosses=True) for edge in _edges(node) if edge.there != edge.here]
    for side in ([each.there for each in crossings], [each.here for each in crossings]):
        if len(set(side)) < len(side):
            raise _unsplittable("more than one tensor with a gradient passes between its blocks")
    runs = [set(_nodes(ends, crosses=False)) for ends in (losses, *([each.source] for each in crossings))]
    if sum(map(len, runs)) > len(set().union(*runs)):
        raise _unsplittable("its last layer is also reached from the first without the blocks between them")


def on_device(module: nn.Module, device: str | torch.device) -> nn.Module:
    """Return ``module``, moved to ``device`` unless it is on such, over several or streamed."""
    placed = {each.type for each in devices_of(module)} == {torch.device(device).type}
    return module if placed else module.to(device)


def devices_of(module: nn.Module) -> tuple[torch.device, ...]:
    """Return the devices of the parameters and buffers, in their order; of what is streamed, where it is used."""
    streamed = {id(home.parameter): stream.device for stream in streams_of(module) for home in stream.homes()}
    tensors = chain(module.parameters(), module.buffers())
    return tuple(dict.fromkeys(streamed.get(id(each), each.device) for each in tensors))


def bytes_over(module: nn.Module, count: int) -> list[int]:
    """Return the bytes that parameters, buffers and sums would take on each of so many devices.

    Raises:
        ModelError: ``unsplittable_model`` as :func:`place`.
    """
    return _best_division(module, count).sizes


@dataclass(frozen=True, slots=True)
class _Entry:
    """A hook at a layer's entry: it copies the inputs to the layer's device, and autograd their gradients back."""

    home: torch.device

    def __call__(self, _layer: nn.Module, args: Any, named: Any) -> tuple[Any, Any]:
        def copied(tensor: Tensor) -> Tensor:
            return tensor if tensor.device == self.home else tensor.to(self.home)

        moved: tuple[Any, Any] = tree_map_only(Tensor, copied, (args, named))
        return moved


@dataclass(frozen=True, slots=True, eq=False)
class _Division:
    """A way to divide a model, at one list of its layers.

    Attributes:
        above: layers that contain the list, with tensors of their own.
        before, blocks, behind: all others with tensors; of those outside the blocks, every layer by itself.
        runs: the blocks of each device.
        sizes: bytes on each device.
    """

    above: list[nn.Module]
    before: list[nn.Module]
    blocks: list[nn.Module]
    behind: list[nn.Module]
    runs: list[range]
    sizes: list[int]

    @classmethod
    def at(cls, module: nn.Module, path: str, blocks: list[nn.Module], count: int) -> "_Division":
        """Divide at the list of that path, over ``count`` devices."""
        inside = {id(layer) for block in blocks for layer in block.modules()}
        above, before, behind = list[nn.Module](), list[nn.Module](), list[nn.Module]()
        reached = False
        for name, layer in module.named_modules():
            if id(layer) in inside:
                reached = True
            elif _own_tensors(layer):
                if not name or path == name or path.startswith(f"{name}."):
                    above.append(layer)
                # A table of angles has no parameter. It stands behind the blocks, and is computed before them.
                else:
                    (behind if reached and any(True for _ in layer.parameters(recurse=False)) else before).append(layer)
        sizes = [sum(map(_weight, _unique(_tensors(block)))) for block in blocks]
        first = _unique(tensor for layer in (*above, *before) for tensor in _own_tensors(layer))
        known = {id(each) for each in first}
        last = _unique(each for layer in behind for each in _own_tensors(layer) if id(each) not in known)
        beside = [sum(map(_weight, first)), *[0] * (count - 2), sum(map(_weight, last))]
        runs = _balanced(sizes, beside)
        taken = [sum(sizes[run.start : run.stop]) + more for run, more in zip(runs, beside, strict=True)]
        return cls(above, before, blocks, behind, runs, taken)

    def layers(self, devices: Sequence[torch.device]) -> Iterator[tuple[nn.Module, torch.device, list[Tensor]]]:
        """Yield each layer, the device that it is for, and its tensors; the blocks first."""
        for device, run in zip(devices, self.runs, strict=True):
            yield from ((block, device, _tensors(block)) for block in self.blocks[run.start : run.stop])
        yield from ((layer, devices[0], _own_tensors(layer)) for layer in (*self.above, *self.before))
        yield from ((layer, devices[-1], _own_tensors(layer)) for layer in self.behind)


def _best_division(module: nn.Module, count: int) -> _Division:
    """Return the division whose fullest device has the least; ModelError ``unsplittable_model`` if there is none."""
    best = min(_divisions(module, count), key=lambda each: max(each.sizes), default=None)
    if best is None:
        raise _unsplittable(f"{type(module).__name__} has no list of {count} layers or more")
    return best


def _divisions(module: nn.Module, count: int) -> Iterator[_Division]:
    if count == 1:
        yield _Division([], [], [module], [], [range(1)], [sum(map(_weight, _unique(_tensors(module))))])
        return
    for path, layers in module.named_modules():
        blocks = list(layers.children()) if isinstance(layers, nn.ModuleList | nn.Sequential) else []
        # `children` names a layer that is used twice once.
        if len(blocks) == len(layers._modules) >= count:
            yield _Division.at(module, path, blocks, count)


def _balanced(sizes: Sequence[int], beside: Sequence[int]) -> list[range]:
    """Cut blocks into runs of at least one, so that the largest is as small as can be.

    Args:
        sizes: bytes of each block.
        beside: bytes that each run has beside its blocks.
    """
    sums = [0, *accumulate(sizes)]
    # By end of a run: the bytes of the largest so far, and the starts of all runs.
    best = {0: (0, [0])}
    for number, more in enumerate(beside):
        ends = range(number + 1, len(sizes) - (len(beside) - number - 1) + 1)
        best = {
            end: min(
                (max(largest, sums[end] - sums[start] + more), [*starts, end])
                for start, (largest, starts) in best.items()
                if start < end
            )
            for end in ends
        }
    return [range(start, end) for start, end in pairwise(best[len(sizes)][1])]


class _Edge(NamedTuple):
    """An edge of autograd's graph, from a node on the device ``here`` to the source of its input ``there``."""

    source: Any
    there: torch.device
    here: torch.device


def _edges(node: Any) -> Iterator[_Edge]:
    here = node._input_metadata[0].device
    for source, number in node.next_functions:
        if source is not None:
            yield _Edge(source, source._input_metadata[number].device, here)


def _nodes(ends: Iterable[Any], crosses: bool) -> Iterator[Any]:
    """Yield the nodes of autograd's graph behind ``ends`` but for its leaves, each once.

    Args:
        crosses: whether to go on to other devices.
    """
    seen, waiting = set[Any](), list(ends)
    while waiting:
        node = waiting.pop()
        if node is not None and node.next_functions and node not in seen:
            seen.add(node)
            waiting += [edge.source for edge in _edges(node) if crosses or edge.there == edge.here]
            yield node


def _weight(tensor: Tensor) -> int:
    return tensor.nbytes + (_SUM_BYTES * tensor.numel() if tensor.requires_grad else 0)


def _tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def _own_tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(each): each for each in tensors}.values())


def _unsplittable(why: str) -> ModelError:
    return ModelError(
        "unsplittable_model",
        f"the model cannot be laid over several GPUs with the bytes of one: {why}.",
        "Give each worker one GPU by placement.resources_per_worker: {GPU: 1}, or at most one for each of its blocks.",
    )
