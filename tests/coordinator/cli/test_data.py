"""``raycloak data seal``: what it seals, for whom, and what it refuses."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.attestation.policy.policy import simulated_policy
from raycloak.attestation.sealed.chunk_stream import write_payload
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.attestation.sealed.sealed_data import SealedHeader, SliceKeys
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.coordinator.cli import app
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import load_config
from raycloak.coordinator.planning.references import sealed_terms
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs import sealed as sealed_dataset
from tests.protocol import VIRTUAL_WORKERS, examples

CONFIG = """
num_workers: 3
virtual_workers: {count}
steps: 3
expected_batch_size: 20
model: "tests.models:small_model"
dataset: {dataset}
dp_config: {{noise_multiplier: 2.0, epsilon_cap: 20.0}}
"""
PLAIN = "{kind: npz, path: examples.npz, features: features}"
DEMANDED = ("--ledger-key", "6c" * 32, "--account", "patients", "--least-noise", "1.5")
SEALED = "{kind: sealed, path: sealed, key_file: data.key}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    features, labels = examples()
    np.savez(tmp_path / "examples.npz", features=features, labels=labels)
    for name, count, dataset in (("plain", 8, PLAIN), ("run", 8, SEALED), ("fewer", 4, SEALED)):
        (tmp_path / f"{name}.yaml").write_text(CONFIG.format(count=count, dataset=dataset))
    return tmp_path


@pytest.fixture
def seal(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the command on a configuration of ``folder``; returns (exit code, the object)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def call(config: str, out: str = "sealed", *options: str) -> tuple[int, dict[str, Any]]:
        options = options or DEMANDED
        paths = [str(folder / each) for each in (f"{config}.yaml", "data.key", out)]
        with pytest.raises(SystemExit) as stopped:
            app.main(["data", "seal", paths[0], "--key", paths[1], "--out", paths[2], "--json", *options])
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, json.loads(capfd.readouterr().out)

    return call


def test_a_dataset_is_sealed_for_the_policy_and_the_virtual_workers_of_its_configuration(folder, seal):
    code, told = seal("plain")
    header = SealedHeader.load(folder / "sealed")
    policy = simulated_policy(SimulatedVendor.load_or_create(home.simulator_folder()), code_measurement())
    assert header.policy_digest == policy.digest()
    assert (code, told["slices"], told["policy_digest"]) == (0, VIRTUAL_WORKERS, policy.digest().hex())
    assert told["simulated"]
    assert told["demand"] == {"ledger_key": "6c" * 32, "account": "patients", "least_noise_multiplier": 1.5}
    assert header.demand == SealedDemand(ledger_key=b"l" * 32, account="patients", least_noise_multiplier=1.5)
    assert told["fingerprint"] == header.digest().hex()
    assert (folder / "data.key").stat().st_mode & 0o777 == 0o600
    terms = sealed_terms(load_config(folder / "run.yaml", None), folder)
    assert terms is not None
    assert terms.header == header
    with pytest.raises(ConfigError, match="sealed_data"):
        sealed_terms(load_config(folder / "fewer.yaml", None), folder)


def test_nothing_is_sealed_twice_or_over_something_and_the_key_stays(folder, seal):
    assert seal("plain")[0] == 0
    key, header = (folder / "data.key").read_bytes(), SealedHeader.load(folder / "sealed")
    assert seal("run")[1]["error"]["code"] == "config"
    assert seal("plain")[1]["error"]["code"] == "dataset_unreadable"
    assert seal("plain", "other")[0] == 0
    assert (folder / "data.key").read_bytes() == key
    assert SealedHeader.load(folder / "sealed") == header
    assert SealedHeader.load(folder / "other").dataset_id != header.dataset_id
    (folder / "data.key").unlink()
    assert seal("plain")[1]["error"]["code"] == "dataset_unreadable"
    assert not (folder / "data.key").exists()


def test_a_disk_that_fills_up_leaves_neither_half_a_dataset_nor_a_key(folder, seal, monkeypatch):
    written = []

    def full(file, *rest):
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(file.write(b"half"))
        return write_payload(file, *rest)

    monkeypatch.setattr(sealed_dataset, "write_payload", full)
    code, told = seal("plain")
    assert (code, told["error"]["code"]) == (2, "dataset_unreadable")
    assert told["error"]["message"].endswith("No space left on device.")
    assert not (folder / "sealed").exists()
    assert not (folder / "data.key").exists()


def test_a_key_that_was_there_stays_where_sealing_fails(folder, seal):
    assert seal("plain")[0] == 0
    (folder / "file").touch()
    assert seal("plain", "file/sealed")[0] == 2
    assert (folder / "data.key").exists()


@pytest.mark.parametrize("left_out", [0, 2, 4])
def test_training_data_is_not_sealed_without_a_whole_demand(folder, seal, left_out):
    code, told = seal("plain", "sealed", *DEMANDED[:left_out], *DEMANDED[left_out + 2 :])
    assert (code, told["error"]["code"]) == (2, "seal_demand")
    assert not (folder / "sealed").exists()
    assert not (folder / "data.key").exists()


@pytest.mark.parametrize(
    ("option", "value", "refused"),
    [(1, "6c", "seal_demand"), (1, "xyz", "usage"), (3, "", "seal_demand"), (5, "0", "seal_demand"),
     (5, "-1", "seal_demand"), (5, "nan", "seal_demand"), (5, "inf", "seal_demand")],
)  # fmt: skip
def test_a_demand_that_means_nothing_is_refused(folder, seal, option, value, refused):
    code, told = seal("plain", "sealed", *DEMANDED[:option], value, *DEMANDED[option + 1 :])
    assert (code, told["error"]["code"]) == (2, refused)
    assert not (folder / "sealed").exists()


def test_a_key_has_a_name(folder, capfd, monkeypatch):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        app.main(["data", "seal", str(folder / "plain.yaml"), "--key", "", "--out", str(folder / "s"), *DEMANDED])
    assert (stopped.value.code, capfd.readouterr().err.partition(" '.'")[0]) == (2, "error: dataset_key:")


def test_the_command_that_sealing_prints_opens_the_account_or_says_that_its_name_is_taken(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The demand names an account and no cap, so the owner must open it before anybody else sees the header."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def called(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as stopped:
            app.main(list(arguments))
        told = capfd.readouterr()
        return stopped.value.code, told.out + told.err

    paths = [str(folder / name) for name in ("plain.yaml", "data.key", "sealed")]
    _, told = called("data", "seal", paths[0], "--key", paths[1], "--out", paths[2], *DEMANDED)
    printed = "".join(told.split("open first")[1].replace("│", "").split())
    bound = ("--fingerprint", SealedHeader.load(folder / "sealed").digest().hex())
    assert "raycloakbudgetopenpatients--epsilon-capE" + "".join(bound) in printed
    opened = ("budget", "open", "patients", "--epsilon-cap")
    assert called(*opened, "8", *bound)[0] == 0
    code, told = called(*opened, "1000", *bound)
    assert (code, "account_mismatch" in told) == (3, True)


def test_an_evaluation_split_is_sealed_for_evaluation_alone(folder, seal):
    """Also from the same examples, with the same key."""
    clear, sealed = (f"evaluation: {{dataset: {each}}}" for each in (PLAIN, SEALED.replace("}", ", public: true}")))
    for name, dataset in (("plain", clear), ("run", sealed)):
        path = folder / f"{name}.yaml"
        path.write_text(path.read_text() + dataset)
    assert seal("plain", "sealed", "--part", "evaluation")[1]["part"] == "evaluation"
    assert SealedHeader.load(folder / "sealed").use == "evaluation"
    assert seal("plain", "more", "--part", "evaluation", *DEMANDED[:2])[1]["error"]["code"] == "seal_demand"
    config = load_config(folder / "run.yaml", None)
    terms = sealed_terms(config, folder, "evaluation")
    assert terms is not None
    assert SliceKeys.open(terms, "evaluation").header == terms.header
    with pytest.raises(ConfigError, match="sealed for evaluation"):
        sealed_terms(config, folder)
    undeclared = load_config(folder / "run.yaml", ["evaluation.dataset.public=false"])
    with pytest.raises(ConfigError, match=r"evaluation_not_public: .* results on it"):
        sealed_terms(undeclared, folder, "evaluation")
    assert seal("run", "other", "--part", "evaluation")[1]["error"]["code"] == "config"
    assert seal("plain", "other")[0] == 0
    with pytest.raises(ConfigError, match="sealed for training"):
        sealed_terms(load_config(folder / "run.yaml", ["evaluation.dataset.path=other"]), folder, "evaluation")


@pytest.fixture
def check(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Run the check on a configuration of ``folder``; returns (exit code, what it printed)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def call(*options: str, config: str = "plain") -> tuple[int, str]:
        with pytest.raises(SystemExit) as stopped:
            app.main(["data", "check", str(folder / f"{config}.yaml"), *options])
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, capfd.readouterr().out

    return call


def test_a_check_tells_the_owner_and_fails_on_what_a_run_must_not_train_on(folder, check):
    code, text = check("--json")
    told = json.loads(text)
    assert (code, told["problems"], told["examples"], told["recorded"]) == (0, [], len(examples()[0]), None)
    features, labels = examples()
    features[2] = np.nan
    np.savez(folder / "examples.npz", features=features, labels=labels)
    code, text = check("--json")
    assert (code, json.loads(text)["not_finite"]) == (2, 1)
    code, text = check()
    assert code == 2
    assert "PRIVATE" in text
    assert "with a value that is NaN or infinite: 1." in " ".join(text.split())


def test_sealed_data_is_checked_with_its_owners_key_and_found_by_its_header(folder, seal, check):
    _, sealed = seal("plain")
    code, text = check("--json", config="run")
    told = json.loads(text)
    assert (code, told["fingerprint"], told["examples"]) == (0, sealed["fingerprint"], len(examples()[0]))
    assert home.check_file(bytes.fromhex(told["fingerprint"])).read_text().strip() == told["recorded"]
    (folder / "data.key").write_text("0e" * 32)
    assert check("--json", config="run")[0] == 2
