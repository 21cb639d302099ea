"""Models by configuration: built the same everywhere, and refused by name before anything is charged."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.planning.model_source import model_source
from raycloak.metrics.errors import ConfigError, ModelError
from raycloak.workers.inputs.hub_files import quiet
from raycloak.workers.models.models import build_noted, read_flat, tensor_contents, trainable_tensors
from raycloak.workers.terms.model_digest import frozen_digest
from tests.tiny_text import SIZES, WORDS, bert_config, write_bert, write_gpt2, write_tokenizer

SIDES = {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
"""Of an encoder-decoder."""

REMOTE = """
from transformers import BertForSequenceClassification

class Own(BertForSequenceClassification):
    pass
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    write_bert(folder / "bert")
    write_gpt2(folder / "gpt2")
    return folder


def source(**model):
    given = {"hf": "bert", "task": "sequence_classification", **model}
    raw = {"expected_batch_size": 8, "dp_config": {"target_epsilon": 8}, "model": given}
    return model_source(parse_config(raw).model)


def built(base, seed=0, **model):
    return build_noted(source(**model), base, seed)


def refused(base, **model):
    with pytest.raises(ConfigError) as caught:
        built(base, **model)
    return caught.value


def test_the_whole_model_is_trained_without_an_adapter(base):
    module, notes = built(base, classes=3)
    assert all(tensor.requires_grad for tensor in module.parameters())
    assert module.classes == 3
    assert "hidden_dropout_prob was 0.1" in notes[0]
    assert "classifier.weight" in notes[1]
    weights = load_file(base / "bert" / "model.safetensors")
    own = module.model.bert.embeddings.word_embeddings.weight
    assert torch.equal(own, weights["embeddings.word_embeddings.weight"])


def test_an_adapter_is_trained_with_the_head_and_nothing_else(base):
    module, _ = built(base, lora={"rank": 2})
    names = [tensor.name for tensor in trainable_tensors(module)]
    assert all("lora_A" in name or "lora_B" in name or "classifier.modules_to_save" in name for name in names)
    assert len(names) == 2 * 2 * 2 + 2
    module, _ = built(base, hf="gpt2", task="causal_lm", lora={"rank": 2})
    assert all("c_attn.lora_" in tensor.name for tensor in trainable_tensors(module))
    module, _ = built(base, lora={"rank": 2, "bias": "all", "target_modules": ["key"]})
    names = [tensor.name for tensor in trainable_tensors(module)]
    assert any(name.endswith("key.lora_A.default.weight") for name in names)
    assert any(name.endswith("LayerNorm.bias") for name in names)


def test_the_names_are_those_of_an_adapter_that_peft_opens(base):
    """Without ``model.`` before and ``.default`` inside, a released tensor has the name that PEFT's file has."""
    import peft

    module, _ = built(base, lora={"rank": 2})
    ours = {
        name.removeprefix("model.").replace(".default", "").replace(".modules_to_save", "")
        for name in (tensor.name for tensor in trainable_tensors(module))
    }
    assert ours == set(peft.get_peft_model_state_dict(module.model))


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapter"])
def test_one_seed_gives_one_model_and_another_seed_another_head(lora, base):
    one, other, third = (built(base, seed, lora=lora)[0] for seed in (1, 1, 2))
    assert tensor_contents(one) == tensor_contents(other)
    assert (read_flat(one) != read_flat(third)).any()
    assert [each.name for each in tensor_contents(one)] == [each.name for each in tensor_contents(third)]


def test_weights_of_the_base_have_one_digest_and_others_another(base):
    shutil.copytree(base / "bert", base / "changed", dirs_exist_ok=True)
    path = base / "changed" / "model.safetensors"
    weights = load_file(path)
    weights["embeddings.word_embeddings.weight"][3, 3] += 1
    save_file(weights, path, metadata={"format": "pt"})
    digests = {frozen_digest(tensor_contents(built(base, hf=hf, lora={"rank": 2})[0])) for hf in ("bert", "changed")}
    assert len(digests) == 2


def test_the_code_digest_is_of_all_but_weights_and_place(base):
    shutil.copytree(base / "bert", base / "moved", dirs_exist_ok=True)
    first = source().code_digest(base)
    assert source(hf="moved").code_digest(base) == first
    assert source(hf="/somewhere/else/bert").name == source(hf="bert").name == "bert"
    assert source(lora={"rank": 2}).code_digest(base) != first
    config = json.loads((base / "moved" / "config.json").read_text())
    (base / "moved" / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.1}))
    assert source(hf="moved").code_digest(base) != first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_frozen_base_keeps_its_precision_and_what_is_trained_is_float32(dtype, base):
    folder = base / f"half-{dtype}".replace(".", "")
    transformers.BertModel(bert_config()).to(dtype).save_pretrained(folder)
    module, _ = built(base, hf=folder.name, lora={"rank": 2})
    assert module.model.base_model.model.bert.embeddings.word_embeddings.weight.dtype == dtype
    assert {tensor.dtype for tensor in module.parameters() if tensor.requires_grad} == {torch.float32}
    whole, _ = built(base, hf=folder.name)
    assert {tensor.dtype for tensor in whole.parameters()} == {torch.float32}
    assert module(torch.full((2, 6), 5)).isfinite().all()


def test_a_frozen_base_is_mapped_from_its_file(base):
    module, _ = built(base, lora={"rank": 2})
    address = module.model.base_model.model.bert.embeddings.word_embeddings.weight.data_ptr()
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    ranges = [(*(int(end, 16) for end in line[0].split("-")), line[-1]) for line in lines]
    (path,) = [name for start, end, name in ranges if start <= address < end]
    assert path.endswith("bert/model.safetensors")


def test_unknown_target_modules_are_refused_with_those_that_exist(base):
    error = refused(base, lora={"rank": 2, "target_modules": ["query", "q_proj"]})
    assert (error.code, "q_proj" in error.message, "value" in error.remedy) == ("target_modules", True, True)
    error = refused(base, hf="gpt2", task="causal_lm", lora={"rank": 2, "target_modules": ["query"]})
    assert "c_attn" in error.remedy


def test_a_task_without_a_head_is_refused(base):
    error = refused(base, task="causal_lm")
    assert (error.code, "sequence_classification" in error.remedy) == ("no_head", True)
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    transformers.ViTModel(config).save_pretrained(base / "vit")
    assert refused(base, hf="vit").code == "no_head"
    write_t5(base / "t5")
    error = refused(base, hf="t5", task="causal_lm")
    assert (error.code, error.remedy) == (
        "no_head",
        "Tasks that it has a head for: sequence_classification, token_classification.",
    )


def write_t5(folder):
    config = transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, vocab_size=16)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_a_t5_is_trained_with_a_head_of_classes(task, base):
    write_t5(base / "t5")
    module, notes = built(base, hf="t5", task=task, classes=3)
    assert module(torch.full((2, 6), 5)).shape == ((2, 3) if task == "sequence_classification" else (2, 6, 3))
    assert "drawn from the seed" in notes[-1]
    assert module.classes == 3


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_all_linear_is_all_linear_layers_of_the_body_and_the_head_is_trained_whole(task, base):
    module, _ = built(base, task=task, classes=2, lora={"rank": 2, "target_modules": "all-linear"})
    names = [tensor.name for tensor in trainable_tensors(module)]
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}
    assert adapted == {"query", "key", "value", "dense"}
    assert {name for name in names if ".lora_" not in name} == {
        f"model.base_model.model.classifier.modules_to_save.default.{part}" for part in ("weight", "bias")
    }


@pytest.mark.parametrize(
    ("kind", "fields", "heads"),
    [
        ("Bart", {"d_model": 8, **SIDES}, {"classification_head"}),
        ("DistilBert", {"dim": 8, "n_heads": 2, "hidden_dim": 8, "n_layers": 1}, {"pre_classifier", "classifier"}),
        ("ModernBert", {**SIZES, "pad_token_id": 0}, {"head", "classifier"}),
    ],
)
def test_a_head_by_any_name_is_trained_beside_an_adapter(kind, fields, heads, base):
    import peft

    config = getattr(transformers, f"{kind}Config")(**{"max_position_embeddings": 24, **fields}, vocab_size=16)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(base / kind)
    module, _ = built(base, hf=kind, classes=2, lora={"rank": 2, "target_modules": "all-linear"})
    names = [tensor.name.removeprefix("model.base_model.model.") for tensor in trainable_tensors(module)]
    assert {name.partition(".")[0] for name in names if ".lora_" not in name} == heads
    module.model.save_pretrained(base / f"{kind}-adapter")
    bare = getattr(transformers, f"{kind}ForSequenceClassification").from_pretrained(base / kind, num_labels=2)
    with quiet():
        again = peft.PeftModel.from_pretrained(bare, base / f"{kind}-adapter").state_dict()
    for name, tensor in module.model.state_dict().items():
        if "lora_" in name or "modules_to_save" in name:
            assert torch.equal(tensor, again[name]), name


def test_what_peft_cannot_adapt_is_refused_by_name_with_what_it_can(base):
    config = transformers.MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(base / "mamba")
    error = refused(base, hf="mamba", task="causal_lm", lora={"rank": 2, "target_modules": ["in_proj", "out_proj"]})
    assert (error.code, "no layer out_proj" in error.message) == ("target_modules", True)
    assert error.remedy == "Set lora.target_modules to some of: dt_proj, embeddings, in_proj, x_proj."
    module, notes = built(base, hf="mamba", task="causal_lm", lora={"rank": 2, "target_modules": "all-linear"})
    names = {tensor.name.partition(".lora_")[0].rpartition(".")[2] for tensor in trainable_tensors(module)}
    assert names == {"in_proj", "x_proj"}
    # The model takes the weight of this one itself, so an adapter beside it reaches nothing.
    assert "frozen, since no logit depends on it" in notes[-1]
    assert "dt_proj.lora_A" in notes[-1]


def test_a_refusal_of_peft_itself_is_an_error_of_ours(base, monkeypatch):
    def refuse(*_):
        raise ValueError("Module 'query' is odd. Please try again.")

    monkeypatch.setattr("peft.get_peft_model", refuse)
    error = refused(base, lora={"rank": 2, "target_modules": ["query"]})
    assert (error.code, error.message) == (
        "target_modules",
        "LoRA cannot adapt BertForSequenceClassification: PEFT says: Module 'query' is odd.",
    )


def test_the_experts_of_a_mixture_are_adapted_as_all_linear_or_by_name(base):
    sizes = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 2, "pad_token_id": 0}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, vocab_size=16)).save_pretrained(base / "moe")
    for targets, found in (("all-linear", 12), (["q_proj"], 2), (["down_proj"], 2), (["gate_up_proj", "k_proj"], 4)):
        module, _ = built(base, hf="moe", task="causal_lm", lora={"rank": 2, "target_modules": targets})
        assert len(trainable_tensors(module)) == 2 * found
    error = refused(base, hf="moe", task="causal_lm", lora={"rank": 2, "target_modules": ["gate"]})
    assert (error.code, "gate_up_proj" in error.remedy) == ("target_modules", True)


def test_a_classifier_without_padding_pads_as_its_tokenizer(base):
    """Its class is read at the last token that is no padding, so an exported pair would else disagree."""
    assert json.loads((base / "gpt2" / "config.json").read_text()).get("pad_token_id") is None
    module, _ = built(base, hf="gpt2")
    assert module.model.config.pad_token_id == 0
    alone = base / "alone"
    shutil.copytree(base / "gpt2", alone, ignore=shutil.ignore_patterns("tokenizer*"), dirs_exist_ok=True)
    assert built(base, hf="alone")[0].model.config.pad_token_id == 3


def test_a_tokenizer_of_another_vocabulary_is_refused(base):
    write_tokenizer(base / "same")
    write_tokenizer(base / "other", [*WORDS[1:], WORDS[0]])
    hub = source().hub
    for fitting in (None, "bert", "same", str(base / "same")):
        hub.check_tokenizer(fitting, base)
    with pytest.raises(ConfigError) as caught:
        hub.check_tokenizer("other", base)
    assert caught.value.code == "tokenizer_mismatch"


def test_what_a_process_has_set_for_the_libraries_stays(base):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    built(base)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_head_of_another_size_is_refused(base):
    transformers.BertForSequenceClassification(bert_config(num_labels=5)).save_pretrained(base / "five")
    assert built(base, hf="five")[0].classes == 5
    error = refused(base, hf="five", classes=2)
    assert (error.code, "another shape of classifier.bias than" in error.message) == ("head_size", True)


def test_a_checkpoint_without_a_part_of_the_body_is_refused(base):
    shutil.copytree(base / "bert", base / "part", dirs_exist_ok=True)
    path = base / "part" / "model.safetensors"
    weights = load_file(path)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    error = refused(base, hf="part")
    assert (error.code, "encoder.layer.1.output.dense.weight" in error.message) == ("weights_missing", True)


def test_pickled_weights_and_folders_without_any_are_refused(base):
    folder = base / "pickled"
    folder.mkdir()
    shutil.copy(base / "bert" / "config.json", folder)
    torch.save(load_file(base / "bert" / "model.safetensors"), folder / "pytorch_model.bin")
    error = refused(base, hf="pickled")
    assert (error.code, "pytorch_model.bin" in error.message) == ("model_unreadable", True)
    assert ".save_pretrained(FOLDER)" in error.remedy
    write_tokenizer(base / "tokenizer")
    (base / "tokenizer" / "config.json").unlink(missing_ok=True)
    assert refused(base, hf="tokenizer").code == "model_unreadable"


def test_what_is_not_cached_says_how_to_fetch_it(base, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refused(base, hf="nobody/has-this-model")
    assert (error.code, "hf download nobody/has-this-model" in error.remedy) == ("not_cached", True)
    assert refused(base, hf="./no/such/folder").code == "not_cached"


def test_what_the_hub_has_is_fetched_when_the_cache_has_not(base, monkeypatch):
    """The hub is asked only after its cache."""
    import huggingface_hub

    asked = []

    def download(hf, *, revision, local_files_only, allow_patterns):
        asked.append((hf, revision, local_files_only))
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        return str(base / "bert")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    built(base, hf="somebody/bert", revision="v1")
    assert asked[:2] == [("somebody/bert", "v1", True), ("somebody/bert", "v1", False)]


@pytest.fixture
def remote(base):
    folder = base / "remote"
    shutil.copytree(base / "bert", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(REMOTE)
    return folder


def test_remote_code_is_refused_unless_a_field_allows_it(remote, base, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    error = refused(base, hf="remote")
    assert (error.code, "own.Own" in error.message) == ("remote_code", True)
    module, _ = built(base, hf="remote", allow_remote_code=True)
    assert type(module.model).__name__ == "Own"


def test_allowed_remote_code_is_part_of_the_code_digest(remote, base):
    allowed = source(hf="remote", allow_remote_code=True)
    first = allowed.code_digest(base)
    (remote / "own.py").write_text(REMOTE + "# Another one.\n")
    assert allowed.code_digest(base) != first


def test_remote_code_of_another_repository_is_refused(remote, base):
    config = json.loads((remote / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "somebody/else--own.Own"}
    (remote / "config.json").write_text(json.dumps(config))
    assert refused(base, hf="remote", allow_remote_code=True).code == "remote_code"


@pytest.mark.parametrize(
    "model",
    [
        {"hf": "bert"},
        {"hf": "bert", "task": "translation"},
        {"hf": "gpt2", "task": "causal_lm", "classes": 2},
        {"hf": "bert", "task": "sequence_classification", "lora": {"rank": 0}},
        {"hf": "bert", "task": "sequence_classification", "lora": {"target_modules": "some"}},
    ],
)
def test_a_wrong_field_is_named(model):
    with pytest.raises(ConfigError) as caught:
        parse_config({"expected_batch_size": 8, "dp_config": {"target_epsilon": 8}, "model": model})
    assert (caught.value.code, caught.value.message.startswith("model")) == ("config", True)
    assert not isinstance(caught.value, ModelError)
