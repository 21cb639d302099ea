"""The models and batches of ``raycloak-lab bench gradient``: random weights of fixed seeds, public synthetic batches.

Dropout is 0 everywhere. A text model gets its positions with a row for each example, and an explicit mask in four
dimensions: Opacus needs the first, and transformers would drop a mask of ones and choose another kernel without it.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.losses import cross_entropy
from raycloak.workers.models.models import LossFn, ModelSource

Features = NDArray[np.float32] | NDArray[np.int64]
SEED: Final = 0
_LORA_RANK: Final = 8


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One model and its batch.

    Attributes:
        name: key of the table of models, and the name that a user gives.
        rows: m, examples of a micro-batch; the batch has no padding.
        micro_batches: M. Four of them share what a step does once, as in a run of the default shape.
    """

    name: str
    rows: int
    micro_batches: int = 4

    def build(self) -> nn.Module:
        """Return the model; the same weights at every call. ConfigError ``missing_extra`` without transformers."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # transformers and peft warn of their own code.
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(SEED)
            return _KINDS[self.name].build().train()

    def batches(self) -> list[tuple[Features, NDArray[np.int64]]]:
        """Return features [m, ...] and labels [m] or [m, T - 1] of each micro-batch."""
        draw = np.random.default_rng(SEED)
        return [_KINDS[self.name].batch(draw, self.rows) for _ in range(self.micro_batches)]

    @property
    def source(self) -> ModelSource:
        """The model by its name, for a process of its own; of one that is a function with a name."""
        build = _KINDS[self.name].build
        return ModelSource.of(f"{build.__module__}:{build.__qualname__}")

    @property
    def loss_fn(self) -> LossFn:
        """The loss of each example, which every method is given."""
        return _KINDS[self.name].loss_fn

    def form(self) -> tuple[DatasetForm, int | None]:
        """Return the form of the data, and the number of ids where features are ids."""
        kind = _KINDS[self.name]
        features, labels = self.batches()[0]
        form = DatasetForm(
            num_examples=self.rows * self.micro_batches,
            feature_shape=features.shape[1:],
            feature_dtype="float32" if kind.vocabulary is None else "int64",
            label_shape=labels.shape[1:],
            label_dtype="int64",
        )
        return form, kind.vocabulary


def case_named(name: str) -> BenchCase:
    """Return the case of that name; ConfigError ``bench_input`` if there is none."""
    if name not in CASES:
        raise ConfigError("bench_input", f"the bench has no model '{name}'.", f"Name one of {', '.join(CASES)}.")
    return CASES[name]


def missing_extra(name: str) -> ConfigError:
    """Return the refusal for a package of the extra ``hf`` that is not installed."""
    return ConfigError("missing_extra", f"this needs the package {name}.", "Install raycloak[hf].")


def next_token(output: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over an example's own tokens, [n], of logits [n, T - 1, V] and ids [n, T - 1]."""
    losses = functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(1)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A model, its loss, and the shape of its examples: of pixels, or of T ids below ``vocabulary``."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 10
    vocabulary: int | None = None
    loss_fn: LossFn = cross_entropy

    def batch(self, draw: np.random.Generator, rows: int) -> tuple[Features, NDArray[np.int64]]:
        if self.vocabulary is None:
            return draw.random((rows, *self.shape), np.float32), draw.integers(self.classes, size=rows)
        ids = draw.integers(self.vocabulary, size=(rows, *self.shape))
        return ids, ids[:, 1:] if self.loss_fn is next_token else draw.integers(self.classes, size=rows)


def _digits() -> nn.Module:
    """Build the model of examples/digits.yaml."""
    return nn.Sequential(nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    """Build the convolutional network of the MNIST recipe (`examples/mnist/recipes.py`)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3),
        nn.GroupNorm(4, 16, affine=False),
        _Pool(),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.GroupNorm(4, 32, affine=False),
        _Pool(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.LayerNorm(32, elementwise_affine=False),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class _Pool(nn.Module):
    """The recipe's pooling: a maximum over 2 x 2 windows, in the memory order in which the CPU is fast at it."""

    def forward(self, maps: Tensor) -> Tensor:
        pooled = functional.max_pool2d(maps.contiguous(memory_format=torch.channels_last), 2, stride=1)
        return pooled.contiguous()


def _mlp() -> nn.Module:
    """Build three linear layers with 1,001,738 parameters."""
    return nn.Sequential(
        nn.Linear(784, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


class _TextModel(nn.Module):
    """A module from ids [n, T] to logits, around a model of transformers.

    Args:
        model: its forward takes ids, positions and a mask.
        causal: a token sees those before it, and the logits are those of the next token: [n, T - 1, V].
        extra: further arguments of the forward that are zeros of the shape of the ids.
    """

    def __init__(self, model: nn.Module, causal: bool, extra: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model, self._causal, self._extra = model, causal, extra

    def forward(self, ids: Tensor) -> Tensor:
        rows, tokens = ids.shape
        dtype = next(self.parameters()).dtype
        hidden = torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype, device=ids.device)
        mask = hidden.triu(1) if self._causal else torch.zeros_like(hidden)
        output = self.model(
            input_ids=ids,
            # A row for each example: Opacus finds no batch in positions of shape [1, T].
            position_ids=torch.arange(tokens, device=ids.device).repeat(rows, 1),
            attention_mask=mask.expand(rows, 1, tokens, tokens),
            **{name: torch.zeros_like(ids) for name in self._extra},
        )
        logits: Tensor = output.logits
        return logits[:, :-1] if self._causal else logits


def _bert() -> nn.Module:
    """Build a BERT of MiniLM's width with a classifier of two classes."""
    package = _package("transformers")
    config = package.BertConfig(
        vocab_size=30_522,
        hidden_size=384,
        num_hidden_layers=2,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return _TextModel(package.BertForSequenceClassification(config), causal=False, extra=("token_type_ids",))


def _gpt2() -> nn.Module:
    """Build a GPT-2 whose head is tied to its embedding."""
    package = _package("transformers")
    config = package.GPT2Config(
        vocab_size=5000,
        n_positions=128,
        n_embd=256,
        n_layer=2,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _TextModel(package.GPT2LMHeadModel(config), causal=True)


def _llama() -> nn.Module:
    package = _package("transformers")
    config = package.LlamaConfig(
        vocab_size=5000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return _TextModel(package.LlamaForCausalLM(config), causal=True)


def _with_lora(text: nn.Module, targets: tuple[str, ...], **settings: Any) -> nn.Module:
    """Freeze ``text`` and add adapters of rank 8 to the layers of those names."""
    config = _package("peft").LoraConfig(
        r=_LORA_RANK,
        lora_alpha=2 * _LORA_RANK,
        lora_dropout=0.0,
        target_modules=list(targets),
        # PEFT begins with B = 0, where half of the gradient is zero and would be compared with nothing.
        init_lora_weights=False,
        **settings,
    )
    assert isinstance(text, _TextModel)
    text.model = _package("peft").get_peft_model(text.model, config)
    return text


def _bert_lora() -> nn.Module:
    text = _with_lora(_bert(), ("query", "value"))
    # The classifier of a new task is trained as a whole.
    for name, tensor in text.named_parameters():
        tensor.requires_grad_(tensor.requires_grad or ".classifier." in name)
    return text


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise missing_extra(name) from None


_KINDS: Final[Mapping[str, _Kind]] = MappingProxyType(
    {
        "digits": _Kind(_digits, (64,)),
        "cnn": _Kind(_cnn, (1, 28, 28)),
        "mlp": _Kind(_mlp, (784,)),
        "bert": _Kind(_bert, (64,), 2, 30_522),
        "bert-lora": _Kind(_bert_lora, (64,), 2, 30_522),
        "gpt2": _Kind(_gpt2, (128,), vocabulary=5000, loss_fn=next_token),
        "gpt2-lora": _Kind(
            lambda: _with_lora(_gpt2(), ("c_attn",), fan_in_fan_out=True), (128,), vocabulary=5000, loss_fn=next_token
        ),
        "llama-lora": _Kind(
            lambda: _with_lora(_llama(), ("q_proj", "v_proj")), (128,), vocabulary=5000, loss_fn=next_token
        ),
    }
)
CASES: Final[Mapping[str, BenchCase]] = MappingProxyType(
    {name: BenchCase(name, 64 if kind.vocabulary is None else 8) for name, kind in _KINDS.items()}
)
