"""The tiny public texts and the tiny encoder that this project is tried on.

The texts are sentences from the documentation of two installed libraries, NumPy and torch; the class says which. The
encoder is a BERT of two layers with RANDOM weights: nothing is downloaded. Take a pretrained one instead.
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).parent


def prepare() -> None:
    """Write texts and encoder. Delete this once you have texts of your own and a pretrained model."""
    libraries = (np, np.linalg, np.random, np.fft, np.ma), (torch, torch.nn, torch.nn.functional, torch.optim)
    examples = [(text, label) for label, modules in enumerate(libraries) for text in _sentences(modules)]
    for name, kept in (("public", 0), ("train", 1)):
        rows = [f"{text}\t{label}\n" for number, (text, label) in enumerate(examples) if min(1, number % 5) == kept]
        (FOLDER / f"{name}.tsv").write_text("".join(rows), encoding="utf-8")
    _write_encoder([text for text, _ in examples])


def _sentences(modules: Iterable[object]) -> list[str]:
    """Return the sentences in front of the tables of parameters, each once."""
    found = set()
    for documented in (getattr(module, name) for module in modules for name in dir(module) if name[0] != "_"):
        if callable(documented):
            introduction = re.split(r"Parameters|Args:|Examples?|>>>", inspect.getdoc(documented) or "")[0]
            found |= {" ".join(sentence.split()) for sentence in re.split(r"\. |\n\n", introduction)}
    return sorted(text[:300] for text in found if 5 <= len(text.split()) <= 60)


def _write_encoder(texts: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # These texts are public. A tokenizer that is trained on private ones would be a release that nothing covers.
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordLevelTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(FOLDER / "public/encoder")
    torch.manual_seed(0)
    sizes = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    transformers.BertModel(sizes).save_pretrained(FOLDER / "public/encoder")


if __name__ == "__main__":
    prepare()
