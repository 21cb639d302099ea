"""``raycloak attest serve``: a service without a cluster, which restarts where it was."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from raycloak.attestation.attester.attester import Attester
from raycloak.attestation.core.canonical import digest
from raycloak.attestation.core.keys import Secret
from raycloak.attestation.core.messages import parse
from raycloak.attestation.keys.halves import ServiceContract
from raycloak.attestation.keys.release import ExpectedRelease, RunKeys, commitments_digest, open_keys, open_slice_keys
from raycloak.attestation.orchestrator.orchestrator import RunSession
from raycloak.attestation.policy.key_policy import KeyKind
from raycloak.attestation.policy.policy import Policy, simulated_policy
from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.attestation.service.client import EvidenceClient
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor, code_measurement
from raycloak.attestation.tdx.rules import RTMRS
from raycloak.coordinator.cli import app
from raycloak.coordinator.config import home
from raycloak.coordinator.config.section import validated
from raycloak.coordinator.evidence.sources import LocalPlatform
from raycloak.coordinator.evidence.standalone_service import ServiceConfig, load_service, start_service
from raycloak.metrics.errors import ConfigError, DatasetError, EvidenceError, RefusedError
from raycloak.workers.inputs.datasets import ArrayDataset
from raycloak.workers.inputs.sealed import SealedDataset, seal_dataset
from raycloak.workers.terms.manifest import Manifest
from raycloak.workers.train_worker import TrainWorker
from tests.attestation.collateral_site import published
from tests.protocol import SECRET, VIRTUAL_WORKERS, HandRun, examples

ROOT = Path(__file__).resolve().parents[3]
ANSWER = digest(b"")
CONFIG = {
    "bind": "127.0.0.1:0",
    "run_secret": "secret.hex",
    "hosting": {"worker-0": [0, 2], "worker-1": [1]},
    "contract": {"virtual_workers": 3},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret.hex").write_text("ab" * 32)
    return tmp_path


def started(folder, **changes):
    return start_service(validated(ServiceConfig, CONFIG | changes), folder)


def member(contract, address, name="worker-0"):
    attester = Attester(name, LocalPlatform(SimulatedVendor.load_or_create(home.simulator_folder()).platform()))
    client = EvidenceClient(
        address, manifest_digest=contract.digest(), orchestrator_key=contract.orchestrator_key, attester=attester
    )
    return client, attester


def keys_of(contract, client, attester):
    release, terms = client.release_keys(0), release_terms(contract, attester)
    epoch, keys = open_keys(release, terms, hpke_key=attester.hpke, key_commitments=contract.key_commitments)
    return epoch, {v: key.stream.reveal() for v, key in keys.items()}


def release_terms(contract, attester):
    policy = simulated_policy(SimulatedVendor.load_or_create(home.simulator_folder()), code_measurement())
    return ExpectedRelease(contract.orchestrator, contract.run_id, attester.member_id, contract.digest(), policy)


def simulated():
    """Return the policy of every service here that names none."""
    return simulated_policy(SimulatedVendor.load_or_create(home.simulator_folder()), code_measurement())


def test_a_member_gets_the_keys_of_the_evaluation_slices_it_hosts(folder):
    dataset = ArrayDataset(np.arange(18, dtype=np.float32).reshape(9, 2), np.zeros(9, np.int64))
    seal_dataset(dataset, 3, simulated().digest(), Secret(b"d" * 32), folder / "split", "evaluation")
    (folder / "data.key").touch(mode=0o600)
    (folder / "data.key").write_text((b"d" * 32).hex())
    server, session, facts = started(folder, evaluation={"path": "split", "key_file": "data.key"})
    contract = parse(ServiceContract, facts.contract.read_bytes().strip())
    client, attester = member(contract, facts.address)
    with client:
        client.attest(attester.present(client.challenge(), contract.digest(), ANSWER))
        release = client.release_keys(0)
    server.stop()
    session.run.close()
    terms, hpke = release_terms(contract, attester), attester.hpke
    opened = SealedDataset(folder / "split", "evaluation")
    opened.unlock(open_slice_keys(release.evaluation, KeyKind.EVALUATION, terms, hpke))
    assert opened.batch(np.array([3, 2]))[0].tolist() == [[6, 7], [4, 5]]
    with pytest.raises(DatasetError, match="slice_sealed"):
        opened.batch(np.array([1]))
    with pytest.raises(EvidenceError, match="key_package_mismatch"):
        open_slice_keys(release.evaluation, KeyKind.DATASET, terms, hpke)


def page_of(facts):
    with urllib.request.urlopen(facts.metrics, timeout=60) as answer:
        return answer.read().decode()


def test_a_service_has_a_metrics_page_until_it_stops(folder):
    server, session, facts = started(folder)
    contract = parse(ServiceContract, facts.contract.read_bytes().strip())
    client, _ = member(contract, facts.address)
    with client:
        client.challenge()
    page = page_of(facts)
    server._queue.failure = OSError("disk full")
    broken = page_of(facts)
    server.stop()
    session.run.close()
    assert "raycloak_service_up 1.0" in page
    assert 'raycloak_service_calls_total{code="ok",method="Challenge"} 1.0' in page
    assert "raycloak_service_collateral_expiry_timestamp_seconds" in page
    assert "raycloak_service_up 0.0" in broken
    with pytest.raises(OSError, match="refused"):
        page_of(facts)


def test_a_service_whose_metrics_address_is_taken_serves_nothing(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics_bind"):
            started(folder, metrics={"bind": f"127.0.0.1:{taken.getsockname()[1]}"})
    server, session, _ = started(folder)  # its files were closed
    server.stop()
    session.run.close()


@pytest.mark.parametrize("account", ["by-hand", "others"])
def test_training_slices_are_opened_only_for_a_manifest_that_states_their_owners_terms(folder, account):
    policy = simulated()
    stated = HandRun(folder / "hand").manifest.model_copy(update={"policy_digest": policy.digest()})
    (folder / "manifest.json").write_bytes(stated.encode())
    demand = SealedDemand(ledger_key=stated.ledger_key, account=account, least_noise_multiplier=1.5)
    dataset = ArrayDataset(*examples())
    seal_dataset(dataset, VIRTUAL_WORKERS, policy.digest(), Secret(b"d" * 32), folder / "sealed", demand=demand)
    (folder / "data.key").touch(mode=0o600)
    (folder / "data.key").write_text((b"d" * 32).hex())
    server, session, facts = started(
        folder,
        contract=None,
        manifest="manifest.json",
        sealed={"path": "sealed", "key_file": "data.key"},
        hosting={"worker-0": [0, 2], "worker-1": [1, *range(3, VIRTUAL_WORKERS)]},
    )
    client, attester = member(stated, facts.address)
    with client:
        client.attest(attester.present(client.challenge(), stated.digest(), stated.known_answer))
        if account != stated.account:
            with pytest.raises(RefusedError, match=r"sealed_demand: .*the account 'others'"):
                client.release_keys(0)
        else:
            terms = ExpectedRelease(stated.log_owner, stated.run_id, "worker-0", stated.digest(), policy)
            keys = open_slice_keys(client.release_keys(0).slices, KeyKind.DATASET, terms, attester.hpke)
            opened = SealedDataset(folder / "sealed")
            opened.unlock(keys)
            assert opened.batch(np.array([0, 2]))[0].tobytes() == dataset.batch(np.array([0, 2]))[0].tobytes()
    server.stop()
    session.run.close()


class Apart(HandRun):
    """A run of which one machine may have the keys of three virtual workers; each worker is on a machine of its own."""

    def __init__(self, home):
        privacy = {"noise_multiplier": 2.0, "epsilon_cap": 20.0, "accountant": "rdp", "colluding_workers": 1}
        super().__init__(home, min_workers=3, dp_config=privacy)

    def new_worker(self, name):
        return TrainWorker(name, LocalPlatform(self.vendor.platform(name)), self.clock)


@dataclass
class Served:
    """The service of a bounded run's manifest, with a sealed evaluation split."""

    manifest: Manifest
    policy: Policy
    session: RunSession

    @classmethod
    def start(cls, folder, stack):
        policy, of_run = simulated(), Apart(folder / "hand").manifest
        unkeyed = of_run.model_copy(update={"policy_digest": policy.digest()})
        keys = RunKeys(Secret(bytes.fromhex(SECRET)), unkeyed.run_id)
        epochs = [keys.commitments(unkeyed.key_context, VIRTUAL_WORKERS, epoch) for epoch in range(2)]
        manifest = unkeyed.with_keys(tuple(map(commitments_digest, epochs)))
        (folder / "manifest.json").write_bytes(manifest.encode())
        split, key = ArrayDataset(*examples()), Secret(b"d" * 32)
        seal_dataset(split, VIRTUAL_WORKERS, policy.digest(), key, folder / "split", "evaluation")
        (folder / "data.key").touch(mode=0o600)
        (folder / "data.key").write_text(key.reveal().hex())
        hosting = {f"worker-{i}": list(range(i, VIRTUAL_WORKERS, 3)) for i in range(3)}
        sealed = {"path": "split", "key_file": "data.key"}
        terms = {"contract": None, "manifest": "manifest.json", "evaluation": sealed, "hosting": hosting}
        server, session, _ = started(folder, **terms)
        stack.callback(session.run.close)
        stack.callback(server.stop)
        return cls(manifest, policy, session)

    def admit(self, name, machine):
        vendor = SimulatedVendor.load_or_create(home.simulator_folder())
        attester = Attester(name, LocalPlatform(vendor.platform(machine)))
        challenge = self.session.admission.challenge(name, "worker")
        self.session.admission.admit(attester.present(challenge, self.manifest.digest(), self.manifest.known_answer))
        return attester

    def released(self):
        """The releases in the log, and the refused ones."""
        entries = [entry for entry in self.session.run.books.log.entries() if entry.kind.startswith("release")]
        return [(entry.content["member_id"], entry.content["kind"], entry.kind) for entry in entries]


@pytest.fixture
def served(folder):
    with ExitStack() as stack:
        yield Served.start(folder, stack)


def test_the_service_of_a_runs_manifest_keeps_to_its_bound_for_each_machine(served):
    """Before, one machine got all eight keys in three names, and no honest worker could open its own."""
    assert served.manifest.keys_per_machine == 3
    first = served.admit("worker-0", "one")
    release = served.session.keys.release("worker-0", 0, (0, 3, 6))
    terms = ExpectedRelease(
        served.manifest.log_owner, served.manifest.run_id, "worker-0", served.manifest.digest(), served.policy,
        keys_per_machine=3,
    )  # fmt: skip
    opened = open_keys(release, terms, hpke_key=first.hpke, key_commitments=served.manifest.key_commitments)
    assert sorted(opened[1]) == [0, 3, 6]
    served.admit("worker-1", "one")
    with pytest.raises(EvidenceError, match="the noise allows for 3 on one machine"):
        served.session.keys.release("worker-1", 0, (1, 4, 7))
    served.admit("worker-2", "another")
    served.session.keys.release("worker-2", 0, (2, 5))
    assert served.session.run.most_hosted() == 3


def test_a_refused_grant_logs_no_release_of_slice_keys_and_uses_up_no_quota(served):
    served.admit("worker-0", "one")
    served.session.keys.release("worker-0", 0, (0, 3, 6))
    before = served.released()
    assert before == [("worker-0", "evaluation", "released"), ("worker-0", "virtual_worker", "released")]
    served.admit("worker-1", "one")
    for _ in range(served.policy.key_quotas.per_member + 1):
        with pytest.raises(EvidenceError, match="on one machine"):
            served.session.keys.release("worker-1", 0, (1, 4, 7))
    assert {*served.released()} - {*before} == {("worker-1", "virtual_worker", "release_refused")}
    served.admit("worker-1", "another")
    served.session.keys.release("worker-1", 0, (1, 4, 7))


def test_evidence_of_a_refused_grant_is_not_bound_to_its_epoch(served):
    served.admit("worker-0", "one")
    served.session.keys.release("worker-0", 0, (0, 3, 6))
    served.admit("worker-1", "one")
    with pytest.raises(EvidenceError, match="on one machine"):
        served.session.keys.release("worker-1", 0, (1, 4, 7))
    served.session.keys.release("worker-1", 1, (1, 4, 7))


def test_a_refusal_is_logged_under_the_kind_of_key_that_it_is_about(served):
    served.admit("worker-0", "one")
    for _ in range(served.policy.key_quotas.per_member):
        served.session.keys.release("worker-0", 0, (0,))
    with pytest.raises(EvidenceError, match="has drawn evaluation key 0"):
        served.session.keys.release("worker-0", 0, (0,))
    assert served.released()[-1] == ("worker-0", "evaluation", "release_refused")


def test_a_member_with_the_contract_gets_the_keys_it_commits_to_also_after_a_restart(folder):
    server, session, facts = started(folder)
    assert facts.evidence == "SIMULATED"
    contract = parse(ServiceContract, facts.contract.read_bytes().strip())
    assert contract.digest() == facts.manifest_digest
    client, attester = member(contract, facts.address)
    with client:
        client.attest(attester.present(client.challenge(), contract.digest(), ANSWER))
        keys = keys_of(contract, client, attester)
    server.stop()
    session.run.close()
    assert (keys[0], sorted(keys[1])) == (0, [0, 2])

    server, session, again = started(folder)
    assert parse(ServiceContract, again.contract.read_bytes().strip()) == contract
    client = EvidenceClient(
        again.address, manifest_digest=contract.digest(), orchestrator_key=contract.orchestrator_key, attester=attester
    )
    with client:
        assert keys_of(contract, client, attester) == keys  # still admitted
    server.stop()
    session.run.close()


def test_a_hardware_policy_refuses_simulated_workers(folder):
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    policy = simulated_policy(vendor, code_measurement())
    hardware = {"accepted_classes": ["intel_tdx"], "anchors": ["intel_tdx"]}
    known = json.loads(policy.encode())
    hardware["anchors"] += known["anchors"]
    known["tdx"] |= dict.fromkeys(RTMRS, "any")
    (folder / "policy.yaml").write_text(yaml.safe_dump({**known, **hardware}))
    (folder / "tdx.json").write_bytes(vendor.tdx_collateral(1_800_000_000).encode())
    (folder / "collateral.yaml").write_text("tdx: [tdx.json]\n")
    server, session, facts = started(folder, policy="policy.yaml", collateral="collateral.yaml")
    assert facts.evidence == "hardware"
    contract = parse(ServiceContract, facts.contract.read_bytes().strip())
    client, attester = member(contract, facts.address)
    with client, pytest.raises(RefusedError) as error:
        client.attest(attester.present(client.challenge(), contract.digest(), ANSWER))
    assert error.value.code == "simulator_not_allowed"
    server.stop()
    session.run.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hosting": {"worker-0": [0, 1]}}, "hosting"),
        ({"hosting": {"worker-0": [0, 1, 2], "worker-1": [2]}}, "hosting"),
        ({"contract": None}, "config"),
        ({"collateral": "collateral.yaml"}, "config"),
        ({"policy": "none.yaml"}, "policy"),
        ({"policy": "policy.yaml", "collateral": "none.yaml"}, "collateral"),
        ({"policy": "policy.yaml", "collateral": "secret.hex"}, "collateral"),
        ({"contract": None, "manifest": "none.json"}, "manifest"),
        ({"contract": None, "manifest": "secret.hex"}, "manifest"),
        ({"run_secret": "none"}, "run_secret"),
        ({"bind": "not-a-host.invalid:1"}, "bind"),
        ({"limits": {"deadline_s": 0}}, "config"),
        ({"sealed": {"path": "none", "key_file": "data.key"}}, "config"),
        ({"sealed": {"path": "none", "key_file": "data.key"}, "hosting": "any"}, "config"),
        ({"evaluation": {"path": "none", "key_file": "data.key"}}, "sealed_data"),
        ({"evaluation": {"path": "none", "key_file": "data.key"}, "hosting": "any"}, "config"),
        ({"no_such_field": 1}, "config"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(changes, code, folder):
    with pytest.raises(ConfigError) as error:
        started(folder, **changes)
    assert error.value.code == code


def test_a_secret_that_others_can_read_is_warned_of_on_stderr(folder, capfd, monkeypatch):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    (folder / "secret.hex").chmod(0o644)
    (folder / "service.yaml").write_text(yaml.safe_dump({**CONFIG, "policy": "none.yaml"}))
    with pytest.raises(SystemExit):
        app.main(["attest", "serve", str(folder / "service.yaml"), "--json"])
    out, err = capfd.readouterr()
    warning, error = err.splitlines()
    assert warning.startswith(f"warning: {folder / 'secret.hex'} has mode 0644.")
    assert error.startswith("error: policy: ")
    assert json.loads(out)["error"]["code"] == "policy"


def test_collateral_comes_from_the_service_that_the_policy_names(folder):
    vendor = SimulatedVendor.load_or_create(home.simulator_folder())
    collateral = vendor.tdx_collateral(int(time.time()))
    with published(collateral) as site:
        family = json.loads(collateral.tcb_info)["fmspc"]
        policy = json.loads(simulated_policy(vendor, code_measurement()).encode())
        policy["collateral_service"] = {"intel": site.url, "tdx_families": [family]}
        (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
        site.answers["/tdx/certification/v4/tcb"] = 503
        with pytest.raises(EvidenceError, match="collateral_stale"):
            started(folder, policy="policy.yaml")
        site.answers.clear()
        server, session, facts = started(folder, policy="policy.yaml")
        contract = parse(ServiceContract, facts.contract.read_bytes().strip())
        client, attester = member(contract, facts.address)
        with client:
            result = client.attest(attester.present(client.challenge(), contract.digest(), ANSWER))
        assert result.evidence_class == "simulated"
        server.stop()
        session.run.close()
    server, session, _ = started(folder, policy="policy.yaml")  # without a network
    server.stop()
    session.run.close()
    (folder / "plain.yaml").write_text(yaml.safe_dump({**policy, "collateral_service": None}))
    with pytest.raises(ConfigError, match="names no collateral service"):
        started(folder, policy="plain.yaml")


def test_the_command_says_where_it_listens_and_ends_with_sigterm(folder):
    (folder / "service.yaml").write_text(yaml.safe_dump(CONFIG))
    assert load_service(folder / "service.yaml") == validated(ServiceConfig, CONFIG)
    command = [sys.executable, "-m", "raycloak", "attest", "serve", str(folder / "service.yaml"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        facts = json.loads(process.stdout.readline())
        contract = parse(ServiceContract, Path(facts["contract"]).read_bytes().strip())
        client, _ = member(contract, facts["address"])
        with client:
            assert client.is_serving()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        assert process.stdout.read() == ""
    assert facts["evidence"] == "SIMULATED"
