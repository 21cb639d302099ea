"""Whole runs on a real Ray: the trainer, its actors, its run directory, its metrics and its failures.

A run costs many seconds, nearly all of them for the start of its processes. So `observed` is one run that several tests
look at, and a test that needs no third worker has none.
"""

import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import yaml
from safetensors.numpy import load_file

from raycloak.attestation.attester.tsm import tee_nodes
from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.attestation.tdx.rules import RTMRS
from raycloak.coordinator.cluster.actors import GpuSamplers, kill_all, start_platforms
from raycloak.coordinator.cluster.backend import ActorLost
from raycloak.coordinator.cluster.processes import descendants, process_table
from raycloak.coordinator.cluster.ray_calls import ask, fetch
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.runs.evidence_address import manifest_in
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ModelError, RefusedError
from raycloak.metrics.gpu_readings import GpuSampler
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.terms.model_digest import model_digest, tensor_digests
from raycloak_lab.bench.chaos.cluster import role
from tests.own_code import Told
from tests.protocol import RENYI, settle
from tests.ray.unruly import AGED_S, BAD, revoke, unruly
from tests.ray.watching import Observed, Scraping, observe, watched

STEPS = 4
DEATH_NOTICED_S = 60
"""Half of the deadline by which a worker that only hangs is given up. An idle machine takes less than 2 s."""


def digits(**changes):
    raw = demo_config() | {"steps": STEPS} | changes
    return parse_config(raw)


SERVED = {"attestation": {"bind": "127.0.0.1:0"}}
ALONE = {"num_workers": 1, "secure_aggregation": False}
MEASURED = {
    "measurements": {
        "class_counts": {"classes": 10, "noise_multiplier": 20},
        "evaluation": {"every": 2, "noise_multiplier": 20},
    }
}
OBSERVED = {"aggregators": 2, "loggers": {"tensorboard": {}}, **MEASURED}


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("5e" * 32)
    return path


def train(config, **options):
    return Trainer(config, notice=lambda line: None, **options).train()


def digests(result):
    lines = (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [event["model_digest"] for event in map(json.loads, lines) if event["event"] == "step"]


@pytest.fixture(scope="module")
def observed(ray_cluster, secret, tmp_path_factory):
    """Return an undisturbed run of three workers and two aggregators, with measurements, which serves its evidence."""
    before, processes, scraping, evidence = _members(), set(), Scraping(), []

    def look(report):
        scraping(report)
        processes.update(_members() - before)
        if report.step in (1, STEPS - 1):
            evidence.append(observe(trainer, f"observer-{report.step}", tmp_path_factory.mktemp("seen")))

    with pytest.MonkeyPatch.context() as patch, watched() as watching:
        home = tmp_path_factory.mktemp("observed") / "home"
        settle(home)
        patch.setenv("RAYCLOAK_HOME", str(home))
        config, said = digits(**OBSERVED, **SERVED), scraping.notices.append
        trainer = Trainer(config, run_secret=secret, notice=said, progress=look, callbacks=[Told()])
        result = trainer.train()
        vectors = [ray.get([each.held for each in references], timeout=120) for references in watching.seen]
    return Observed(trainer, result, scraping.pages, processes, vectors, evidence, scraping.notices)


def _members():
    """Return the live processes of workers and aggregators below this one, which started their cluster."""
    return {
        (each.pid, each.started, role(each))
        for each in descendants([os.getpid()], process_table())
        if role(each) in ("worker", "aggregator") and each.state not in "ZX"
    }


def test_every_vector_of_a_step_and_of_a_measurement_is_masked(observed):
    words = STEPS * 4810 + 10 + 2 * 2
    assert len(digests(observed.result)) == STEPS
    assert observed.result["metrics"]["masked_bytes"] == 3 * 4 * words
    assert len(observed.result["metrics"]["measurements"]) == 3


def test_run_directory_holds_what_a_third_party_needs(observed):
    result = observed.result
    folder = Path(result["run_dir"])
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    tensors = manifest.computation.tensors
    saved = load_file(folder / "parameters.safetensors")
    flat = np.concatenate([saved[tensor.name].ravel() for tensor in tensors])
    assert model_digest(tensors, tensor_digests(flat, tensors)).hex() == result["metrics"]["model_digest"]
    assert len(read_exported_log(folder / "evidence.jsonl", manifest.log_owner).entries) > STEPS
    committed = re.findall(rb'"released_digest":"([0-9a-f]{64})"', (folder / "evidence.jsonl").read_bytes())
    steps = digests(result)
    assert [digest.decode() for digest in committed if digest.decode() in steps] == steps
    assert len(committed) == STEPS + len(result["metrics"]["measurements"])
    assert parse_config(yaml.safe_load((folder / "config.yaml").read_text())) == digits(**OBSERVED, **SERVED)
    assert result["metrics"]["evidence_class"] == "simulated"


def test_callbacks_are_told_of_a_whole_run(observed):
    own, _ = observed.trainer._execution._callbacks._threads
    told = own._callback.told
    kinds = [type(each).__name__.removesuffix("Report") for each in told]
    steps = ["Step", "Step", "Measurement", "Step", "Evaluation", "Step", "Measurement"]
    assert kinds == ["RunStarted", "Measurement", *steps, "Checkpoint", "RunEnded"]
    assert told[-1].metrics == observed.result["metrics"]
    events = Path(observed.result["run_dir"], "tensorboard").glob("events.out.tfevents.*")
    assert [b"privacy_epsilon" in path.read_bytes() for path in events] == [True]


def test_metrics_are_served_during_the_run(observed):
    pages = observed.pages
    assert len(pages) == STEPS
    spent = [float(re.search(r"^raycloak_privacy_epsilon_spent\{.*\} (\S+)$", page, re.MULTILINE)[1]) for page in pages]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert 'raycloak_workers_admitted{run="' in pages[-1]
    assert re.search(rf"^raycloak_steps_committed_total\{{.*\}} {STEPS}\.0$", pages[-1], re.MULTILINE)
    assert not any(line.startswith("raycloak_gpu") for line in pages[-1].splitlines())
    assert re.search(r'^raycloak_run_state\{.*state="training"\} 1\.0$', pages[-1], re.MULTILINE)
    assert re.search(rf"^raycloak_steps_finished\{{.*\}} {STEPS}\.0$", pages[-1], re.MULTILINE)
    assert "raycloak_collateral_expiry_timestamp_seconds{" in pages[-1]
    # The orchestrator's process counts the calls of the run's service.
    assert "raycloak_service_up 1.0" in pages[-1]
    assert re.search(r'^raycloak_service_calls_total\{code="ok",method="Attest"\} [1-9]', pages[-1], re.MULTILINE)


def test_a_sampler_where_there_is_no_nvml_says_so_and_ends(ray_cluster):
    samplers = GpuSamplers()
    (handle,) = samplers._handles.values()
    reasons = samplers.unavailable_reasons()
    if not reasons:
        samplers.close()
        pytest.skip("this machine has NVML")
    assert [reason.partition(" from ")[0] for reason in reasons] == ["no GPU metrics"]
    assert samplers.sample() == ()
    assert samplers.unavailable_reasons() == []

    def ask_until_it_is_gone():
        # Ray ends a killed process a little later, and a call that comes first is still answered.
        for _ in range(60):
            fetch(ask(handle, GpuSampler.sample), 30)
            time.sleep(1)

    with pytest.raises(ActorLost) as lost:
        ask_until_it_is_gone()
    assert lost.value.cause == "died"


def test_where_another_actor_finds_no_nvml_no_sampler_is_started(ray_cluster):
    platforms = start_platforms(SimulatedVendor.create())
    samplers = GpuSamplers(platforms)
    assert not samplers._handles
    (node,) = platforms
    reasons = samplers.unavailable_reasons()
    assert len(reasons) + len(samplers._handles) == 1
    assert all(reason.startswith(f"no GPU metrics from {node[:12]}: ") for reason in reasons)
    assert samplers.unavailable_reasons() == []
    kill_all(platforms.values())
    samplers.close()


def test_roster_and_log_are_served_during_the_run(observed):
    (service,) = (line for line in observed.notices if line.startswith("evidence service: "))
    address = observed.result["metrics"]["evidence_service"]
    assert service == f"evidence service: {address} (SIMULATED evidence)"
    first, last = observed.evidence
    assert 0 <= first.roster.step < last.roster.step < STEPS
    assert sorted(v for member in first.roster.workers for v in member.virtual_workers) == list(range(8))
    assert {each.evidence_class for each in last.members} == {"simulated"}
    folder = Path(observed.result["run_dir"])
    whole = read_exported_log(folder / "evidence.jsonl", manifest_in(folder).log_owner)
    assert whole.entries[: len(last.log.entries)] == last.log.entries
    assert whole.entries[: len(first.log.entries)] == first.log.entries


def test_a_run_continues_without_a_bad_a_killed_and_a_revoked_worker_on_renewed_evidence_with_the_same_bytes(
    observed, secret, tmp_path, raycloak_home
):
    """One of five workers is refused. Another is killed in the first step, which is noticed by its death and costs one
    attempt. Evidence ages after that step, and another worker is revoked after the second."""
    noticed = []
    settle(raycloak_home)

    def disturb(report):
        if report.step == 1:
            passing.let_pass(AGED_S)
        if report.step == 2:
            revoke(trainer._execution.folder.path, "worker-1")

    with watched() as watching, unruly(raycloak_home) as passing:
        watching.doomed = ("worker-3", 1)
        trainer = Trainer(
            digits(**MEASURED, num_workers=5, failure={"max_failures": 2}),
            run_secret=secret,
            progress=disturb,
            notice=lambda line: noticed.append(time.monotonic()) if "died" in line else None,
        )
        result = trainer.train()
        assert 0 < noticed[0] - watching.killed_time < DEATH_NOTICED_S
    assert digests(result) == digests(observed.result)
    for same in ("measurements", "privacy_epsilon_charged"):
        assert result["metrics"][same] == observed.result["metrics"][same]
    assert trainer.finished.outcomes[0].commit.attempts == 2
    assert result["metrics"]["num_workers"] == 2
    left = [line for line in result["metrics"]["warnings"] if " left: " in line]
    assert left[0].startswith(f"{BAD} left: root_unknown: ")
    assert any(line.startswith("worker-3 left: died") for line in left)
    folder = Path(result["run_dir"])
    entries = read_exported_log(folder / "evidence.jsonl", manifest_in(folder).log_owner).entries
    told = [(each.kind, each.content.get("member_id", each.content.get("name"))) for each in entries]
    assert ("refused", BAD) in told
    assert ("admitted", BAD) not in told
    revoked = told.index(("revoked", "worker-1"))
    for member_id in ("worker-0", "worker-1", "worker-2"):
        assert told[:revoked].count(("admitted", member_id)) == 2, "once at the start, and once when it had aged"
    assert told[revoked:].count(("expelled", "worker-1")) == 1
    assert not {("admitted", "worker-1"), ("released", "worker-1")} & set(told[revoked:])
    released = [(i, each.content) for i, each in enumerate(entries) if each.kind == "released"]
    hosted = {v for _, content in released if content["member_id"] == "worker-1" for v in content["virtual_workers"]}
    assert {v for i, content in released if i > revoked for v in content["virtual_workers"]} == hosted
    rosters = [each.content for each in entries[revoked:] if each.kind == "roster"]
    assert next(roster["step"] for roster in rosters if roster["query"] == "gradient") == 2


def test_correlated_noise_gives_the_same_bytes_where_a_worker_is_killed_within_a_mix(
    ray_cluster, secret, tmp_path, monkeypatch
):
    """Another worker computes the sums of two earlier steps that the dead one held, from models that it is given."""
    noise = RENYI | {"noise": {"correlated": "auto", "bands": 3}}
    changes = {"dp_config": noise, "evaluation": None, "expected_batch_size": 300}
    found = []
    for place, hosting in (("several", {}), ("one", ALONE)):
        home = tmp_path / place
        settle(home)
        monkeypatch.setenv("RAYCLOAK_HOME", str(home))
        with watched() as watching:
            watching.doomed = None if hosting else ("worker-1", 2)
            result = train(digits(**changes, **hosting), run_secret=secret)
        found.append(digests(result))
        assert any("worker-1 left: died" in line for line in result["metrics"]["warnings"]) == (not hosting)
    assert found[0] == found[1]
    assert len(set(found[0])) == STEPS
    manifest = Manifest.model_validate_json((Path(result["run_dir"]) / "manifest.json").read_bytes())
    assert manifest.computation.mechanism.bands == 3


def test_aggregator_receives_no_vector_that_correlates_with_the_model(observed):
    """Every received vector, as centred ring words, is uncorrelated with the decoded update it contributes to.

    The correlation of two independent vectors of d coordinates is normal with deviation 1/sqrt(d); |r| above 6
    deviations has probability 2e-9, and so has a share of large words that far from a half. 24 vectors are looked at:
    false alarms below 1e-6.
    """
    updates = [parts for parts in observed.vectors if len(parts[0]) > 100]
    assert len(updates) == 2 * STEPS
    assert sum(len(parts[0]) for parts in updates) == STEPS * observed.trainer.finished.plan.mechanism.dimension
    for parts in updates:
        assert len(parts) == 3
        with np.errstate(over="ignore"):
            update = (parts[0] + parts[1] + parts[2]).view(np.int32).astype(float)
        assert np.abs(update).max() < 2**31 * 0.9
        for part in parts:
            centred = part.view(np.int32).astype(float)
            assert abs(np.corrcoef(centred, update)[0, 1]) < 6 / np.sqrt(len(update))
            assert abs(np.mean(np.abs(centred) > 2**30) - 0.5) < 3 / np.sqrt(len(update))


def test_what_is_wrong_with_the_input_is_said_before_anything_is_charged(ray_cluster, raycloak_home):
    """The errors of a worker; test_coordinator.py tests all others on plain objects."""
    config = digits(**ALONE, dp_config=RENYI).model_copy(update={"model": None})
    with pytest.raises(ModelError, match="BatchNorm"):
        train(config, model_init_fn=lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)))
    assert not list((raycloak_home / "runs").rglob("manifest.json"))
    assert not list(raycloak_home.rglob("*.secret")), "a run that failed keeps no key of its noise"
    assert len(list((raycloak_home / "runs").rglob("evidence.jsonl"))) == 1


def test_a_policy_for_hardware_is_met_by_no_machine_without_a_tee(ray_cluster, tmp_path):
    if tee_nodes():
        pytest.skip("this machine has a device of a trusted execution environment")
    rules = "".join(f", {name}: any" for name in RTMRS)
    (tmp_path / "policy.yaml").write_text(
        f"accepted_classes: [intel_tdx]\nanchors: [intel_tdx]\ntdx: {{measurements: ['{'11' * 48}']{rules}}}\n"
    )
    (tmp_path / "collateral.yaml").write_text("tdx: []\n")
    config = digits(policy="policy.yaml", collateral="collateral.yaml", dp_config=RENYI, **ALONE)
    with pytest.raises(RefusedError, match="tee_unavailable"):
        train(config, config_dir=tmp_path)


class Visits(torch.utils.data.TensorDataset):
    """Two visits of each patient, both of which a step may see."""

    rows_per_unit = 2

    def unit(self, index):
        return f"patient {index // 2}"


def test_an_in_memory_dataset_and_a_loose_result_are_said_and_data_and_generated_secret_go_with_the_run(
    ray_cluster, raycloak_home
):
    """A run without noise is tested on plain objects, in test_public_run.py, as is a secret that is kept."""
    generator = torch.Generator().manual_seed(7)
    features = torch.rand(160, 64, generator=generator)
    dataset = Visits(features, torch.arange(160) % 10)
    changes = {"expected_batch_size": 40, "steps": 2, "evaluation": None, "allow_nondeterministic": True}
    config = digits(**ALONE, **changes, dp_config=RENYI).model_copy(update={"dataset": None})
    scraping, modes = Scraping(), []

    def look(report):
        scraping(report)
        modes.extend(path.stat().st_mode & 0o777 for path in raycloak_home.rglob("*.secret"))

    trainer = Trainer(config, train_dataset=dataset, notice=scraping.notices.append, progress=look)
    result = trainer.train()
    assert result["metrics"]["masked_bytes"] == 0
    assert any("the driver has seen the examples" in line for line in result["metrics"]["warnings"])
    assert not list(raycloak_home.rglob("*.npz"))
    assert modes == [0o600, 0o600], "a generated secret lies in a file during the run"
    assert not list(raycloak_home.rglob("*.secret"))
    assert result["metrics"]["exact"] is False
    assert re.search(r'^raycloak_run_claims_info\{exactness="NOT_EXACT"', scraping.pages[0], re.MULTILINE)
    manifest = Manifest.model_validate_json((Path(result["run_dir"]) / "manifest.json").read_bytes())
    assert not manifest.computation.exact
    mechanism = manifest.computation.mechanism
    assert (mechanism.unit, mechanism.rows_per_unit, mechanism.num_examples) == ("unit", 2, 80)
    assert result["metrics"]["unit"] == "unit"
    assert result["metrics"]["account"] == f"data-{manifest.dataset_fingerprint.hex()[:16]}", "known by its content"
    assert (raycloak_home / "data.key").stat().st_mode & 0o777 == 0o600


def test_no_worker_or_aggregator_outlives_its_run(observed):
    assert len(observed.processes) >= 4
    deadline = time.monotonic() + 120
    while (left := observed.processes & _members()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
