"""An adapter to serve, from a trained PEFT model: its LoRA matrices, and the parts that its owner shares.

Only plain LoRA on linear layers can be computed over ciphertexts. All else is refused by name: nothing that was trained
is silently left out.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from safetensors.torch import save
from torch import Tensor, nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.models.text_model import is_peft
from raycloak_lab.encrypted.adapter_worker import Adapter, LowRank

# They are in one message with the adapter's description, of which a client takes four times as much.
_SHARED_BYTES: Final = 16 * 2**20
_PREFIX = "base_model.model."
_REMEDY = "Serve plain LoRA on linear layers: no DoRA, no bias, nothing else that is trained."


def lora_of(module: nn.Module, shared: Iterable[str] = ()) -> Adapter:
    """Return the adapter of a PEFT model, with layers by their names in the base model.

    Args:
        shared: trained parts, by name, that clients are given in the clear.

    Raises:
        ModelError: ``adapter_kind`` for a model without LoRA, with several adapters, with DoRA, a bias, other layers
            than linear ones, a trained part that ``shared`` does not name, or shared parts that are too large.
    """
    if not is_peft(module):
        raise ModelError("adapter_kind", f"{type(module).__name__} has no adapter of PEFT.", _REMEDY)
    matrices: dict[str, LowRank] = {}
    parts: dict[str, Tensor] = {}
    covered: set[str] = set()
    shared = set(shared)
    for path, layer in module.named_modules():
        name = path.removeprefix(_PREFIX)
        if hasattr(layer, "lora_A"):
            matrices[name] = _low_rank(name, layer)
            covered |= {f"{path}.{part}" for part, _ in layer.named_parameters() if part.startswith("lora_")}
        elif type(layer).__name__ == "ModulesToSaveWrapper" and name in shared:
            (saved,) = layer.modules_to_save.values()
            parts |= {f"{name}.{part}": each.detach().cpu() for part, each in saved.named_parameters()}
            covered |= {f"{path}.{part}" for part, _ in layer.named_parameters()}
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    if other := sorted(trained - covered):
        part = other[0].removeprefix(_PREFIX).partition(".modules_to_save.")[0]
        raise ModelError(
            "adapter_kind",
            f"'{part}' is trained beside the LoRA matrices, and no answer over ciphertexts holds it.",
            f"Name it in 'shared', which gives it to every client in the clear; or train without it. {_REMEDY}",
        )
    if not matrices:
        raise ModelError("adapter_kind", "the model has no LoRA layer.", _REMEDY)
    given = save(parts) if parts else b""
    if len(given) > _SHARED_BYTES:
        raise ModelError(
            "adapter_kind",
            f"the shared parts have {len(given)} bytes, and a client is given at most {_SHARED_BYTES}.",
            "Share a head alone; give clients larger parts with the base model.",
        )
    return Adapter(matrices, given)


def _low_rank(name: str, layer: Any) -> LowRank:
    names = list(layer.lora_A)
    kinds = {
        # First, since other layers keep their matrices elsewhere.
        "is no linear layer": not isinstance(layer.get_base_layer(), nn.Linear),
        "has several adapters": len(names) != 1,
        "uses DoRA": bool(getattr(layer, "lora_magnitude_vector", ())),
        "has a bias of its own": any(getattr(layer, "lora_bias", {}).values()),
        "is merged into its base": bool(layer.merged),
    }
    for what, is_so in kinds.items():
        if is_so:
            raise ModelError("adapter_kind", f"'{name}' {what}.", _REMEDY)
    down, up = layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight
    return LowRank(_float64(down), _float64(up) * float(layer.scaling[names[0]]))


def _float64(weight: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(weight.detach().cpu().double().numpy(), np.float64)
