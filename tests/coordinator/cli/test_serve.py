"""``raycloak serve`` as a process: it says where it listens, owns its store, and ends with SIGTERM."""

import hashlib
import json
import signal
import subprocess
import sys
import urllib.request

import pytest
import yaml

from raycloak.coordinator.cli import app
from raycloak.coordinator.client.service_client import ServiceClient

DEADLINE_S = 300


@pytest.fixture
def settings(tmp_path, raycloak_home):
    """Return a file of settings for a tenant whose token is ``secret``."""
    file = tmp_path / "service.yaml"
    hashed = hashlib.sha256(b"secret").hexdigest()
    raw = {
        "bind": "127.0.0.1:0",
        "metrics": {"bind": "127.0.0.1:0"},
        "datasets": {"digits": {"dataset": {"kind": "digits"}}},
        "tenants": {"ward": {"token_sha256": [{"sha256": hashed}], "datasets": ["digits"]}},
    }
    file.write_text(yaml.safe_dump(raw))
    return file


def serve(*arguments):
    """Start the command."""
    command = [sys.executable, "-m", "raycloak", "serve", *map(str, arguments), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_says_where_it_listens_owns_its_store_and_ends_with_sigterm(settings, raycloak_home):
    with serve(settings) as service:
        facts = json.loads(service.stdout.readline())
        assert (facts["evidence"], facts["store"]) == ("SIMULATED", "SQLite")
        with ServiceClient(facts["address"], "secret") as client:
            assert client.capabilities().tenant == "ward"
            assert client.list_clients() == []
            page = urllib.request.urlopen(facts["metrics_url"], timeout=DEADLINE_S).read().decode()
            assert "raycloak_training_service_up 1.0" in page
            assert 'raycloak_training_service_clients{status="READY"} 0.0' in page
            # A second one finds the folder taken, and leaves it as it is.
            with serve(settings) as second:
                assert second.wait(DEADLINE_S) == 2
                assert json.load(second.stdout)["error"]["code"] == "store_taken"
            # It ends although a tenant is still connected.
            service.send_signal(signal.SIGTERM)
            assert service.wait(DEADLINE_S) == 0, service.stderr.read()
        assert service.stderr.read() == ""
    files = [path for path in (raycloak_home / "training-service").rglob("*") if path.is_file()]
    assert [path for path in files if path.stat().st_mode & 0o077 and path.suffix != ".pub"] == []


@pytest.fixture
def said(capfd, monkeypatch):
    """Run a command that ends at once in this process; returns the object that it prints, and its exit code."""
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            app.main(["serve", *arguments, "--json"])
        return json.loads(capfd.readouterr().out), ended.value.code

    return run


def test_a_token_is_made_with_its_line(said):
    made, code = said("--token")
    assert code == 0
    assert hashlib.sha256(made["token"].encode()).hexdigest() == made["sha256"]
    assert len(made["token"]) > 40


@pytest.mark.parametrize(("arguments", "code"), [((), "usage"), (("--token", "x.yaml"), "usage"), (("none.yaml",), "config")])  # fmt: skip # noqa: E501
def test_a_wrong_call_is_refused(said, arguments, code):
    refused, exit_code = said(*arguments)
    assert (refused["error"]["code"], exit_code) == (code, 2)


@pytest.mark.parametrize(
    ("fields", "tenant", "field"),
    [
        ({"models": {"tiny": "nowhere:small"}}, {}, "models.tiny"),
        ({}, {"code": ["own:f", "nowhere.deep:small"]}, "tenants.ward.code[1]"),
    ],
)
def test_a_module_that_is_not_there_is_refused_at_the_start_and_none_is_executed(said, settings, fields, tenant, field):
    (settings.parent / "own.py").write_text("raise AssertionError('it is executed')\n")
    raw = yaml.safe_load(settings.read_text()) | fields
    raw["tenants"]["ward"] |= tenant
    settings.write_text(yaml.safe_dump(raw))
    refused, exit_code = said(str(settings))
    assert (refused["error"]["code"], exit_code) == ("module_function", 2)
    assert refused["error"]["message"].startswith(f"{field}: no module 'nowhere")
    assert str(settings.parent) in refused["error"]["message"]


def test_a_service_needs_neither_torch_nor_ray():
    """So that it starts at once and leaves the memory to its drivers."""
    script = "import sys, raycloak.coordinator.service.service; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
