"""Runs of Hugging Face models: what is released, and bad input that is refused before any charge.

That any number of workers gives the same bytes is shown in `test_one_digest.py`.
"""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raycloak.attestation.core.keys import Secret
from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.attestation.sealed.package_keys import SIGNER_PUBLIC_FILE, TrustStore, load_signer, run_recipient_key
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.checkpoints.reader import open_to_file, verify_package
from raycloak.coordinator.checkpoints.storage import PackageStorage
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.record.outcome import Evaluation
from raycloak.coordinator.runs.verdict import verdict_of
from raycloak.coordinator.training.assignment import NewRun
from raycloak.coordinator.training.evaluation import public_evaluation
from raycloak.metrics.errors import ConfigError, DatasetError, ModelError
from raycloak.workers import workload
from raycloak.workers.gradients import kept_state
from raycloak.workers.gradients.model_checks import check_rows, check_trainable
from raycloak.workers.gradients.row_memory import largest_rows
from raycloak.workers.inputs.sealed import seal_dataset
from raycloak.workers.models import models
from raycloak.workers.models.compute_mode import ComputeMode
from raycloak.workers.terms.manifest import LossSpec
from raycloak.workers.train_worker import TrainWorker
from tests.protocol import RENYI, SECRET, VIRTUAL_WORKERS, config, settle, trained, whole_run, worker_setup
from tests.tiny_text import WORDS, write_bert, write_gpt2, write_llama, write_reviews, write_tokenizer

LENGTH = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("public")
    write_bert(folder / "bert", num_hidden_layers=1)
    write_gpt2(folder / "gpt2", n_layer=1)
    write_reviews(folder / "train.tsv", 40)
    write_tokenizer(folder / "other", [*WORDS[1:], WORDS[0]])
    (folder / "plot.txt").write_text("the film was very fine a plot is dull\n" * 36)
    config = json.loads((write_bert(folder / "remote", num_hidden_layers=1) / "config.json").read_text())
    (folder / "remote" / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "own.Own"}}))
    return folder


def bert(base, **model):
    return {
        "model": {"hf": str(base / "bert"), "task": "sequence_classification", "classes": 2, **model},
        "dataset": {"kind": "text", "path": str(base / "train.tsv"), "max_length": LENGTH},
    }


def gpt2(base, **model):
    return {
        "model": {"hf": str(base / "gpt2"), "task": "causal_lm", **model},
        "dataset": {"kind": "text_blocks", "path": str(base / "plot.txt"), "max_length": LENGTH},
    }


LORA = {"rank": 2}


def fields(task, **more):
    """A short run of a configuration: what the tests are about is its bytes."""
    return {**task, "steps": 2, "micro_batch_size": 8, "dp_config": RENYI, **more}


def test_only_the_adapter_is_released_and_the_plan_says_what_was_changed(base, tmp_path):
    split = bert(base)["dataset"] | {"path": str(write_reviews(tmp_path / "dev.tsv", 12)), "public": True}
    run = trained(tmp_path, **fields(bert(base, lora=LORA)), evaluation={"dataset": split})
    computation = run.finished.manifest.computation
    assert all("lora_" in tensor.name or "modules_to_save" in tensor.name for tensor in computation.tensors)
    assert len(run.finished.parameters) == sum(tensor.size for tensor in computation.tensors) < 400
    assert any("dropout is set to 0" in warning for warning in run.finished.plan.warnings)
    assert any("drawn from the seed" in warning for warning in run.finished.plan.warnings)
    assert computation.numerics.model_libraries.endswith("attention eager")
    assert len(computation.tokenizer) == 32
    assert (computation.loss.name, computation.loss_code) == ("cross_entropy", b"")
    assert 0 <= said(run.finished).evaluation_f1 <= 1
    causal = computation.model_copy(update={"loss": LossSpec.of("next_token_cross_entropy")})
    manifest = run.finished.manifest.model_copy(update={"computation": causal})
    for loss, perplexity in ((2.0, pytest.approx(7.389056)), (float("nan"), None), (1e6, None)):
        measured = replace(run.finished, manifest=manifest, evaluation=Evaluation("loss", loss, 12))
        assert said(measured).evaluation_perplexity == perplexity


def said(finished):
    return verdict_of(finished, Path(), 1.0, "complete", ())


def test_each_worker_hashes_a_base_once_at_its_start_and_never_again(base, tmp_path, monkeypatch):
    """Not in a check, not for the known answer, not in a step: a large base would be read again each time."""
    for check in (check_trainable, check_rows, largest_rows):
        monkeypatch.setattr(workload, check.__name__, check)
    hashed, genuine = Counter(), models.content_hash

    def counted(value):
        if isinstance(value, torch.Tensor):
            hashed[value.data_ptr(), tuple(value.shape)] += 1
        return genuine(value)

    monkeypatch.setattr(models, "content_hash", counted)
    monkeypatch.setattr(kept_state, "content_hash", counted)
    run = trained(tmp_path, **fields(bert(base, lora=LORA), num_workers=1, secure_aggregation=False))
    computation = run.finished.manifest.computation
    in_file, head = len(load_file(base / "bert" / "model.safetensors")), 2
    assert len(hashed) >= in_file + len(computation.tensors) - head
    assert set(hashed.values()) == {1}


def test_a_run_on_sealed_text_needs_no_tokenizer_and_seals_the_adapter_alone(base, tmp_path):
    """The owner seals token ids. A package opens without the base, which is public."""
    settle(tmp_path)
    ledger = PrivacyLedger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    ledger.open_account("readers", OpeningTerms(20.0, 1e-5, "rdp"))
    demand = SealedDemand(ledger_key=ledger.public_key, account="readers", least_noise_multiplier=1.0)
    ledger.close()
    policy = simulated_policy(SimulatedVendor.load_or_create(tmp_path / "simulator"), code_measurement())
    text = config(**bert(base)).dataset
    owner = Secret(b"o" * 32)
    seal_dataset(
        descriptor(text).open(base), VIRTUAL_WORKERS, policy.digest(), owner, tmp_path / "sealed", demand=demand
    )
    (tmp_path / "owner.key").touch(mode=0o600)
    (tmp_path / "owner.key").write_text(owner.reveal().hex())
    sealed = {"kind": "sealed", "path": str(tmp_path / "sealed"), "key_file": str(tmp_path / "owner.key")}
    archive = Archive(CheckpointConfig(checkpoint_frequency=1, storage="packages"), "run", tmp_path, print)
    task = bert(base, lora=LORA) | {"dataset": sealed, "ledger": {"account": "readers"}}
    run = whole_run(tmp_path, assignment=NewRun(archive), **fields(task))
    finished = run.train()
    assert finished.manifest.computation.tokenizer == b""
    storage = PackageStorage.open(str(tmp_path / "packages" / "run"))
    signer = load_signer(tmp_path / "signer" / SIGNER_PUBLIC_FILE)
    package = verify_package(storage, storage.names()[-1], TrustStore.of("site", signer))
    assert package.run_manifest == finished.manifest
    opened = tmp_path / "adapter.safetensors"
    open_to_file(package, package.unwrap(run_recipient_key(Secret(bytes.fromhex(SECRET)))), opened)
    adapter = load_file(opened)
    assert all("lora_" in name or "modules_to_save" in name for name in adapter)
    assert sum(tensor.numel() for tensor in adapter.values()) == len(finished.parameters) < 400
    assert opened.stat().st_size < (base / "bert" / "model.safetensors").stat().st_size / 4


def test_a_base_that_differs_on_one_worker_is_refused_by_the_name_of_the_tensor(base, tmp_path):
    shutil.copytree(base / "bert", tmp_path / "here" / "bert")
    path = tmp_path / "here" / "bert" / "model.safetensors"

    def tamper(worker, member_id):
        if member_id == "worker-0":
            worker.prepare = lambda setup: prepared_on_another_node(worker, setup)

    def prepared_on_another_node(worker, setup):
        kept = path.read_bytes()
        weights = load_file(path)
        weights["encoder.layer.0.output.dense.weight"][0, 0] += 1
        # Another file and not another content: the first one is mapped.
        path.unlink()
        save_file(weights, path, metadata={"format": "pt"})
        try:
            return TrainWorker.prepare(worker, setup)
        finally:
            path.unlink()
            path.write_bytes(kept)

    run = whole_run(
        tmp_path / "run",
        tamper=tamper,
        **fields(bert(tmp_path / "here", lora=LORA), steps=1)
        | {"dataset": bert(base)["dataset"] | {"tokenizer": str(base / "bert")}},
    )
    run.train()
    assert run.left == [("worker-0", "model_mismatch")]
    assert "encoder.layer.0.output.dense" in run.departures[0].message


def test_a_worker_with_another_tokenizer_is_refused(base, tmp_path):
    def tamper(worker, member_id):
        if member_id == "worker-0":

            def prepare(setup):
                other = setup.dataset.model_copy(update={"tokenizer": str(base / "other")})
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("raycloak.workers.models.hub_model.HubSpec.check_tokenizer", lambda *_: None)
                    return TrainWorker.prepare(worker, setup.model_copy(update={"dataset": other}))

            worker.prepare = prepare

    run = whole_run(tmp_path, tamper=tamper, **fields(bert(base, lora=LORA), steps=1))
    run.train()
    assert run.left == [("worker-0", "manifest_mismatch")]
    assert "tokenizer" in run.departures[0].message


BAD = {
    "sequence_too_long": lambda base: bert(base) | {"dataset": bert(base)["dataset"] | {"max_length": 25}},
    "tokenizer_mismatch": lambda base: (
        bert(base) | {"dataset": bert(base)["dataset"] | {"tokenizer": str(base / "other")}}
    ),
    "tokens_beyond_vocabulary": lambda base: (
        bert(base) | {"dataset": {"kind": "npz", "path": "examples.npz", "features": "features", "vocabulary": 17}}
    ),
    "labels_beyond_head": lambda base: bert(base) | {"dataset": bert(base)["dataset"] | {"classes": 3}},
    "target_modules": lambda base: bert(base, lora={"rank": 2, "target_modules": ["q_proj"]}),
    "no_head": lambda base: bert(base, task="causal_lm", classes=None),
    "loss_of_task": lambda base: gpt2(base) | {"loss": "cross_entropy"},
    "not_cached": lambda base: bert(base, hf="./nowhere"),
    "remote_code": lambda base: bert(base, hf=str(base / "remote")),
}


BAD_SPLITS = {
    "sequence_too_long": (bert, {"max_length": 25}, "good film\t0\n"),
    "labels_beyond_head": (bert, {}, "good film\t0\nbad film\t2\n"),
    "labels_beyond_head, as declared": (bert, {"classes": 3}, "good film\t0\n"),
    "tokens_beyond_vocabulary": (
        lambda base: bert(base) | {"dataset": {"kind": "npz", "path": "examples.npz", "features": "features"}},
        {"tokenizer": "large"},
        "good later\t0\n",
    ),
    "dataset_unreadable": (bert, {"path": "nowhere.tsv"}, ""),
}


@pytest.mark.parametrize("case", BAD_SPLITS)
def test_a_bad_public_split_is_refused_by_name_before_anything_is_charged(case, base, tmp_path):
    """By the plan too; a split is public, so its own labels are looked at."""
    task, changes, text = BAD_SPLITS[case]
    if "tokenizer" in changes:
        changes = {"tokenizer": str(write_tokenizer(tmp_path / "large", [*WORDS, "later"]))}
    (tmp_path / "dev.tsv").write_text(text)
    of_text = {"kind": "text", "path": str(tmp_path / "dev.tsv"), "max_length": LENGTH, "public": True}
    settings = config(**fields(task(base)), evaluation={"dataset": of_text | changes})
    setup = worker_setup(settings, tmp_path, (np.zeros((40, LENGTH), np.int64), np.zeros(40, np.int64)))
    code = case.partition(",")[0]
    with pytest.raises((ConfigError, DatasetError, ModelError), match=f"^{code}"):
        public_evaluation(settings, setup.model, setup.base).evaluator()
    with pytest.raises((ConfigError, DatasetError, ModelError), match=f"^{code}"):
        plan_of(settings, tmp_path / "data")


@pytest.mark.parametrize("code", BAD)
def test_bad_input_is_refused_by_name_before_anything_is_charged(code, base, tmp_path):
    given = fields(BAD[code](base))
    ids = np.zeros((40, LENGTH), np.int64), np.zeros(40, np.int64)
    run = whole_run(tmp_path, data=ids, **given)
    with pytest.raises(ConfigError) as caught:
        run.train()
    assert caught.value.code == code
    with pytest.raises(ConfigError) as caught:
        plan_of(config(**given), tmp_path / "data")
    assert caught.value.code == code
    assert run.stage.calls("charge") == run.stage.calls("step") == []


MODES = {
    "bf16": {"precision": "bf16"},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_computing_gives_the_same_bytes_for_one_and_two_workers(mode, base, tmp_path):
    task = {**bert(base, lora=LORA), **MODES[mode]}
    runs = [
        trained(tmp_path / str(workers), **fields(task, num_workers=workers, secure_aggregation=workers > 1))
        for workers in (1, 2)
    ]
    assert len({tuple(run.digests) for run in runs}) == 1
    assert len({run.finished.parameters.tobytes() for run in runs}) == 1
    numerics = runs[0].finished.manifest.computation.numerics
    stated = {"precision": numerics.precision, "gradient_checkpointing": numerics.gradient_checkpointing}
    assert stated == {"precision": "float32", "gradient_checkpointing": False} | MODES[mode]


@pytest.mark.parametrize("mode", ["bf16", "checkpointing"])
def test_a_worker_that_computes_in_another_way_takes_no_part(mode, base, tmp_path):
    def tamper(worker, member_id):
        if member_id == "worker-0":
            prepare = worker.prepare
            worker.prepare = lambda setup: prepare(setup.model_copy(update={"mode": ComputeMode()}))

    run = whole_run(tmp_path, tamper=tamper, **fields({**bert(base, lora=LORA), **MODES[mode]}, steps=1))
    run.train()
    assert run.left == [("worker-0", "manifest_mismatch")]
    assert "numerics" in run.departures[0].message


def test_blocks_that_a_model_does_not_have_are_refused_before_any_charge(tmp_path):
    with pytest.raises(ModelError) as error:
        trained(tmp_path, steps=1, gradient_checkpointing=True)
    assert error.value.code == "gradient_checkpointing"
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("wrong", [{"precision": "fp8"}, {"precision": "bfloat16"}, {"gradient_checkpointing": "some"}])
def test_an_unknown_way_of_computing_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))) as error:
        config(**wrong)
    assert error.value.code == "config"


def test_ligers_kernels_are_refused_without_a_gpu_by_the_plan_and_by_workers_and_nothing_is_charged(base, tmp_path):
    model = {"hf": str(write_llama(tmp_path / "llama")), "task": "causal_lm", "use_liger_kernels": True, "lora": LORA}
    task = fields({"model": model, "dataset": gpt2(base)["dataset"]})
    with pytest.raises(ModelError, match="they need a GPU") as error:
        plan_of(config(**task), tmp_path)
    assert error.value.code == "liger_kernels"
    planned = plan_of(config(**task, use_gpu=True), tmp_path)
    assert any("each worker computes RMSNorm" in warning for warning in planned.warnings)
    run = whole_run(tmp_path / "run", **task)
    with pytest.raises(ModelError, match="they need a GPU"):
        run.train()
    assert run.stage.calls("charge") == []
