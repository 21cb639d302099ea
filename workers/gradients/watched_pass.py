"""A model's forward pass on synthetic examples, watched layer by layer, and compared with another one's.

Hides how layers are watched, and how the layer is found that mixes the examples of a batch.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError

KEEP_APART = (
    "Treat each example alone: GroupNorm or LayerNorm, padding to one fixed length in place of the longest example, "
    "and an explicit mask."
)


@dataclass(frozen=True, slots=True)
class WatchedPass:
    """A forward pass.

    Attributes:
        layers: name of every layer and shape of its output, in the order in which layers finish: inner ones before
            the outer ones, the model itself last.
        output: of the model, a row per example.
    """

    features: Tensor
    layers: list[tuple[str, torch.Size]]
    output: Tensor

    def of_row(self, row: int) -> "WatchedPass":
        """Return the same with the output of one row in the place of every row; outputs of a large model are large."""
        return replace(self, output=self.output[row : row + 1].clone().expand_as(self.output))


def watched_pass(
    module: nn.Module, features: Tensor, outputs: list[Tensor] | None = None, *, graph: bool = False
) -> WatchedPass:
    """Run the model.

    Args:
        outputs: gets a copy of every layer's output. Only an error needs them, and to copy them takes as long as to
            compute them.
        graph: whether the output keeps autograd's graph.

    Raises:
        ModelError: ``random_layer`` if torch's generator is drawn from; ``model_input``.
    """
    layers: list[tuple[str, torch.Size]] = []
    entered, drew = list[bytes](), list[str]()

    def leave(name: str, output: object) -> None:
        if entered.pop() != _generators(features.device):
            drew.append(name)
        if isinstance(output, Tensor):
            layers.append((name, output.shape))
            if outputs is not None:
                outputs.append(output.detach().clone())

    with layers_watched(module, leave, lambda: entered.append(_generators(features.device))):
        output = module(features)
    if drew:
        raise random_layer(drew[0])
    if not isinstance(output, Tensor) or output.shape[:1] != features.shape[:1]:
        raise ModelError(
            "model_input",
            "the model's output is not one tensor with a row per example.",
            "Let its forward return one. Several heads are its columns, torch.cat([one, two], 1), with a list as loss.",
        )
    return WatchedPass(features, layers, output if graph else output.detach())


def _generators(device: torch.device) -> bytes:
    """Return the states of the generators that a forward pass on ``device`` may draw from."""
    state = torch.get_rng_state().numpy().tobytes()
    return state + torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else state


@contextmanager
def layers_watched(
    module: nn.Module, leave: Callable[[str, object], None], enter: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Call ``enter`` before each layer of ``module``, and ``leave`` with name and output after it, inner ones first."""
    names = {layer: name or "model" for name, layer in module.named_modules()}
    with ExitStack() as hooks:
        for each in names:
            hooks.enter_context(each.register_forward_pre_hook(lambda *_: enter()))
            hooks.enter_context(each.register_forward_hook(lambda layer, _, output: leave(names[layer], output)))
        yield


def random_layer(name: str) -> ModelError:
    return ModelError(
        "random_layer",
        f"layer '{name}' draws random numbers outside the run's keyed streams, so a step could not be repeated.",
        "Take the randomness out of the forward pass.",
    )


def require_apart(module: nn.Module, left: WatchedPass, right: WatchedPass, rows: slice) -> None:
    """Require the same layers in the same shapes, and the same output for ``rows``, which are equal in both batches."""
    for index, pair in enumerate(zip_longest(left.layers, right.layers)):
        if pair[0] != pair[1]:
            # Of two passes, the longer one has the layer that the other skips.
            raise ModelError(
                "mixing_layer",
                f"layer '{max(left.layers, right.layers, key=len)[index][0]}' has another shape, or is skipped, when "
                "one example of the batch changes, as if the batch were trimmed to its longest text.",
                KEEP_APART,
            )
    if not same_values(left.output[rows], right.output[rows]):
        raise _moved(module, left.features, right.features, rows)


def _moved(module: nn.Module, left: Tensor, right: Tensor, rows: slice) -> ModelError:
    """Return the error for equal rows with other outputs: the first layer that shows it, by computing once more."""
    outputs: tuple[list[Tensor], ...] = ([], [], [])
    passes = [watched_pass(module, *each) for each in zip((left, left, right), outputs, strict=True)]
    name = passes[0].layers[-1][0]
    for (layer, _), first, again, other in zip(passes[0].layers, *outputs, strict=False):
        if not same_values(first, again):
            return random_layer(layer)
        # An inner tensor may have another first extent than the batch.
        if first.shape[:1] == left.shape[:1] == other.shape[:1] and not same_values(first[rows], other[rows]):
            name = layer
            break
    return ModelError(
        "mixing_layer",
        f"layer '{name}' mixes the examples of a batch, so one example changes another's gradient.",
        KEEP_APART,
    )


def same_values(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have one shape and equal numbers; a NaN counts as zero, an infinity as the largest."""
    if left.shape != right.shape:
        return False
    return torch.equal(left, right) or torch.equal(left.nan_to_num(), right.nan_to_num())
