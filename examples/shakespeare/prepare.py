"""Make what the configurations here read: ``python examples/shakespeare/prepare.py FILE``.

FILE is a text in UTF-8; the results are of Karpathy's tinyshakespeare (1,115,394 characters). Nothing is downloaded.

Written beside this file, to ``data/``: ``train.txt``, the first nine tenths of FILE, ``test.txt``, the rest, and
``gpt2``, a model as the Hugging Face hub has them: a GPT-2 of two layers with random weights, and a tokenizer of
characters.

The characters are the printable ones of ASCII and the end of a line, whatever FILE has: a tokenizer is public, so it
must not be made from private text.
"""

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

DATA = Path(__file__).resolve().parent / "data"
UNKNOWN = "<unk>"
CHARACTERS = [UNKNOWN, "\n", *map(chr, range(0x20, 0x7F))]
BLOCK = 64


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character; any other than `CHARACTERS` is unknown."""
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=UNKNOWN)


def gpt2() -> transformers.GPT2LMHeadModel:
    """Two layers of width 128, with weights drawn from seed 0; the head is tied to the embedding."""
    torch.manual_seed(0)
    sizes = {"n_positions": BLOCK, "n_embd": 128, "n_layer": 2, "n_head": 4}
    # There is no token for an end; 0 stands where padding is masked.
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(CHARACTERS), **sizes, **ends))


def main(source: Path) -> None:
    """Write the model and the two splits."""
    folder = DATA / "gpt2"
    gpt2().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    text = source.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    for split, part in (("train", text[:cut]), ("test", text[cut:])):
        (DATA / f"{split}.txt").write_text(part, encoding="utf-8")
        print(f"{split}: {len(part)} characters, {-(-len(part) // BLOCK)} blocks of {BLOCK}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
