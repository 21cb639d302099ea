"""The commands of encrypted adapters."""

import json
import signal

import pytest
from typer.testing import CliRunner

from raycloak.attestation.core.keys import IdentityKey
from raycloak.attestation.keys.run_secret import load_secret
from raycloak.coordinator.config.section import validated
from raycloak.metrics.errors import ConfigError
from raycloak_lab.adapter import places, serve
from raycloak_lab.adapter.settings import AdapterSettings
from raycloak_lab.cli.app import app


def test_a_client_is_told_the_key_that_it_is_known_by(capfd):
    said = []
    for _ in range(2):
        CliRunner().invoke(app, ["adapter", "identity", "--json"])
        said.append(json.loads(capfd.readouterr().out))
    first, again = said
    key = IdentityKey.from_seed(load_secret(places.identity_file()))
    assert first == again == {"identity_key": key.public.hex()}


@pytest.mark.parametrize(
    "text", ["bind: 127.0.0.1:0\n", "clients: {}\n", "clients: {a: zz}\n", "clients: [\n", "unknown: 1\n"]
)
def test_settings_that_cannot_be_used_are_refused_before_anything_starts(tmp_path, capfd, text):
    file = tmp_path / "adapter.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["adapter", "serve", str(tmp_path), str(file), "--json"])
    assert done.exit_code == 2
    assert json.loads(capfd.readouterr().out)["error"]["code"] == "config"


def test_ctrl_c_ends_a_server_that_still_reads_its_adapter(tmp_path, monkeypatch):
    handlers = []

    def start(*_):
        handlers.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "served_adapter", start)
    file = tmp_path / "adapter.yaml"
    file.write_text(
        f"{{evidence: simulated, clients: {{a: {'ab' * 32}}}, tokens_of_adapter: 64, tokens_of_client: 64}}"
    )
    done = CliRunner().invoke(app, ["adapter", "serve", "run", str(file), "--json"])
    assert done.exit_code == 4
    assert handlers == [signal.default_int_handler]
    assert "starting the worker" in done.stderr


def test_a_key_has_one_name_and_so_one_budget():
    key = "ab" * 32
    terms = {"tokens_of_adapter": 300, "tokens_of_client": 300, "evidence": "simulated"}
    with pytest.raises(ConfigError, match="two clients have one key"):
        validated(AdapterSettings, {**terms, "clients": {"one": key, "other": key}})
    assert validated(AdapterSettings, {**terms, "clients": {"one": key}}).clients == {"one": key}
    for missing in ("tokens_of_adapter", "tokens_of_client"):
        unbounded = {name: value for name, value in terms.items() if name != missing}
        with pytest.raises(ConfigError, match=missing):
            validated(AdapterSettings, {**unbounded, "clients": {"one": key}})
        # Less than a block is charged for none.
        with pytest.raises(ConfigError, match="no block of 64 tokens"):
            validated(AdapterSettings, {**terms, missing: 63, "clients": {"one": key}})
