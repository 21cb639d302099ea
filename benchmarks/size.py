"""The table "Size" of docs/models.md: ``python -m benchmarks.size``. Peak memory of every process of a run, by role.

    full    GPT-2 small, 124 million parameters in float32, all of them trained
    lora    a Llama of 1.2 billion parameters in bfloat16, frozen, with LoRA adapters
    floor   a tiny GPT-2: what each process takes without a model
    stream  the model of lora on one device that is too small for it: how much of the base is there at once

The first three write random weights and a data set of random ids into a temporary folder, train two workers for some
steps through ``raycloak run``, and read /proc twice a second until the command ends. ``stream`` computes a micro-batch
in this process, on a device that is a tag on the host's memory, and counts the bytes of the base that it names there.
Nothing is kept but the figures.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from raycloak.coordinator.cluster.processes import descendants, process_table
from raycloak.workers.gradients.clipping import GradientEngine
from raycloak.workers.gradients.numerics import pin_numerics
from raycloak.workers.gradients.placement import place
from raycloak.workers.gradients.row_memory import mechanism_of_rows
from raycloak.workers.gradients.streaming import streams_of
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.models.hub_model import HubSpec, LoraSpec
from raycloak.workers.models.losses import next_token_cross_entropy
from raycloak.workers.models.models import ModelSource, build_model, read_flat
from raycloak_lab.scale.tagged_devices import devices, tagged
from tests.workers.gradients.tagged_devices import FromHost, on_host

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = 512
INTERVAL_S = 0.5
SHARD_BYTES = 2**30
ROLES = {
    "TrainWorkerActor": "worker",
    "MaskedAggregatorActor": "aggregator",
    "LedgerActor": "ledger",
    "OrchestratorActor": "orchestrator",
}
"""By the class that Ray puts into the title of an actor's process."""
STREAM = "stream"
FIELDS = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "Rss")


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained.

    Attributes:
        settings: of the model's type, for `transformers`.
        dtype: of its file.
        length: tokens of an example.
        run: fields of the run's configuration beside those that all cases share.
    """

    model_type: str
    settings: dict[str, int]
    dtype: torch.dtype
    length: int = 4
    run: dict[str, object] = field(default_factory=dict)
    lora: dict[str, object] | None = None


CASES = {
    "floor": Case("gpt2", {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128}, torch.float32),
    # The wider ring, which large batches need.
    "full": Case("gpt2", {}, torch.float32, run={"ring": {"bits": 64}}),
    "lora": Case(
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        4,
        # Under avx2 no library has a fast product of bfloat16.
        {"cpu_capability": "default"},
        {"rank": 8, "target_modules": ["q_proj", "v_proj"]},
    ),
}


@dataclass(slots=True)
class Peaks:
    """The most memory seen so far, in bytes.

    Attributes:
        total: of all processes together, PSS.
        own: by role, of one process, without the object store's shared memory.
        rss: by role, of one process, with everything that it shares.
        store: shared memory of all processes: Ray's object store.
        at_total: by role, when ``total`` was reached: own memory of all processes of the role.
    """

    total: int = 0
    own: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    rss: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    anonymous: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    store: int = 0
    at_total: dict[str, int] = field(default_factory=dict)

    def take(self, driver: int) -> None:
        """Read every process below ``driver``, and itself."""
        table = process_table()
        own: dict[str, int] = defaultdict(int)
        total = store = 0
        for each in [each for each in table if each.pid == driver] + descendants([driver], table):
            memory = memory_of(each.pid)
            if memory is None:
                continue
            role = "driver" if each.pid == driver else role_of(each.title)
            mine = memory["Pss"] - memory["Pss_Shmem"]
            own[role] += mine
            total += memory["Pss"]
            store += memory["Pss_Shmem"]
            self.own[role] = max(self.own[role], mine)
            self.anonymous[role] = max(self.anonymous[role], memory["Pss_Anon"])
            self.rss[role] = max(self.rss[role], memory["Rss"])
        self.store = max(self.store, store)
        if total > self.total:
            self.total, self.at_total = total, {**own, "object store": store}


def role_of(title: str) -> str:
    """Return the role of a process; everything that is Ray's own is one."""
    return next((role for name, role in ROLES.items() if name in title), "ray and platform")


def memory_of(pid: int) -> dict[str, int] | None:
    """Return the kernel's figures of a process in bytes; None if it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
        found = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        return {name: found[name] for name in FIELDS}
    return None


def write_model(case: Case, folder: Path) -> int:
    """Write configuration and random weights in shards; returns the number of parameters."""
    config = transformers.CONFIG_MAPPING[case.model_type](**case.settings)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    # Repeated: a billion draws would take longer than a step, and no figure depends on them.
    draws = torch.randn(2**22, generator=torch.Generator().manual_seed(1)).mul_(0.02).to(case.dtype)
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    # A parameter that is used in two places is written once, under its first name.
    for name, parameter in model.named_parameters():
        if sum(map(_bytes, shard.values())) > SHARD_BYTES:
            _write_shard(shard, folder, index)
            shard = {}
        is_scale, count = parameter.ndim == 1 and name.endswith("weight"), parameter.numel()
        values = torch.ones(count, dtype=case.dtype) if is_scale else draws.repeat(-(-count // len(draws)))[:count]
        shard[name] = values.clone().view(parameter.shape)
    _write_shard(shard, folder, index)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings |= {"dtype": str(case.dtype).removeprefix("torch."), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def _write_shard(shard: dict[str, torch.Tensor], folder: Path, index: dict[str, str]) -> None:
    file = f"model-{len(set(index.values())) + 1:05}.safetensors"
    save_file(shard, folder / file, metadata={"format": "pt"})
    index |= dict.fromkeys(shard, file)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def write_run(case: Case, folder: Path, steps: int, overrides: dict[str, object]) -> tuple[Path, int]:
    """Write model, data and configuration; returns the configuration's file and the number of parameters."""
    size = write_model(case, folder / "model")
    vocabulary = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    ids = np.random.default_rng(1).integers(vocabulary, size=(EXAMPLES, case.length))
    np.savez(folder / "data.npz", features=ids, labels=ids)
    config = {
        "name": "size",
        "num_workers": 2,
        "virtual_workers": 2,
        "steps": steps,
        "expected_batch_size": 4,
        "micro_batch_size": 4,
        "model": {"hf": "model", "task": "causal_lm"} | ({} if case.lora is None else {"lora": case.lora}),
        "dataset": {"kind": "npz", "path": "data.npz", "features": "features", "vocabulary": vocabulary},
        "dp_config": {"target_epsilon": 8.0},
        "failure": {"admission_deadline_s": 1200, "step_deadline_s": 1200, "control_deadline_s": 120},
        **case.run,
        **overrides,
    }
    # JSON is YAML.
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    return folder / "run.yaml", size


def measured(name: str, steps: int, limit_s: float, overrides: dict[str, object]) -> dict[str, object]:
    """Run one case in a temporary folder, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="raycloak-size-") as temporary:
        folder = Path(temporary)
        config, size = write_run(CASES[name], folder, steps, overrides)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYCLOAK_HOME": str(folder / "home")}
        command = [sys.executable, "-m", "raycloak", "run", str(config), "--json"]
        peaks, began = Peaks(), time.monotonic()
        with (
            (folder / "stdout").open("w+", encoding="utf-8") as out,
            subprocess.Popen(command, env=environment, stdout=out) as run,
        ):
            try:
                while run.poll() is None:
                    peaks.take(run.pid)
                    if time.monotonic() - began > limit_s:
                        sys.exit(f"{name} took more than {limit_s:g} s, and was ended; peaks so far: {peaks}")
                    time.sleep(INTERVAL_S)
            finally:
                # Of a run that has ended it does nothing; Ray's processes end with their driver.
                run.kill()
        seconds = time.monotonic() - began
        if run.returncode:
            sys.exit(f"{name} ended with {run.returncode}")
        verdict = json.loads((folder / "stdout").read_text(encoding="utf-8"))
    return {
        "case": name,
        "parameters": size,
        "trained": verdict.get("parameters"),
        "steps": verdict["steps"],
        "seconds": round(seconds),
        "peak_bytes": peaks.total,
        "object_store_bytes": peaks.store,
        "own_bytes": dict(peaks.own),
        "anonymous_bytes": dict(peaks.anonymous),
        "rss_bytes": dict(peaks.rss),
        "at_peak_bytes": peaks.at_total,
    }


def streamed() -> dict[str, object]:
    """Compute the clipped sum of a micro-batch with streamed blocks, and return its figures."""
    case, began = CASES["lora"], time.monotonic()
    lora = LoraSpec(rank=8, alpha=16.0, target_modules=("q_proj", "v_proj"), bias="none")
    pin_numerics()
    with tempfile.TemporaryDirectory(prefix="raycloak-size-") as folder, tagged():
        size = write_model(case, Path(folder) / "model")
        source = ModelSource.of(HubSpec(hf="model", task="causal_lm", lora=lora))
        module = build_model(source, folder, 0, ComputeMode(gradient_checkpointing=True))
        parameters = read_flat(module)
        on_host(module)
        place(module, devices(1), lambda device: 2**40, beside=2**40)
        (stream,) = streams_of(module)
        base = sum(each.nbytes for each in module.parameters() if not each.requires_grad)
        kept = base - sum(home.host.nbytes for home in stream.homes())
        engine = GradientEngine(module, next_token_cross_entropy, mechanism_of_rows(parameters.size, 4), devices(1)[0])
        ids = np.random.default_rng(1).integers(case.settings["vocab_size"], size=(4, 32))
        with FromHost() as copies:
            engine.clipped_sum(parameters, [(ids, ids, np.ones(4, np.bool_))])
    return {
        "case": STREAM,
        "parameters": size,
        "trained": parameters.size,
        "seconds": round(time.monotonic() - began),
        "base_bytes": base,
        "kept_bytes": kept,
        "peak_base_bytes": kept + copies.peak,
    }


def table(figures: list[dict[str, object]]) -> str:
    """Return the figures as Markdown: GB of one process of each role, and bytes for each parameter above the floor."""
    return "\n".join(_rows(figures))


def _rows(figures: list[dict[str, object]]) -> Iterator[str]:
    floor = next((each for each in figures if each["case"] == "floor"), None)
    yield "| case | role | GB | bytes a parameter above the floor |"
    yield "|---|---|---|---|"
    for each in [each for each in figures if "own_bytes" in each]:
        roles = {**each["own_bytes"], "object store": each["object_store_bytes"]}
        least = {} if floor is None else {**floor["own_bytes"], "object store": floor["object_store_bytes"]}
        for role, peak in sorted(roles.items()):
            above = f"{(peak - least[role]) / each['parameters']:.1f}" if role in least and each is not floor else ""
            yield f"| {each['case']} | {role} | {peak / 1e9:.2f} | {above} |"
        yield f"| {each['case']} | all together | {each['peak_bytes'] / 1e9:.2f} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join((*CASES, STREAM)))
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which a case is given up")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a field of the configuration")
    chosen = parser.parse_args()
    # So that a run is ended with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    overrides = {name: json.loads(value) for name, _, value in (each.partition("=") for each in chosen.set)}
    if unknown := set(chosen.cases) - {*CASES, STREAM}:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join((*CASES, STREAM))}")
    figures = []
    for name in chosen.cases or CASES:
        figures.append(streamed() if name == STREAM else measured(name, chosen.steps, chosen.limit, overrides))
        print(json.dumps(figures[-1]), flush=True)
    print(table(figures))


if __name__ == "__main__":
    main()
