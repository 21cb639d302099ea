"""TrainingConfig is a part of RunConfig, with its names, types and defaults; what it leaves out is refused by name."""

import json

import pytest

import raycloak
from raycloak.coordinator.client.training_config import parse_training_config
from tests.coordinator.client.conftest import CONFIG

OWN = {"lora", "metadata"}
"""Fields that a run has elsewhere, or not at all."""
OTHERWISE = {"dataset", "expected_batch_size", "loss", "model"}
"""Fields with other values: a registered name; always given; the model's own by default."""


def test_fields_are_the_runs():
    mine, runs = raycloak.TrainingConfig.model_fields, raycloak.RunConfig.model_fields
    assert mine.keys() - runs.keys() == OWN
    for name in mine.keys() - OWN - OTHERWISE:
        assert (mine[name].annotation, mine[name].default, repr(mine[name].metadata)) == (
            runs[name].annotation,
            runs[name].default,
            repr(runs[name].metadata),
        ), name


def test_a_configuration_from_python_and_from_json_is_the_same():
    config = raycloak.TrainingConfig(
        name="mine",
        model=raycloak.ModelConfig(hf="gpt2", task="causal_lm"),
        lora=raycloak.LoraConfig(rank=4, alpha=8, target_modules=["c_attn"], bias="lora_only"),
        optimizer=raycloak.OptimizerConfig(name="adafactor", learning_rate=0.01, schedule="cosine", warmup_steps=3),
        dp_config=raycloak.DPConfig(target_epsilon=3.0),
        dataset="letters",
        expected_batch_size=64,
        metadata={"why": "a test"},
    )
    assert parse_training_config(config.to_json()) == config
    assert parse_training_config(json.loads(config.to_json())) == config


@pytest.mark.parametrize("field", sorted(raycloak.RunConfig.model_fields.keys() - raycloak.TrainingConfig.model_fields))
def test_what_the_service_decides_is_refused_by_name(field):
    with pytest.raises(raycloak.ServiceValidationError, match=field) as caught:
        parse_training_config({**CONFIG, field: 1})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"steps": True}, "steps"),
        ({"steps": 3, "epochs": 2}, "steps"),
        ({"optimizer": {"name": "adamww"}}, "optimizer.name"),
        ({"optimizer": {"beta1": 1}}, "optimizer.beta1"),
        ({"dp_config": {}}, "dp_config"),
        ({"model": {"hf": "gpt2", "task": "causal_lm", "depth": 3}}, "model.depth"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": "m:f", "lora": {}}, "lora"),
        ({"model": {"hf": "gpt2", "task": "causal_lm", "lora": {}}, "lora": {}}, "lora"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"loss": "entropy"}, "loss"),
        ({"dataset": {"kind": "npz", "path": "/etc/passwd"}}, "dataset"),
        ({"dataset": ""}, "dataset"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(33)}}, "metadata"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_field_is_named(change, field):
    with pytest.raises(raycloak.ServiceValidationError) as caught:
        parse_training_config({**CONFIG, **change})
    assert caught.value.field == field


def test_an_unknown_field_is_answered_with_the_one_that_was_meant():
    for field, raw in {"expected_batch_size": {"batch_size": 1}, "optimizer.learning_rate": {"optimizer": {"lr": 1}}}.items():  # fmt: skip # noqa: E501
        with pytest.raises(raycloak.ServiceValidationError, match=f"did you mean {field}?"):
            parse_training_config({**CONFIG, **raw})


def test_what_is_no_object_is_refused():
    for raw in ("[", "[]", 3, None):
        with pytest.raises(raycloak.ServiceValidationError):
            parse_training_config(raw)


def test_a_wrong_configuration_in_python_is_refused_as_the_service_refuses_it():
    with pytest.raises(raycloak.ServiceValidationError, match="num_workers") as caught:
        raycloak.TrainingConfig(**CONFIG, num_workers=3)
    with pytest.raises(raycloak.ServiceValidationError) as parsed:
        parse_training_config({**CONFIG, "num_workers": 3})
    assert (caught.value.message, caught.value.field) == (parsed.value.message, parsed.value.field)
    assert caught.value.__suppress_context__


def test_a_mapping_that_is_wrong_never_leaves(memory_service, service):
    with pytest.raises(raycloak.ServiceValidationError) as caught:
        service.create_training_client({**CONFIG, "policy": "/etc/passwd"})
    assert caught.value.field == "policy"
    assert memory_service.clients == {}
