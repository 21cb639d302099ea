"""What `plan` and `run` find wrong in the first second: before torch, Ray, data or model."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycloak.coordinator.config.home import ledger_url
from raycloak.coordinator.config.run import RunConfig, load_config, parse_config
from raycloak.coordinator.config.secret_variables import require_none_needed
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms, RegistrationTerms
from raycloak.coordinator.planning.first_look import first_look
from raycloak.coordinator.planning.payer import named_marks
from raycloak.coordinator.planning.plan import make_plan
from raycloak.coordinator.runs.by_hand import by_hand
from raycloak.coordinator.runs.search import tunable
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ConfigError, RaycloakError
from tests.coordinator.ledger.witness_server import url_file

GOOD: dict[str, Any] = {
    "expected_batch_size": 100,
    "steps": 2,
    "model": "raycloak.coordinator.runs.demo:digits_model",
    "dataset": {"kind": "digits"},
    "dp_config": {"target_epsilon": 8.0},
}


def config(**changes: Any) -> RunConfig:
    return parse_config(GOOD | changes)


@pytest.fixture
def taken() -> Iterator[str]:
    """Yield an address that a server listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refusal(settings: RunConfig, base: Path, **options: Any) -> str:
    with pytest.raises(RaycloakError) as refused:
        first_look(settings, base, **options)
    assert refused.value.remedy
    with pytest.raises(RaycloakError) as again:
        Trainer(settings, config_dir=base, **options)
    assert again.value.code == refused.value.code
    return refused.value.code


def test_what_is_well_is_written_to_by_nobody(tmp_path: Path, raycloak_home: Path):
    (tmp_path / "secret").write_text("ab" * 32)
    first_look(config(metrics={"bind": "127.0.0.1:0"}), tmp_path, tmp_path / "secret")
    assert not raycloak_home.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_a_program_that_gives_no_configuration_is_told_what_to_give(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("no configuration of a run")

    def by_hand_of(given: Any) -> None:
        with by_hand(given):
            pytest.fail("it began")

    for given in (GOOD, str(tmp_path / "config.yaml"), None):
        for door in (Trainer, by_hand_of, tunable, lambda config: make_plan(config, 100, 10)):
            with pytest.raises(ConfigError, match=f"config: a {type(given).__name__} is no configuration") as caught:
                door(given)
            assert "raycloak.RunConfig" in caught.value.remedy


def test_a_program_may_give_its_paths_as_text(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "secret").write_text("short")
    settings = load_config(str(tmp_path / "config.yaml"))
    assert settings == config()
    with pytest.raises(ConfigError, match="run_secret"):
        Trainer(settings, config_dir=str(tmp_path), run_secret=str(tmp_path / "secret"))
    lost = config(policy="nowhere.yaml")
    for door in (lambda: Trainer(lost, config_dir=str(tmp_path)), lambda: by_hand(lost, config_dir=".").__enter__()):
        with pytest.raises(ConfigError, match="nowhere"):
            door()


def test_a_port_that_is_taken_is_named(tmp_path: Path, taken: str):
    assert refusal(config(metrics={"bind": taken}), tmp_path) == "metrics_bind"
    assert refusal(config(attestation={"bind": taken}), tmp_path) == "bind"
    assert refusal(config(metrics={"bind": "192.0.2.1:0"}), tmp_path) == "metrics_bind"
    assert refusal(config(metrics={"bind": "no.such.host.invalid:0"}), tmp_path) == "metrics_bind"


def test_a_secret_file_that_cannot_be_one_is_named(tmp_path: Path):
    (tmp_path / "short").write_text("ab")
    for name in ("none", "short", "."):
        assert refusal(config(), tmp_path, run_secret=tmp_path / name) == "run_secret"


def test_a_state_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYCLOAK_HOME", "relative")
    assert refusal(config(), tmp_path) == "relative_home"
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "file" / "home"))
    assert refusal(config(), tmp_path) == "home_unusable"
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert refusal(config(), tmp_path) == "home_unusable"


def test_a_witness_that_does_not_answer_is_named(tmp_path: Path, taken: str):
    assert refusal(config(ledger={"witness": str(tmp_path / "none")}), tmp_path) == "witness_unavailable"
    with socket.create_server(("127.0.0.1", 0)) as closing_soon:
        dead = closing_soon.getsockname()[1]
    silent = url_file(tmp_path, f"http://127.0.0.1:{dead}")
    assert refusal(config(ledger={"witness": silent}), tmp_path) == "witness_unavailable"
    first_look(config(ledger={"witness": str(tmp_path)}), tmp_path)


def test_an_account_that_would_refuse_the_run_is_named(tmp_path: Path):
    assert refusal(config(ledger={"account": "clinic"}), tmp_path) == "ledger_missing"
    with closing(PrivacyLedger(ledger_url())) as ledger:
        for name in ("clinic", "closed"):
            ledger.open_account(name, OpeningTerms(8.0, 1e-6))
        ledger.close_account("closed")
        dp = {"target_epsilon": 8.0, "target_delta": 1e-6}
        assert refusal(config(ledger={"account": "others"}), tmp_path) == "account_unknown"
        assert refusal(config(ledger={"account": "clinic"}), tmp_path) == "account_mismatch"
        closed = config(ledger={"account": "closed"}, dp_config=dp)
        assert refusal(closed, tmp_path) == "account_closed"
        first_look(closed, tmp_path, resumes=True)
        first_look(config(ledger={"account": "clinic"}, dp_config=dp), tmp_path)


def test_a_second_run_on_the_same_data_is_refused_unless_it_may_be_the_first(tmp_path: Path):
    settings = config()
    assert settings.dataset is not None
    data, plan = named_marks(settings.dataset, tmp_path), make_plan(settings, 1437, 100)
    with closing(PrivacyLedger(ledger_url())) as ledger:
        ledger.open_account("own", OpeningTerms(8.0, 1e-5, "pld"))
        first_look(settings, tmp_path)
        ledger.register_run(RegistrationTerms("a", "own", (plan.mechanism,), b"m" * 32, data))
    assert refusal(settings, tmp_path) == "account_not_shared"
    first_look(settings, tmp_path, resumes=True)
    first_look(config(dataset={"kind": "digits", "public": True}), tmp_path)
    first_look(config(ledger={"url": f"sqlite:///{tmp_path / 'other.sqlite'}"}), tmp_path)


def test_spans_that_could_not_be_exported_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert refusal(config(), tmp_path) == "tracing"


ON_S3 = {"kind": "parquet", "path": "s3://b/d", "labels": "y"}


@pytest.mark.parametrize(
    ("variable", "changes", "code"),
    [
        ("PGPASSWORD", {"ledger": {"url": "postgresql://u@127.0.0.1:1/l"}}, "secret_variable"),
        ("AWS_SECRET_ACCESS_KEY", {"dataset": ON_S3}, "secret_variable"),
        ("AZURE_CLIENT_SECRET", {"dataset": ON_S3 | {"path": "abfss://c@account/d"}}, "secret_variable"),
    ],
)
def test_a_secret_that_only_this_process_has_is_refused_where_an_actor_needs_it(
    variable: str, changes: dict[str, Any], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A local Ray starts without it, and would end with an error that names no cause."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(variable, "s3cret")
    assert refusal(config(**changes), tmp_path) == code
    require_none_needed(config())
    monkeypatch.delenv(variable)
    require_none_needed(config(**changes))


def test_workers_of_a_cluster_that_is_there_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    require_none_needed(config(dataset=ON_S3))
