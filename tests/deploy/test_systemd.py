"""The files for systemd: valid, as closed as docs/operations.md says, and of the same roles as the image."""

import os
import re
import shutil
import subprocess

import pytest
import typer.main

from raycloak.coordinator.cli.app import app
from tests.deploy.definitions import ROOT

FILES = ROOT / "deploy" / "systemd"
UNIT = "raycloak-vault@.service"
ROLES = ["ledger", "orchestrator", "aggregator", "worker", "platform"]
MOST_EXPOSED = 30
"""In tenths of systemd's scale up to 10. Without a single setting it would be 96, and the ratings differ by version."""


def run(program, *arguments):
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def units(tmp_path):
    """The unit of each role, with a program that is here; the worker's has both drop-ins."""
    text = (FILES / UNIT).read_text().replace("/opt/raycloak/bin/raycloak", "/bin/true")
    paths = []
    for role in ROLES:
        paths.append(tmp_path / UNIT.replace("@", f"@{role}"))
        paths[-1].write_text(text)
    extra = tmp_path / "raycloak-vault@worker.service.d"
    extra.mkdir()
    for name in ("gpu.conf", "evidence.conf"):
        shutil.copy(FILES / name, extra)
    return paths


def test_systemd_understands_every_setting(units):
    done = run("systemd-analyze", "verify", "--recursive-errors=no", *units)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_vault_is_closed_to_what_it_does_not_need(units):
    for unit in units:
        done = run("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", unit)
        assert done.returncode == 0, done.stdout


def test_guarantee_a_vaults_unit_keeps_memory_off_disks_and_shows_peers_by_their_users():
    settings = dict(re.findall(r"^(\w+)=(.*)$", (FILES / UNIT).read_text(), re.MULTILINE))
    wanted = {
        "User": "raycloak-%i",
        "LimitCORE": "0",
        "MemorySwapMax": "0",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "PrivateUsers": "no",
        "PrivateIPC": "yes",
        "PrivateTmp": "yes",
        "ProtectSystem": "strict",
        "UMask": "0077",
    }
    assert settings.items() >= wanted.items()
    assert settings["ExecStart"].split()[1:] == ["vault", "%i", "/etc/raycloak/vaults/%i.yaml"]
    # A service manager's environment is clean, and this one line is all that is added.
    assert (FILES / UNIT).read_text().count("Environment") == 1


def test_the_command_of_a_vault_exists():
    """The containers of deploy/vaults name the same one."""
    assert "vault" in typer.main.get_command(app).commands


def test_users_of_machines_and_of_the_image_are_the_same():
    users = re.findall(r"^u (\S+)", (FILES / "sysusers.conf").read_text(), re.MULTILINE)
    assert users == ["ray", *(f"raycloak-{role}" for role in ROLES)]
    image = re.findall(r"useradd --uid \d+ .* (\S+) ", (ROOT / "deploy" / "Dockerfile").read_text())
    assert image == users


def test_guarantee_only_its_vault_makes_a_socket_and_reads_its_settings(tmp_path):
    """On a machine of its own below ``tmp_path``, made by the programs that read the files on a real one."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to other users")
    settings = tmp_path / "etc" / "raycloak" / "vaults"
    settings.mkdir(parents=True)
    for role in ROLES:
        (settings / f"{role}.yaml").touch(mode=0o644)
    for program, name in (("systemd-sysusers", "sysusers.conf"), ("systemd-tmpfiles", "tmpfiles.conf")):
        create = ["--create"] * (program == "systemd-tmpfiles")
        done = run(program, f"--root={tmp_path}", *create, FILES / name)
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "etc" / "passwd").read_text().splitlines()
    uids = {name: int(uid) for name, _, uid, *_ in (line.split(":") for line in lines)}
    groups = {name: int(gid) for name, _, _, gid, *_ in (line.split(":") for line in lines)}
    assert len(set(uids.values())) == len(ROLES) + 1
    for role in ROLES:
        user = f"raycloak-{role}"
        folder = (tmp_path / "run" / "raycloak" / role).stat()
        # Set-group-id: the socket gets Ray's group. Of the platform, vaults are peers too.
        group, mode = (groups[user], 0o755) if role == "platform" else (groups["ray"], 0o2750)
        assert (folder.st_uid, folder.st_gid, folder.st_mode & 0o7777) == (uids[user], group, mode)
        own = (settings / f"{role}.yaml").stat()
        assert (own.st_uid, own.st_gid, own.st_mode & 0o7777) == (uids[user], groups[user], 0o400)
