"""LoRA adapters of `transformers` models: the layers that they adapt, and PEFT's refusals as errors of raycloak."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from raycloak.attestation.core.messages import Message
from raycloak.metrics.errors import ModelError
from raycloak.workers.inputs.hub_files import library
from raycloak.workers.models.experts import stacks_of


class LoraSpec(Message):
    """A LoRA adapter, as `peft.LoraConfig` takes it.

    Attributes:
        target_modules: last parts of the names of the layers that it adapts; ``all-linear`` for all but the head;
            None for what PEFT adapts in this type of model.
        bias: which biases are trained beside it.
    """

    DOMAIN: ClassVar[str] = "raycloak/lora/v1"

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | Literal["all-linear"] | None
    bias: Literal["none", "all", "lora_only"]


def adapted(model: Any, lora: LoraSpec, task: str) -> nn.Module:
    """Return a `transformers` model with an adapter, and all else frozen but a head of classes.

    Args:
        task: as PEFT names it, such as ``SEQ_CLS``.

    Raises:
        ModelError: ``target_modules`` if it has no such layers, or PEFT cannot adapt them.
    """
    peft = library("peft")
    targets = lora.target_modules
    if targets is None:
        targets = tuple(peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type, ()))
    heads = [] if task == "CAUSAL_LM" else _heads(model)
    layers = _layers(model, heads)
    stacks = [f"{name}.{own}" for name, layer in model.named_modules() for own in stacks_of(layer)]
    if targets == "all-linear":
        # A table of tokens is no linear layer.
        layers = [name for name in layers if not isinstance(model.get_submodule(name), nn.Embedding)]
    else:
        _check_targets(model, targets, layers, stacks)
        layers, stacks = _named(layers, targets), _named(stacks, targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        target_parameters=stacks or None,
        # From PEFT's own model down: their last names alone may be those of layers of the body.
        modules_to_save=[f"model.{name}" for name in heads] or None,
        bias=lora.bias,
        lora_dropout=0.0,
        task_type=task,
    )
    try:
        found: nn.Module = peft.get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        # It knows types of models some layers of which compute by other ways than their own.
        raise _refused(model, f"PEFT says: {str(error).partition('. ')[0]}", (*layers, *stacks)) from None
    for layer in found.modules():
        if isinstance(layer, peft.utils.ModulesToSaveWrapper):
            for head in layer.modules_to_save.values():
                # The head of a base in half precision: trained parameters are float32, and so must be what they meet.
                head.float().register_forward_pre_hook(_in_float32)
    return found


def _heads(model: Any) -> list[str]:
    """Return the names of the layers beside the body of a classifier."""
    own = [name for name, layer in model.named_children() if next(layer.parameters(), None) is not None]
    return [name for name in own if name != model.base_model_prefix]


def _layers(model: Any, heads: Sequence[str]) -> list[str]:
    """Return the names of the layers that LoRA can adapt: plain products and tables, outside of a head.

    A layer that gives more than its product, as a router may, is none; nor is one whose weight another layer takes.
    """
    conv1d = library("transformers.pytorch_utils").Conv1D
    plain = (nn.Linear.forward, conv1d.forward, nn.Embedding.forward)
    head = model.get_output_embeddings()
    return [
        name
        for name, layer in model.named_modules()
        if type(layer).forward in plain
        and layer is not head
        and name.partition(".")[0] not in heads
        and not _is_taken_apart(model, name)
    ]


def _is_taken_apart(model: nn.Module, name: str) -> bool:
    """Return whether PEFT refuses a layer by its name: a fused operation of the model takes its weight alone."""
    peft = library("peft")
    try:
        library("peft.tuners.tuners_utils")._check_lora_target_modules_mamba(
            peft.LoraConfig(), model, name.rpartition(".")[2]
        )
    except ValueError:
        return True
    return False


def _named(names: Iterable[str], targets: Sequence[str]) -> list[str]:
    return [name for name in names if any(name == each or name.endswith(f".{each}") for each in targets)]


def _check_targets(model: nn.Module, targets: Sequence[str], layers: Sequence[str], stacks: Sequence[str]) -> None:
    """Require every target to be a layer of the model; ModelError ``target_modules``."""
    known = (*layers, *stacks)
    unknown = [each for each in targets if not _named(known, [each])]
    if unknown or not targets:
        raise _refused(
            model, f"it has no layer {', '.join(unknown)}" if unknown else "PEFT knows no layers to adapt in it", known
        )


def _refused(model: nn.Module, why: str, names: Iterable[str]) -> ModelError:
    there = sorted({name.rpartition(".")[2] for name in names} - {""})
    return ModelError(
        "target_modules",
        f"LoRA cannot adapt {type(model).__name__}: {why.rstrip('.')}.",
        f"Set lora.target_modules to some of: {', '.join(there) or 'none there is'}.",
    )


def _in_float32(_head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.float() for each in inputs)
