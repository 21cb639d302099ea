import json
from datetime import UTC, datetime

import pytest

from raycloak.attestation.policy.policy import load_policy, simulated_policy
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.cli.app import main
from raycloak.workers.inputs.code_bundle import CodeBundle
from tests.simulators.gpu import SimulatedGpuVendor

NOW = 1_800_000_000


@pytest.fixture
def index(tmp_path):
    """Return one case that is accepted, one that is refused and one of a family that nobody judges."""
    vendor = SimulatedVendor.create()
    (tmp_path / "quote").write_bytes(vendor.platform().quote(bytes(64), bytes(range(48))))
    (tmp_path / "collateral").write_bytes(vendor.tdx_collateral(NOW).encode())
    (tmp_path / "root").write_bytes(vendor.root_der)
    shared = {"evidence": "quote", "encoding": "raw", "at": datetime.fromtimestamp(NOW, UTC).isoformat()}
    shared |= {"family": "tdx", "collateral": "collateral"}
    policy = {"simulator_root": "root", "allow_simulator": True, "measurements": None}
    cases = [
        {"id": "good", **shared, "policy": policy, "expect": "accept"},
        {"id": "bad", **shared, "policy": policy | {"measurements": []}, "expect": "accept"},
        {"id": "odd", **shared, "policy": {}, "family": "sgx"},
    ]
    path = tmp_path / "INDEX.json"
    path.write_text(json.dumps({"cases": cases}))
    return path


def run(capfd, *arguments):
    with pytest.raises(SystemExit) as left:
        main(["attest", *map(str, arguments)])
    said = capfd.readouterr()
    return left.value.code, said.out, said.err


def test_verify_prints_one_object(index, capfd):
    code, out, _ = run(capfd, "verify", "--index", index, "--case", "good", "--case", "bad", "--json")
    good, bad = json.loads(out)["cases"]
    assert code == 0
    assert set(good) == set(bad) == {"id", "verdict", "refusal", "step", "milliseconds"}
    assert (good["id"], good["verdict"], good["refusal"]) == ("good", "accept", None)
    assert (bad["id"], bad["verdict"], bad["refusal"]) == ("bad", "refuse", "measurement_unknown")


def test_verify_shows_a_table_to_a_person(index, capfd):
    code, out, err = run(capfd, "verify", "--index", index, "--case", "good", "--case", "bad")
    assert code == 0
    assert "accept (SIMULATED)" in out
    assert "SIMULATED: the accepted evidence of good" in err
    assert "1 of 2 cases accepted, 1 not as the index expects" in out


def test_verify_lists_what_nobody_compared_of_an_accepted_gpu(tmp_path, capfd):
    vendor, nonce = SimulatedGpuVendor.create(), bytes(range(32))
    gpu = vendor.gpu()
    (tmp_path / "report").write_bytes(gpu.report(nonce))
    for position, certificate in enumerate(gpu.chain):
        (tmp_path / f"{position}.der").write_bytes(certificate)
    rules = {"simulator_root": "4.der", "allow_simulator": True, "require_rim": False, "require_ocsp": False}
    case = {"id": "gpu", "family": "nvidia_gpu", "evidence": "report", "encoding": "raw", "policy": rules}
    case |= {"chain": [f"{position}.der" for position in range(5)], "nonce": nonce.hex()}
    case |= {"at": datetime.fromtimestamp(NOW, UTC).isoformat()}
    (tmp_path / "INDEX.json").write_text(json.dumps({"cases": [case]}))
    code, out, err = run(capfd, "verify", "--index", tmp_path / "INDEX.json", "--json")
    (verdict,) = json.loads(out)["cases"]
    assert (code, verdict["verdict"]) == (0, "accept"), out
    assert verdict["uncovered_measurements"][:3] == [1, 2, 3]
    assert "not compared: gpu: in no reference manifest are measurements 1, 2, 3" in err


def test_a_case_that_cannot_be_appraised_fails_the_command(index, capfd):
    code, out, err = run(capfd, "verify", "--index", index, "--json")
    assert code == 4
    odd = json.loads(out)["cases"][2]
    assert (odd["verdict"], odd["refusal"]) == (None, None)
    assert "'sgx'" in odd["error"]
    assert "odd" in err


def test_an_unknown_case_or_index_is_bad_input(index, capfd):
    assert run(capfd, "verify", "--index", index, "--case", "none")[0] == 2
    assert run(capfd, "verify", "--index", index.parent / "absent")[0] == 2


@pytest.mark.parametrize("document", ["{}", '{"cases": []}'])
def test_an_index_without_cases_is_bad_input(document, tmp_path, capfd):
    """Nothing was appraised, which is no success."""
    (path := tmp_path / "INDEX.json").write_text(document)
    code, out, err = run(capfd, "verify", "--index", path, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "index")
    assert "Traceback" not in err


POLICY = """\
accepted_classes: [intel_tdx, nvidia_gpu]
anchors: [intel_tdx, nvidia_gpu]
gpus_per_worker: 8
tdx: {tcb_statuses: [UpToDate, OutOfDate], rtmr0: any, rtmr1: any, rtmr2: any, rtmr3: any}
"""


def test_policy_check_explains_and_warns(tmp_path, capfd):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    code, out, _ = run(capfd, "policy", "check", path, "--json")
    said = json.loads(out)
    assert code == 0
    assert not said["accepts_simulated"]
    warnings = [each["text"] for each in said["says"] if each["warning"]]
    assert any("no guest is accepted" in text for text in warnings)
    assert any("OutOfDate" in text for text in warnings)
    assert "Laxer than the defaults: tdx.tcb_statuses." in warnings


def test_policy_check_shows_sentences_to_a_person(tmp_path, capfd):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    code, out, _ = run(capfd, "policy", "check", path)
    assert code == 0
    assert "exactly 8 GPU(s)" in out


@pytest.fixture
def project(tmp_path):
    (tmp_path / "project" / "parts").mkdir(parents=True)
    for name in ("model.py", "parts/loss.py"):
        (tmp_path / "project" / name).write_text("def f():\n    pass\n")
    return tmp_path / "project"


def test_policy_code_prints_the_digest_that_lists_a_project(project, capfd):
    code, out, _ = run(capfd, "policy", "code", project, "--json")
    digest = CodeBundle.read(project).digest.hex()
    assert code == 0
    assert json.loads(out) == {"folder": str(project), "code": digest, "files": ["model.py", "parts/loss.py"]}


def test_policy_code_shows_the_files_to_a_person(project, capfd):
    code, out, _ = run(capfd, "policy", "code", project)
    assert code == 0
    assert [
        each for each in (CodeBundle.read(project).digest.hex(), "model.py", "parts/loss.py") if each not in out
    ] == []


@pytest.mark.parametrize("folder", ["parts/none", "."])
def test_policy_code_refuses_a_folder_without_code(tmp_path, folder, capfd):
    code, out, _ = run(capfd, "policy", "code", tmp_path / folder, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "code_unreadable")


def test_a_policy_with_the_printed_digest_lists_the_project(tmp_path, capfd):
    (tmp_path / "model.py").write_text("def f():\n    pass\n")
    _, out, _ = run(capfd, "policy", "code", tmp_path, "--json")
    vendor = SimulatedVendor.create()
    raw = json.loads(simulated_policy(vendor, bytes(48)).encode()) | {"code": [json.loads(out)["code"]]}
    (tmp_path / "policy.yaml").write_text(json.dumps(raw))
    assert load_policy(tmp_path / "policy.yaml").code == (CodeBundle.read(tmp_path).digest,)


def test_policy_check_refuses_what_is_no_policy(tmp_path, capfd):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY + "unknown: 1\n")
    assert run(capfd, "policy", "check", path)[0] == 2


def test_measure_says_what_can_be_computed(capfd, tmp_path):
    from raycloak.attestation.simulators.tdx_vendor import code_measurement

    code, out, _ = run(capfd, "measure", "simulated", "--json")
    said = json.loads(out)
    assert (code, said["measurement"]) == (0, code_measurement().hex())
    assert "SIMULATED" in said["note"]
    code, _, err = run(capfd, "measure", "tdx")
    assert code == 2
    assert "measure_tool" in err
    assert run(capfd, "measure", "sev-snp", "--ovmf", tmp_path / "absent", "--vcpus", 1)[0] == 2
