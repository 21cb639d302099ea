"""Examples that a client sends to workers on Ray: the run trains, and Ray's files hold nothing clear."""

from pathlib import Path

import pytest

import raycloak
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.ledger.rules import OpeningTerms
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.record.batch_files import BatchFiles
from raycloak.coordinator.runs.execution import Execution
from raycloak.coordinator.service.service import TrainingService
from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.coordinator.service.tenants import new_token
from tests.layout import ROOT
from tests.owner import key_service
from tests.ray.leaks import files_below
from tests.sent import MARK, Client, data_keys, examples, fields

STEPS = 2
SOON = 240.0


def test_a_run_on_sent_data_trains_on_ray_and_leaves_no_clear_example(ray_cluster, raycloak_home, tmp_path):
    with key_service(tmp_path) as owner:
        client = Client(owner, tmp_path, {step: [examples(step), examples(100 + step, 5)] for step in range(STEPS)})
        config = parse_config(
            {
                "num_workers": 2,
                "virtual_workers": 8,
                "steps": STEPS,
                "micro_batch_size": 4,
                "model": "tests.models:small_model",
                "metrics": {"bind": "127.0.0.1:0"},
                **fields(owner),
            }
        )
        run = Execution(config, model_source(config.model), str(tmp_path), notice=lambda line: None, pace=client)
        outcome = run.begin(None)
    assert outcome.finished.steps == STEPS
    assert [len(BatchFiles(outcome.folder.path).sets(step)) for step in range(STEPS)] == [1] * STEPS
    secrets = MARK.tobytes(), b"patient-"
    folders = raycloak_home, tmp_path, Path(ray_cluster.environment["RAY_TMPDIR"])
    files = dict(files_below(*folders))
    assert len(files) > 20
    for path, content in files.items():
        assert not any(secret in content for secret in secrets), path


def test_a_client_trains_through_the_service_on_what_it_sends(ray_cluster, raycloak_home, tmp_path, monkeypatch):
    """From the owner's program over gRPC to workers; an example is used as often as its owner agreed, and no more."""
    for name, value in ray_cluster.environment.items():
        monkeypatch.setenv(name, value)
    token, hashed = new_token()
    with key_service(tmp_path) as owner:
        tenant = {
            "token_sha256": [{"sha256": hashed}],
            "code": ["tests.models:small_model"],
            "key_services": [owner.address],
        }
        settings = ServiceSettings.model_validate(
            {
                "bind": "127.0.0.1:0",
                "run": {"num_workers": 2, "virtual_workers": 8, "metrics": {"bind": "127.0.0.1:0"}},
                "tenants": {"hospital": tenant},
                "metrics": {"bind": "127.0.0.1:0"},
            }
        )
        ledger = PrivacyLedger(home.ledger_url())
        ledger.open_account("hospital", OpeningTerms(20.0, 1e-5))
        keys = data_keys(owner, ledger.public_key, "hospital", tmp_path)
        ledger.close()
        given = {name: value for name, value in fields(owner).items() if name != "key_service"}
        config = {"model": "tests.models:small_model", "micro_batch_size": 4, "steps": STEPS + 1, **given}
        with (
            TrainingService(settings, ROOT) as service,
            raycloak.ServiceClient(service.facts.address, token) as connection,
        ):
            elsewhere = keys.key_service("127.0.0.1:1")
            with pytest.raises(raycloak.ServicePermissionError, match="key_service"):
                connection.create_training_client({**config, "key_service": elsewhere}, data_keys=keys)
            section = keys.key_service(owner.address)
            client = connection.create_training_client({**config, "key_service": section}, data_keys=keys)
            first = client.forward_backward(examples(0))
            with pytest.raises(raycloak.ServiceValidationError) as refusal:
                client.forward_backward(examples(0, 3)).result(SOON)
            assert refusal.value.code == "id_repeated"
            again = client.forward_backward(examples(7, 5))
            steps = [client.optim_step(), client.forward_backward(examples(0)), client.optim_step()]
            assert first.result(SOON).examples_sent == 12
            assert again.result(SOON).step == 0
            results = [steps[0].result(SOON), steps[2].result(SOON)]
            assert results[0].model_digest != results[1].model_digest
            assert 0 < results[0].dp_metrics.epsilon_spent < results[1].dp_metrics.epsilon_spent
            with pytest.raises(raycloak.ServiceValidationError) as refusal:
                client.forward_backward(examples(0)).result(SOON)
            assert refusal.value.code == "participations_exceeded"
            client.forward_backward(examples(1)).result(SOON)
            # An example's two participations are paid for: the third step costs nothing more.
            third = client.optim_step().result(SOON)
            assert third.dp_metrics.epsilon_spent == results[1].dp_metrics.epsilon_spent
            run_id = client.summary.run_id
            client.close()
    secrets = MARK.tobytes(), b"patient-"
    files = dict(files_below(raycloak_home))
    assert any(run_id in path for path in files)
    for path, content in files.items():
        assert not any(secret in content for secret in secrets), path
