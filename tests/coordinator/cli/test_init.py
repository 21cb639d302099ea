"""``raycloak init``: every template is a project that can be planned as it is written, and one of them is run whole."""

import json
from typing import get_args

import pytest
import yaml

import raycloak as package
from raycloak.coordinator.cli import app
from raycloak.coordinator.cli.init import FILES, Template, write_project
from raycloak.coordinator.config.run import load_config
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.user_code import resolve


@pytest.fixture
def raycloak(capfd, monkeypatch):
    """Run the command in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            app.main([str(each) for each in arguments])
        captured = capfd.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run


@pytest.mark.parametrize("template", get_args(Template))
def test_a_new_project_can_be_planned_at_once(raycloak, tmp_path, template):
    folder = tmp_path / "own" / template
    code, out, err = raycloak("init", folder, "--template", template, "--json")
    assert code == 0, err
    written = json.loads(out)
    assert {path.name for path in folder.iterdir()} == {*FILES, *written["data"]}
    code, out, err = raycloak("plan", folder / "config.yaml", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["steps_within_cap"] == plan["steps"]
    assert plan["rows_per_expected_row"] <= 1.5, "most of what it computes is drawn and no padding"
    assert plan["delta"] < 1 / plan["num_examples"]
    # A warning in a template would be in every project.
    assert [each for each in plan["warnings"] if not each.startswith("The model: ")] == []


def test_a_project_says_how_to_go_on_and_nothing_is_overwritten(raycloak, tmp_path):
    code, out, _ = raycloak("init", tmp_path / "own", "--template", "image")
    assert code == 0
    assert "raycloak run config.yaml" in out
    before = {path: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    code, _, err = raycloak("init", tmp_path / "own", "--template", "tabular")
    assert (code, "error: folder_not_empty" in err) == (2, True)
    assert {path: path.read_bytes() for path in (tmp_path / "own").iterdir()} == before
    code, _, err = raycloak("init", tmp_path / "other", "--template", "video")
    assert (code, "not one of 'tabular', 'patients', 'image', 'text', 'lora'." in err) == (2, True)
    assert not (tmp_path / "other").exists()


def test_a_template_of_hugging_face_is_refused_without_the_libraries(raycloak, tmp_path, monkeypatch):
    def missing():
        raise ConfigError("hf_missing", "models need peft.", "pip install 'raycloak[hf]'")

    monkeypatch.setattr("raycloak.workers.inputs.hub_files.require_libraries", missing)
    code, _, err = raycloak("init", tmp_path / "own", "--template", "lora")
    assert (code, "error: hf_missing" in err) == (2, True)
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("template", get_args(Template))
def test_a_configuration_has_few_words_and_its_project_says_what_is_yours(tmp_path, template):
    write_project(tmp_path, template)
    raw = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert len(raw) <= 10
    assert all("YOURS" in (tmp_path / name).read_text() for name in ("config.yaml", "README.md"))
    assert load_config(tmp_path / "config.yaml").epochs is not None
    assert callable(resolve("project:prepare", tmp_path))
    assert callable(package.load)
