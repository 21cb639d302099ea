"""Measures the checks that a worker makes of a large model before anything is charged: ``raycloak-lab bench checks``.

The model is a Llama with random weights in bfloat16, frozen under a LoRA adapter: by default the 1.2 billion
parameters of the table "Size" of docs/models.md.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeVar

import torch
from torch import nn

from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.row_memory import largest_rows, mechanism_of_rows
from raycloak.workers.gradients.spare_rows import spare_rows
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.models.hub_model import LoraSpec, adapted
from raycloak.workers.models.losses import next_token_cross_entropy
from raycloak.workers.models.models import parameter_count
from raycloak.workers.models.text_model import TextModel, as_text_model
from raycloak_lab.bench.gradient_cases import missing_extra

_VOCABULARY: Final = 128_256
_HEAD: Final = 64
_LORA: Final = LoraSpec(rank=8, alpha=16, target_modules=("q_proj", "v_proj"), bias="none")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChecksBench:
    """Processor seconds of each check, on one thread.

    Attributes:
        parameters, trained: numbers of all parameters and of trained ones.
        largest_rows: rows of a micro-batch, which ``check_rows_s`` was measured with.
        checks_s: all checks together; a worker's start without its imports, data and known answer.
    """

    parameters: int
    trained: int
    tokens: int
    largest_rows: int
    check_trainable_s: float
    largest_rows_s: float
    check_rows_s: float
    spare_rows_s: float
    checks_s: float


def bench_checks(layers: int, width: int, tokens: int) -> ChecksBench:
    """Measure the checks of a Llama of so many layers, as wide, on texts of so many tokens.

    Raises:
        ConfigError: ``missing_extra``.
    """
    pin_numerics(True, 1)
    model, seconds = _llama(layers, width), list[float]()

    def timed(check: Callable[[], _T]) -> _T:
        begun = time.process_time()
        found = check()
        seconds.append(time.process_time() - begun)
        return found

    form = DatasetForm(
        num_examples=1024, feature_shape=(tokens,), feature_dtype="int64", label_shape=(tokens,), label_dtype="int64"
    )
    loss = next_token_cross_entropy
    trained = parameter_count(model)
    timed(lambda: check_trainable(model, form, loss, vocabulary=_VOCABULARY))
    rows = timed(lambda: largest_rows(model, form, loss, vocabulary=_VOCABULARY))
    mechanism = mechanism_of_rows(trained, rows)
    timed(lambda: check_rows(model, form, loss, [mechanism], vocabulary=_VOCABULARY))
    timed(lambda: spare_rows(model, form, vocabulary=_VOCABULARY))
    return ChecksBench(
        parameters=sum(each.numel() for each in model.parameters()),
        trained=trained,
        tokens=tokens,
        largest_rows=rows,
        check_trainable_s=seconds[0],
        largest_rows_s=seconds[1],
        check_rows_s=seconds[2],
        spare_rows_s=seconds[3],
        checks_s=sum(seconds),
    )


def _llama(layers: int, width: int) -> TextModel:
    try:
        package: Any = import_module("transformers")
    except ModuleNotFoundError:
        raise missing_extra("transformers") from None
    config = package.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // _HEAD,
        num_key_value_heads=max(1, width // _HEAD // 4),
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # transformers and peft warn of their own code.
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        base: nn.Module = package.AutoModelForCausalLM.from_config(config)
        model, _ = as_text_model(adapted(base, _LORA, "CAUSAL_LM").train())
    assert isinstance(model, TextModel)
    return model
