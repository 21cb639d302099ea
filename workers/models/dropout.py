"""Dropout, by what a layer does: its draws come from no keyed stream, so a run sets it to 0 and says what it was."""

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from raycloak.metrics.listing import listed

# Layers that a sentence names.
_SHOWN = 3
# Rows of images, of texts and of vectors.
_TRIED = ((2, 3, 4, 4), (2, 3, 4), (2, 3))


def silence_dropout(module: nn.Module, by_name: bool) -> tuple[str, ...]:
    """Set every dropout in ``module`` to 0, and return a sentence that says so; none if all are 0 already.

    Args:
        by_name: whether a number that is named after dropout is one, as in `transformers` and PEFT.
    """
    found = []
    for prefix, layer in module.named_modules():
        for name, value in dropouts(layer, by_name):
            setattr(layer, name, 0.0)
            shown = prefix if isinstance(layer, nn.modules.dropout._DropoutNd) else f"{prefix}.{name}".lstrip(".")
            found.append((shown, value))
    return _silenced(found)


def silence_config(config: Any) -> tuple[str, ...]:
    """Set every dropout that a `transformers` configuration names to 0; returns as :func:`silence_dropout`."""
    found = [(name, float(value)) for name, value in vars(config).items() if _is_named(name) and _is_positive(value)]
    for name, _ in found:
        setattr(config, name, 0.0)
    return _silenced(found)


def dropouts(layer: nn.Module, by_name: bool = False) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number above 0 that makes ``layer`` itself drop what it is given at random.

    A layer without tensors, such as DropPath or StochasticDepth, is dropout if it draws random numbers in training and
    gives back what it was given once the number is 0.

    Args:
        by_name: see :func:`silence_dropout`.
    """
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        named = ["p"]
    elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        named = ["dropout"]
    else:
        named = [name for name in vars(layer) if (by_name and _is_named(name)) or _drops_out(layer, name)]
    for name in named:
        if _is_positive(value := getattr(layer, name)):
            yield name, float(value)


def _drops_out(layer: nn.Module, name: str) -> bool:
    value = vars(layer)[name]
    # First, since layers have many attributes, and few are such numbers.
    if not (isinstance(value, float) and 0 < value <= 1):
        return False
    if next(chain[object](layer.children(), layer.parameters(), layer.buffers()), None) is not None:
        return False
    probe = copy.deepcopy(layer).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for shape in _TRIED:
            features = torch.ones(shape)
            try:
                drew = _draws(probe, features)[0]
                setattr(probe, name, 0.0)
                draws, output = _draws(probe, features)
            except Exception:  # noqa: BLE001 - a layer of the user's own may raise anything; it is not dropout then
                setattr(probe, name, value)
                continue
            return drew and not draws and isinstance(output, torch.Tensor) and torch.equal(output, features)
    return False


def _draws(layer: nn.Module, features: torch.Tensor) -> tuple[bool, object]:
    """Return whether torch's generator was drawn from, and the output."""
    before = torch.get_rng_state()
    output = layer(features)
    return not torch.equal(before, torch.get_rng_state()), output


def _silenced(found: list[tuple[str, float]]) -> tuple[str, ...]:
    if not found:
        return ()
    shown = listed([f"{name or 'model'} was {value:g}" for name, value in found], _SHOWN)
    return (f"dropout is set to 0 ({shown}).",)


def _is_named(name: str) -> bool:
    # Some routers of experts multiply what they are given by draws near 1.
    return "drop" in name or "jitter" in name


def _is_positive(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value > 0
