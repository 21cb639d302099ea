"""Accuracy of an encrypted adapter: ``python benchmarks/encrypted_sst2.py MINILM SST2 [--sentences N] [--steps N]``.

MINILM is the folder of all-MiniLM-L6-v2, SST2 that of `train.tsv` and `dev.tsv` (examples/sst2/README.md). A LoRA
adapter of rank 8 on query and value of all six layers is trained in the clear, without privacy, and served to a client
over a real channel under SIMULATED evidence. Prints one JSON object: accuracies on the first N sentences of `dev.tsv`
by the clear model, by the encrypted one and by the base, and what it took.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import peft
import torch
import transformers

import raycloak_lab
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.keys.run_secret import load_secret
from raycloak_lab.adapter import places
from raycloak_lab.adapter.budgets import TokenBudgets
from raycloak_lab.adapter.desk import AdapterDesk
from raycloak_lab.adapter.lora import lora_of
from raycloak_lab.adapter.serve import simulated_platform
from raycloak_lab.adapter.server import serving
from raycloak_lab.encrypted.adapter_worker import AdapterWorker

BATCH, LENGTH = 16, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("sst2", type=Path)
    parser.add_argument("--sentences", type=int, default=872)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    torch.manual_seed(24)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.minilm)
    base = classifier(given.minilm)
    head = {name: each.detach().clone() for name, each in base.classifier.named_parameters()}
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    adapted = peft.get_peft_model(base, lora)
    train(adapted, tokenizer, read(given.sst2 / "train.tsv"), given.steps)
    adapted.eval()
    sentences = read(given.sst2 / "dev.tsv")[: given.sentences]
    client = classifier(given.minilm)
    client.classifier.load_state_dict(head)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYCLOAK_HOME"] = folder
        figures = measured(adapted, client, tokenizer, sentences, Path(folder))
    print(json.dumps({"sentences": len(sentences), "steps": given.steps, **figures}))


def classifier(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()


def read(path: Path) -> list[tuple[str, int]]:
    rows = (line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return [(text, int(label)) for text, label in rows]


def encoded(tokenizer, rows):
    texts = [text for text, _ in rows]
    return tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=LENGTH)


def train(model, tokenizer, rows, steps) -> None:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 2e-3)
    model.train()
    for _ in range(steps):
        batch = [rows[index] for index in torch.randint(len(rows), (BATCH,))]
        labels = torch.tensor([label for _, label in batch])
        model(**encoded(tokenizer, batch), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def answers(model, tokenizer, rows):
    """Return the logits of each sentence."""
    found = []
    with torch.no_grad():
        for start in range(0, len(rows), BATCH):
            found.append(model(**encoded(tokenizer, rows[start : start + BATCH])).logits)
    return torch.cat(found)


def measured(adapted, client, tokenizer, rows, folder):
    labels = torch.tensor([label for _, label in rows])
    worker = AdapterWorker(lora_of(adapted, ["classifier"]), 64, simulated_platform())
    key = IdentityKey.from_seed(load_secret(places.identity_file()))
    budgets = TokenBudgets(folder / "tokens.sqlite", 10**9, 10**9)
    desk = AdapterDesk(worker, budgets, {key.public: "bench"}, sessions=4, idle_s=600.0)
    clear, bare = answers(adapted, tokenizer, rows), answers(client, tokenizer, rows)
    with serving(desk, worker.end, "127.0.0.1:0") as server:
        address = f"{worker.facts.identity_key.hex()}@127.0.0.1:{server.port}"
        with raycloak_lab.EncryptedAdapter(client, address) as model:
            wall, processor = time.perf_counter(), time.process_time()
            encrypted = answers(model, tokenizer, rows)
            took = {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}
            traffic = asdict(model.traffic)
    budgets.close()

    def accuracy(logits):
        return float((logits.argmax(1) == labels).double().mean())

    return {
        "accuracy_clear": accuracy(clear),
        "accuracy_encrypted": accuracy(encrypted),
        "accuracy_base": accuracy(bare),
        "answers_that_differ": int((clear.argmax(1) != encrypted.argmax(1)).sum()),
        "largest_logit_error": float((clear - encrypted).abs().max()),
        "largest_logit_change": float((clear - bare).abs().max()),
        **took,
        "traffic": traffic,
    }


if __name__ == "__main__":
    main()
