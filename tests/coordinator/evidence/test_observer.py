"""``raycloak attest observe``: the view of an outsider on a run in progress."""

import json
from pathlib import Path

import pytest

from raycloak.attestation.log.evidence_log import read_exported_log
from raycloak.attestation.tdx.rules import RTMRS
from raycloak.coordinator.cli import app
from raycloak.coordinator.config import home
from raycloak.coordinator.runs.evidence_address import FILE, RunService, announce, served_at
from raycloak.metrics.errors import ConfigError
from tests.protocol import trained, whole_run

SERVED = {"attestation": {"bind": "127.0.0.1:0"}}


@pytest.fixture
def observe(capfd, monkeypatch):
    """Run the command; returns (exit code, the object)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            app.main(["attest", "observe", *map(str, arguments), "--json"])
        return stopped.value.code, json.loads(capfd.readouterr().out)

    return call


def observed_run(observe, tmp_path, lost=False):
    """Look at a run as its steps 0 and 2 are computed; with ``lost``, its orchestrator dies in between."""
    seen = []

    def disturb(call):
        if (call.method, call.member_id) == ("step", "worker-0") and call.index in (0, 2):
            address = run.session.control.orchestrator.service_address()
            seen.append((address, *observe(run.folder, "--address", address, "--log", tmp_path / "seen.jsonl")))
        is_second = (call.member_id, call.method, call.index) == ("orchestrator", "open_step", 1)
        return "dies" if lost and is_second else None

    run = whole_run(home.home(), disturb=disturb, **SERVED)
    run.train()
    return run, seen


@pytest.mark.parametrize("lost", [False, True], ids=["undisturbed run", "orchestrator lost"])
def test_roster_evidence_and_log_of_a_run_are_checked_from_outside(lost, observe, undisturbed, tmp_path):
    run, seen = observed_run(observe, tmp_path, lost)
    assert run.digests == undisturbed
    assert [role for role, _ in run.restarts] == ["orchestrator"] * lost
    (before, first, at_first), (after, second, at_third) = seen
    assert (first, second) == (0, 0)
    assert before == after, "a new incarnation serves where the former one did"
    assert (at_first["evidence"], at_first["step"], at_third["step"]) == ("SIMULATED", 0, 2)
    hosts = {each["member_id"]: each["virtual_workers"] for each in at_first["members"]}
    assert hosts == {m.member_id: list(m.virtual_workers) for m in run.stage.rosters[0].members}
    assert at_first["log_entries"] < at_third["log_entries"]
    kept = read_exported_log(tmp_path / "seen.jsonl", run.session.orchestrator_key)
    assert kept.head.root.hex() == at_third["log_root"]
    own = [(entry.kind, entry.content) for entry in kept.entries]
    assert run.evidence[: len(own)] == own, "what was seen is how the log of the finished run begins"
    code, said = observe(run.folder, "--address", before)
    assert (code, said["error"]["code"]) == (3, "release_denied"), "a run that is over answers nothing"


def test_what_is_needed_to_look_is_named(observe, tmp_path):
    assert observe(tmp_path)[1]["error"]["code"] == "not_a_run"
    run = trained(home.home(), steps=1)
    assert observe(run.folder)[1]["error"]["code"] == "not_served"
    policy = tmp_path / "policy.yaml"
    registers = ", ".join(f"{name}: any" for name in RTMRS)
    policy.write_text(f"accepted_classes: [intel_tdx]\nanchors: [intel_tdx]\ntdx: {{{registers}}}\n")
    (tmp_path / "collateral.yaml").write_text("tdx: []\n")
    given = ("--policy", policy, "--collateral", tmp_path / "collateral.yaml")
    assert observe(run.folder, "--address", "127.0.0.1:1", *given)[1]["error"]["code"] == "policy"


def test_the_folder_of_a_run_says_where_it_serves(observe, tmp_path):
    answers = []

    def disturb(call):
        if call.method == "reduce" and not answers:
            control, manifest = run.session.control, run.coordinator.order.folder.manifest()
            answers.append(announce(control, manifest, "simulated", run.folder))
            answers.append(observe(run.folder))

    run = whole_run(home.home(), disturb=disturb, steps=1, **SERVED)
    run.train()
    service, (code, seen) = answers
    assert isinstance(service, RunService)
    assert (service.evidence, served_at(run.folder)) == ("SIMULATED", service.address)
    assert (code, seen["run_id"]) == (0, run.session.run_id)
    silent = trained(home.home(), steps=1)
    manifest = silent.coordinator.order.folder.manifest()
    assert announce(silent.session.control, manifest, "simulated", silent.folder) is None
    assert not (Path(silent.folder) / FILE).exists()


def test_an_address_without_a_port_is_refused():
    with pytest.raises(ConfigError, match=r"attestation\.bind"):
        whole_run(home.home(), attestation={"bind": "localhost"})
