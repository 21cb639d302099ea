"""Open the result of a run: ``python examples/shakespeare/generate.py RUN_DIRECTORY``.

Loads what the run released into the public model that it started from, and prints 200 characters that it draws.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parent / "data" / "gpt2"
LENGTH = 200
CONTEXT = 63
"""Characters that the model sees at once, less the next one."""


def main(run: Path) -> None:
    """Print text that begins a line."""
    model = transformers.GPT2LMHeadModel.from_pretrained(FOLDER, local_files_only=True).eval()
    found = load_file(run / "parameters.safetensors")
    released = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    # The head is the embedding's tensor, so it is released once.
    model.load_state_dict({**model.state_dict(), **released, "lm_head.weight": released["transformer.wte.weight"]})
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    ids = tokenizer("\n")["input_ids"]
    torch.manual_seed(0)
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-CONTEXT:]])).logits[0, -1]
        ids.append(int(torch.multinomial(logits.softmax(0), 1)))
    print("".join(tokenizer.convert_ids_to_tokens(ids)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
