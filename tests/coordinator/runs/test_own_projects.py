"""The first hour of a newcomer: a template is written, changed as its README says, checked, trained and loaded."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

import raycloak
from raycloak.coordinator.cli.init import write_project
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.planning.data_check import check_data
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.record.folder import RunFolder
from tests.protocol import trained
from tests.tiny_text import write_bert, write_gpt2, write_reviews

pytestmark = pytest.mark.usefixtures("checked_once")
PRIVATE = {"noise_multiplier": 2.0, "epsilon_cap": 20.0}
ROWS = 60


def table(folder):
    """Own columns, and a number for each class."""
    draws = np.random.default_rng(5).normal(size=(2 * ROWS, 2))
    for name, part in (("train", draws[:ROWS]), ("public", draws[ROWS:])):
        outcome = np.where(part.sum(axis=1) > 0, "ill", "well")
        lines = [f"{age:.3f},{bmi:.3f},{each}" for (age, bmi), each in zip(part, outcome, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["age,bmi,outcome", *lines]))
    project = (folder / "project.py").read_text()
    start, end = project.index("COLUMNS = {"), project.index("}\nCLASSES")
    (folder / "project.py").write_text(project[:start] + 'COLUMNS = {"age": (-4, 4), "bmi": (-4, 4)' + project[end:])
    return {"kind": "csv", "labels": "outcome", "classes": ["well", "ill"]}, {}


def images(folder):
    draws = np.random.default_rng(5)
    for name in ("train", "public"):
        pixels = draws.integers(0, 256, (ROWS, 3, 8, 8)).astype(np.uint8)
        np.savez(folder / f"{name}.npz", images=pixels, labels=draws.integers(0, 2, ROWS))
    project = (folder / "project.py").read_text()
    changed = project.replace("CHANNELS, SIDE, CLASSES = 1, 8, 10", "CHANNELS, SIDE, CLASSES = 3, 8, 2")
    assert changed != project
    (folder / "project.py").write_text(changed)
    return {"kind": "npz", "scale": 255}, {}


def texts(folder):
    write_bert(folder / "mine")
    for name in ("train", "public"):
        write_reviews(folder / f"{name}.tsv", ROWS)
    return {"kind": "text", "max_length": 8}, {"model": {"hf": "mine", "task": "sequence_classification", "classes": 2}}


def stories(folder):
    write_gpt2(folder / "mine")
    for name in ("train", "public"):
        (folder / f"{name}.txt").write_text("the film was very fine a plot is dull\n" * ROWS)
    model = {"hf": "mine", "task": "causal_lm", "lora": {"rank": 2, "target_modules": ["c_attn"]}}
    return {"kind": "text_blocks", "max_length": 8}, {"model": model}


OWN = {"tabular": (table, ".csv"), "image": (images, ".npz"), "text": (texts, ".tsv"), "lora": (stories, ".txt")}


def predicted(template, module):
    """Return what the loaded model says of two inputs."""
    with torch.no_grad():
        if template == "tabular":
            return module(torch.zeros(2, 2))
        if template == "image":
            return module(torch.zeros(2, 3, 8, 8))
        ids = torch.tensor([[2, 4, 6, 3], [2, 9, 5, 3]])
        return module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize("template", OWN)
def test_a_newcomers_own_project_leads_from_its_template_to_a_loaded_model(template, tmp_path):
    folder = tmp_path / "home" / "data"
    write_project(folder, template)
    shutil.rmtree(folder / "public", ignore_errors=True)
    write_own, ending = OWN[template]
    dataset, changes = write_own(folder)
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    raw |= {"dataset": {"path": f"train{ending}"} | dataset, "dp_config": PRIVATE, **changes}
    raw |= {"evaluation": {"dataset": {"path": f"public{ending}", "public": True} | dataset}}
    raw |= {"expected_batch_size": 20, "epochs": None, "steps": 2, "virtual_workers": 2}
    (folder / "config.yaml").write_text(json.dumps(raw))
    settings = load_config(folder / "config.yaml")
    assert check_data(settings, folder).report.examples >= ROWS
    assert plan_of(settings, folder).steps_within_cap == 2
    run = trained(tmp_path / "home", **raw)
    assert len(run.digests) == 2
    record = RunFolder.create(run.config, run.session.run_id, str(folder), None)
    for name in ("manifest.json", "parameters.safetensors"):
        shutil.copy2(run.folder / name, record.path)
    record.mark("done")
    logits = predicted(template, raycloak.load(record.path))
    assert logits.shape[0] == 2
    assert torch.isfinite(logits).all()
