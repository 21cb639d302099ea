"""``raycloak attest revoke`` on the state of a run, and whom it tells that it cannot."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from raycloak.attestation.orchestrator.revocations import count_revocations
from raycloak.coordinator.cli import app
from raycloak.coordinator.config import home
from raycloak.coordinator.record.folder import RunFolder
from tests.protocol import WholeRun, trained


@pytest.fixture
def run(tmp_path, monkeypatch) -> WholeRun:
    """Return a run that looks as if it were under way."""
    monkeypatch.setenv(home.HOME_VARIABLE, str(tmp_path))
    run = trained(tmp_path, steps=1)
    RunFolder(run.folder, run.coordinator.order.folder.record).mark("running")
    return run


@pytest.fixture
def revoke(run, capfd, monkeypatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run the command; returns (exit code, the object)."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        with pytest.raises(SystemExit) as stopped:
            app.main(["attest", "revoke", str(run.folder), *arguments, "--json"])
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, json.loads(capfd.readouterr().out)

    return call


def test_a_member_and_a_platform_are_revoked(run, revoke):
    said = {"run_id": run.session.run_id, "kind": "member", "name": "worker-1", "members": ["worker-1"]}
    assert revoke("--member", "worker-1", "--reason", "stolen") == (0, said | {"reason": "stolen"})
    admitted = [json.loads(line) for line in (run.folder / "evidence.jsonl").read_text().splitlines()]
    platform = next(e["body"]["platform_id"] for e in admitted if e.get("kind") == "admitted")
    code, said = revoke("--platform", platform)
    assert (code, said["kind"], said["name"]) == (0, "platform", platform)
    assert {"worker-0", "worker-1"} <= set(said["members"])
    assert run.session.revocations() == count_revocations(home.orchestrator_file(run.session.run_id)) == 2


def test_what_cannot_be_revoked_is_refused_and_changes_nothing(run, revoke):
    def refused(*arguments: str) -> tuple[int, str]:
        code, said = revoke(*arguments)
        return code, said["error"]["code"] if isinstance(said["error"], dict) else said["error"]

    assert refused() == refused("--member", "worker-1", "--platform", "ab") == (2, "revoke_one")
    assert refused("--gpu", "ab" * 48, "--platform", "ab" * 16) == (2, "revoke_one")
    assert refused("--platform", "ab" * 16) == refused("--gpu", "ab" * 48) == (2, "revokes_nobody")
    assert refused("--member", "worker-7") == (2, "member_unknown")
    assert refused("--platform", "machine") == refused("--platform", "ab" * 15) == (2, "platform_id")
    assert refused("--gpu", "ab" * 16) == (2, "gpu_id")
    run.coordinator.order.folder.mark("done")
    assert refused("--member", "worker-1") == (2, "run_done")
    assert run.session.revocations() == 0
