"""Two nodes whose caches hold other weights under one name: the base is never sent, so each worker reads its own."""

import json
from contextlib import closing

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from raycloak.coordinator.config.home import ledger_url
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak_lab.bench.chaos.raylets import Node
from tests.tiny_text import write_gpt2

COMMIT = "0" * 40
CHANGED = "transformer.h.1.mlp.c_fc.weight"


def write_cache(home):
    """Write what the hub's client has cached of a tiny GPT-2; returns its folder."""
    repository = home / "hub" / "models--raycloak--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return write_gpt2(repository / "snapshots" / COMMIT)


@pytest.fixture
def homes(tmp_path):
    """Return two caches of the same model; the second has another number in one frozen tensor."""
    homes = tmp_path / "one", tmp_path / "other"
    folders = [write_cache(home) for home in homes]
    weights = load_file(folders[1] / "model.safetensors")
    weights[CHANGED][0, 0] += 1
    (folders[1] / "model.safetensors").unlink()
    save_file(weights, folders[1] / "model.safetensors", metadata={"format": "pt"})
    return homes


@pytest.fixture
def nodes(raylets, homes):
    nodes = [raylets.add(Node(1, {f"base{i}": 1}, environment={"HF_HOME": str(home)})) for i, home in enumerate(homes)]
    yield nodes
    for each in nodes:
        each.kill()


def test_a_base_that_differs_between_nodes_is_refused_by_the_name_of_the_tensor(nodes, homes, raylets, run_python):
    """Nothing is charged: the run ends at admission, for want of a second worker."""
    ids = np.random.default_rng(1).integers(16, size=(40, 8))
    np.savez(run_python.folder / "data.npz", features=ids, labels=ids)
    config = {
        "name": "other-base",
        "num_workers": 2,
        "virtual_workers": 4,
        "steps": 1,
        "expected_batch_size": 16,
        "micro_batch_size": 4,
        "model": {"hf": "raycloak/tiny", "task": "causal_lm", "lora": {"rank": 2}},
        "dataset": {
            "kind": "npz",
            "path": str(run_python.folder / "data.npz"),
            "features": "features",
            "vocabulary": 16,
        },
        "dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 100.0, "accountant": "rdp"},
        "placement": {"strategy": "STRICT_SPREAD"},
        "failure": {"join_timeout_s": 0},
    }
    (run_python.folder / "run.yaml").write_text(json.dumps(config))
    environment = {**raylets.environment, "HF_HOME": str(homes[0]), "HF_HUB_OFFLINE": "1"}
    done = run_python("-m", "raycloak", "run", "run.yaml", "--json", environment=environment, deadline_s=600)
    assert done.code != 0
    assert "model_mismatch" in done.stderr + done.stdout
    assert CHANGED.removeprefix("transformer.") in done.stderr + done.stdout
    with closing(PrivacyLedger(ledger_url(), create=False)) as ledger:
        runs = [run for account in ledger.view().accounts for run in account.runs]
    assert not any(query.charged for run in runs for query in run.queries)
