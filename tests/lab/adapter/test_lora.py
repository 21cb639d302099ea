"""What of a PEFT model can be served, and what is refused by name."""

import peft
import pytest
import torch
from safetensors.torch import load

from raycloak.metrics.errors import ModelError
from raycloak_lab.adapter import connection, lora
from raycloak_lab.adapter.lora import lora_of

SHARED_BYTES = lora._SHARED_BYTES


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(6, 4)
        self.words = torch.nn.Embedding(5, 6)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.query(self.words(ids)))


def adapted(**fields):
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": ["query"], **fields})
    return peft.get_peft_model(Net(), config)


def refusal(module, shared=()):
    with pytest.raises(ModelError) as error:
        lora_of(module, shared)
    assert error.value.code == "adapter_kind"
    return error.value.message


def test_the_matrices_are_the_models_own_with_its_scale():
    module = adapted(init_lora_weights=False)
    (name, low), *rest = lora_of(module).projections.items()
    assert (name, rest) == ("query", [])
    layer = module.base_model.model.query
    given = torch.randn(3, 6, dtype=torch.float64)
    expected = layer.double()(given) - layer.base_layer.double()(given)
    assert torch.allclose(given @ torch.from_numpy(low.up @ low.down).T, expected, atol=1e-6)


def test_a_fresh_adapter_can_be_served_too():
    assert (lora_of(adapted()).projections["query"].up == 0).all()


def test_a_trained_head_is_shared_if_it_is_named_and_refused_otherwise():
    module = adapted(modules_to_save=["head"])
    assert "'head'" in refusal(module)
    assert "'head'" in refusal(module, ["other"])
    shared = load(lora_of(module, ["head"]).shared)
    assert {name: list(each.shape) for name, each in shared.items()} == {"head.weight": [2, 4], "head.bias": [2]}


def test_shared_parts_that_no_client_could_be_told_are_refused(monkeypatch):
    module = adapted(modules_to_save=["head"])
    monkeypatch.setattr(lora, "_SHARED_BYTES", len(lora_of(module, ["head"]).shared))
    lora_of(module, ["head"])
    monkeypatch.setattr(lora, "_SHARED_BYTES", lora._SHARED_BYTES - 1)
    assert "shared parts" in refusal(module, ["head"])
    assert 4 * SHARED_BYTES <= connection._ANSWER_BYTES


@pytest.mark.parametrize(
    ("why", "make"),
    [
        ("no adapter of PEFT", Net),
        ("uses DoRA", lambda: adapted(use_dora=True)),
        ("'query.base_layer.bias' is trained", lambda: adapted(bias="lora_only")),
        ("'head.bias' is trained", lambda: adapted(bias="all")),
        ("has a bias of its own", lambda: adapted(lora_bias=True)),
        ("is no linear layer", lambda: adapted(target_modules=["query", "words"])),
    ],
)
def test_other_adapters_are_refused_by_name(why, make):
    assert why in refusal(make())


def test_several_adapters_and_a_merged_one_are_refused():
    module = adapted()
    module.add_adapter("second", peft.LoraConfig(r=2, target_modules=["query"]))
    assert "several adapters" in refusal(module)
    module = adapted()
    module.merge_adapter()
    assert "merged" in refusal(module)
