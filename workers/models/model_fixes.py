"""Mechanical fixes of a model: layers that cannot be trained per example become the nearest ones that can.

A run fixes nothing by itself: the model's function calls :func:`fix`, and its author sees what changes.
`nn.MultiheadAttention` and `nn.TransformerEncoder` need no fix. Operations outside the layers, such as ``x += y`` on a
parameter, cannot be fixed in this way.
"""

import copy
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.models.dropout import silence_dropout

MOST_GROUPS = 32
"""Groups of a GroupNorm that replaces a BatchNorm of images, where they divide its channels (Wu and He, 2018)."""


def fix(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of a model with all mechanical mends made, and one line for each of them.

    BatchNorm becomes GroupNorm with its scale and shift; where these are frozen, it keeps its statistics and stays in
    evaluation mode. Statistics of batches are dropped from InstanceNorm. Recurrent layers become those of Opacus, with
    their weights. In-place activations become out-of-place ones, every dropout becomes 0, and trained parameters become
    float32. All other layers, and ``model`` itself, stay as they are.

    Raises:
        ModelError: ``model_kind`` if ``model`` is no `torch.nn.Module`.
    """
    given: Any = model
    if not isinstance(given, nn.Module):
        kind = given.__name__ if isinstance(given, type) else f"a {type(given).__name__}"
        raise ModelError("model_kind", f"fix takes a torch.nn.Module, not {kind}.", "Build the model first.")
    fixed, done = copy.deepcopy(model), []
    for name, layer in list(fixed.named_modules(remove_duplicate=False)):
        mend = _mend_of(layer)
        if mend is None:
            continue
        what, make = mend
        done.append(f"{name or 'model'}: {what}")
        replacement = make()
        if replacement is layer:
            continue
        replacement.train(layer.training)
        if not name:
            fixed = replacement
        else:
            parent, _, own = name.rpartition(".")
            setattr(fixed.get_submodule(parent), own, replacement)
    done += silence_dropout(fixed, by_name=False)
    for name, tensor in fixed.named_parameters():
        if tensor.requires_grad and tensor.is_floating_point() and tensor.dtype != torch.float32:
            done.append(f"{name}: float32 in place of {str(tensor.dtype).removeprefix('torch.')}")
            tensor.data = tensor.data.float()
    return fixed, tuple(done)


def fix_of(layer: nn.Module) -> str | None:
    """Return what :func:`fix` would do to a layer alone, its dropout aside; None if nothing. Changes nothing."""
    mend = _mend_of(layer)
    return None if mend is None else mend[0]


def _mend_of(layer: nn.Module) -> tuple[str, Callable[[], nn.Module]] | None:
    """Return a mend in words, and the act that returns the layer to have instead, or the same one changed."""
    kind = type(layer).__name__
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return None
    if isinstance(layer, nn.modules.batchnorm._NormBase) and is_frozen(layer):
        still = isinstance(layer, _Still)
        return None if still else (f"{kind} stays in evaluation mode, since it is frozen", partial(_still, layer))
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and _only_normalises(layer):
        groups = _groups(layer)
        return f"GroupNorm({groups}, {layer.num_features}) in place of {kind}", partial(_group_norm, layer, groups)
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        none = dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"))
        return f"{kind} without statistics of batches", partial(_changed, layer, track_running_stats=False, **none)
    if type(layer) in (nn.LSTM, nn.GRU, nn.RNN) and not layer.proj_size:
        return f"opacus.layers.DP{kind} in place of {kind}, with its weights", partial(_recurrent, layer)
    if getattr(layer, "inplace", None) is True:
        return f"{kind} out of place", partial(_changed, layer, inplace=False)
    return None


def keep_still(model: nn.Module) -> None:
    """Let frozen norms that are in evaluation mode stay in it when ``model`` is put into training mode.

    Their statistics are public, as those of a checkpoint are, and they treat each example alone.
    """
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and not layer.training and is_frozen(layer):
            _still(layer)


def is_frozen(layer: nn.modules.batchnorm._NormBase) -> bool:
    """Return whether a norm has statistics to keep, and parameters of which none is trained."""
    own = [tensor.requires_grad for tensor in layer.parameters(recurse=False)]
    return layer.running_mean is not None and bool(own) and not any(own)


class _Still:
    """The part of a norm that leaves it in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        """Stay in evaluation mode, whatever ``mode`` is."""
        return super().train(False)  # type: ignore[misc]


@cache
def _still_kind(kind: type) -> type:
    return type(kind.__name__, (_Still, kind), {"__module__": __name__})


def _still(layer: nn.Module) -> nn.Module:
    kind: Any = type(layer)
    if not issubclass(kind, _Still):
        layer.__class__ = _still_kind(kind)
    return layer.eval()


def _groups(layer: Any) -> int:
    """Return how many groups normalise their channels apart; none of them has one channel if there are more."""
    channels: int = layer.num_features
    # A vector has nothing else to normalise over than its own numbers.
    if isinstance(layer, nn.BatchNorm1d):
        return 1
    groups = math.gcd(MOST_GROUPS, channels)
    return groups // 2 if channels == groups > 1 else groups


def _only_normalises(layer: Any) -> bool:
    """Return whether a BatchNorm does what torch's does, and then what the layers inside it do, as one with an
    activation has it."""
    if type(layer).forward is nn.modules.batchnorm._BatchNorm.forward:
        return True
    if layer.running_mean is None:
        return False
    probe = copy.deepcopy(layer).cpu().float().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for dimensions in (2, 4, 5):
            features = torch.randn(2, layer.num_features, *[2] * (dimensions - 2), generator=draw)
            try:
                found = probe(features.clone())
            except Exception:  # noqa: BLE001 - norms of vectors, images and volumes take no others, and say so in many ways
                continue
            own = nn.functional.batch_norm(
                features, probe.running_mean, probe.running_var, probe.weight, probe.bias, eps=probe.eps
            )
            return torch.allclose(found, nn.Sequential(*probe.children())(own), rtol=1e-4, atol=1e-5)
    return False


def _group_norm(layer: Any, groups: int) -> nn.Module:
    norm = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.to(layer.weight.device, layer.weight.dtype)
        norm.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
        norm.requires_grad_(layer.weight.requires_grad)
    inside = OrderedDict(layer.named_children())
    return nn.Sequential(OrderedDict(norm=norm, **inside)) if inside else norm


def _changed(layer: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def _recurrent(layer: Any) -> nn.Module:
    from opacus import layers  # late: few models are recurrent, and the import takes seconds

    own = {nn.LSTM: layers.DPLSTM, nn.GRU: layers.DPGRU, nn.RNN: layers.DPRNN}[type(layer)]
    more = {"nonlinearity": layer.nonlinearity} if isinstance(layer, nn.RNN) else {}
    replacement: nn.Module = own(
        layer.input_size,
        layer.hidden_size,
        num_layers=layer.num_layers,
        bias=layer.bias,
        batch_first=layer.batch_first,
        dropout=0,
        bidirectional=layer.bidirectional,
        **more,
    )
    replacement.load_state_dict(layer.state_dict())
    replacement.requires_grad_(any(tensor.requires_grad for tensor in layer.parameters()))
    name_once(replacement)
    return replacement


def name_once(model: nn.Module) -> None:
    """Let the recurrent layers of Opacus in ``model`` have each tensor once in a state dictionary, as torch's do.

    Inside another module they have it twice: by torch's name, and by that of their own layer within, since the hook
    that drops the second one looks for it without the module's name before it.
    """
    # Nobody has a layer of a library that was never loaded.
    renaming: Any = sys.modules.get("opacus.layers.param_rename")
    layers: Any = () if renaming is None else model.modules()
    for layer in layers:
        hooks = layer._state_dict_hooks
        for key in [key for key, hook in hooks.items() if hook is renaming.filter_out_old_keys]:
            del hooks[key]
            layer.register_state_dict_post_hook(_without_inner_names)
            layer.register_load_state_dict_pre_hook(_with_inner_names)


def _without_inner_names(layer: Any, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    for inner in layer.old_to_new:
        state.pop(prefix + inner, None)


def _with_inner_names(layer: Any, state: dict[str, Any], prefix: str, *_others: object) -> None:
    for inner, own in layer.old_to_new.items():
        if prefix + own in state:
            state.setdefault(prefix + inner, state[prefix + own])
