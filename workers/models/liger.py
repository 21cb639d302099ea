"""Liger's kernels in the frozen layers of a model under an adapter: RMSNorm, rotary embedding and SwiGLU.

A kernel shows torch no operation, so nothing that is trained may enter one, and a layer is replaced only if its class
is one of those that were compared with Liger's. Liger's own autograd functions write gradients over tensors that a
second backward pass reads, rotate the output of a projection in its memory, and make an output from a shape alone,
which a tap then takes for the same in all rows. The functions here call its kernels on tensors of their own.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.inputs.hub_files import library

PACKAGE, VERSION = "liger-kernel", "0.8.5"
"""The one version whose kernels were read: the functions below call them by the arguments that it gives them."""

_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
)
"""By type of model, the head of its classes' names. Gemma is none: its norms have an offset, its MLP another gate."""

_DEVICE = "cuda"
_ROTATION = "apply_rotary_pos_emb"
# Of Liger's ways to round within a norm, the one of these models: only the reciprocal root is float32.
_AS_LLAMA = 0


def require_fitting(model: Any, adapted: bool) -> None:
    """Refuse a `transformers` model that Liger's kernels cannot be used in, by its class.

    Args:
        adapted: whether an adapter is trained and all else but a head of classes frozen.

    Raises:
        ModelError: ``liger_kernels``.
    """
    kind, family = type(model), model.config.model_type
    if not adapted:
        raise _refused(
            "the whole model is trained, and a kernel shows no operation that a trained norm enters",
            "Train an adapter (model.lora), or leave use_liger_kernels out.",
        )
    if family not in _FAMILIES or kind.__module__ != _modeling(family):
        raise _refused(
            f"the layers of {kind.__name__} were not compared with Liger's",
            f"Take a model of type {', '.join(_FAMILIES)} without code of its own, or leave use_liger_kernels out.",
        )
    if model.config.hidden_act not in ("silu", "swish"):
        raise _refused(
            f"{kind.__name__} has the activation {model.config.hidden_act}, and the kernel computes SwiGLU",
            "Leave use_liger_kernels out.",
        )


def require_gpu(device: str) -> None:
    """Refuse a run whose workers compute on ``device``, unless it is ``cuda``; ModelError ``liger_kernels``."""
    if device != _DEVICE:
        raise _refused(
            "they need a GPU, and the workers of this run compute on CPUs",
            "Set use_gpu: true, or leave use_liger_kernels out.",
        )


def use_liger(module: nn.Module) -> None:
    """Let the layers of ``module`` that Liger has kernels for compute in these from now on.

    Guarantee: a kernel writes to no tensor but those that its function made from the tensors that the kernel reads.

    Args:
        module: on a GPU, built as :func:`require_fitting` allows; it keeps its parameters and their names.

    Raises:
        ModelError: ``liger_kernels`` if the module is on a CPU or over several GPUs, this version of Liger is not
            installed, or a layer that it would replace is trained.
    """
    require_gpu(next(module.parameters()).device.type)
    if len({tensor.device for tensor in module.parameters()}) > 1:
        raise _refused(
            "they are launched on a worker's first GPU, and the model lies over several",
            "Leave use_liger_kernels out, or give each worker one GPU.",
        )
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        found = ""
    if found != VERSION:
        what = f"{PACKAGE} {found} is installed" if found else f"{PACKAGE} is not installed"
        raise _refused(f"{what}, and version {VERSION} is needed", "Install raycloak[liger] on the nodes.")
    replacements = {kind: own for family in _FAMILIES for kind, own in _replacements(family).items()}
    for name, layer in module.named_modules():
        own = replacements.get(type(layer))
        if own is None:
            continue
        if any(tensor.requires_grad for tensor in layer.parameters(recurse=False)):
            raise _refused(f"layer '{name}' ({type(layer).__name__}) is trained", "Freeze it.")
        layer.__class__ = own


def has_liger(module: nn.Module) -> bool:
    """Return whether a layer of ``module`` computes in Liger's kernels."""
    return any(type(each).__module__ == __name__ for each in module.modules())


def _refused(why: str, remedy: str) -> ModelError:
    return ModelError("liger_kernels", f"Liger's kernels cannot be used: {why}.", remedy)


def _modeling(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"


@cache
def _replacements(family: str) -> Mapping[type, type]:
    """Return by class of `transformers` the same class with another forward pass."""
    modeling, head = library(_modeling(family)), _FAMILIES[family]
    forwards = {"RMSNorm": _normed, "MLP": _gated, "Attention": _rotating(getattr(modeling, f"{head}Attention"))}
    kinds: dict[type, Any] = {getattr(modeling, f"{head}{own}"): forward for own, forward in forwards.items()}
    return {
        kind: type(f"Liger{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})
        for kind, forward in kinds.items()
    }


def _normed(layer: Any, hidden_states: Tensor) -> Any:
    return _RMSNorm.apply(hidden_states, layer.weight, layer.variance_epsilon)  # type: ignore[no-untyped-call]


def _gated(layer: Any, x: Tensor) -> Any:
    return layer.down_proj(_SwiGLU.apply(layer.gate_proj(x), layer.up_proj(x)))  # type: ignore[no-untyped-call]


def _rotated(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return _RotaryEmbedding.apply(queries, keys, cos, sin)  # type: ignore[no-untyped-call]


def _rotating(attention: Any) -> FunctionType:
    """Return the forward pass of a layer of attention, with another function under the name of its rotation.

    The name in its module stays: it belongs to all models of this process.
    """
    own = attention.forward
    if _ROTATION not in own.__code__.co_names:
        raise _refused(
            f"{attention.__name__} of transformers {version('transformers')} calls no {_ROTATION}",
            "Install the version of transformers that raycloak pins, or leave use_liger_kernels out.",
        )
    forward = FunctionType(
        own.__code__, {**own.__globals__, _ROTATION: _rotated}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


class _RMSNorm(torch.autograd.Function):
    """A frozen RMSNorm over the last dimension of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        kernels, utils = _kernels("rms_norm"), _kernels("utils")
        tokens = x.reshape(-1, x.shape[-1])
        count, width = tokens.shape
        # From the input, and not from its shape: what torch makes from no tensor comes from no example.
        output, roots = torch.empty_like(tokens), tokens.new_empty(count, dtype=torch.float32)
        block, warps = utils.calculate_settings(width)
        with utils.device_context(x.device):
            kernels._rms_norm_forward_kernel[(count,)](
                *(output, width, tokens, width, weight, 1, roots, 1, width, epsilon, 0.0, _AS_LLAMA),
                elementwise_affine=True,
                BLOCK_SIZE=block,
                num_warps=warps,
            )
        ctx.save_for_backward(x, weight, roots)
        return output.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        kernels, utils = _kernels("rms_norm"), _kernels("utils")
        x, weight, roots = ctx.saved_tensors
        tokens = x.reshape(-1, x.shape[-1])
        settings = utils.calculate_settings(x.shape[-1])
        # Not in place, where a tap may hold the gradient. One form of the kernel, whatever the number of tokens.
        found, _ = kernels.rms_norm_backward(
            gradient.contiguous(), tokens, weight, roots, 0.0, _AS_LLAMA, *settings, False, True, needs_dw=False
        )
        return found, None, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Any:
        ctx.save_for_backward(gate, up)
        return _kernels("swiglu").swiglu_forward(gate.contiguous(), up.contiguous())[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # The kernel writes over both, and the checks run several backward passes of one forward pass.
        gate, up = (_own(each) for each in ctx.saved_tensors)
        return _kernels("swiglu").swiglu_backward(gate, up, gradient.contiguous())


class _RotaryEmbedding(torch.autograd.Function):
    """The rotary embedding of queries and keys [rows, heads, tokens, width], of which all is rotated."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return _kernels("rope").rope_forward(*_token_first(queries, keys), cos, sin)[:2]

    @staticmethod
    def backward(ctx: Any, of_queries: Tensor, of_keys: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *_kernels("rope").rope_backward(*_token_first(of_queries, of_keys), cos, sin), None, None


def _token_first(*tensors: Tensor) -> list[Tensor]:
    """Return copies with the tokens before the heads in memory: there the kernel rotates them in place."""
    return [_own(each.transpose(1, 2)).transpose(1, 2) for each in tensors]


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _kernels(name: str) -> Any:
    """Return a module of Liger's; loading the first one takes seconds."""
    return import_module(f"liger_kernel.ops.{name}")
