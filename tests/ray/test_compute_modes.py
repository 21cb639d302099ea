"""Runs on a real Ray that compute in another way: the same bytes for one and two workers."""

import json
from pathlib import Path

import pytest

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import RENYI, settle
from tests.tiny_text import write_gpt2

SHORT = {"steps": 2, "evaluation": None, "dp_config": RENYI}
WORKERS = [{"num_workers": 1, "secure_aggregation": False}, {"num_workers": 2}]


def narrow(folder: Path) -> dict[str, object]:
    return {**demo_config(), **SHORT, "precision": "bf16"}


def checkpointed(folder: Path) -> dict[str, object]:
    write_gpt2(folder / "gpt2")
    (folder / "plot.txt").write_text("the film was very fine a plot is dull\n" * 36)
    return {
        **SHORT,
        "model": {"hf": str(folder / "gpt2"), "task": "causal_lm", "lora": {"rank": 2}},
        "dataset": {"kind": "text_blocks", "path": str(folder / "plot.txt"), "max_length": 8},
        "virtual_workers": 4,
        "expected_batch_size": 16,
        "micro_batch_size": 4,
        "gradient_checkpointing": True,
    }


@pytest.mark.parametrize("task", [narrow, checkpointed])
def test_another_way_of_computing_gives_one_and_two_workers_the_same_bytes(ray_cluster, raycloak_home, tmp_path, task):
    (tmp_path / "secret").write_text("5e" * 32)
    settle(raycloak_home)
    raw = task(tmp_path)
    digests = []
    for workers in WORKERS:
        config = parse_config({**raw, **workers})
        result = Trainer(config, run_secret=tmp_path / "secret", notice=lambda line: None).train()
        folder = Path(result["run_dir"])
        events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        digests.append([event["parameter_digest"] for event in events if event["event"] == "step"])
        numerics = Manifest.model_validate_json((folder / "manifest.json").read_bytes()).computation.numerics
        assert (numerics.precision, numerics.gradient_checkpointing) == (
            config.precision,
            config.gradient_checkpointing,
        )
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]
