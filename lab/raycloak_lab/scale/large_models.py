"""The memory of a large model on each GPU of a worker, counted by the product's own engine on shapes without numbers.

The model is built and laid over the GPUs as a worker does it, on ``meta``, so no weights are needed and none is
allocated. As many micro-batches as the engine has under way are begun, and the first is finished and added up, while
the bytes of all tensors are counted on each GPU. Not in it: the kernels of a GPU, which form rows in less memory, what
libraries and torch's allocator keep for themselves, and `precision: bf16`, whose products take less.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycloak.coordinator.config.section import Section
from raycloak.coordinator.config.sections import LoraConfig
from raycloak.metrics.errors import ConfigError
from raycloak.workers.gradients.clipping import ClippedSum, in_flight
from raycloak.workers.gradients.gradient_parts import GradientParts
from raycloak.workers.gradients.placement import place
from raycloak.workers.inputs.hub_files import library, quiet
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.models.dropout import silence_config
from raycloak.workers.models.hub_model import LoraSpec, adapted
from raycloak.workers.models.losses import next_token_cross_entropy
from raycloak.workers.models.models import ModelSource, build_model
from raycloak_lab.scale.tagged_devices import devices, tagged

_LLAMA: Final = {"model_type": "llama", "dtype": "bfloat16"}
_SHAPES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def llama(*shapes: int, vocabulary: int, tied: bool = False) -> dict[str, Any]:
    """Return the settings of a Llama: `_SHAPES` in their order, the vocabulary, and whether it is tied to the head."""
    named = zip(_SHAPES, shapes, strict=True)
    return _LLAMA | dict(named) | {"vocab_size": vocabulary, "tie_word_embeddings": tied}


KNOWN: Final[Mapping[str, dict[str, Any]]] = {
    "llama-3.2-1b": llama(2048, 8192, 16, 32, 8, vocabulary=128_256, tied=True),
    "llama-3.1-8b": llama(4096, 14_336, 32, 32, 8, vocabulary=128_256),
    "llama-2-7b": llama(4096, 11_008, 32, 32, 32, vocabulary=32_000),
    "llama-2-13b": llama(5120, 13_824, 40, 40, 40, vocabulary=32_000),
    "llama-2-70b": llama(8192, 28_672, 80, 64, 8, vocabulary=32_000),
}
"""Shapes by name, as the models' own ``config.json`` have them."""


class LargeModelConfig(Section):
    """A causal language model by its shapes, and how a worker computes it.

    Attributes:
        config: a name in `KNOWN`, or a path of a ``config.json``.
        lora: the adapter; everything is trained if absent.
        gpus: numbers of GPUs of a worker; the model is counted on each number.
        tokens: of an example. rows: of a micro-batch.
        gradient_checkpointing: as of a run.
    """

    config: str
    lora: LoraConfig | None = None
    gpus: list[int] = Field(default=[1, 2, 4, 8], min_length=1)
    tokens: int = Field(default=512, gt=1)
    rows: int = Field(default=4, gt=0)
    gradient_checkpointing: bool = True


@dataclass(frozen=True, slots=True)
class GpuBytes:
    """The bytes on one GPU of a worker.

    Attributes:
        trained: number of trained coordinates there.
        frozen, parameters, sums: of what is frozen, of what is trained, and of its float64 sum.
        micro_batches: the most that all micro-batches under way take.
    """

    trained: int
    frozen: int
    parameters: int
    sums: int
    micro_batches: int


@dataclass(frozen=True, slots=True)
class LargeModel:
    """The counts of one model.

    Attributes:
        trained, frozen: numbers of coordinates.
        tokens: of an example. recomputed: whether its blocks run forward twice.
        by_gpus: by their number in a worker, the bytes on each.
    """

    trained: int
    frozen: int
    tokens: int
    recomputed: bool
    by_gpus: Mapping[int, tuple[GpuBytes, ...]]


def count_model(config: LargeModelConfig) -> LargeModel:
    """Return the bytes of the model on each number of GPUs.

    Raises:
        ConfigError: ``config`` if there is no such ``config.json``.
        ModelError: as `raycloak.workers.models.models.build_model` and `raycloak.workers.gradients.placement.place`.
    """
    source = ModelSource.of(partial(_on_meta, _settings(config.config), config.lora))
    mode = ComputeMode(gradient_checkpointing=config.gradient_checkpointing)

    def built() -> nn.Module:
        return build_model(source, Path(), 0, mode)

    sizes = [(each.numel(), each.requires_grad) for each in built().parameters()]
    return LargeModel(
        trained=sum(size for size, trained in sizes if trained),
        frozen=sum(size for size, trained in sizes if not trained),
        tokens=config.tokens,
        recomputed=config.gradient_checkpointing,
        by_gpus={count: on_gpus(built(), count, config.rows, config.tokens) for count in config.gpus},
    )


def on_gpus(module: nn.Module, count: int, rows: int, tokens: int, memory: str = "meta") -> tuple[GpuBytes, ...]:
    """Return the bytes of a causal language model on each of so many GPUs; it is moved there.

    Args:
        rows, tokens: of each micro-batch.
        memory: ``cpu`` computes with numbers, to compare the two.
    """
    homes = devices(count)
    with tagged(memory), warnings.catch_warnings(action="ignore"):
        place(module, homes)
        trained = [each for each in module.parameters() if each.requires_grad]
        gradients = GradientParts(module, next_token_cross_entropy)
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device=homes[0])
        valid = torch.ones(rows, dtype=torch.bool, device=homes[0])
        with LiveBytes([*module.parameters(), *module.buffers(), ids, valid]) as live:
            clipped = ClippedSum([each.numel() for each in trained], 1.0, [each.device for each in trained])
            sums = Counter(live.now)
            with gradients.lent():
                begun = [gradients.begun(ids, ids) for _ in range(in_flight(count))]
                clipped.add(gradients.finished(*begun.pop(0)), valid)
    found = list[GpuBytes]()
    for home in homes:
        here = [each for each in (*module.parameters(), *module.buffers()) if each.device == home]
        own = [each for each in here if each.requires_grad]
        found.append(
            GpuBytes(
                trained=sum(each.numel() for each in own),
                frozen=sum(each.nbytes for each in here if not each.requires_grad),
                parameters=sum(each.nbytes for each in own),
                sums=sums[home],
                micro_batches=live.peaks[home] - sums[home],
            )
        )
    return tuple(found)


def _settings(config: str) -> Any:
    """Return the configuration of `transformers` of a model with these shapes, without dropout."""
    automatic = library("transformers").AutoConfig
    try:
        if config in KNOWN:
            settings = automatic.for_model(**KNOWN[config])
        else:
            settings = automatic.from_pretrained(config, local_files_only=True)
    except (ValueError, OSError, KeyError):
        raise ConfigError(
            "config",
            f"model.config: '{config}' has no shapes of a model.",
            f"Name a config.json, or {', '.join(KNOWN)}.",
        ) from None
    silence_config(settings)
    return settings


def _on_meta(settings: Any, lora: LoraConfig | None) -> nn.Module:
    with quiet(), torch.device("meta"):
        # A frozen base keeps the precision of its file.
        dtype = {} if lora is None else {"dtype": settings.dtype}
        model: nn.Module = library("transformers").AutoModelForCausalLM.from_config(settings, **dtype)
        if lora is None:
            return model.float()
        # Not strict: what a section has as lists, messages have as tuples.
        return adapted(model, LoraSpec.model_validate(lora.model_dump(), strict=False), "CAUSAL_LM")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts on each device the bytes of storages from their first use until they are freed, except those of ``held``.

    Attributes:
        now, peaks: by device.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peaks = Counter[torch.device](), Counter[torch.device]()
        self._known = {each.untyped_storage()._cdata for each in held}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch loads its compiler here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._meet(each.untyped_storage(), each.device)
        return result

    def _meet(self, storage: torch.UntypedStorage, home: torch.device) -> None:
        if (place := storage._cdata) not in self._known:
            self._known.add(place)
            self.now[home] += storage.nbytes()
            self.peaks[home] = max(self.peaks[home], self.now[home])
            weakref.finalize(storage, self._forget, place, home, storage.nbytes())

    def _forget(self, place: int, home: torch.device, size: int) -> None:
        self._known.discard(place)
        self.now[home] -= size
