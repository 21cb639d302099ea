"""`raycloak doctor --boundary`: each hole in a machine's boundary is found, and named with what mends it."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from raycloak.coordinator.cli import doctor_boundary
from raycloak.coordinator.cli.doctor_boundary import check_devices, check_reports, check_swap, examine_boundary
from tests.attestation.serving import eventually
from tests.ray import apart
from tests.ray.apart import RAY, USERS, machine


def by_name(found):
    return {each.name: each for each in found}


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="rd", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_a_vault_of_rays_own_user_is_found(folder):
    """Whatever this process is: the vault and its peer are the same user."""
    socket = folder / "vault.sock"
    (folder / "aggregator.yaml").write_text(yaml.safe_dump({"socket": str(socket), "peer": str(os.getuid())}))
    command = [sys.executable, "-m", "raycloak", "vault", "aggregator", str(folder / "aggregator.yaml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as program:
        try:
            eventually(lambda: socket.exists() or program.poll() is not None)
            found = by_name(examine_boundary(folder))
        finally:
            program.terminate()
    assert found["aggregator settings"].status == "ok"
    assert found["aggregator user"].status == "fail"
    assert "user of its own" in found["aggregator user"].remedy
    assert found["aggregator privileges"].status == "fail"
    assert "NoNewPrivileges" in found["aggregator privileges"].remedy
    assert found["aggregator namespace"].status == "ok"
    gone = by_name(examine_boundary(folder))["aggregator socket"]
    assert (gone.status, gone.remedy) == ("fail", "systemctl start raycloak-vault@aggregator")


def test_vaults_that_are_apart_are_well_but_for_what_is_changed(folder):
    if (reason := apart.missing()) is not None:
        pytest.skip(reason)
    with machine(folder) as made:
        vaults = [str(USERS["aggregator"])]
        made.listen("platform", state=str(folder / "platform" / "state"), vaults=vaults)
        made.listen("aggregator", platform=made.socket.replace("{role}", "platform"))
        found = examine_boundary(folder)
        # A Ray of other tests may be here too, and run as root.
        assert [each for each in found if each.status == "fail" and not each.name.startswith("ray ")] == []
        assert by_name(found)["aggregator memory"].status == "ok"
        settings = folder / "aggregator.yaml"
        settings.chmod(0o666)
        assert by_name(examine_boundary(folder))["aggregator settings"].remedy.startswith("chown root")
        settings.chmod(0o644)
        os.chown(settings, RAY, RAY)
        assert by_name(examine_boundary(folder))["aggregator settings"].remedy == f"chown root {settings}"


def test_a_folder_without_settings_is_a_failure(folder):
    (found,) = examine_boundary(folder)
    assert found.status == "fail"


def test_swap_reports_and_devices_of_rays_user_are_found(tmp_path):
    assert check_swap(tmp_path).status == check_reports(tmp_path, {RAY}).status == "ok"
    assert [each.status for each in check_devices(tmp_path, {RAY})] == ["ok"]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "swaps").write_text("Filename Type\n/dev/sda2 partition\n")
    assert "MemorySwapMax=0" in check_swap(tmp_path).remedy
    reports = tmp_path / doctor_boundary.TSM_REPORTS
    reports.mkdir(parents=True)
    reports.chmod(0o755)
    assert check_reports(tmp_path, {RAY}).status == "ok"
    assert check_reports(tmp_path, {os.getuid()}).status == "fail"
    reports.chmod(0o757)
    assert check_reports(tmp_path, {RAY}).remedy.startswith("chown root /")
    node = tmp_path / "dev" / "nvidia0"
    node.parent.mkdir()
    node.touch(mode=0o600)
    assert check_devices(tmp_path, {RAY})[0].status == "ok"
    node.chmod(0o666)
    assert "chmod 660" in check_devices(tmp_path, {RAY})[0].remedy
