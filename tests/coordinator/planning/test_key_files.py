"""Keys below a folder that a job is submitted from: each kind that raycloak makes, wherever it lies and is called."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from raycloak.attestation.keys.run_secret import create_secret
from raycloak.attestation.sealed.package_keys import PackageSigner, TrustStore, create_recipient
from raycloak.attestation.simulators.tdx_vendor import SimulatedVendor
from raycloak.coordinator.cli.doctor import check_working_folder
from raycloak.coordinator.config import home
from raycloak.coordinator.ledger.cap_authority import create_authority
from raycloak.coordinator.ledger.ledger import PrivacyLedger
from raycloak.coordinator.planning.key_files import keys_below, require_none_in_job
from raycloak.metrics.errors import ConfigError


def pem(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".public").write_bytes(public)


def vendor(path: Path) -> None:
    SimulatedVendor.load_or_create(path.parent)
    (path.parent / "vendor.json").rename(path)


def signer(path: Path) -> None:
    folder = path.parents[2] / "made"
    made = PackageSigner.load_or_create(folder)
    (private,) = (each for each in folder.iterdir() if each.stat().st_mode & 0o077 == 0)
    private.rename(path)
    (path.parent / "trust.json").write_bytes(TrustStore.of("site", made.public).encode())


KEYS: dict[str, Callable[[Path], object]] = {
    "a run secret that a run generated": lambda path: create_secret(path.parent)[0].rename(path),
    "a fingerprint key or an owner's key": lambda path: path.write_text("ab" * 32 + "\n"),
    "a recipient's key": lambda path: create_recipient(path),
    "an authority's key": lambda path: create_authority(path),
    "the key of the site's packages": signer,
    "a simulated vendor": vendor,
    "a key of TLS": pem,
}


@pytest.mark.parametrize("kind", KEYS)
def test_guarantee_a_key_below_a_jobs_folder_is_refused_by_its_content(kind: str, tmp_path: Path) -> None:
    """Its public half is no key, and lies there for good."""
    job = tmp_path / "job"
    path = job / "conf" / "innocent.txt"
    path.parent.mkdir(parents=True)
    (job / "config.yaml").write_text("steps: 3\n")
    (job / "table.json").write_text('{"name": "x", "values": [1]}')
    (job / "data.sha256").write_text("ab" * 32)
    require_none_in_job(job)
    assert check_working_folder(job).status == "ok"
    KEYS[kind](path)
    assert [each for each, _ in keys_below(job)] == [path]
    with pytest.raises(ConfigError, match=rf"key_in_job: {path} .* /etc/raycloak") as refusal:
        require_none_in_job(job)
    assert path.read_bytes().strip() not in str(refusal.value).encode()
    found = check_working_folder(job)
    assert (found.status, "ray job submit" in found.finding) == ("warn", True)


@pytest.mark.parametrize("place", ["below", "linked"])
def test_guarantee_a_state_folder_below_a_jobs_folder_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, state = tmp_path / "job", tmp_path / ("job/state" if place == "below" else "state")
    job.mkdir()
    state.mkdir()
    if place == "linked":
        (job / "state").symlink_to(state)
    monkeypatch.setenv("RAYCLOAK_HOME", str(job / "state"))
    with pytest.raises(ConfigError, match=r"key_in_job: .*state is the state folder"):
        require_none_in_job(job)
    assert check_working_folder(job).status == "warn"


def test_another_state_folder_is_found_by_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a job has another `RAYCLOAK_HOME` than its submitter."""
    other = tmp_path / "job" / ".raycloak"
    other.mkdir(parents=True)
    PrivacyLedger(f"sqlite:///{other / 'ledger.sqlite'}").close()
    monkeypatch.setenv("RAYCLOAK_HOME", str(tmp_path / "home"))
    assert home.data_key_file().exists()
    assert list(keys_below(tmp_path / "job")) == [(other, "a state folder, with a ledger and its keys")]


def test_what_ray_leaves_out_is_not_looked_at(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for name in (".git", ".venv", "__pycache__"):
        (job / name).mkdir(parents=True)
        (job / name / "key").write_text("ab" * 32)
    (job / "gone").symlink_to(tmp_path / "nowhere")
    assert list(keys_below(job)) == []
