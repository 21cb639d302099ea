"""The tiny public text and the tiny decoder that this project is tried on.

The text is the documentation of an installed library, NumPy. The decoder is a GPT-2 of two layers with RANDOM weights:
nothing is downloaded. Take a pretrained one instead.
"""

import inspect
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent


def prepare() -> None:
    """Write text and decoder. Delete this once you have a text of your own and a pretrained model."""
    documented = [getattr(np, name) for name in sorted(dir(np)) if not name.startswith("_")]
    texts = [(inspect.getdoc(each) or "")[:600] for each in documented if callable(each)]
    (FOLDER / "public.txt").write_text("\n\n".join(texts[::10]), encoding="utf-8")
    (FOLDER / "train.txt").write_text(
        "\n\n".join(text for number, text in enumerate(texts) if number % 10), encoding="utf-8"
    )
    _write_decoder(texts)


def _write_decoder(texts: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # This text is public. A tokenizer that is trained on a private one would be a release that nothing covers.
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=[end], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end)
    fast.save_pretrained(FOLDER / "public/decoder")
    torch.manual_seed(0)
    sizes = transformers.GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(sizes).save_pretrained(FOLDER / "public/decoder")


if __name__ == "__main__":
    prepare()
