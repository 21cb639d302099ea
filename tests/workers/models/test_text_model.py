"""A transformers model computes the same behind one tensor of ids, whatever is in its padding."""

import copy
import sys

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from raycloak.metrics.errors import ConfigError, ModelError
from raycloak.workers.gradients import row_memory
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.row_memory import largest_rows
from raycloak.workers.inputs.datasets import DatasetForm
from raycloak.workers.inputs.hub_files import quiet
from raycloak.workers.models.losses import cross_entropy, next_token_cross_entropy, token_cross_entropy
from raycloak.workers.models.models import ModelSource, build_noted
from raycloak.workers.models.text_model import TextModel, as_text_model, check_text, libraries
from tests.protocol import mechanism
from tests.tiny_text import SIZES, bert_config, gpt2_config

FORM = DatasetForm(num_examples=90, feature_shape=(12,), feature_dtype="int64", label_shape=(), label_dtype="int64")
TOKENS = FORM.model_copy(update={"label_shape": (12,)})
LARGER = {**SIZES, "vocab_size": 40}


def _bert(**fields):
    return transformers.BertForSequenceClassification(bert_config(**fields))


def _gpt2(**fields):
    return transformers.GPT2LMHeadModel(gpt2_config(**fields))


MODELS = {
    "bert": _bert,
    "bert tokens": lambda **fields: transformers.BertForTokenClassification(bert_config(num_labels=3, **fields)),
    "roberta": lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**LARGER)),
    "albert": lambda: transformers.AlbertForSequenceClassification(
        transformers.AlbertConfig(**LARGER, embedding_size=8)
    ),
    "electra": lambda: transformers.ElectraForSequenceClassification(transformers.ElectraConfig(**LARGER)),
    "gpt2": _gpt2,
    "gpt2 classes": lambda: transformers.GPT2ForSequenceClassification(gpt2_config()),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGER, num_key_value_heads=1)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=40,
            max_position_embeddings=24,
        )
    ),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**LARGER)),
    "deberta": lambda: transformers.DebertaV2ForSequenceClassification(
        transformers.DebertaV2Config(
            **LARGER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, share_att_key=True,
            norm_rel_ebd="layer_norm",
        )
    ),
    "mpnet": lambda: transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**LARGER)),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
    ),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=40, state_size=4)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**LARGER, num_key_value_heads=1, head_dim=8, sliding_window=4)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LARGER, num_key_value_heads=1, num_local_experts=4)
    ),
    "t5 tokens": lambda: transformers.T5ForTokenClassification(_t5_config()),
    "t5": lambda: transformers.T5ForSequenceClassification(_t5_config()),
    "bart": lambda: transformers.BartForSequenceClassification(_bart_config()),
}  # fmt: skip


def _t5_config():
    return transformers.T5Config(
        d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8, vocab_size=40, decoder_start_token_id=0
    )


def _bart_config():
    sides = {f"{side}_{field}": 2 for side in ("encoder", "decoder") for field in ("layers", "attention_heads")}
    return transformers.BartConfig(
        **sides, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=40, max_position_embeddings=24
    )


@pytest.fixture(autouse=True)
def _one_seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _moved(module):
    """The module with parameters that hide nothing: many are drawn as zero or nearly so."""
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_the_explicit_inputs_give_what_the_model_gives_with_its_own(name):
    inner = _moved(MODELS[name]()).eval()
    reference = copy.deepcopy(inner)
    model = TextModel(inner).eval()
    padding = 1 if name in ("roberta", "mpnet") else inner.config.get_text_config().pad_token_id or 0
    ids = torch.randint(4, 16, (3, 12))
    seen = torch.ones_like(ids)
    seen[1, 7:] = seen[2, 2:] = 0
    if name in ("t5", "bart"):
        # Their own call looks for the one token that ends a text.
        ids[[0, 1, 2], [11, 6, 1]] = inner.config.eos_token_id
    with torch.no_grad():
        ours = model(torch.where(seen.bool(), ids, -1))
        reference.config.get_text_config().pad_token_id = padding
        theirs = reference(input_ids=torch.where(seen.bool(), ids, padding), attention_mask=seen).logits
    if ours.ndim == 3:
        ours, theirs = ours[seen.bool()], theirs[seen.bool()]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_depends_on_the_batch_alone(name):
    model, seen = TextModel(MODELS[name]()).eval(), []
    for features in (torch.full((4, 12), 5), torch.full((4, 12), -1), torch.arange(48).reshape(4, 12) % 16):
        shapes = Shapes()
        with torch.no_grad(), shapes:
            model(features)
        seen.append(shapes.met)
    assert seen[0] == seen[1] == seen[2]


class Shapes(TorchFunctionMode):
    """Notes each operation of torch and the shape of its result."""

    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.met.append((getattr(func, "__name__", ""), getattr(output, "shape", None)))
        return output


@pytest.mark.parametrize("name", ["bert", "gemma3", "modernbert"])
def test_a_mask_that_hides_nothing_is_built_in_full(name, monkeypatch):
    """`transformers` leaves it out, so one text that is shorter would change how all are computed."""
    model = TextModel(_modernbert() if name == "modernbert" else MODELS[name]()).eval()
    masks = []
    functions = sys.modules[type(model.model).__module__]
    own = functions.eager_attention_forward
    monkeypatch.setattr(
        functions, "eager_attention_forward", lambda *args, **named: masks.append(args[4]) or own(*args, **named)
    )
    model(torch.full((4, 12), 5))
    assert {mask.shape for mask in masks} == {(4, 1, 12, 12)}


def test_a_model_outside_of_ours_builds_its_masks_as_before():
    inner = MODELS["bert"]().eval()
    tracing = sys.modules["transformers.masking_utils"].is_tracing
    TextModel(MODELS["bert"]())(torch.full((2, 4), 5))
    assert not tracing()
    assert not sys.modules["transformers.masking_utils"].is_tracing()
    with torch.no_grad():
        inner(input_ids=torch.full((2, 4), 5), attention_mask=torch.ones(2, 4, dtype=torch.int64))


def _modernbert():
    return transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(**LARGER, local_attention=4, pad_token_id=0)
    )


def test_a_text_may_be_longer_than_a_window():
    """Each token of the one layer sees the four before it, and no other."""
    config = transformers.MistralConfig(**{**LARGER, "num_hidden_layers": 1}, num_key_value_heads=1, sliding_window=4)
    model = TextModel(_moved(transformers.MistralForCausalLM(config))).eval()
    check_text(model, TOKENS, "next_token_cross_entropy", None, None)
    features = torch.full((1, 12), 5)
    moved = features.clone()
    moved[0, 2] = 6
    with torch.no_grad():
        changed = (model(features) != model(moved)).any(2)[0].tolist()
    assert changed == [2 <= place < 6 for place in range(12)]


def test_what_is_in_the_padding_changes_nothing():
    model = TextModel(_moved(_bert())).eval()
    one, other = torch.full((4, 12), 5), torch.full((4, 12), 5)
    one[:, 6:], other[:, 6:] = -1, -100
    assert torch.equal(model(one), model(other))


@pytest.mark.parametrize("build", [_bert, _gpt2], ids=["bert", "gpt2"])
def test_an_id_beyond_the_vocabulary_is_no_error_and_no_number(build):
    model = TextModel(build()).eval()
    ordinary = torch.full((4, 12), 5)
    strange = ordinary.clone()
    strange[1, 3] = 2**20
    with torch.no_grad():
        before, after = model(ordinary), model(strange)
    assert after[1].isnan().all()
    rest = [0, 2, 3]
    assert torch.equal(before[rest], after[rest])


@pytest.mark.parametrize("name", ["bert", "gpt2 classes"])
def test_a_text_model_passes_the_checks_of_a_forward_pass(name):
    module, _ = as_text_model(_moved(MODELS[name]()))
    check_rows(module, FORM, cross_entropy, [mechanism(micro_batch_size=9)], True, 16)


def test_a_lora_model_passes_all_checks_and_trains_the_adapter_alone():
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1, task_type="SEQ_CLS")
    with quiet():
        adapted = peft.get_peft_model(_bert(), settings)
    module, notes = as_text_model(adapted)
    assert "dropout is set to 0" in notes[0]
    check_trainable(module, FORM, cross_entropy, True, 16)
    trained = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in trained)
    assert libraries(module).split(", ")[0] == f"transformers {transformers.__version__}"
    assert "peft" in libraries(module)
    assert libraries(module).endswith("attention eager")
    assert not libraries(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["bert", "bert tokens"])
def test_a_frozen_base_larger_than_a_micro_batch_leaves_room_for_its_rows(name, monkeypatch):
    """The base is shared by the workers of a node; a micro-batch has activations, and gradients of what is trained."""
    inner = MODELS[name](hidden_size=256).requires_grad_(False)
    inner.classifier.requires_grad_(True)
    model = TextModel(inner)
    form = FORM.model_copy(update={"feature_shape": (2,), "label_shape": () if name == "bert" else (2,)})
    loss = cross_entropy if name == "bert" else token_cross_entropy
    base = [(tensor, tensor.data_ptr(), tensor.clone()) for tensor in model.parameters()]
    monkeypatch.setitem(row_memory.MICRO_BATCH_BYTES, "cpu", 2**21)
    assert sum(tensor.nbytes for tensor in model.parameters() if not tensor.requires_grad) > 2**21
    rows = largest_rows(model, form, loss, True, check_text(model, form, "mse", None, None))
    assert rows >= 2 * row_memory.FEWEST_ROWS
    assert all(tensor.data_ptr() == place and torch.equal(tensor, kept) for tensor, place, kept in base)


def test_the_attention_is_pinned_and_the_cache_off():
    inner = transformers.GPT2LMHeadModel(gpt2_config())
    assert inner.config._attn_implementation == "sdpa"
    model = TextModel(inner)
    assert model.model.config._attn_implementation == "eager"
    assert not model.model.config.use_cache


def test_tied_weights_stay_tied():
    model, _ = as_text_model(_gpt2())
    inner = model.model
    assert inner.lm_head.weight is inner.transformer.wte.weight
    assert sum("lm_head" in name for name, _ in model.named_parameters()) == 0


def test_a_copy_shares_the_frozen_parameters_and_no_others():
    model = TextModel(_bert())
    model.model.bert.requires_grad_(False)
    copied = copy.deepcopy(model)
    for (name, own), (_, other) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
        assert (own is other) == (not own.requires_grad), name
        assert torch.equal(own, other)


def test_a_function_may_return_a_model_of_transformers_as_it_is(tmp_path):
    (tmp_path / "own.py").write_text(
        "import transformers\n"
        f"def model():\n    return transformers.BertForSequenceClassification(transformers.BertConfig(**{LARGER!r}))\n"
    )
    module, notes = build_noted(ModelSource.of("own:model"), tmp_path, 3)
    assert isinstance(module, TextModel)
    assert len(notes) == 1
    assert "dropout" in notes[0]
    again, _ = build_noted(ModelSource.of("own:model"), tmp_path, 3)
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def _refused(module, form, loss="cross_entropy", vocabulary=None, classes=None):
    with pytest.raises(ConfigError) as caught:
        check_text(module, form, loss, vocabulary, classes)
    return caught.value


def test_sequences_beyond_the_positions_are_refused():
    module = TextModel(_bert())
    error = _refused(module, FORM.model_copy(update={"feature_shape": (25,)}))
    assert (error.code, "24" in error.remedy) == ("sequence_too_long", True)
    check_text(module, FORM.model_copy(update={"feature_shape": (24,)}), "cross_entropy", None, None)


def test_the_positions_of_a_roberta_begin_behind_its_padding():
    module = TextModel(transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**LARGER)))
    assert _refused(module, FORM.model_copy(update={"feature_shape": (23,)})).code == "sequence_too_long"


def test_xlnets_minus_one_is_no_number_of_positions():
    config = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=32)
    assert config.max_position_embeddings == -1
    assert TextModel(transformers.XLNetForSequenceClassification(config))._positions is None


def test_tokens_beyond_the_vocabulary_are_refused():
    module = TextModel(_bert())
    assert _refused(module, FORM, vocabulary=17).code == "tokens_beyond_vocabulary"
    assert check_text(module, FORM, "cross_entropy", 16, None) == 16
    assert check_text(module, FORM, "cross_entropy", None, None) == 16


def test_more_classes_than_the_head_has_are_refused():
    module = TextModel(_bert(num_labels=3))
    assert _refused(module, FORM, classes=4).code == "labels_beyond_head"
    check_text(module, FORM, "cross_entropy", None, 3)


@pytest.mark.parametrize(
    ("build", "form", "loss"),
    [
        (_gpt2, TOKENS, "cross_entropy"),
        (_gpt2, FORM, "next_token_cross_entropy"),
        (_bert, FORM, "token_cross_entropy"),
    ],
)
def test_a_loss_of_another_task_is_refused(build, form, loss):
    assert _refused(TextModel(build()), form, loss).code == "loss_of_task"


def test_features_that_are_no_ids_are_refused():
    form = FORM.model_copy(update={"feature_dtype": "float32"})
    assert _refused(TextModel(_bert()), form).code == "text_form"


@pytest.mark.parametrize(
    "build",
    [
        lambda: transformers.BertModel(bert_config()),
        lambda: transformers.T5ForConditionalGeneration(_t5_config()),
        lambda: transformers.CanineForSequenceClassification(transformers.CanineConfig(**SIZES)),
    ],
    ids=["no head", "encoder-decoder", "no table of tokens"],
)
def test_a_model_of_another_kind_is_refused(build):
    with pytest.raises(ModelError) as caught:
        check_text(TextModel(build()), FORM, "cross_entropy", None, None)
    assert caught.value.code == "text_model"


def test_a_model_that_gathers_tokens_of_the_batch_is_refused_with_its_cause():
    config = transformers.LongformerConfig(**SIZES, vocab_size=16, attention_window=4)
    with pytest.raises(ModelError, match="gathers the tokens of a batch that attend globally") as caught:
        TextModel(transformers.LongformerForSequenceClassification(config))
    assert caught.value.code == "text_model"


def test_a_failure_on_token_ids_is_told_with_its_cause():
    config = transformers.BrosConfig(**SIZES, vocab_size=16)
    with pytest.raises(ModelError, match="fails on token ids with ValueError: You have to specify bbox") as caught:
        check_text(TextModel(transformers.BrosForTokenClassification(config)), TOKENS, "mse", None, None)
    assert caught.value.code == "text_model"


def test_a_model_that_computes_something_else_in_its_own_call_is_refused():
    class Shifted(transformers.BertForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **others):
            if position_ids is not None:
                position_ids = position_ids + 1
            return super().forward(input_ids, attention_mask, position_ids=position_ids)

    with pytest.raises(ModelError) as caught:
        check_text(TextModel(_moved(Shifted(bert_config()))), FORM, "cross_entropy", None, None)
    assert caught.value.code == "text_model"


@pytest.mark.parametrize("name", ["deberta", "mpnet", "bloom", "mamba", "mixtral", "t5", "t5 tokens", "bart"])
def test_a_family_of_its_own_passes_all_checks(name):
    module, _ = as_text_model(_moved(MODELS[name]()))
    token = name == "t5 tokens"
    form = TOKENS if token or name in ("bloom", "mamba", "mixtral") else FORM
    loss = token_cross_entropy if token else next_token_cross_entropy if form is TOKENS else cross_entropy
    check_text(module, form, loss.terms[0].name, None, None)
    check_trainable(module, form, loss, True, 16)


def test_what_no_logit_depends_on_is_frozen_and_said():
    """A decoder alone has nobody to attend to; its attention to an encoder would get noise and nothing else."""
    module, notes = as_text_model(transformers.BartForCausalLM(_bart_config()))
    frozen = [name for name, tensor in module.named_parameters() if not tensor.requires_grad]
    assert frozen
    assert all("encoder_attn" in name for name in frozen)
    assert notes[-1].startswith(f"frozen, since no logit depends on it: {frozen[0].removeprefix('model.')}, ")
    check_trainable(module, TOKENS, next_token_cross_entropy, True, 16)
