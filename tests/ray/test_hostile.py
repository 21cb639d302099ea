"""A holder of the cluster's token finds no secret of a run in any process or file that Ray has; see `hostile`."""

import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import yaml

from raycloak.attestation.core.keys import Secret
from raycloak.coordinator.ledger.store import LedgerStore
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.terms.manifest import Manifest
from tests.attestation.serving import eventually
from tests.conftest import ROOT
from tests.coordinator.ledger.witness_server import url_file, witness_server
from tests.ray import leaks, planted
from tests.ray.hostile import WANTED

DEADLINE_S = 600
STEPS = 3000
"""More than pass while the program searches."""


def _events(home: Path) -> list[dict]:
    lines = [line for file in home.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


def _needles(home: Path, folder: Path, ledger: str) -> dict[str, bytes]:
    """Return the planted secrets, the ledger's key, and what the run secret gives for the first step."""
    (run,) = home.glob("runs/*/manifest.json")
    manifest = Manifest.model_validate_json(run.read_bytes())
    with closing(LedgerStore(ledger, create=False)) as store:
        key = store.key
    dataset = DatasetDescriptor(kind="npz", path="data.npz").open(folder)
    return {
        **planted.needles(home),
        **leaks.key_needles("key of the ledger", key._key.private_bytes_raw()),
        **leaks.run_needles(manifest, dataset, Secret(planted.RUN_SECRET), [manifest.computation.initial_parameters]),
    }


def _settled(home: Path, run: subprocess.Popen, number: int) -> None:
    """Wait until so many steps are done."""
    eventually(lambda: run.poll() is not None or len(_events(home)) >= number, DEADLINE_S)
    assert run.poll() is None, "the run ended early"


def test_guarantee_a_holder_of_the_clusters_token_finds_no_secret_in_what_ray_runs_and_keeps(
    head, raycloak_home, tmp_path, postgres
):
    folder, log = planted.inputs(tmp_path), tmp_path / "run.log"
    environment = {**head.environment, "RAY_ADDRESS": head.address, "RAYCLOAK_HOME": str(raycloak_home)}
    with witness_server() as server, log.open("w") as output:
        witness = url_file(folder, f"http://127.0.0.1:{server.server_port}/{planted.WITNESS_PATH}")
        config = planted.config(folder, postgres.url(), witness, STEPS)
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "raycloak", "run", "run.yaml", "--run-secret", "run.secret"]
        with subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output) as run:
            try:
                _settled(raycloak_home, run, 3)
                needles = _needles(raycloak_home, folder, config["ledger"]["url"])
                given = {"needles": {name: each.hex() for name, each in needles.items()}, "dashboard": head.dashboard}
                done = subprocess.run(
                    [sys.executable, "-m", "tests.ray.hostile"],
                    env=environment, cwd=ROOT, input=json.dumps(given), capture_output=True, text=True,
                    timeout=DEADLINE_S, check=False,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr[-3000:]
                _settled(raycloak_home, run, len(_events(raycloak_home)) + 2)
                run.send_signal(signal.SIGTERM)
                run.wait(DEADLINE_S)
            finally:
                run.kill()
    told = json.loads(done.stdout)
    assert sorted(each["actor"] for each in told["relays"]) == sorted(
        ["LedgerActor", "OrchestratorActor", "MaskedAggregatorActor", "TrainWorkerActor", "TrainWorkerActor"]
    )
    for each in told["relays"]:
        assert {*each["attributes"]} <= {"_before", "vault"}, "an actor holds nothing but the way to its vault"
        assert each["refused"] == [*WANTED]
    # The search sees: the program itself left a word in arguments, in a runtime environment and in a log.
    seen = {line.removeprefix("bait in ") for line in told["found"] if line.startswith("bait in ")}
    assert any("memory of gcs_server" in each for each in seen)
    assert any(each.startswith("dashboard: log worker-") for each in seen)
    assert any(each.startswith("dashboard: /api/v0/") for each in seen)
    relays = [f"memory of ray::{name}" for name in {each["actor"] for each in told["relays"]}]
    for place in (
        *relays,
        "memory of raylet",
        "memory of ray-dashboard",
        "object store",
        "environ of ray::",
        "cmdline of ray::",
    ):
        assert any(each.startswith(place) and size for each, size in told["looked"].items()), f"{place} was not read"
    assert [line for line in told["found"] if not line.startswith("bait in ")] == []
