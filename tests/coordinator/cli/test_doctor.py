"""Each check of the doctor sees the fault it is there for, and says how to mend it."""

import socket
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from raycloak.coordinator.cli import doctor
from raycloak.coordinator.cluster import ray_checks
from raycloak.coordinator.ledger.ledger import PrivacyLedger

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_check_runs_here_and_a_fault_comes_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    checks = doctor.examine()
    assert {check.name for check in checks} >= {"python", "ray", "torch", "state", "ledger", "tee"}
    assert all(check.remedy for check in checks if check.status != "ok")
    assert {check.status for check in checks if check.name in ("python", "ray", "torch")} == {"ok"}


def test_supported_versions_are_those_of_the_distribution():
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert doctor.PYTHON == ((3, 11), (3, 13))
    requirements = {text.split("=")[0].split(">")[0].split("[")[0]: text for text in PROJECT["dependencies"]}
    for name, series in doctor.SUPPORTED.items():
        assert f"=={series}.*" in requirements[name] or f">={series},<" in requirements[name]


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail")]
)
def test_python(version, status):
    assert doctor.check_python(version).status == status


@pytest.mark.parametrize(
    ("installed", "status"),
    [("2.60.0", "ok"), ("2.6.0", "fail"), ("2.600.1", "fail"), ("2.61.0", "fail"), (None, "fail")],
)
def test_versions(installed, status):
    check = doctor.check_version("ray", installed)
    assert check.status == status
    assert ("pip install 'ray==2.60.*'" in check.remedy) is (status == "fail")


def test_an_installed_version_is_read_without_importing():
    assert doctor.installed_version("rich") == metadata.version("rich")
    assert doctor.installed_version("no-such-distribution") is None


@pytest.mark.parametrize(("mode", "status"), [("token", "ok"), (None, "warn"), ("disabled", "fail")])
def test_auth_mode(mode, status):
    assert doctor.check_auth_mode({} if mode is None else {"RAY_AUTH_MODE": mode}).status == status


@pytest.mark.parametrize(("mode", "status"), [(0o600, "ok"), (0o400, "ok"), (0o644, "fail"), (0o640, "fail")])
def test_a_token_file_that_others_can_read_fails(mode, status, tmp_path):
    token = tmp_path / "auth_token"
    token.write_text("secret")
    token.chmod(mode)
    check = doctor.check_token({"RAY_AUTH_TOKEN_PATH": str(token)})
    assert check.status == status
    assert check.remedy == ("" if status == "ok" else f"chmod 600 {token}")
    assert "secret" not in check.finding


def test_the_default_token_file_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert doctor.check_token({}).status == "ok"
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray" / "auth_token"
    token.touch()
    token.chmod(0o644)
    assert doctor.check_token({}).status == "fail"


def test_a_token_path_to_nowhere_fails(tmp_path):
    assert doctor.check_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}).status == "fail"


def test_a_token_in_the_environment_is_a_warning_and_not_shown():
    check = doctor.check_token({"RAY_AUTH_TOKEN": "s3cret"})
    assert check.status == "warn"
    assert "s3cret" not in check.finding


def test_a_relative_home_fails(monkeypatch):
    monkeypatch.setenv("RAYCLOAK_HOME", "state")
    check = doctor.check_home()
    assert check.status == "fail"
    assert "absolute" in check.remedy
    assert doctor.check_ledger("").status == "fail"


def test_a_home_that_others_can_read_is_a_warning(raycloak_home):
    assert doctor.check_home().status == "ok"
    raycloak_home.chmod(0o755)
    check = doctor.check_home()
    assert (check.status, check.remedy) == ("warn", f"chmod 700 {raycloak_home}")


def test_a_home_below_a_file_fails(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "file" / "home"))
    assert doctor.check_home().status == "fail"


def test_ledger(raycloak_home):
    assert doctor.check_ledger("").finding.startswith("none yet")
    path = raycloak_home / "ledger.sqlite"
    PrivacyLedger(f"sqlite:///{path}").close()
    assert doctor.check_ledger("").status == "ok"
    path.chmod(0o644)
    assert f"chmod 600 {path}" in doctor.check_ledger("").remedy


def test_a_file_that_is_no_ledger_fails(raycloak_home):
    raycloak_home.mkdir()
    path = raycloak_home / "ledger.sqlite"
    path.write_text("not a database, but long enough to be read as the header of one" * 20)
    path.chmod(0o600)
    assert doctor.check_ledger("").status == "fail"


def test_a_ledger_on_a_network_file_system_fails(raycloak_home):
    check = doctor.check_ledger(f"server:/export {raycloak_home} nfs4 rw 0 0\n")
    assert check.status == "fail"
    assert "nfs4" in check.finding


@pytest.mark.parametrize(("kind", "status"), [("tmpfs", "ok"), ("ext4", "warn")])
def test_ray_temp_on_a_disk_is_a_warning(kind, status, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_checks, "SOCKET_BYTES", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    check = doctor.check_ray_temp(f"/dev/root / ext4 rw 0 0\nnone {tmp_path} {kind} rw 0 0\n")
    assert check.status == status
    assert kind in check.finding


def test_a_ray_temp_that_ray_cannot_use_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("d" * 100)))
    check = doctor.check_ray_temp("")
    assert (check.status, "RAY_TMPDIR" in check.remedy) == ("fail", True)


def test_shared_memory(tmp_path, monkeypatch):
    assert doctor.check_shared_memory(tmp_path / "none").status == "warn"
    monkeypatch.setattr(doctor, "SHARED_MEMORY_BYTES", 0)
    assert doctor.check_shared_memory(tmp_path).status == "ok"
    monkeypatch.setattr(doctor, "SHARED_MEMORY_BYTES", 2**70)
    assert "--shm-size" in doctor.check_shared_memory(tmp_path).remedy


@pytest.mark.parametrize(("mib", "status"), [(4096, "ok"), (512, "warn")])
def test_a_machine_on_which_no_service_would_start_with_its_default_limits_is_told_of(tmp_path, mib, status):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {mib * 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    check = doctor.check_service_memory(tmp_path)
    assert (check.name, check.status) == ("memory of services", status)
    assert f"calls may take {mib // 2:,} MiB" in check.finding


def test_a_port_in_use_is_a_warning():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert doctor.check_port(port).status == "warn"
    assert doctor.check_port(0).status == "ok"


def test_tee_devices_are_found(tmp_path):
    assert doctor.check_tee(tmp_path).status == "warn"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "tdx_guest").touch()
    check = doctor.check_tee(tmp_path)
    assert check.status == "warn"
    assert "/dev/tdx_guest (Intel TDX guest), but /sys/kernel/config/tsm/report is missing" in check.finding
    (tmp_path / "sys/kernel/config/tsm/report").mkdir(parents=True)
    check = doctor.check_tee(tmp_path)
    assert check.status == "ok"
    assert check.finding.startswith("/sys/kernel/config/tsm/report (")


def test_a_secret_in_the_environment_is_named_and_not_shown():
    assert doctor.check_variables({"PATH": "/bin", "RAY_AUTH_TOKEN": "s3cret"}).status == "ok"
    check = doctor.check_variables({"WANDB_API_KEY": "s3cret", "PGPASSWORD": "s3cret"})
    assert (check.status, "PGPASSWORD, WANDB_API_KEY" in check.finding, "~/.pgpass" in check.remedy) == (
        "warn",
        True,
        True,
    )
    assert "s3cret" not in f"{check}"
