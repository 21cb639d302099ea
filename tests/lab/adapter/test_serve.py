"""The whole of it in three processes: the client, the server that takes its calls, and the worker with the adapter.

The client's orchestrator is in the client's process: it appraises the worker under the client's own policy and keeps
the client's log, so nobody else's process has a part in either.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from typer.testing import CliRunner

import raycloak
import raycloak_lab
from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.sealed.package_keys import TrustStore, create_recipient, load_signer
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.config import home
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.training.assignment import NewRun
from raycloak.metrics.errors import RaycloakError, RefusedError
from raycloak_lab.adapter import adapter_pb2 as wire
from raycloak_lab.adapter import places
from raycloak_lab.adapter.connection import AdapterAddress, AdapterConnection
from raycloak_lab.adapter.worker_process import load_adapter
from raycloak_lab.cli.app import app
from tests.coordinator.runs.test_released_model import LORA, directory_of, of_text
from tests.lab.adapter.conftest import identity
from tests.protocol import RENYI, trained
from tests.test_snippets import BLOCKS
from tests.tiny_text import write_bert, write_reviews

DOCUMENT = "docs/encrypted-adapters.md"
TEXTS = torch.tensor([[2, 4, 6, 7, 3, 0, 0], [2, 9, 5, 8, 11, 6, 3]])
MASK = (TEXTS != 0).long()


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory):
    """Return the home of all tests of the file, which share a server."""
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


def started(shared_home, *command):
    """Start Python with this home, so that it finds the library wherever this process did."""
    import tenseal

    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(tenseal.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "RAYCLOAK_HOME": shared_home}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)


def settings_of(shared_home, folder):
    """Write the settings of a server for this home's client and the hostile ones."""
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
    return file


def serve(shared_home, target, folder, *options):
    """Start the command that serves an adapter."""
    file = settings_of(shared_home, folder)
    return started(shared_home, "-m", "raycloak_lab", "adapter", "serve", str(target), str(file), "--json", *options)


@contextmanager
def command(shared_home, target, folder, *options):
    """Serve an adapter by the command; yields what it printed, and its process."""
    process = serve(shared_home, target, folder, *options)
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


def await_end(processes, deadline_s=120.0):
    """Wait until none of the processes is there; multiprocessing's own helper ends a little after its parent."""
    end = time.monotonic() + deadline_s
    while left := [each for each in processes if Path(f"/proc/{each}").exists()]:
        assert time.monotonic() < end, f"{left} outlived the server"
        time.sleep(0.05)


def child_processes(pid):
    return [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]


def has_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def base_model(folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()


def test_a_classifier_in_three_processes_computes_what_the_trained_model_does(run, server):
    folder, directory = run
    facts, process = server
    assert facts["evidence"] == "SIMULATED"
    assert facts["projections"] == 4
    worker = child_processes(process.pid)[-1]
    # The adapter is a PEFT model, so whoever has read it has loaded torch.
    assert [has_torch(each) for each in (process.pid, worker)] == [False, True]
    base = base_model(folder)
    with raycloak_lab.EncryptedAdapter(base, facts["address"]) as model, torch.no_grad():
        found = model(input_ids=TEXTS, attention_mask=MASK).logits
        expected = raycloak.load(directory)(input_ids=TEXTS, attention_mask=MASK).logits
        bare = base(input_ids=TEXTS, attention_mask=MASK).logits
        assert model.traffic.blocks == 2
    assert torch.allclose(found, expected, atol=1e-3 * expected.abs().max())
    assert not torch.allclose(bare, expected, atol=1e-2 * expected.abs().max())


PREPARED = Path(__file__).resolve().parents[3] / "examples" / "sst2" / "data"
CLIENT = """
import json, sys
import torch, transformers
import raycloak_lab

base, address, policy, texts = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
given = transformers.AutoTokenizer.from_pretrained(base)(texts, return_tensors="pt", padding=True)
model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=2).eval()
with raycloak_lab.EncryptedAdapter(model, address, policy=policy) as adapted:
    logits = adapted(**given).logits
    print(json.dumps({"logits": logits.tolist(), "blocks": adapted.traffic.blocks, "simulated": adapted.simulated}))
"""


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_minilm_says_the_same_of_sst_2_with_its_adapter_elsewhere(shared_home, tmp_path_factory):
    """Client, server and worker are processes of their own; this one trained the adapter, and compares.

    The client's policy is a file of the client's. Its orchestrator appraises the worker by it and keeps the log.
    """
    if not PREPARED.exists():
        pytest.skip("sst2 was not prepared: run examples/sst2/prepare.py")
    site = tmp_path_factory.mktemp("minilm")
    (site / "bert").symlink_to(PREPARED / "minilm")
    rows = sorted((PREPARED / "dev.tsv").read_text(encoding="utf-8").splitlines(), key=len)[:40]
    (site / "train.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = {**of_text(site, lora=LORA), "steps": 1, "micro_batch_size": 8, "dp_config": RENYI}
    directory = directory_of(trained(tmp_path_factory.mktemp("trained"), **config))
    texts = [row.rsplit("\t", 1)[0] for row in rows[:16]]
    policy = simulated_policy(SimulatedVendor.load_or_create(home.simulator_folder()), code_measurement())
    (site / "policy.yaml").write_text(policy.model_dump_json())
    with command(shared_home, directory, site) as (facts, server):
        assert facts["projections"] == 12
        (worker,) = child_processes(server.pid)[-1:]
        arguments = (site / "bert", facts["address"], site / "policy.yaml", json.dumps(texts))
        client = started(shared_home, "-c", CLIENT, *map(str, arguments))
        said, _ = client.communicate(timeout=300)
        assert client.returncode == 0
        assert len({os.getpid(), client.pid, server.pid, worker}) == 4
    said = json.loads(said)
    found = torch.tensor(said["logits"])
    given = transformers.AutoTokenizer.from_pretrained(site / "bert")(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = raycloak.load(directory)(**given).logits
        bare = base_model(site / "bert")(**given).logits
    assert torch.allclose(found, expected, atol=1e-3 * expected.abs().max())
    assert (found.argmax(1) == expected.argmax(1)).all()
    assert not torch.allclose(bare, expected, atol=1e-2 * expected.abs().max())
    assert said["simulated"]
    # Query and value of a layer share their blocks.
    assert said["blocks"] == 6 * -(-int(given["attention_mask"].sum()) // facts["block_tokens"])
    (log,) = logs_of(facts["adapter"])
    assert list(log)[:5] == ["session", "admitted", "adapter_keys", "released", "finished"]
    assert policy.digest().hex() in json.dumps(log["session"])


def logs_of(adapter):
    """Return the logs of clients about one adapter: bodies by kind."""
    found = []
    for path in (places.adapters_folder() / "sessions").glob("*/evidence.jsonl"):
        entries = (json.loads(line) for line in path.read_text().splitlines())
        log = {each.get("kind"): each.get("body") for each in entries}
        if log["adapter_keys"]["adapter"] == adapter:
            found.append(log)
    return found


def sealed_run(folder, **settings):
    """Train for a step; leave the package in ``folder``, with the keys of its one recipient. Returns the run."""
    create_recipient(folder / "auditor.key")
    terms = CheckpointConfig(storage="packages", recipients=["auditor.key.pub"])
    archive = Archive(terms, "0" * 16, folder, lambda _: None)
    made = trained(folder, **settings, steps=1, assignment=NewRun(archive))
    TrustStore().with_signer("site", load_signer(folder / "signer" / "signer.pub.json")).save(folder / "trust.json")
    (path,) = (folder / "packages").rglob("*.tssp")
    path.rename(folder / path.name)
    return made


def bare_package(folder):
    """Return what `load_adapter` is asked for a package whose model has no adapter."""
    folder.mkdir()
    settings = {"model": "tests.models:small_model", "dp_config": RENYI}
    sealed_run(folder, **settings)
    (path,) = folder.glob("*.tssp")
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "expected_batch_size": 4}))
    return {
        "path": str(path),
        "trust": folder / "trust.json",
        "key": folder / "auditor.key",
        "config": folder / "config.yaml",
        "shared": (),
    }


@pytest.fixture(scope="module")
def sealed(run, tmp_path_factory):
    """Return a folder with a package of a LoRA run, its run directory, and what its one recipient has."""
    folder = tmp_path_factory.mktemp("sealed")
    settings = {**of_text(run[0].parent, lora=LORA), "micro_batch_size": 8, "dp_config": RENYI}
    made = sealed_run(folder, **settings)
    (path,) = folder.glob("*.tssp")
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "expected_batch_size": 4}))
    (folder / "whole.yaml").write_text(yaml.safe_dump({**settings, **of_text(run[0].parent), "expected_batch_size": 4}))
    return folder, folder / path.name, directory_of(made)


def options_of(folder, key="auditor.key", config="config.yaml"):
    return ("--trust", str(folder / "trust.json"), "--key", str(folder / key), "--config", str(folder / config))


def test_a_sealed_package_is_served_as_its_run_is_and_a_worker_that_is_killed_is_named(
    shared_home, run, sealed, tmp_path
):
    """Every later call is refused, and the server still ends as it should."""
    folder, package, directory = sealed
    base = base_model(run[0])
    with command(shared_home, package, tmp_path, *options_of(folder)) as (facts, process), torch.no_grad():
        assert facts["projections"] == 4
        with raycloak_lab.EncryptedAdapter(base, facts["address"]) as model:
            found = model(input_ids=TEXTS, attention_mask=MASK).logits
            os.kill(child_processes(process.pid)[-1], signal.SIGKILL)
            for call in (model, model):
                with pytest.raises(RefusedError) as refusal:
                    call(input_ids=TEXTS, attention_mask=MASK)
                assert (type(refusal.value), refusal.value.code) == (RefusedError, "worker_gone")
        with urllib.request.urlopen(facts["metrics"], timeout=60) as page:
            assert 'raycloak_adapter_calls_total{code="worker_gone",method="Apply"} 2.0' in page.read().decode()
        (log,) = logs_of(facts["adapter"])
        assert log["released"]
        expected = raycloak.load(directory)(input_ids=TEXTS, attention_mask=MASK).logits
        bare = base(input_ids=TEXTS, attention_mask=MASK).logits
    assert torch.allclose(found, expected, atol=1e-3 * expected.abs().max())
    assert not torch.allclose(bare, expected, atol=1e-2 * expected.abs().max())


def test_the_command_refuses_a_package_for_the_wrong_recipient_and_leaves_no_process(
    shared_home, sealed, tmp_path, capfd
):
    """The command in this process, which has imported what its worker's process must."""
    folder, package, _ = sealed
    create_recipient(folder / "eve.key")
    settings = settings_of(shared_home, tmp_path)
    before = child_processes(os.getpid())
    command = ["adapter", "serve", str(package), str(settings), "--json", *options_of(folder, "eve.key")]
    assert CliRunner().invoke(app, command).exit_code == 3
    assert json.loads(capfd.readouterr().out)["error"]["code"] == "not_a_recipient"
    assert [each for each in child_processes(os.getpid()) if each not in before and not is_helper(each)] == []


def is_helper(pid):
    """Say whether a child is multiprocessing's own, which ends with this process."""
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("package_keys", lambda given: {**given, "trust": None}),
        ("model_needed", lambda given: {**given, "config": None}),
        ("package_unknown_signer", lambda given: {**given, "trust": stranger(given["trust"])}),
        ("package_file_changed", lambda given: {**given, "path": damaged(Path(given["path"]))}),
        ("model_mismatch", lambda given: {**given, "config": given["config"].with_name("whole.yaml")}),
        ("adapter_kind", lambda given: {**given, "shared": ()}),
        ("adapter_kind", lambda given: bare_package(Path(given["path"]).parent / "bare")),
    ],
)
def test_packages_that_cannot_be_served_are_refused_by_name(sealed, tmp_path, code, spoil):
    folder, package, _ = sealed
    copy = shutil.copytree(folder, tmp_path / "copy")
    given = {
        "path": str(copy / package.name),
        "trust": copy / "trust.json",
        "key": copy / "auditor.key",
        "config": copy / "config.yaml",
        "shared": ("classifier",),
    }
    load_adapter(**given)
    with pytest.raises(RaycloakError) as refusal:
        load_adapter(**spoil(given))
    assert refusal.value.code == code


def stranger(trust):
    """Return a trust store that knows no signer."""
    TrustStore().save(trust)
    return trust


def damaged(package):
    """Return a package with one byte of its parameters changed."""
    (path,) = package.rglob("parameters*") if package.is_dir() else (package,)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return str(package)


def test_the_documented_client_runs_as_it_is_there(run, server):
    (block,) = (each for each in BLOCKS if each.document == DOCUMENT and each.language == "python")
    names = {
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
    with raycloak_lab.EncryptedAdapter(base_model(run[0]), facts["address"]) as model:
        model(input_ids=TEXTS, attention_mask=MASK)
