"""Open the result of a run: ``python examples/sst2/classify.py RUN_DIRECTORY SENTENCE...``.

Lays the adapter and the head that the run released over the public base, and prints how positive each sentence is.
"""

import sys
from pathlib import Path

import torch
import transformers
from recipes import FOLDER, minilm
from safetensors.torch import load_file


def main(run: Path, sentences: list[str]) -> None:
    """Print the probability of class 1 of each sentence."""
    released = load_file(run / "parameters.safetensors")
    model = minilm().eval()
    model.load_state_dict({**model.state_dict(), **released})
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    for sentence in sentences:
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        with torch.no_grad():
            positive = model(ids).softmax(1)[0, 1].item()
        print(f"{positive:.2f}  {sentence}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
