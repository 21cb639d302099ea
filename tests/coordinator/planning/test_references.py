"""Both `plan` and the trainer check what a configuration names before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.references import preflight
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ConfigError

GOOD: dict[str, Any] = {
    "expected_batch_size": 100,
    "steps": 2,
    "model": "raycloak.coordinator.runs.demo:digits_model",
    "dataset": {"kind": "digits"},
    "dp_config": {"target_epsilon": 8.0},
}
UNUSABLE = [
    ({"evaluation": {"dataset": {"kind": "digits", "split": "public"}}}, "evaluation_not_public"),
    ({"ledger": {"url": "mysql://host/x"}}, "ledger_url"),
    ({"ledger": {"url": "ledger.sqlite"}}, "ledger_url"),
    ({"ledger": {"url": "sqlite:///ledger.sqlite"}}, "ledger_url"),
    ({"ledger": {"witness": "witness"}}, "witness"),
    ({"checkpoint": {"recipients": ["none.pub"]}}, "recipient"),
    ({"key_service": {"address": "owner:7443", "contract": "none.json"}}, "key_service"),
]


@pytest.mark.parametrize(("changes", "code"), UNUSABLE)
def test_what_could_not_be_used_later_is_refused_by_name(changes: dict[str, Any], code: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        preflight(parse_config(GOOD | changes), tmp_path)
    assert refused.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_used_is_connected_to_by_nobody(tmp_path: Path):
    ledger = {"url": "postgresql://127.0.0.1:1/none", "witness": "http://127.0.0.1:1/none"}
    preflight(parse_config(GOOD | {"ledger": ledger}), tmp_path)
    preflight(parse_config(GOOD | {"ledger": {"witness": str(tmp_path / "not-there-yet")}}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_trainer_and_the_plan_look_first(tmp_path: Path):
    config = parse_config(GOOD | {"checkpoint": {"recipients": ["none.pub"]}})
    with pytest.raises(ConfigError, match=r"recipient: cannot read .*none\.pub"):
        Trainer(config, config_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"recipient: cannot read .*none\.pub"):
        plan_of(config, tmp_path)


def test_a_plan_has_a_tensor_for_each_aggregator(tmp_path: Path):
    with pytest.raises(ConfigError, match="aggregators: 5 aggregators cannot share 4 trainable tensors"):
        plan_of(parse_config(GOOD | {"aggregators": 5}), tmp_path)
