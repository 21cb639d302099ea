"""`workers/models/liger.py`: which models its kernels enter, and in Triton's interpreter what they compute there."""

from importlib.util import find_spec
from unittest.mock import patch

import peft
import pytest
import torch
import transformers
from torch import nn

from raycloak.metrics.errors import ModelError
from raycloak.workers.models import liger
from raycloak.workers.models.hub_model import HubSpec, LoraSpec
from raycloak.workers.models.models import loss_function
from raycloak.workers.terms.loss import LossSpec
from tests.tiny_text import write_gpt2

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
needs_liger = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel (the extra liger)")
SIZES = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
INTERPRETED = "tests.workers.models.interpreted_liger"
LORA = LoraSpec(rank=2, alpha=4.0, target_modules=None, bias="none")


def llama(**fields):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | fields))


def adapted():
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))


def refused(match, act):
    with pytest.raises(ModelError, match=match) as error:
        act()
    assert error.value.code == "liger_kernels"


def test_what_the_kernels_do_not_fit_is_refused_by_name():
    class Own(transformers.LlamaForCausalLM):
        """A model with code of its own."""

    liger.require_fitting(llama(), adapted=True)
    refused("the whole model is trained", lambda: liger.require_fitting(llama(), adapted=False))
    refused("Own were not compared", lambda: liger.require_fitting(Own(llama().config), adapted=True))
    refused("activation gelu", lambda: liger.require_fitting(llama(hidden_act="gelu"), adapted=True))
    gemma = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES, head_dim=4))
    refused("GemmaForCausalLM were not compared", lambda: liger.require_fitting(gemma, adapted=True))


def test_a_model_by_configuration_is_refused_as_it_is_built(tmp_path):
    folder = str(write_gpt2(tmp_path / "gpt2"))
    spec = HubSpec(hf=folder, task="causal_lm", lora=LORA, use_liger_kernels=True)
    refused("GPT2LMHeadModel were not compared", lambda: spec.build(tmp_path))
    refused("the whole model is trained", lambda: spec.model_copy(update={"lora": None}).build(tmp_path))


def test_a_cpu_computes_in_no_kernels():
    module = adapted()
    refused("need a GPU", lambda: liger.use_liger(module))
    assert not liger.has_liger(module)


def test_a_model_over_several_gpus_computes_in_none(monkeypatch):
    monkeypatch.setattr(liger, "_DEVICE", "cpu")
    module = adapted()
    module.get_base_model().lm_head.to("meta")
    refused("the model lies over several", lambda: liger.use_liger(module))


def test_another_version_or_none_is_refused(monkeypatch):
    monkeypatch.setattr(liger, "_DEVICE", "cpu")
    monkeypatch.setattr(liger, "version", lambda name: "0.8.4")
    refused("liger-kernel 0.8.4 is installed, and version 0.8.5 is needed", lambda: liger.use_liger(adapted()))
    monkeypatch.undo()
    monkeypatch.setattr(liger, "_DEVICE", "cpu")
    monkeypatch.setattr(liger, "PACKAGE", "no-such-package")
    refused("no-such-package is not installed", lambda: liger.use_liger(adapted()))


@needs_liger
def test_a_trained_norm_is_refused(monkeypatch):
    monkeypatch.setattr(liger, "_DEVICE", "cpu")
    module = adapted()
    module.get_base_model().model.norm.weight.requires_grad_()
    refused("layer 'base_model.model.model.norm' .* is trained", lambda: liger.use_liger(module))


@needs_liger
def test_other_models_of_the_process_keep_their_layers(monkeypatch):
    monkeypatch.setattr(liger, "_DEVICE", "cpu")
    module, other = adapted(), adapted()
    rotation = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    liger.use_liger(module)
    assert liger.has_liger(module)
    assert not liger.has_liger(other)
    assert transformers.models.llama.modeling_llama.apply_rotary_pos_emb is rotation
    with torch.no_grad():
        assert other(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()


def test_attention_that_rotates_in_another_way_is_refused():
    class Attention(nn.Module):
        def forward(self, x):
            return x

    refused("Attention of transformers .* calls no apply_rotary_pos_emb", lambda: liger._rotating(Attention))


def test_a_spec_without_the_kernels_has_the_bytes_of_before():
    spec = HubSpec(hf="a", task="causal_lm", lora=LORA)
    assert b"liger" not in spec.encode()
    assert b"liger" in spec.model_copy(update={"use_liger_kernels": True}).encode()


def test_losses_of_liger_are_refused_by_name():
    def loss(output, labels):
        return output

    loss.__module__ = "liger_kernel.transformers.functional"
    with patch("raycloak.workers.models.models.resolve", lambda name, base: loss):
        refused("the loss own:loss is Liger's", lambda: loss_function(LossSpec(name="own:loss"), "."))


# Several functions in one process: it takes seconds to import Liger.


@needs_liger
def test_guarantee_a_kernel_writes_to_no_tensor_but_its_functions_own_and_rows_are_bounded(interpreted):
    interpreted("functions", "values", "families")


@needs_liger
def test_guarantee_outputs_and_sums_agree_or_a_model_is_refused(interpreted):
    interpreted("checks", "wrong_kernels", "habits_of_liger")


@needs_liger
def test_a_workload_in_the_kernels_passes_all_checks_and_names_them(interpreted):
    interpreted("workload")
