"""What a client copies of an adapter from ordinary text: ``python benchmarks/encrypted_copy.py MINILM SST2``.

The folders and the adapter are those of `encrypted_sst2.py`. The client has the hidden states of the first sentences of
`train.tsv` and the deltas for them, in the clear with the error of an encrypted answer, and solves for B·A by least
squares. Then it runs its copy on `dev.tsv`. Prints a JSON object for each number of tokens: the median over layers of
the errors of B·A and of the deltas for other text, and how many sentences the copy answers as the adapter does.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import peft
import torch
import transformers
from encrypted_sst2 import BATCH, answers, classifier, encoded, read, train

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
"""Tokens over the width."""
ERROR = 1e-5
"""Deviation of an answer's error, over the token's norm and the largest row norm of B·A."""
OTHER_TOKENS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("sst2", type=Path)
    given = parser.parse_args()
    torch.manual_seed(24)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.minilm)
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    model = peft.get_peft_model(classifier(given.minilm), lora)
    sentences = read(given.sst2 / "train.tsv")
    train(model, tokenizer, sentences, 200)
    model.eval()
    layers = {name: each for name, each in model.named_modules() if hasattr(each, "lora_A")}
    exact = {name: product(each) for name, each in layers.items()}
    width = next(iter(exact.values())).shape[1]
    seen = states(model, layers, tokenizer, sentences, width)
    rows = read(given.sst2 / "dev.tsv")
    other = states(model, layers, tokenizer, rows, OTHER_TOKENS)
    labels = torch.tensor([label for _, label in rows])
    own = answers(model, tokenizer, rows).argmax(1)
    rng = np.random.default_rng(24)
    for share in SHARES:
        tokens = int(share * width)
        copies = {name: solved(seen[name][:tokens], exact[name], rng) for name in layers}
        with replaced(layers, {name: copies[name] - exact[name] for name in layers}):
            found = answers(model, tokenizer, rows).argmax(1)
        print(
            json.dumps(
                {
                    "tokens": tokens,
                    "error_of_weights": median(size(copies[name] - exact[name], exact[name]) for name in layers),
                    "error_of_deltas": median(
                        size(other[name] @ (copies[name] - exact[name]).T, other[name] @ exact[name].T)
                        for name in layers
                    ),
                    "same_answers": float((found == own).double().mean()),
                    "accuracy": float((found == labels).double().mean()),
                    "accuracy_of_the_adapter": float((own == labels).double().mean()),
                }
            ),
            flush=True,
        )


def product(layer) -> np.ndarray:
    (name,) = layer.lora_A
    up, down = layer.lora_B[name].weight, layer.lora_A[name].weight
    return (up.double() @ down.double() * layer.scaling[name]).detach().numpy()


def states(model, layers, tokenizer, rows, most) -> Mapping[str, np.ndarray]:
    """Return what each layer reads of the first ``most`` tokens."""
    found = {name: [] for name in layers}
    handles = [
        layer.register_forward_hook(lambda _, given, __, name=name: found[name].append(given[0][mask]))
        for name, layer in layers.items()
    ]
    held = 0
    with torch.no_grad():
        for start in range(0, len(rows), BATCH):
            batch = encoded(tokenizer, rows[start : start + BATCH])
            mask = batch["attention_mask"].bool()
            model(**batch)
            held += int(mask.sum())
            if held >= most:
                break
    for each in handles:
        each.remove()
    return {name: torch.cat(each)[:most].double().numpy() for name, each in found.items()}


def solved(tokens: np.ndarray, exact: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the client's copy of B·A; directions that it hardly saw are left at zero."""
    spread = ERROR * np.linalg.norm(tokens, axis=1)[:, None] * np.linalg.norm(exact, axis=1).max()
    deltas = tokens @ exact.T + rng.normal(size=(len(tokens), len(exact))) * spread
    return np.linalg.lstsq(tokens, deltas, rcond=1e-3)[0].T


def size(error: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(error) / np.linalg.norm(exact))


@contextmanager
def replaced(layers, deltas) -> Iterator[None]:
    """Add other deltas to the layers inside the block."""
    handles = []
    for name, layer in layers.items():
        delta = torch.from_numpy(deltas[name]).float()
        handles.append(layer.register_forward_hook(lambda _, given, output, delta=delta: output + given[0] @ delta.T))
    yield
    for each in handles:
        each.remove()


if __name__ == "__main__":
    main()
