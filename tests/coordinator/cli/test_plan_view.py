"""What a plan says of an adapter."""

from types import SimpleNamespace

from raycloak.coordinator.cli.views.plan import adapter_cover, adapter_rows
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs.demo import demo_config


def test_a_plan_says_what_covers_an_adapter_that_leaks():
    plan = SimpleNamespace(epsilon_outsiders=3.0, delta=1e-5, mechanism=SimpleNamespace(private=True))
    lora = {"hf": "bert", "task": "sequence_classification", "classes": 2, "lora": {"rank": 8}}
    text = {"kind": "text", "path": "train.tsv", "max_length": 8}
    config = parse_config({**demo_config(), "model": lora, "dataset": text})
    ((label, said),) = adapter_rows(config, plan)
    assert label == "adapter"
    assert said.startswith("ε 3")
    assert "clients can reconstruct it" in said
    assert adapter_rows(parse_config(demo_config()), plan) == []
    assert adapter_cover(config, plan) == {"epsilon": 3.0, "delta": 1e-5}
    assert adapter_cover(parse_config(demo_config()), plan) == {}
    # Nothing is charged without noise: that ε of 0 covers nobody.
    plan.epsilon_outsiders, plan.mechanism.private = 0.0, False
    ((_, said),) = adapter_rows(config, plan)
    assert said.startswith("NO ε covers an example")
    assert adapter_cover(config, plan) == {"epsilon": None, "delta": 1e-5}
