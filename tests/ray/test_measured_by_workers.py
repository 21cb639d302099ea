"""A whole run on a real Ray whose model no driver runs: the vaults of its workers measure it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.coordinator.training import evaluation
from raycloak.coordinator.training.evaluation import public_evaluation
from raycloak.workers.terms.manifest import Manifest
from tests.protocol import settle

# The workers' processes import it, and the driver does not.
LARGE = """
from torch import nn

from raycloak.workers.models import models

models.LARGEST_IN_DRIVER = 0


def model():
    return nn.Linear(64, 10)
"""


def test_workers_measure_a_model_that_no_driver_runs(ray_cluster, raycloak_home, tmp_path, monkeypatch):
    settle(raycloak_home)
    (tmp_path / "large.py").write_text(LARGE)
    monkeypatch.chdir(tmp_path)
    config = parse_config(demo_config() | {"num_workers": 2, "steps": 2, "model": "large:model"})
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "build_model", None)
        result = Trainer(config, notice=lambda line: None).train()
    folder = Path(result["run_dir"])
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    saved = load_file(folder / "parameters.safetensors")
    flat = np.concatenate([saved[tensor.name].ravel() for tensor in manifest.computation.tensors])
    opened = public_evaluation(config, model_source(config.model), tmp_path)
    assert opened is not None
    here = opened.evaluator().measure(flat)
    shown = result["metrics"]
    assert shown["evaluation_accuracy"] == pytest.approx(here.accuracy, abs=2 / here.num_examples)
    assert shown["evaluation_f1"] == pytest.approx(here.f1, abs=0.02)
    kinds = [entry.kind for entry in read_exported_log(folder / "evidence.jsonl", manifest.log_owner).entries]
    # The demo measures every ten steps, and at the end.
    assert kinds.count("evaluation_ordered") == 1
