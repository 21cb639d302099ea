"""Tiny public models, tokenizers and texts, written as the Hugging Face hub has them; all weights are random."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["good", "bad", "film", "plot", "a", "the", "very", "not", "dull", "fine", "is", "was"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
}


def write_tokenizer(folder: Path, words: list[str] | None = None) -> Path:
    """A tokenizer of whole words, which puts [CLS] before a text and [SEP] behind it."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *(words or WORDS)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    return folder


def bert_config(**fields) -> transformers.BertConfig:
    return transformers.BertConfig(**{**SIZES, "vocab_size": len(SPECIAL) + len(WORDS), **fields})


def gpt2_config(**fields) -> transformers.GPT2Config:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "bos_token_id": 2, "eos_token_id": 3}
    return transformers.GPT2Config(**{**sizes, "vocab_size": len(SPECIAL) + len(WORDS), **fields})


def write_bert(folder: Path, pooled: bool = True, **fields) -> Path:
    """A BERT without a head, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        transformers.BertModel(bert_config(**fields), add_pooling_layer=pooled).save_pretrained(folder)
    return write_tokenizer(folder)


def write_gpt2(folder: Path, **fields) -> Path:
    """A GPT-2 whose head is tied to its embedding, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        transformers.GPT2LMHeadModel(gpt2_config(**fields)).save_pretrained(folder)
    return write_tokenizer(folder)


def write_llama(folder: Path, **fields) -> Path:
    """A Llama of one layer, and its tokenizer."""
    sizes = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": len(SPECIAL) + len(WORDS)}
    config = transformers.LlamaConfig(**sizes | {"bos_token_id": 2, "eos_token_id": 3} | fields)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder)


def write_reviews(path: Path, count: int = 64) -> Path:
    """Texts of one to nine words, and whether they have a good word."""
    rows = []
    for number in range(count):
        words = [WORDS[(number * 5 + place * (number % 3 + 1)) % len(WORDS)] for place in range(number % 9 + 1)]
        rows.append(f"{' '.join(words)}\t{int('good' in words or 'fine' in words)}")
    path.write_text("\n".join(rows) + "\n")
    return path
