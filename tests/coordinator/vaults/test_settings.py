"""The settings of a machine's vaults: who may write them, and what they may say."""

import os
from pathlib import Path

import pytest
import yaml

from raycloak.coordinator.vaults.settings import (
    ROLES,
    LedgerSettings,
    OrchestratorSettings,
    PlatformSettings,
    WorkerSettings,
    read_settings,
    uid_of,
)
from raycloak.metrics.errors import ConfigError
from tests.coordinator.vaults.listeners import STRANGER, needs_root, written

KEY = "ab" * 32
WORKER = {"ledgers": [KEY], "policies": [KEY], "code": [KEY], "data": []}
PAID = {"account": "patients", "least_noise": 1.0}


def refusal(folder: Path, role: str, **settings) -> str:
    with pytest.raises(ConfigError) as refused:
        read_settings(role, written(folder, role, **settings))
    return str(refused.value)


def test_each_role_reads_its_own(tmp_path):
    state = str(tmp_path)
    of_roles = {
        "ledger": ({"url": "sqlite:////srv/ledger.sqlite"}, LedgerSettings),
        "orchestrator": ({"state": state, "policies": [KEY]}, OrchestratorSettings),
        "aggregator": ({}, ROLES["aggregator"][0]),
        "worker": (WORKER, WorkerSettings),
        "platform": ({"state": state, "vaults": ["root"]}, PlatformSettings),
    }
    assert of_roles.keys() == ROLES.keys()
    for role, (settings, kind) in of_roles.items():
        found = read_settings(role, written(tmp_path, role, **settings))
        assert type(found) is kind
        assert found.sessions == 1


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o777])
def test_guarantee_settings_that_others_could_have_written_are_refused_by_mode(tmp_path, mode):
    file = written(tmp_path, "aggregator")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"vault_settings.*written by others"):
        read_settings("aggregator", file)
    file.chmod(0o644)
    read_settings("aggregator", file)


@needs_root
def test_guarantee_settings_that_others_could_have_written_are_refused_by_owner(tmp_path):
    file = written(tmp_path, "aggregator")
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=r"vault_settings.*written by others"):
        read_settings("aggregator", file)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="vault_settings"):
        read_settings("aggregator", link)


def test_a_file_that_cannot_be_read_or_is_not_yaml_is_named(tmp_path):
    file = tmp_path / "none.yaml"
    with pytest.raises(ConfigError, match=r"vault_settings.*cannot read.*none.yaml"):
        read_settings("worker", file)
    for content in (b"a: [", b"\xff\xfe\xff", b"!!python/object/apply:os.getpid []"):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match=r"vault_settings.*none.yaml is not YAML"):
            read_settings("worker", file)
    file.write_text("")
    with pytest.raises(ConfigError, match="config"):
        read_settings("worker", file)


def test_a_field_that_is_unknown_or_missing_is_refused(tmp_path):
    assert "create: there is no such field" in refusal(tmp_path, "ledger", url="sqlite:////l", create=True)
    assert "url" in refusal(tmp_path, "ledger")
    assert "policies" in refusal(tmp_path, "orchestrator", state="/srv/state")
    assert "ledgers.0" in refusal(tmp_path, "worker", **{**WORKER, "ledgers": ["ab"]})
    assert "sessions" in refusal(tmp_path, "aggregator", sessions=0)


@pytest.mark.parametrize(
    ("role", "field", "others"),
    [
        ("aggregator", "socket", {}),
        ("aggregator", "platform", {}),
        ("orchestrator", "state", {"policies": []}),
        ("orchestrator", "secrets", {"policies": [], "state": "/srv"}),
        ("platform", "state", {"vaults": []}),
    ],
)
def test_a_relative_path_is_refused_since_listener_and_vaults_work_in_different_folders(tmp_path, role, field, others):
    assert f"{field}: must be an absolute path" in refusal(tmp_path, role, **others, **{field: "here"})


def test_a_user_has_a_name_or_a_number_and_one_that_is_not_there_is_named():
    assert uid_of("root") == uid_of("0") == 0
    assert uid_of(str(STRANGER)) == STRANGER
    with pytest.raises(ConfigError, match=r"vault_settings.*no user nobody-of-this-name"):
        uid_of("nobody-of-this-name")


@pytest.mark.parametrize(
    "place",
    [
        {"path": "data", **PAID},
        {"path": "npz", **PAID},
        {"path": "file:///srv/data", **PAID},
        {"path": "/srv/data"},
        {"path": "/srv/data", "account": "patients"},
        {"path": "/srv/data", "least_noise": 1.0},
        {"path": "/srv/data", "public": True, **PAID},
        {"path": "/srv/data", "public": True, "account": "patients"},
        {"path": "/srv/data", "public": True, "least_noise": 1.0},
        {"path": "/srv/data", "account": "patients", "least_noise": -1.0},
        {"path": "/srv/data", "account": "patients", "least_noise": float("nan")},
    ],
)
def test_a_place_of_data_has_a_whole_path_and_the_terms_of_private_or_of_public_data(tmp_path, place):
    assert "data.0" in refusal(tmp_path, "worker", **{**WORKER, "data": [place]})


def test_places_that_lie_in_one_another_are_refused_since_each_has_terms_of_its_own(tmp_path):
    (tmp_path / "link").symlink_to("/srv/data")
    free = {"public": True}
    for one, other in [
        ("/srv", "/srv/data"),
        ("/srv/data/a", "/srv/data/"),
        ("/srv/data", "/srv/x/../data/b"),
        ("/srv/data", str(tmp_path / "link" / "b")),
        ("s3://b/data", "s3://b/data/c"),
        ("digits", "digits"),
    ]:
        places = [{"path": one, **PAID}, {"path": other, **free}]
        assert "lies in" in refusal(tmp_path, "worker", **{**WORKER, "data": places})
    apart = ["/srv/data", "/srv/data-2", "s3://b/data", "s3://b/data-2", "digits", "module", "sent"]
    found = read_settings(
        "worker", written(tmp_path, "worker", **{**WORKER, "data": [{"path": p, **PAID} for p in apart]})
    )
    assert [each.path for each in found.data] == apart


def test_devices_are_as_many_as_sessions(tmp_path):
    assert "devices" in refusal(tmp_path, "worker", **WORKER, sessions=2, devices=[0])
    found = read_settings("worker", written(tmp_path, "worker", **WORKER, sessions=2, devices=[1, 0]))
    assert found.devices == (1, 0)
    raw = yaml.safe_load((tmp_path / "worker.yaml").read_text())
    assert raw["devices"] == [1, 0]
