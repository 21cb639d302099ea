"""The command `raycloak model check`: a line for each layer, and an exit code."""

import json

import numpy as np
import pytest
import yaml

from raycloak.coordinator.cli import app
from raycloak.coordinator.runs.demo import demo_config

MODELS = """
from torch import nn
def good(): return nn.Sequential(nn.Linear(64, 8), nn.ReLU(inplace=True), nn.Linear(8, 10))
def bad(): return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
def broken(): raise KeyError("row 17")
"""


@pytest.fixture
def raycloak(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODELS)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(demo_config()))

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            app.main(["model", "check", *arguments])
        captured = capfd.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run


def test_a_model_is_judged_by_its_types_or_in_a_run(raycloak):
    code, out, _ = raycloak("mine:good", "--json")
    found = json.loads(out)
    assert (code, found["refused"], found["was_run"]) == (0, [], False)
    assert found["trained_parameters"] == 64 * 8 + 8 + 80 + 10
    code, out, _ = raycloak("config.yaml", "--set", "model=mine:good", "--json")
    assert (code, json.loads(out)["was_run"]) == (0, True)


def test_a_refused_layer_is_named_with_its_mend(raycloak):
    code, out, _ = raycloak("mine:bad")
    assert code == 2
    assert "Model (1 refused, judged by types alone" in out
    assert "GroupNorm(1, 8) in place of BatchNorm1d" in " ".join(out.split())
    code, out, _ = raycloak("config.yaml", "--set", "model=mine:bad", "--json")
    assert (code, json.loads(out)["refused"]) == (2, ["1"])


def test_a_model_with_too_few_outputs_for_the_declared_classes_is_refused(raycloak, tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.zeros((20, 64), np.float32), y=np.arange(20) % 10)
    dataset = {"kind": "npz", "path": "rows.npz", "features": "x", "labels": "y", "classes": 11}
    config = demo_config() | {"model": "mine:good", "dataset": dataset}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    code, _, err = raycloak("config.yaml")
    assert code == 2
    assert err.startswith("error: labels_beyond_head: the data has 11 classes, and the model outputs for 10.")
    assert raycloak("config.yaml", "--set", "dataset.classes=10")[0] == 0


def test_what_is_no_model_is_bad_input(raycloak):
    assert raycloak("none.yaml")[2].startswith("error: config: cannot read none.yaml")
    assert raycloak("mine:none")[2].startswith("error: module_function: mine:none: ")
    code, _, err = raycloak("mine:broken", "--debug")
    assert code == 2
    assert "KeyError: 'row 17'" in err
