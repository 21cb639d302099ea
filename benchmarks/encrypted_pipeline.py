"""What cutting a batch in two gains: ``python benchmarks/encrypted_pipeline.py [--rounds N]``.

A BERT of MiniLM's size, with random weights, asks for the deltas of query and value of all six layers, over a real
channel under SIMULATED evidence. Client, server and worker are processes of their own. The peer is the same call with
labels: a loss is of the whole batch, so that call is not cut. Both take the same blocks. Calls are interleaved, and
each figure is a median. Prints a JSON object for each batch: seconds of both calls, their ratio, and each one's ratio
to the time in which the server worked.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

import raycloak
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.keys.run_secret import load_secret
from raycloak.coordinator.adapter.budgets import TokenBudgets
from raycloak.coordinator.adapter.desk import AdapterDesk
from raycloak.coordinator.adapter.serve import simulated_platform
from raycloak.coordinator.adapter.server import serving
from raycloak.coordinator.adapter.worker_process import WorkerProcess
from raycloak.coordinator.config import home
from raycloak.workers.encrypted.adapter_worker import Adapter, LowRank

WIDTH, LAYERS, RANK, BLOCK = 384, 6, 8, 64
BATCHES = ((2, 64), (4, 32), (16, 32))
"""Sequences, and tokens of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYCLOAK_HOME"] = folder
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        server = context.Process(target=serve, args=(other, Path(folder)))
        server.start()
        try:
            measure(pipe, rounds)
        finally:
            pipe.send(None)
            server.join()


def serve(pipe: Connection, folder: Path) -> None:
    """Serve the adapter: send the address, and for each request the seconds of work so far; until None comes."""
    worker = WorkerProcess(adapter, BLOCK, simulated_platform)
    key = IdentityKey.from_seed(load_secret(home.adapter_identity_file()))
    budgets = TokenBudgets(folder / "tokens.sqlite", 10**9, 10**9)
    desk = AdapterDesk(worker, budgets, {key.public: "bench"}, sessions=4, idle_s=600.0)
    with serving(desk, worker.end, "127.0.0.1:0") as server:
        pipe.send(f"{worker.facts.identity_key.hex()}@127.0.0.1:{server.port}")
        while pipe.recv() is not None:
            pipe.send(sum(desk.figures({}).seconds.values()))
    budgets.close()
    worker.stop()


def adapter() -> Adapter:
    rng = np.random.default_rng(24)
    names = [f"bert.encoder.layer.{n}.attention.self.{each}" for n in range(LAYERS) for each in ("query", "value")]
    return Adapter({name: LowRank(rng.normal(size=(RANK, WIDTH)), rng.normal(size=(WIDTH, RANK))) for name in names})


def measure(pipe: Connection, rounds: int) -> None:
    torch.manual_seed(24)
    settings = transformers.BertConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=12, intermediate_size=4 * WIDTH
    )
    client = transformers.BertForSequenceClassification(settings).eval()
    with raycloak.EncryptedAdapter(client, pipe.recv()) as model:
        for count, length in BATCHES:
            ids = torch.randint(1000, 30000, (count, length))
            calls = {"cut": {"input_ids": ids}, "whole": {"input_ids": ids, "labels": torch.zeros(count).long()}}
            figures = {name: [] for name in calls}
            blocks = {}
            for each in range(rounds + 1):
                for name, call in calls.items():
                    before = model.traffic.blocks
                    found = timed(model, call, pipe)
                    blocks[name] = model.traffic.blocks - before
                    if each:  # The first call of a kind warms up.
                        figures[name].append(found)
            assert blocks["cut"] == blocks["whole"]
            wall = {name: median(seconds for seconds, _ in found) for name, found in figures.items()}
            print(
                json.dumps(
                    {
                        "sequences": count,
                        "tokens": length,
                        "blocks": blocks["cut"],
                        **{f"{name}_s": round(each, 3) for name, each in wall.items()},
                        "whole_over_cut": round(wall["whole"] / wall["cut"], 3),
                        **{
                            f"{name}_over_server": round(median(seconds / busy for seconds, busy in found), 3)
                            for name, found in figures.items()
                        },
                    }
                ),
                flush=True,
            )


def timed(model: raycloak.EncryptedAdapter, call: dict[str, torch.Tensor], pipe: Connection) -> tuple[float, float]:
    """Return the seconds of a call, and those in which the server worked for it."""

    def worked() -> float:
        pipe.send("seconds")
        return pipe.recv()

    busy, began = worked(), time.perf_counter()
    model(**call)
    return time.perf_counter() - began, worked() - busy


if __name__ == "__main__":
    main()
