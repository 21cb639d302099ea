"""A trained model is loaded with its released weights, and exported to what other libraries open."""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from safetensors.numpy import load_file, save_file

import raycloak
from raycloak.attestation.sealed.package_keys import TrustStore, create_recipient, load_signer
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.cli import app
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.record.folder import AUDIT, RunFolder
from raycloak.coordinator.runs.export import export
from raycloak.coordinator.runs.released_model import Keys, released_model
from raycloak.coordinator.training.assignment import NewRun
from raycloak.metrics.errors import ConfigError, EvidenceError, ModelError, RefusedError
from raycloak.workers.terms.loss import LossSpec
from tests import models
from tests.protocol import RENYI, trained
from tests.tiny_text import write_bert, write_gpt2, write_reviews

LENGTH = 8
LORA = {"rank": 2}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("public")
    write_bert(folder / "bert", num_hidden_layers=1)
    write_bert(folder / "unpooled", pooled=False, num_hidden_layers=1)
    write_gpt2(folder / "gpt2", n_layer=1)
    write_reviews(folder / "train.tsv", 40)
    (folder / "plot.txt").write_text("the film was very fine a plot is dull\n" * 36)
    return folder


def of_text(site, name="bert", **model):
    return {
        "model": {"hf": str(site / name), "task": "sequence_classification", "classes": 2, **model},
        "dataset": {"kind": "text", "path": str(site / "train.tsv"), "max_length": LENGTH},
    }


def of_blocks(site, **model):
    return {
        "model": {"hf": str(site / "gpt2"), "task": "causal_lm", **model},
        "dataset": {"kind": "text_blocks", "path": str(site / "plot.txt"), "max_length": LENGTH},
    }


RUNS = {
    "plain": lambda site: {"model": "tests.models:small_model"},
    "bert lora": lambda site: of_text(site, lora=LORA),
    "unpooled lora": lambda site: of_text(site, "unpooled", lora=LORA),
    "gpt2 lora": lambda site: of_blocks(site, lora=LORA),
    "gpt2 whole": of_blocks,
}


@pytest.fixture(scope="module")
def runs(site, tmp_path_factory):
    """Return the run directory of a name; each is trained once."""
    made = {}

    def run(name):
        if name not in made:
            home = tmp_path_factory.mktemp("home")
            made[name] = directory_of(
                trained(home, **{**RUNS[name](site), "steps": 1, "micro_batch_size": 8, "dp_config": RENYI})
            )
        return made[name]

    return run


def directory_of(run):
    """Return the run's directory as a command leaves it."""
    # A fixture that more than one test shares has no home of its own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYCLOAK_HOME", str(run.home))
        folder = RunFolder.create(run.config, run.session.run_id, str(run.home), None)
    for name in ("manifest.json", "parameters.safetensors"):
        shutil.copy2(run.folder / name, folder.path)
    folder.mark("done")
    # Below a home that the next test does not have.
    return folder.path.rename(run.home / "directory")


def load(path, **options):
    """Load a run of these tests, which lies in no state folder."""
    return raycloak.load(path, **{"run_code": True, **options})


def inputs():
    return torch.tensor([[2, 4, 6, 7, 3], [2, 9, 5, 8, 3]])


def logits(module):
    with torch.no_grad():
        return module(input_ids=inputs(), attention_mask=torch.ones_like(inputs())).logits


def code(call, kind=ConfigError):
    with pytest.raises(kind) as refusal:
        call()
    return refusal.value.code


@pytest.mark.parametrize("name", RUNS)
def test_the_weights_of_a_loaded_model_are_those_that_the_run_released(runs, name):
    module = load(runs(name))
    released = load_file(runs(name) / "parameters.safetensors")
    found = {each: tensor for each, tensor in module.named_parameters() if tensor.requires_grad}
    # A model of transformers comes without the wrapper that gave it its batches.
    prefix = "" if name == "plain" else "model."
    assert {f"{prefix}{each}" for each in found} == set(released)
    for each, tensor in found.items():
        assert np.array_equal(tensor.detach().numpy(), released[f"{prefix}{each}"])
    assert not module.training


def test_a_run_is_loaded_and_exported_by_its_name(runs, tmp_path, raycloak_home, capfd, monkeypatch):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    shutil.copytree(runs("plain"), raycloak_home / "runs" / "mine")
    run_id = RunFolder.open(runs("plain")).record.run_id
    wanted = load(runs("plain")).state_dict()
    for named in ("last", "mine", run_id[:6]):
        found = load(named).state_dict()
        assert all(torch.equal(found[each], wanted[each]) for each in wanted)
    assert raycloak_command("export", "last", "--format", "torch", "--out", tmp_path / "model.pt") == 0
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)) == set(wanted)
    assert code(lambda: load("nowhere")) == "run_unknown"


def test_a_bare_transformers_or_peft_model_is_what_comes_back(runs):
    assert type(load(runs("gpt2 whole"))) is transformers.GPT2LMHeadModel
    assert isinstance(load(runs("bert lora")), peft.PeftModel)


def test_weights_that_were_changed_are_refused(runs, tmp_path):
    folder = shutil.copytree(runs("plain"), tmp_path / "run")
    path = folder / "parameters.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert code(lambda: load(folder), RefusedError) == "weights_changed"
    path.write_bytes(content[:20])
    assert code(lambda: load(folder), RefusedError) == "weights_changed"
    save_file({"other": np.zeros(3, np.float32)}, path)
    assert code(lambda: load(folder), RefusedError) == "weights_changed"


def test_another_model_or_base_is_refused(runs, site, tmp_path):
    assert code(lambda: load(runs("plain"), model_init_fn=models.wide_model), ModelError) == "model_mismatch"
    settings = raycloak.RunConfig(
        **of_text(write_other(tmp_path, site), lora=LORA), expected_batch_size=4, dp_config=RENYI
    )
    with pytest.raises(ModelError, match="a frozen tensor") as refusal:
        load(runs("bert lora"), config=settings)
    assert refusal.value.code == "model_mismatch"


def write_other(folder, site):
    """Return a place with the same text and a BERT of other weights."""
    shutil.copytree(site, folder / "other")
    path = folder / "other" / "bert" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["embeddings.word_embeddings.weight"][7, 0] += 1
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return folder / "other"


def test_a_run_without_weights_says_so(runs, tmp_path):
    folder = shutil.copytree(runs("plain"), tmp_path / "run")
    (folder / "parameters.safetensors").unlink()
    assert code(lambda: load(folder)) == "no_weights"
    (folder / "manifest.json").unlink()
    assert code(lambda: load(folder)) == "no_weights"
    assert code(lambda: load(tmp_path)) == "not_a_run"


def test_a_run_whose_folder_is_gone_asks_for_its_configuration(runs, tmp_path):
    folder = shutil.copytree(runs("plain"), tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"driver_base": str(tmp_path / "gone")}))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("tests.models:", "absent:"))
    with pytest.raises(ConfigError, match=r"model_needed: .*/gone, .* is gone.* --config CONFIG"):
        load(folder)


def test_an_audit_has_no_model_to_load(runs, tmp_path):
    folder = shutil.copytree(runs("plain"), tmp_path / "run")
    (folder / AUDIT).touch()
    with pytest.raises(ConfigError, match=r"no_weights: .* is an audit"):
        load(folder)


def test_a_model_that_was_given_in_python_is_given_again(runs, tmp_path):
    folder = shutil.copytree(runs("plain"), tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("model: tests.models:small_model", "model: null"))
    assert code(lambda: load(folder)) == "model_needed"
    module = load(folder, model_init_fn=models.small_model)
    assert torch.equal(next(module.parameters()), next(load(runs("plain")).parameters()))


def test_paths_start_where_the_run_was_started_and_not_where_it_is_loaded(runs, tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    (project / "own.py").write_text("from tests.models import small_model as model\n")
    folder = shutil.copytree(runs("plain"), tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("tests.models:small_model", "own:model"))
    monkeypatch.chdir(project)
    made = RunFolder.create(RunFolder.open(folder).config(), "ab" * 8, ".", None)
    shutil.copy2(made.path / "run.json", folder)
    monkeypatch.chdir(tmp_path)
    assert load(folder) is not None


@pytest.fixture
def strange(runs, tmp_path):
    """Return a run directory as somebody else may hand it over, whose Python says that it ran."""
    folder = shutil.copytree(runs("plain"), tmp_path / "from elsewhere")
    ran = tmp_path / "ran"
    for name in ("net", "loss"):
        body = f"from tests.models import small_model as model\nopen({str(ran)!r}, 'w').close()\n"
        (folder / f"{name}.py").write_text(body + "def loss(output, labels): ...\n")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"driver_base": str(folder)}))
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("tests.models:small_model", "net:model"))
    return folder, ran


def test_guarantee_python_of_a_run_directory_from_elsewhere_runs_only_if_it_is_allowed(
    strange, runs, tmp_path, raycloak_home, capfd, monkeypatch
):
    folder, ran = strange
    with pytest.raises(ModelError, match=r"runs_code: .* net:model, from .*from elsewhere.* --run-code"):
        raycloak.load(folder)
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    export_it = ("export", folder, "--format", "torch", "--out", tmp_path / "model.pt")
    assert raycloak_command(*export_it) == 2
    assert "runs_code" in capfd.readouterr().err
    # A link into the state folder does not make it one of its runs.
    (raycloak_home / "runs").mkdir(parents=True)
    (raycloak_home / "runs" / "mine").symlink_to(folder)
    assert code(lambda: raycloak.load("mine"), ModelError) == "runs_code"
    assert not ran.exists()
    # The function is the caller's own, and the loss is built in.
    assert raycloak.load(folder, model_init_fn=models.small_model) is not None
    assert not ran.exists()
    assert raycloak_command(*export_it, "--run-code") == 0
    assert ran.exists()
    (raycloak_home / "runs" / "mine").unlink()
    shutil.copytree(runs("plain"), raycloak_home / "runs" / "mine")
    assert raycloak.load("mine") is not None


@pytest.mark.parametrize("given", ["nothing", "model_init_fn", "config"])
def test_guarantee_a_loss_that_a_directory_from_elsewhere_names_is_python_too(strange, runs, given):
    """Also where the caller names a configuration of its own, with another loss."""
    folder, ran = strange
    manifest = RunFolder.open(folder).manifest()
    computation = manifest.computation.model_copy(update={"loss": LossSpec.of("loss:loss")})
    (folder / "manifest.json").write_bytes(manifest.model_copy(update={"computation": computation}).encode() + b"\n")
    options = {"model_init_fn": models.small_model, "config": RunFolder.open(runs("plain")).config()}
    with pytest.raises(ModelError, match=r"runs_code: .* loss:loss"):
        raycloak.load(folder, **{name: each for name, each in options.items() if name == given})
    assert not ran.exists()


def test_a_hugging_face_model_by_configuration_runs_no_code_of_a_directory(runs, site, tmp_path):
    for name in ("gpt2 whole", "bert lora"):
        assert raycloak.load(runs(name)) is not None
    folder = shutil.copytree(runs("gpt2 whole"), tmp_path / "remote")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("allow_remote_code: false", "allow_remote_code: true"))
    with pytest.raises(ModelError, match=r"runs_code: .* the Python files of .*gpt2"):
        raycloak.load(folder)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize("name", ["plain", "gpt2 whole", "bert lora"])
def test_a_file_has_every_tensor_of_the_module(runs, tmp_path, name, form):
    wanted = {each: tensor.clone() for each, tensor in load(runs(name)).state_dict().items()}
    export(released_model(runs(name), run_code=True), form, tmp_path / "model")
    blank = load(runs(name))
    with torch.no_grad():
        for tensor in blank.parameters():
            tensor.zero_()
    if form == "torch":
        blank.load_state_dict(torch.load(tmp_path / "model", weights_only=True))
    else:
        safetensors.torch.load_model(blank, tmp_path / "model")
    found = blank.state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)


def test_from_pretrained_opens_an_exported_decoder_and_its_tokenizer(runs, tmp_path):
    export(released_model(runs("gpt2 whole")), "hf", tmp_path / "out")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert torch.equal(logits(opened), logits(load(runs("gpt2 whole"))))
    assert opened.config.use_cache
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the film")["input_ids"] == [2, 9, 6, 3]


# PEFT asks transformers for a name that it is about to drop.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize(
    ("name", "auto", "more"),
    [
        ("bert lora", transformers.AutoModelForSequenceClassification, {"num_labels": 2}),
        ("gpt2 lora", transformers.AutoModelForCausalLM, {}),
    ],
)
def test_peft_opens_an_exported_adapter_over_its_base(runs, site, tmp_path, name, auto, more):
    export(released_model(runs(name), run_code=True), "peft", tmp_path / "out")
    base = auto.from_pretrained(site / name.split()[0], attn_implementation="eager", **more)
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(logits(opened), logits(load(runs(name))))
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(site / name.split()[0])
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written < 20_000, "the base is not in it"


@pytest.mark.parametrize("name", ["bert lora", "unpooled lora"])
def test_from_pretrained_opens_a_merged_adapter(runs, tmp_path, name):
    export(released_model(runs(name), run_code=True), "hf", tmp_path / "out")
    auto = transformers.AutoModelForSequenceClassification
    opened = auto.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    # Merging adds two matrices and so rounds once more.
    assert torch.allclose(logits(opened), logits(load(runs(name))), rtol=1e-4, atol=1e-5)


def test_an_adapter_to_weights_that_were_drawn_is_refused(runs, tmp_path):
    (tmp_path / "place").mkdir()
    with pytest.raises(ConfigError, match=r"bert\.pooler\.dense\.bias.* was drawn") as refusal:
        export(released_model(runs("unpooled lora")), "peft", tmp_path / "place" / "out")
    assert refusal.value.code == "export_format"
    assert list((tmp_path / "place").iterdir()) == [], "nothing half-written is left"


def test_a_format_that_a_model_does_not_have_is_refused(runs, tmp_path):
    for name, form, remedy in [
        ("plain", "hf", "safetensors"), ("plain", "peft", "safetensors"), ("gpt2 whole", "peft", "hf"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^export_format: .*--format {remedy}"):
            export(released_model(runs(name), run_code=True), form, tmp_path / "out")
    (tmp_path / "there").touch()
    plain = released_model(runs("plain"), run_code=True)
    assert code(lambda: export(plain, "torch", tmp_path / "there")) == "out_exists"
    assert code(lambda: export(plain, "hf", tmp_path / "no" / "out")) == "export_format"
    assert code(lambda: export(plain, "torch", tmp_path / "no" / "out")) == "out"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return a package that a run sealed to an auditor, the auditor's files, and the run's weights."""
    home = tmp_path_factory.mktemp("sealed")
    create_recipient(home / "auditor.key")
    settings = CheckpointConfig(storage="packages", recipients=["auditor.key.pub"])
    said = []
    archive = Archive(settings, "0" * 16, home, said.append)
    run = trained(home, steps=1, dp_config=RENYI, model="tests.models:small_model", assignment=NewRun(archive))
    assert said == []
    TrustStore().with_signer("site", load_signer(home / "signer" / "signer.pub.json")).save(home / "trust.json")
    (path,) = (home / "packages").rglob("*.tssp")
    return path, Keys(home / "trust.json", home / "auditor.key"), load_file(run.folder / "parameters.safetensors")


def raycloak_command(*arguments):
    with pytest.raises(SystemExit) as stopped:
        app.main([str(each) for each in arguments])
    return stopped.value.code


def test_a_package_opens_for_a_recipient_and_for_nobody_else(package, tmp_path):
    path, keys, released = package
    opened = load(path, model_init_fn=models.small_model, trust=keys.trust, key=keys.key)
    assert {name: tensor.tolist() for name, tensor in opened.state_dict().items()} == {
        name: array.tolist() for name, array in released.items()
    }
    assert code(lambda: load(path, model_init_fn=models.small_model)) == "package_keys"
    assert code(lambda: load(path, model_init_fn=models.small_model, trust=keys.trust)) == "package_keys"
    assert code(lambda: load(path, trust=keys.trust, key=keys.key)) == "model_needed"
    create_recipient(tmp_path / "eve.key")
    eve = {"trust": keys.trust, "key": tmp_path / "eve.key", "model_init_fn": models.small_model}
    assert code(lambda: load(path, **eve), EvidenceError) == "not_a_recipient"


def test_the_command_writes_one_object_and_the_file(runs, package, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    out = tmp_path / "model.pt"
    assert raycloak_command("export", runs("plain"), "--run-code", "--format", "torch", "--out", out, "--json") == 0
    fields = json.loads(capfd.readouterr().out)
    assert (fields["format"], fields["out"]) == ("torch", str(out))
    assert "weights_only=True" in fields["opened_by"]
    assert set(torch.load(out, weights_only=True)) == set(load(runs("plain")).state_dict())
    assert raycloak_command("export", runs("plain"), "--format", "onnx", "--out", tmp_path / "m") == 2
    assert "there is no format 'onnx'" in capfd.readouterr().err
    path, keys, _ = package
    config = tmp_path / "config.yaml"
    dp_config = "dp_config: {target_epsilon: 8, target_delta: 1.0e-5}"
    config.write_text(f"model: tests.models:small_model\nexpected_batch_size: 4\n{dp_config}\n")
    options = ("--trust", keys.trust, "--key", keys.key, "--config", config, "--out", tmp_path / "sealed.safetensors")
    assert raycloak_command("export", path, "--format", "safetensors", *options) == 0
    assert Path(tmp_path / "sealed.safetensors").stat().st_size > 0
